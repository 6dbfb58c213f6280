"""Names of this package under the path of torch's module that has them; its other names are torch's own."""

from __future__ import annotations

from torch.distributed.elastic.timer import local_timer

from elastic_run.timer import LocalTimerClient, LocalTimerServer

__all__ = ["LocalTimerClient", "LocalTimerServer"]


def __getattr__(name: str) -> object:
    return getattr(local_timer, name)
