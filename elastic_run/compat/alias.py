"""Modules under torch's names that give out the names of ours: the finder that makes them, and how they get into place.

An alias is a module of its own rather than ours under a second name: the import system writes a child into its parent
and a spec into every module that it loads, and neither may land in our package. Names are looked up, set and deleted
in ours, so that a program that patches `torch.distributed.run.main` patches what runs.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

from elastic_run.compat.paths import PATHS, PRIVATE_NAMES, ROOTS, find_home

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from importlib.abc import Loader
    from types import CodeType
    from typing import Any


#: What the import system looks for and then fills in: an alias must not give out those of ours.
_OF_THE_IMPORT_SYSTEM = {"__path__", "__file__", "__cached__"}


class Alias(ModuleType):
    """One of torch's module names, with one of our modules behind it.

    Args:
        name: Torch's path.
        target: Our module.
        original: Torch's module where it was imported before; private names that we lack are taken from it.
    """

    def __init__(self, name: str, target: ModuleType, original: ModuleType | None = None) -> None:
        super().__init__(name, target.__doc__)
        self.__dict__["__elastic_run__"] = target
        self.__dict__["__torch__"] = original

    def __getattr__(self, name: str) -> Any:
        target: ModuleType = self.__dict__["__elastic_run__"]
        if name in _OF_THE_IMPORT_SYSTEM:
            raise AttributeError(name, name=name, obj=self)
        child = f"{self.__name__}.{name}"
        if child in PATHS:
            # Our package may have a module of this name that is not the one of the table (`multiprocessing.api`).
            return import_module(child)
        try:
            return getattr(target, name)
        except AttributeError:
            home = find_home(self.__name__, name)
            if home is not None:
                return getattr(import_module(home), name)
            if self._is_left_to_torch(name):
                return PRIVATE_NAMES.get((self.__name__, name)) or getattr(self._torchs_own(name), name)
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

    def _is_left_to_torch(self, name: str) -> bool:
        """Whether a name is private and no module: a module is imported, its package's own code not run for it."""
        if not name.startswith("_") or name.startswith("__"):
            return False
        path = self.__dict__.get("__path__")
        return path is None or find_torchs_own(f"{self.__name__}.{name}", path) is None

    def _torchs_own(self, name: str) -> ModuleType:
        """Return torch's module of this name, loaded beside the alias: no import finds it, and no table has it."""
        if self.__dict__["__torch__"] is None:
            spec = find_torchs_own(
                self.__name__, getattr(sys.modules[self.__name__.rpartition(".")[0]], "__path__", None)
            )
            if spec is None or spec.loader is None:
                message = f"neither elastic_run nor torch has {self.__name__}.{name}"
                raise AttributeError(message, name=name, obj=self)
            from importlib.util import module_from_spec

            module = module_from_spec(spec)
            try:
                spec.loader.exec_module(module)
            except Exception as error:  # torch's own code may raise anything, such as when it registers what is there
                message = f"{self.__name__}.{name} is torch's own, which can't be loaded: {error}"
                raise AttributeError(message, name=name, obj=self) from error
            self.__dict__["__torch__"] = module
        original: ModuleType = self.__dict__["__torch__"]
        return original


class AliasLoader:
    """Loads an alias; `python -m torch.distributed.run` gets the code of ours.

    Args:
        home: Path of our module.
    """

    def __init__(self, home: str) -> None:
        self.home = home

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make the alias; our module is imported for it."""
        return Alias(spec.name, import_module(self.home))

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: ours has run."""

    def get_code(self, _name: str) -> CodeType | None:
        """Return the code of ours, for runpy."""
        spec = import_module(self.home).__spec__
        get_code: Any = getattr(spec and spec.loader, "get_code", None)
        return get_code(self.home) if get_code else None

    def get_source(self, _name: str) -> str | None:
        """Return the source of ours, for tracebacks and inspect."""
        spec = import_module(self.home).__spec__
        get_source: Any = getattr(spec and spec.loader, "get_source", None)
        return get_source(self.home) if get_source else None


