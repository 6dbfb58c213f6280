"""elastic-run starts, watches and restarts the workers of a distributed PyTorch job; it keeps torchrun's front door.

The public names are loaded when they are first used: importing this package costs nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.policy import RestartPolicy
    from elastic_run.launcher import LaunchConfig, elastic_launch, launch_agent
    from elastic_run.multiprocessing.errors import ChildFailedError, ProcessFailure, record
    from elastic_run.multiprocessing.logs import DefaultLogsSpecs, LogsSpecs, Std

__all__ = [
    "ChildFailedError",
    "DefaultLogsSpecs",
    "LaunchConfig",
    "LogsSpecs",
    "ProcessFailure",
    "RestartPolicy",
    "Std",
    "elastic_launch",
    "launch_agent",
    "record",
]

__version__ = "0.1.0"

_MODULES = {
    "RestartPolicy": "elastic_run.core.policy",
    "LaunchConfig": "elastic_run.launcher",
    "elastic_launch": "elastic_run.launcher",
    "launch_agent": "elastic_run.launcher",
    "ChildFailedError": "elastic_run.multiprocessing.errors",
    "ProcessFailure": "elastic_run.multiprocessing.errors",
    "record": "elastic_run.multiprocessing.errors",
    "DefaultLogsSpecs": "elastic_run.multiprocessing.logs",
    "LogsSpecs": "elastic_run.multiprocessing.logs",
    "Std": "elastic_run.multiprocessing.logs",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    from importlib import import_module  # noqa: PLC0415 - nobody pays for it who doesn't need it

    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
