"""Looking at other processes through /proc: whose are they, are they gone."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.wait import DEADLINE, wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Every process that a test starts inherits this variable; its value is the test's own.
TEST_TOKEN = "ELASTIC_RUN_TEST"  # noqa: S105 - a name, not a secret


def is_gone(pid: int) -> bool:
    """Tell whether a process is absent or a zombie (under a slow PID 1 zombies linger, and do no harm)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"


def wait_gone(pid: int, *, deadline: float = DEADLINE) -> None:
    """Wait until a process is absent or a zombie."""
    wait_until(lambda: is_gone(pid), deadline=deadline, what=f"process {pid} gone: {describe(pid)}")


def describe(pid: int) -> str:
    """Return a process's command line, state and parent, for messages."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return f"{pid} (gone)"
    return f"{pid} (state {fields[0]}, parent {fields[1]}): {command}"


def processes_with_environment(token: str, *, name: str = TEST_TOKEN) -> list[int]:
    """Find the living processes that were started with an environment variable."""
    wanted = f"{name}={token}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            environment = (entry / "environ").read_bytes()
            if wanted in environment.split(b"\0") and not is_gone(int(entry.name)):
                found.append(int(entry.name))
    return found


def kill_processes(pids: list[int]) -> None:
    """Send SIGKILL to each; those already gone don't matter."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def children_of(pid: int) -> list[int]:
    """Return the pids of a process's living children, zombies left out."""
    children = read_children(pid)
    while (again := read_children(pid)) != children:  # a thread that ends hands its children to another one
        children = again
    return [child for child in children if not is_gone(child)]


def read_children(pid: int | str) -> list[int]:
    """Return the pids of the children of a process, zombies included; "self" stands for this process."""
    children = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += [int(child) for child in path.read_text(encoding="ascii").split()]
    return sorted(children)


def descendants_of(pid: int) -> list[int]:
    """Return the pids of all living processes below a process, parents first."""
    found = []
    queue = [pid]
    while queue:
        below = []
        with contextlib.suppress(OSError):
            below = children_of(queue.pop(0))
        found += below
        queue += below
    return found


def catches(pid: int, number: int, fields: Sequence[str] = ("SigCgt",)) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return False
    caught = [line.split()[1] for line in status.splitlines() if line.startswith(tuple(fields))]
    return any(int(each, 16) >> (number - 1) & 1 for each in caught)


def switches_within(pid: int, seconds: float) -> int:
    """Count how often a process's threads are switched to in a time: 0 when nobody wakes them."""

    def count() -> int:
        texts = [(task / "status").read_text(encoding="ascii") for task in Path(f"/proc/{pid}/task").iterdir()]
        return sum(int(found) for text in texts for found in re.findall(r"ctxt_switches:\s+(\d+)", text))

    before = count()
    time.sleep(seconds)
    return count() - before


_TITLES = ("guardian of", "second guardian of")


def wait_guardians(launcher: int, *, deadline: float = DEADLINE) -> list[int]:
    """Wait until both guardians of a launcher stand."""

    def find() -> list[int]:
        titles = {pid: _read_title(pid) for pid in descendants_of(launcher)}
        found = {title: pid for pid, text in titles.items() for title in _TITLES if text.startswith(title)}
        return [found[title] for title in _TITLES] if len(found) == len(_TITLES) else []

    return wait_until(find, deadline=deadline, what=f"two guardians of {launcher}")


def _read_title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
    except OSError:
        return ""
