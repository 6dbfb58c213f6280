"""elastic-run starts, watches and restarts the workers of a distributed PyTorch job; it keeps torchrun's front door.

The public names are loaded when they are first used: importing this package costs nothing. It imports no other module,
since each worker imports it; see `worker_start`.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.agent.config import AgentConfig
    from elastic_run.core.job.config import JobConfig
    from elastic_run.core.job.node_config import NodeConfig
    from elastic_run.launcher import LaunchConfig, elastic_launch, launch_agent
    from elastic_run.multiprocessing.errors import ChildFailedError, ProcessFailure, record
    from elastic_run.multiprocessing.functions.spawn import spawn
    from elastic_run.multiprocessing.output.logs import DefaultLogsSpecs, LogsSpecs
    from elastic_run.multiprocessing.output.std import Std

__all__ = [
    "AgentConfig",
    "ChildFailedError",
    "DefaultLogsSpecs",
    "JobConfig",
    "LaunchConfig",
    "LogsSpecs",
    "NodeConfig",
    "ProcessFailure",
    "Std",
    "elastic_launch",
    "launch_agent",
    "record",
    "spawn",
]

__version__ = "0.1.0"

_HOMES = {
    "AgentConfig": "core.agent.config",
    "JobConfig": "core.job.config",
    "NodeConfig": "core.job.node_config",
    "LaunchConfig": "launcher",
    "elastic_launch": "launcher",
    "launch_agent": "launcher",
    "ChildFailedError": "multiprocessing.errors",
    "ProcessFailure": "multiprocessing.errors",
    "record": "multiprocessing.errors",
    "spawn": "multiprocessing.functions.spawn",
    "DefaultLogsSpecs": "multiprocessing.output.logs",
    "LogsSpecs": "multiprocessing.output.logs",
    "Std": "multiprocessing.output.std",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:  # such as a module that `from elastic_run import` is about to import
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    from elastic_run.lazy import lazy_names

    return lazy_names(__name__, _HOMES)(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
