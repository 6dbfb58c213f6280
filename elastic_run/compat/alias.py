"""Modules under torch's names that give out the names of ours: the table of paths, and the finder that makes them.

An alias is a module of its own rather than ours under a second name: the import system writes a child into its parent
and a spec into every module that it loads, and neither may land in our package. Names are looked up, set and deleted
in ours, so that a program that patches `torch.distributed.run.main` patches what runs.

Everything in the table is public in torch 2.13 and promised by us. `torch.distributed.elastic` itself and its `agent`
are empty packages; its `timer`, `utils` and `control_plane` run in workers and in programs: they stay torch's, as does
`rendezvous.utils`, of which torch's own backends take private names. A test holds the tables against torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.abc import Loader
    from types import CodeType
    from typing import Any

_ELASTIC = "torch.distributed.elastic"
_AGENT = f"{_ELASTIC}.agent.server"

#: Torch's path -> ours.
PATHS: dict[str, str] = {
    "torch.distributed.run": "elastic_run.run",
    "torch.distributed.launch": "elastic_run.launch",
    "torch.distributed.launcher": "elastic_run.launcher",
    "torch.distributed.launcher.api": "elastic_run.launcher",
    _AGENT: "elastic_run.agent",
    f"{_AGENT}.api": "elastic_run.agent",
    f"{_AGENT}.local_elastic_agent": "elastic_run.agent.local_elastic_agent",
    f"{_AGENT}.health_check_server": "elastic_run.agent.health_check_server",
    f"{_ELASTIC}.events": "elastic_run.events",
    f"{_ELASTIC}.events.api": "elastic_run.events.api",
    f"{_ELASTIC}.events.handlers": "elastic_run.events",
    f"{_ELASTIC}.metrics": "elastic_run.metrics",
    f"{_ELASTIC}.metrics.api": "elastic_run.metrics",
    f"{_ELASTIC}.multiprocessing": "elastic_run.multiprocessing",
    f"{_ELASTIC}.multiprocessing.api": "elastic_run.multiprocessing",
    f"{_ELASTIC}.multiprocessing.errors": "elastic_run.multiprocessing.errors",
    f"{_ELASTIC}.multiprocessing.errors.error_handler": "elastic_run.multiprocessing.errors.error_handler",
    f"{_ELASTIC}.multiprocessing.errors.handlers": "elastic_run.multiprocessing.errors.error_handler",
    f"{_ELASTIC}.rendezvous": "elastic_run.rendezvous",
    f"{_ELASTIC}.rendezvous.api": "elastic_run.rendezvous.api",
    f"{_ELASTIC}.rendezvous.registry": "elastic_run.rendezvous.registry",
}

#: Public names that torch's modules import from torch's other modules, and that programs take from there: they are
#: torch's own, so an alias gives them out and our modules don't. Torch's path -> where to get them -> their names.
BORROWED_NAMES: dict[str, dict[str, str]] = {
    "torch.distributed.run": {"argparse": "REMAINDER", "torch.distributed.argparse_util": "check_env env"},
    "torch.distributed.launcher.api": {"torch._utils_internal": "get_default_numa_options justknobs_check"},
    f"{_AGENT}.local_elastic_agent": {"torch._utils_internal": "justknobs_check"},
    f"{_ELASTIC}.multiprocessing.api": {
        f"{_ELASTIC}.multiprocessing.redirects": "IS_MACOS IS_WINDOWS redirect_stderr redirect_stdout",
        f"{_ELASTIC}.multiprocessing.subprocess_handler": "SubprocessHandler get_subprocess_handler",
        f"{_ELASTIC}.multiprocessing.tail_log": "TailLog",
    },
    f"{_ELASTIC}.rendezvous.api": {"torch.distributed": "Store"},
    f"{_ELASTIC}.rendezvous.registry": {f"{_ELASTIC}.rendezvous.dynamic_rendezvous": "create_handler"},
}


def get_fully_qualified_hostname() -> str:
    """Return this host's name with its domain, as the resolver knows it."""
    import socket

    return socket.getfqdn(socket.gethostname())


