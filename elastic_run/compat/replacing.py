"""Puts aliases in the place of torch's modules, also of imported ones and in children, and takes them away again."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType

from elastic_run.compat.alias import Alias, AliasFinder
from elastic_run.compat.paths import PATHS, ROOTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any


class Replacement:
    """What one `install` has changed.

    Attributes:
        originals: Torch's modules that were imported before, by name.
        rebound: Module, name in it, what stood there, what stands there now.
    """

    def __init__(self) -> None:
        self.originals: dict[str, ModuleType] = {}
        self.rebound: list[tuple[ModuleType, str, object, object]] = []
        self._finder = AliasFinder()
        self._was_loaded: set[str] = set()

    def make(self) -> None:
        """Put the aliases into place."""
        self._was_loaded = {name for name in sys.modules if _is_below(name)}
        self.originals = {name: sys.modules[name] for name in sorted(self._was_loaded & PATHS.keys())}
        sys.meta_path.insert(0, self._finder)
        for name in self.originals:
            del sys.modules[name]
        for name, original in self.originals.items():
            import_module(name).__dict__["__torch__"] = original
        for name in self._was_loaded - PATHS.keys():
            _put_into_package(name, sys.modules[name])
        self._rebind()
        self._warn_of_the_rest()

    def undo(self) -> None:
        """Put back what was there."""
        sys.meta_path.remove(self._finder)
        # What was loaded meanwhile knows our names, torch's own modules below these paths included.
        for name in [name for name in sys.modules if _is_below(name)]:
            module = sys.modules[name]
            if isinstance(module, Alias) or name not in self._was_loaded:
                del sys.modules[name]
                _take_from_package(name, module)
        for name, original in self.originals.items():
            sys.modules[name] = original
            _put_into_package(name, original)
        for module, name, old, new in self.rebound:
            if vars(module).get(name) is new:
                vars(module)[name] = old

    def _rebind(self) -> None:
        """Give ours to every module that has taken one of torch's by name; torch's own modules keep theirs."""
        substitutes = dict(self._substitutes())
        for module in [*sys.modules.values()]:
            # What stands in sys.modules is sometimes no module at all, whatever its type says.
            if not isinstance(module, ModuleType) or _is_torchs(module.__name__):  # type: ignore[redundant-expr]
                continue
            for name, value in [*vars(module).items()]:
                # By identity: a value's own __eq__ may do anything, and needs no hash.
                found = substitutes.get(id(value))
                if found is not None and found[0] is value:
                    vars(module)[name] = found[1]
                    self.rebound.append((module, name, value, found[1]))

    def _substitutes(self) -> Iterator[tuple[int, tuple[object, object]]]:
        """Give each of torch's modules, classes and functions with ours of the same name."""
        for path, original in self.originals.items():
            alias = sys.modules[path]
            yield id(original), (original, alias)
            for name, value in vars(original).items():
                is_its_own = getattr(value, "__module__", None) == path
                if is_its_own and not name.startswith("_") and hasattr(alias, name):
                    yield id(value), (value, getattr(alias, name))

    def _warn_of_the_rest(self) -> None:
        """Tell which classes are derived from torch's for good."""
        derived = sorted(
            f"{child.__module__}.{child.__qualname__} ({value.__name__})"
            for path, original in self.originals.items()
            for value in _classes_of(path, original)
            for child in _children_of(value)
            if not _is_torchs(child.__module__)
        )
        if derived:
            import warnings

            message = (
                f"elastic_run.compat: derived from torch's classes before install(), and still torch's: "
                f"{', '.join(derived)}. Call install() first."
            )
            warnings.warn(message, RuntimeWarning, stacklevel=5)


def _classes_of(path: str, module: ModuleType) -> list[type]:
    return [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == path]


def _children_of(parent: type) -> list[type]:
    return type.__subclasses__(parent)


def _is_below(name: str) -> bool:
    return name in PATHS or name.startswith(tuple(f"{root}." for root in ROOTS))


def _is_torchs(name: str) -> bool:
    return name.partition(".")[0] in {"torch", "elastic_run"}


def _put_into_package(name: str, module: ModuleType) -> None:
    package, _, child = name.rpartition(".")
    if package in sys.modules:
        vars(sys.modules[package])[child] = module


def _take_from_package(name: str, module: ModuleType) -> None:
    package, _, child = name.rpartition(".")
    holder = vars(sys.modules[package]) if package in sys.modules else {}
    if holder.get(child) is module:
        del holder[child]


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


class ChildrenHook:
    """Puts the object into what multiprocessing prepares for each child, from its making until `undo`."""

    def __init__(self) -> None:
        from multiprocessing import spawn

        self._original = spawn.get_preparation_data
        self._is_active = True
        spawn.get_preparation_data = self._prepare

    def _prepare(self, name: str) -> dict[str, Any]:
        data = self._original(name)
        # First, so that it is unpickled first.
        return {_KEY: Arrival(), **data} if self._is_active else data

    def undo(self) -> None:
        """Take it out again; another program's function that was put over this one meanwhile stays."""
        from multiprocessing import spawn

        self._is_active = False
        if spawn.get_preparation_data == self._prepare:
            spawn.get_preparation_data = self._original
