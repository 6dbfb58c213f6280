"""The marker `system`: tests that need root, a compiler or a server. Only `make test-system` runs them.

- `starter` registers a function or class of the test bed that needs any of these. A test gets the marker at its
  collection if its own code, or the code of one of its fixtures, names a starter.
- Other tests set it themselves: a helper function names the starter, or only one value of a parameter needs it (so the
  code of a fixture with parameters does not count).
- A starter refuses to work in a test without the marker, also for root. So a forgotten marker is a failure everywhere,
  not only on a machine that lacks what the test needs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import time
import uuid
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from _pytest.mark import ParameterSet


_Starter = TypeVar("_Starter")
_STARTERS: set[object] = set()
_NAME = "system"
#: The running test, where it has no marker.
_unmarked: list[str] = []


def starter(function: _Starter) -> _Starter:
    """Register what needs root, a compiler or a server; it calls `require_marker` before anything else."""
    _STARTERS.add(function)
    return function


def require_marker(need: str) -> None:
    """Fail in a test without the marker."""
    if _unmarked:
        pytest.fail(f"{_unmarked[0]} needs {need}, so it needs the marker: @pytest.mark.{_NAME}", pytrace=False)


def mark_system(values: Iterable[str], *, but: Collection[str] = ()) -> list[ParameterSet]:
    """Return the values of a parameter, with the marker."""
    return [pytest.param(value, marks=[pytest.mark.system] * (value not in but)) for value in values]


#: Whether a test function needs the marker, by the id of its fixtures; pytest has one such object for all parameters.
_known: dict[int, tuple[object, bool]] = {}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark a test that names a starter, or has a fixture that does."""
    fixtures = getattr(item, "_fixtureinfo", item)
    if id(fixtures) not in _known:
        is_system = any(isinstance(each, FunctionType) and _starts(each) for each in _functions_of(item))
        _known[id(fixtures)] = fixtures, is_system
    if _known[id(fixtures)][1]:
        item.add_marker(_NAME)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note whether the next test has the marker."""
    _unmarked[:] = [] if item.get_closest_marker(_NAME) else [item.nodeid]


def _functions_of(item: pytest.Item) -> Iterator[object]:
    yield getattr(item, "function", None)
    for definitions in item._fixtureinfo.name2fixturedefs.values():  # type: ignore[attr-defined] # pytest says it nowhere else
        if definitions[-1].params is None:
            yield definitions[-1].func


@functools.cache  # one for all values of a parameter, and for all tests with a fixture
def _starts(function: FunctionType) -> bool:
    return _names_starter(function.__code__, function.__globals__)


def _names_starter(code: CodeType, names: dict[str, Any]) -> bool:
    named = [names.get(name) for name in code.co_names]
    named += [vars(module).get(name) for module in named if isinstance(module, ModuleType) for name in code.co_names]
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return any(isinstance(value, (FunctionType, type)) and value in _STARTERS for value in named) or any(
        _names_starter(each, names) for each in inner
    )


# --- a disk, a process namespace and a memory limit for one test; all need root ---------------------------------------
@starter
@contextlib.contextmanager
def small_disk(directory: Path, kibibytes: int) -> Iterator[Path]:
    """Mount a disk below a directory."""
    require_marker("root, for a mount")
    disk = directory / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "none", disk], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


@starter
def as_pid_1(command: Sequence[str]) -> tuple[str, ...]:
    """Return the command line that runs a command as the first process of a process namespace, as in a container."""
    require_marker("root, for a process namespace")
    return ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *command)


_MEMORY = Path("/sys/fs/cgroup/memory")
_MEGABYTE = 1 << 20


@starter
@contextlib.contextmanager
def memory_limit(megabytes: int) -> Iterator[list[str]]:
    """Give the command that puts another one into a memory cgroup of its own; nothing to put before it where 0."""
    if not megabytes:
        yield []
        return
    require_marker("root, for a control group")
    group = _MEMORY / f"elastic-run-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(megabytes * _MEGABYTE), encoding="ascii")
        yield ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group)]
    finally:
        for pid in (group / "cgroup.procs").read_text(encoding="ascii").split():
            with contextlib.suppress(OSError):
                os.kill(int(pid), 9)
        for _ in range(100):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.02)
