"""Names of this package under the path of torch's module that has them; its other names are torch's own."""

from __future__ import annotations

from elastic_run import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.timer import (
        RequestQueue,
        TimerClient,
        TimerRequest,
        TimerServer,
        configure,
        expires,
    )

__all__ = ["RequestQueue", "TimerClient", "TimerRequest", "TimerServer", "configure", "expires"]

__getattr__ = lazy_names(
    __name__, dict.fromkeys(__all__, "elastic_run.timer"), rest="torch.distributed.elastic.timer.api"
)
