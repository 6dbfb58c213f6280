"""What workers write: from their descriptors to the console and to files, with nothing lost and no line cut."""

from __future__ import annotations

from elastic_run.multiprocessing.output.console import Console, ensure_standard_descriptors
from elastic_run.multiprocessing.output.prefix import render_prefix
from elastic_run.multiprocessing.output.worker_output import WorkerOutput

__all__ = ["Console", "WorkerOutput", "ensure_standard_descriptors", "render_prefix"]
