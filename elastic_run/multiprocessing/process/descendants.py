"""Finds the processes that are left of a worker: by session, environment token, parent.

Rules
- Only evidence counts that no stranger can have: a session that a worker leads or led, the launcher's token in the
  environment, a parent with such evidence, or the launcher as the subreaper that an orphan of the workers came to. A
  pipe or a terminal is no evidence: the kernel gives its number to another program after its end.
- A descendant that left the session (a daemon, a nested launcher's worker) still has the token of every launcher above
  it in its environment. A process older than the launcher can't be a descendant, and its files are not read.
- Reading /proc/PID/environ takes the process's memory lock. A process in uninterruptible sleep may hold this lock for
  ever, so its file is never opened.
- The module uses little of the standard library: the guardian runs it after the launcher has died.
"""

from __future__ import annotations

import os

from elastic_run.multiprocessing.process.process_table import (
    GONE_STATES,
    has_group,
    is_recycled,
    list_pids,
    read_stat,
)
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from elastic_run.multiprocessing.process.process_table import ProcessStat


@dataclass(slots=True)
class Session:
    """A session that a worker leads or led: the times of its start and end, in clock ticks since boot."""

    #: 0 if unknown.
    born: int
    #: 0 while it runs.
    ended: int = 0


def find_survivors(
    sessions: Mapping[int, Session],
    token: str,
    *,
    since: int,
    ignored: Collection[int] = (),
    spared: Collection[int] = (),
    is_adopted: Callable[[int, ProcessStat], bool] = lambda *_: False,
) -> dict[int, ProcessStat]:
    """Find the living processes of some workers, with all descendants.

    Args:
        sessions: Sessions of the workers, by their numbers.
        token: The launcher's token; empty to look at sessions only.
        since: Start time of the launcher in clock ticks; older processes are not descendants.
        ignored: Pids that don't count.
        spared: Sessions that don't count.
        is_adopted: Says of a process whether it is an orphan that is known to be a descendant.
    """
    needle = token.encode()
    living = {
        pid: stat for pid, stat in _read_living(since).items() if pid not in ignored and stat.session not in spared
    }
    own = _find_own_sessions(sessions, living)
    found = {
        pid
        for pid, stat in living.items()
        if stat.session in own
        or (pid in sessions and stat.started_at == sessions[pid].born)  # a fork server's child begins its session late
        or is_adopted(pid, stat)
        or (needle and stat.state != b"D" and _carries(pid, needle))
    }
    return {pid: living[pid] for pid in _with_descendants(found, living)}


def find_descendants(sessions: Collection[int], *, since: int) -> list[int]:
    """Find the processes of sessions whose leaders live, and their descendants as far as the parents between live."""
    living = _read_living(since)
    return [*_with_descendants({pid for pid, stat in living.items() if stat.session in sessions}, living)]


def find_groups(sessions: Mapping[int, Session]) -> set[int]:
    """Return the process groups of workers that have members; all processes are read only if a worker has ended."""
    present = {number: session for number, session in sessions.items() if has_group(number)}
    if any(session.ended for session in present.values()):
        return _find_own_sessions(present, _read_living(0))
    return {number for number, session in present.items() if not is_recycled(number, session.born)}


def _find_own_sessions(sessions: Mapping[int, Session], living: Mapping[int, ProcessStat]) -> set[int]:
    """Return the sessions that are still the workers'.

    The kernel gives the number of a session to another process only when the session has no member any more. So the
    number is still the worker's if the worker runs, or if a member lives that is older than the worker's end.
    """
    own = set()
    for stat in living.values():
        session = sessions.get(stat.session)
        if session is not None and (not session.ended or stat.started_at <= session.ended):
            own.add(stat.session)
    return {number for number in own if not is_recycled(number, sessions[number].born)}


def _read_living(since: int) -> dict[int, ProcessStat]:
    """Return the living processes that began at a time, in clock ticks since boot, or later."""
    stats = {int(name): read_stat(name) for name in list_pids()}
    return {
        pid: stat
        for pid, stat in stats.items()
        if stat is not None and stat.state not in GONE_STATES and stat.started_at >= since
    }


def _with_descendants(found: set[int], living: Mapping[int, ProcessStat]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, stat in living.items():
        children.setdefault(stat.parent, []).append(pid)
    queue = [*found]
    for pid in queue:
        below = [child for child in children.get(pid, ()) if child not in found]
        found.update(below)
        queue += below
    return found


def _carries(pid: int, token: bytes) -> bool:
    try:
        fd = os.open(f"/proc/{pid}/environ", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        text = b""
        while chunk := os.read(fd, 1 << 16):
            text += chunk
    except OSError:
        return False
    finally:
        os.close(fd)
    return token in text
