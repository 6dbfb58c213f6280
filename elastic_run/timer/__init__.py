"""Deadlines for pieces of code: a worker that overruns one is ended from outside. Torch's names, loaded on first use.

In the worker::

    from elastic_run import timer

    with timer.expires(after=60, scope="train_step"):
        train_step()

With TORCHELASTIC_ENABLE_FILE_TIMER=1 elastic-run serves the workers' timers itself (`agent.driver.timers`), and its
report names the scope that expired. All other names are torch's own: the clients, and the servers for programs that
start workers by themselves.
"""

from __future__ import annotations

import os
import sys

from elastic_run import alias_modules, lazy_names
from elastic_run.contract import ENV_TIMER_FILE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextlib import _GeneratorContextManager

    from torch.distributed.elastic.timer.api import RequestQueue as RequestQueue
    from torch.distributed.elastic.timer.api import TimerClient as TimerClient
    from torch.distributed.elastic.timer.api import TimerRequest as TimerRequest
    from torch.distributed.elastic.timer.api import TimerServer as TimerServer
    from torch.distributed.elastic.timer.api import configure as configure
    from torch.distributed.elastic.timer.file_based_local_timer import FileTimerClient as FileTimerClient
    from torch.distributed.elastic.timer.file_based_local_timer import FileTimerRequest as FileTimerRequest
    from torch.distributed.elastic.timer.file_based_local_timer import FileTimerServer as FileTimerServer
    from torch.distributed.elastic.timer.local_timer import LocalTimerClient as LocalTimerClient
    from torch.distributed.elastic.timer.local_timer import LocalTimerServer as LocalTimerServer

_NAMES = (
    *("FileTimerClient", "FileTimerRequest", "FileTimerServer", "LocalTimerClient", "LocalTimerServer"),
    *("RequestQueue", "TimerClient", "TimerRequest", "TimerServer", "configure"),
)
_HOMES = dict.fromkeys(_NAMES, "torch.distributed.elastic.timer") | {
    "RequestQueue": "torch.distributed.elastic.timer.api"
}

__all__ = ["expires", *_NAMES]  # noqa: PLE0604 - they are texts

__getattr__ = lazy_names(__name__, _HOMES)
alias_modules(
    __name__,
    {
        name: (__name__, f"torch.distributed.elastic.timer.{name}")
        for name in ("api", "debug_info_logging", "file_based_local_timer", "local_timer")
    },
)


def expires(
    after: float, scope: str | None = None, client: TimerClient | None = None
) -> _GeneratorContextManager[None]:
    """Let this worker be ended unless a block of code is left in time; usable as a decorator, too.

    The server decides: the worker may live a little longer. It is torch's function, but for two things: a scope without
    a name is called after the line that opened it (torch: a line of contextlib, the same for all), and without a client
    the file is used that elastic-run serves.

    Args:
        after: Seconds that the block may take.
        scope: Its name, for the report; None for ``file#line`` of the caller.
        client: The client that tells the server; None for the one given to `configure`.

    Returns:
        The context manager.

    Raises:
        RuntimeError: There is no client.
    """
    from torch.distributed.elastic.timer import api, file_based_local_timer

    if scope is None:
        caller = sys._getframe(1)  # noqa: SLF001 - inspect.stack reads the source of every frame
        scope = f"{caller.f_code.co_filename}#{caller.f_lineno}"
    if client is None and api._timer_client is None:  # noqa: SLF001 - torch has no function that tells it
        path = os.environ.get(ENV_TIMER_FILE)
        if not path:
            message = (
                "no timer client: call timer.configure(client) before timer.expires, "
                "or start the job with TORCHELASTIC_ENABLE_FILE_TIMER=1"
            )
            raise RuntimeError(message)
        api.configure(file_based_local_timer.FileTimerClient(path))
    expiring: _GeneratorContextManager[None] = api.expires(after, scope, client)
    return expiring
