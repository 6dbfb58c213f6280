"""Names of this package under the path of torch's module that has them; its other names are torch's own."""

from __future__ import annotations

from torch.distributed.elastic.timer import file_based_local_timer

from elastic_run.timer import FileTimerClient, FileTimerRequest, FileTimerServer

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]


def __getattr__(name: str) -> object:
    return getattr(file_based_local_timer, name)