class AliasFinder:
    """The first finder that the import system asks; it answers for the paths of the table only."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Say how a module is loaded, or return None where the other finders shall answer."""
        home = PATHS.get(name)
        if home is None:
            return None
        original = find_torchs_own(name, path)
        loader: Loader = AliasLoader(home)  # type: ignore[assignment]  # it has what the import system calls
        spec = ModuleSpec(name, loader, origin=import_module(home).__file__)
        spec.has_location = spec.origin is not None
        if original is not None:
            # Torch's own directory: a child that isn't in the table is found there.
            spec.submodule_search_locations = original.submodule_search_locations
        return spec


def find_torchs_own(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Find a module as if there were no aliases."""
    for finder in sys.meta_path:
        if isinstance(finder, AliasFinder):
            continue
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None


# --- into place, also of modules that were imported before ------------------------------------------------------------
def replace_modules() -> None:
    """Put the aliases into place."""
    loaded = {name for name in sys.modules if _is_below(name)}
    originals = {name: sys.modules[name] for name in sorted(loaded & PATHS.keys())}
    sys.meta_path.insert(0, AliasFinder())
    for name in originals:
        del sys.modules[name]
    for name, original in originals.items():
        import_module(name).__dict__["__torch__"] = original
    for name in loaded - PATHS.keys():
        package, _, child = name.rpartition(".")
        if package in sys.modules:
            vars(sys.modules[package])[child] = sys.modules[name]
    _rebind(dict(_substitutes(originals)))


def _substitutes(originals: Mapping[str, ModuleType]) -> Iterator[tuple[int, tuple[object, object]]]:
    """Give each of torch's modules, classes and functions with ours of the same name."""
    for path, original in originals.items():
        alias = sys.modules[path]
        yield id(original), (original, alias)
        for name, value in vars(original).items():
            is_its_own = getattr(value, "__module__", None) == path
            if is_its_own and not name.startswith("_") and hasattr(alias, name):
                yield id(value), (value, getattr(alias, name))


def _rebind(substitutes: Mapping[int, tuple[object, object]]) -> None:
    """Give ours to every module that has taken one of torch's by name; torch's own modules keep theirs."""
    for module in [*sys.modules.values()]:
        # What stands in sys.modules is sometimes no module at all, whatever its type says.
        if not isinstance(module, ModuleType) or _is_torchs(module.__name__):  # type: ignore[redundant-expr]
            continue
        for name, value in [*vars(module).items()]:
            # By identity: a value's own __eq__ may do anything, and needs no hash.
            found = substitutes.get(id(value))
            if found is not None and found[0] is value:
                vars(module)[name] = found[1]


def _is_below(name: str) -> bool:
    return name in PATHS or name.startswith(tuple(f"{root}." for root in ROOTS))


def _is_torchs(name: str) -> bool:
    return name.partition(".")[0] in {"torch", "elastic_run"}


# --- children --------------------------------------------------------------------------------------------------------
# A fork has what its parent has. A process of spawn or forkserver begins with what `multiprocessing.spawn` prepares for
# it: a dictionary, whose unpickling is the first thing that happens in the child, before it imports the program's main
# file. An object in that dictionary installs the aliases when it is unpickled. The child's own children get it in turn.
# Other Python children have ELASTIC_RUN_COMPAT=1.
_KEY = "elastic-run compat"
#: Runs in the child, whose `sys.path` is not the program's yet.
_ARRIVAL = """
import sys
sys.path.append({directory!r})
try:
    from elastic_run import compat
    compat.install()
finally:
    sys.path.remove({directory!r})
"""


class Arrival:
    """Installs the aliases in the process that unpickles it."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        return exec, (_ARRIVAL.format(directory=os.path.dirname(package)),)


def hook_children() -> None:
    """Put the object into what multiprocessing prepares for each child from now on."""
    from multiprocessing import spawn

    original = spawn.get_preparation_data

    def prepare(name: str) -> dict[str, Any]:
        return {_KEY: Arrival(), **original(name)}  # first, so that it is unpickled first

    spawn.get_preparation_data = prepare
