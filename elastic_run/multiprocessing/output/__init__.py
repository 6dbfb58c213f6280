"""What workers write: taken through pipes and pseudo-terminals, written to log files and the launcher's console.

`Console` owns the launcher's own stdout and stderr; `WorkerOutput` owns the streams of one round's workers.
"""

from __future__ import annotations

from elastic_run.multiprocessing.output.console import Console
from elastic_run.multiprocessing.output.prefix import render_prefix
from elastic_run.multiprocessing.output.worker_output import WorkerOutput

__all__ = ["Console", "WorkerOutput", "render_prefix"]
