"""Names of this package under the path of torch's module that has them; its other names are torch's own."""

from __future__ import annotations

from torch.distributed.elastic.timer import api

from elastic_run.timer import RequestQueue, TimerClient, TimerRequest, TimerServer, configure, expires

__all__ = ["RequestQueue", "TimerClient", "TimerRequest", "TimerServer", "configure", "expires"]


def __getattr__(name: str) -> object:
    return getattr(api, name)
