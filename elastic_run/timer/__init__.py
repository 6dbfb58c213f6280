"""Deadlines for pieces of code: a worker that overruns one is ended from outside. Torch's names, loaded on first use.

In the worker::

    from elastic_run import timer

    with timer.expires(after=60, scope="train_step"):
        train_step()

With TORCHELASTIC_ENABLE_FILE_TIMER=1 elastic-run serves the workers' timers itself, and its report names the scope that
expired. A program that starts workers by itself serves them with a `LocalTimerServer` or a `FileTimerServer`.

| module | what it holds |
|---|---|
| `api` | the interface of servers, and `expires` |
| `countdowns` | the timers that a server counts down |
| `debug_info_logging` | torch's hook for logging more about expired timers |
| `expiries` | which timer has ended which process, for the report |
| `file_based_local_timer` | timers through a named pipe |
| `local_timer` | timers through a `multiprocessing.Queue` |
| `requests` | a worker's request to a timer server, and the interface of its client |
| `signal_process` | the signal that ends a process |
| `timer_file` | the server's end of the named pipe |
"""

from __future__ import annotations

from elastic_run import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.timer.api import RequestQueue as RequestQueue
    from elastic_run.timer.api import TimerServer as TimerServer
    from elastic_run.timer.api import configure as configure
    from elastic_run.timer.api import expires as expires
    from elastic_run.timer.file_based_local_timer import FileTimerClient as FileTimerClient
    from elastic_run.timer.file_based_local_timer import FileTimerServer as FileTimerServer
    from elastic_run.timer.local_timer import LocalTimerClient as LocalTimerClient
    from elastic_run.timer.local_timer import LocalTimerServer as LocalTimerServer
    from elastic_run.timer.requests import FileTimerRequest as FileTimerRequest
    from elastic_run.timer.requests import TimerClient as TimerClient
    from elastic_run.timer.requests import TimerRequest as TimerRequest

_HOMES = {
    "FileTimerClient": "file_based_local_timer",
    "FileTimerRequest": "requests",
    "FileTimerServer": "file_based_local_timer",
    "LocalTimerClient": "local_timer",
    "LocalTimerServer": "local_timer",
    "RequestQueue": "api",
    "TimerClient": "requests",
    "TimerRequest": "requests",
    "TimerServer": "api",
    "configure": "api",
    "expires": "api",
}

__all__ = [*_HOMES]  # noqa: PLE0604 - the keys are the names

__getattr__ = lazy_names(__name__, _HOMES)