#: Private names that torch's own modules take from the modules in whose place ours stand. Workers import these modules
#: (torch.distributed.checkpoint of torch 2.5 to 2.13 is one), and must not load torch's launcher for them.
PRIVATE_NAMES: dict[tuple[str, str], Callable[..., object]] = {
    (f"{_AGENT}.api", "_get_fq_hostname"): get_fully_qualified_hostname,
}
#: What the import system looks for and then fills in: an alias must not give out those of ours.
_OF_THE_IMPORT_SYSTEM = {"__path__", "__file__", "__cached__"}


class Alias(ModuleType):
    """One of torch's module names, with one of our modules, `target`, behind it."""

    def __init__(self, name: str, target: ModuleType) -> None:
        super().__init__(name, target.__doc__)
        self.__dict__["__elastic_run__"] = target

    def __getattr__(self, name: str) -> Any:
        target: ModuleType = self.__dict__["__elastic_run__"]
        child = f"{self.__name__}.{name}"
        if name in _OF_THE_IMPORT_SYSTEM:
            raise AttributeError(name, name=name, obj=self)
        if child in PATHS or child in sys.modules:
            # Our package may have a module of this name that is not the one of the table (`multiprocessing.api`).
            return import_module(child)
        if (self.__name__, name) in PRIVATE_NAMES:
            return PRIVATE_NAMES[self.__name__, name]
        homes = BORROWED_NAMES.get(self.__name__, {})
        try:
            return getattr(target, name)
        except AttributeError:
            home = next((home for home, names in homes.items() if name in names.split()), None)
            if home is not None:
                return getattr(import_module(home), name)
            message = (
                f"{self.__name__} is {target.__name__} here (elastic_run.compat), which has no {name!r}; "
                "without elastic_run.compat it is torch's own"
            )
            raise AttributeError(message, name=name, obj=self) from None

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("__") or sys.modules.get(f"{self.__name__}.{name}") is value:
            self.__dict__[name] = value
        else:
            setattr(self.__dict__["__elastic_run__"], name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            del self.__dict__[name]
        else:
            delattr(self.__dict__["__elastic_run__"], name)

    def __dir__(self) -> list[str]:
        target = self.__dict__["__elastic_run__"]
        return sorted({*self.__dict__, *dir(target), *getattr(target, "__all__", ())})


class AliasFinder:
    """The first finder that the import system asks, and the loader of what it finds: the paths of the table only."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Say how a module is loaded, or return None where the other finders shall answer."""
        if name not in PATHS:
            return None
        loader: Loader = self  # type: ignore[assignment]  # it has what the import system calls
        spec = ModuleSpec(name, loader, origin=import_module(PATHS[name]).__file__)
        spec.has_location = spec.origin is not None
        others = (finder.find_spec(name, path) for finder in sys.meta_path if finder is not self)
        if (original := next(filter(None, others), None)) is not None:
            # Torch's own directory: a child that isn't in the table is found there.
            spec.submodule_search_locations = original.submodule_search_locations
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make the alias; our module is imported for it."""
        return Alias(spec.name, import_module(PATHS[spec.name]))

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: ours has run."""

    def get_code(self, name: str) -> CodeType | None:
        """Return the code of ours, for `python -m torch.distributed.run`."""
        spec = import_module(PATHS[name]).__spec__
        get_code: Any = getattr(spec and spec.loader, "get_code", None)
        return get_code(PATHS[name]) if get_code else None


def replace_modules() -> None:
    """Put the aliases into place, also of modules that were imported before, as by `torch.distributed.checkpoint`."""
    sys.meta_path.insert(0, AliasFinder())
    for name in [name for name in PATHS if sys.modules.pop(name, None) is not None]:
        import_module(name)
