"""elastic-run starts, watches and restarts the workers of a distributed PyTorch job; it keeps torchrun's front door.

The public names are loaded when they are first used: importing this package costs nothing. It imports no other module,
since each worker imports it; see `worker_start`.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elastic_run.core.config import AgentConfig, JobConfig, NodeConfig
    from elastic_run.launcher import LaunchConfig, elastic_launch, launch_agent
    from elastic_run.multiprocessing.api import Std
    from elastic_run.multiprocessing.errors import ChildFailedError, ProcessFailure, record
    from elastic_run.multiprocessing.functions.spawn import spawn
    from elastic_run.multiprocessing.logs import DefaultLogsSpecs, LogsSpecs

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
    "AgentConfig": "core.config",
    "JobConfig": "core.config",
    "NodeConfig": "core.config",
    "LaunchConfig": "launcher",
    "elastic_launch": "launcher",
    "launch_agent": "launcher",
    "ChildFailedError": "multiprocessing.errors",
    "ProcessFailure": "multiprocessing.errors",
    "record": "multiprocessing.errors",
    "spawn": "multiprocessing.functions.spawn",
    "DefaultLogsSpecs": "multiprocessing.logs",
    "LogsSpecs": "multiprocessing.logs",
    "Std": "multiprocessing.api",
}


def lazy_names(
    module: str, homes: "Mapping[str, str]", *, logger: str = "", rest: str = ""
) -> "Callable[[str], object]":
    """Return a module's `__getattr__` (PEP 562), so that a public API costs nothing to import.

    Args:
        module: The module's `__name__`.
        homes: For each name the module that has it, relative to this one unless it begins with `elastic_run` or
            `torch`. `MODULE:OTHER` has it under another name, and `MODULE:` is the module itself.
        logger: A name under which the module's logger can be had, as in torch's module of the same kind.
        rest: A module that has all other names.
    """

    def load(name: str) -> object:
        if name == logger:
            from elastic_run.utils import get_logger

            return get_logger(module)
        if name not in homes and not rest:
            message = f"module {module!r} has no attribute {name!r}"
            raise AttributeError(message)
        import importlib
        import sys

        home, colon, other = homes.get(name, rest).partition(":")
        is_absolute = home.partition(".")[0] in ("elastic_run", "torch")
        found = importlib.import_module(home if is_absolute else f"{module}.{home}")
        value = found if colon and not other else getattr(found, other or name)
        setattr(sys.modules[module], name, value)
        return value

    return load


def alias_modules(package: str, homes: "Mapping[str, tuple[str, ...]]") -> None:
    """Let modules be imported below a package that other modules stand for: torch's paths, without a file for each.

    Args:
        package: The package's `__name__`.
        homes: For each module, the modules whose names it has; the first that has a name counts.
    """
    import sys
    from types import ModuleType

    class Alias(ModuleType):
        """Imports its homes when a name of theirs is asked for; `importlib` and others ask every module for dunders."""

        def __getattr__(self, name: str) -> object:
            if not name.startswith("__") or name == "__all__":
                from importlib import import_module

                for home in homes[self.__name__.removeprefix(f"{package}.")]:
                    found = getattr(import_module(home), name, self)
                    if found is not self:
                        return found
            message = f"module {self.__name__!r} has no attribute {name!r}"
            raise AttributeError(message)

    for name in homes:
        alias = sys.modules[f"{package}.{name}"] = Alias(f"{package}.{name}")
        parent, _, child = alias.__name__.rpartition(".")
        setattr(sys.modules[parent], child, alias)


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
