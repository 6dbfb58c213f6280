"""Finds the processes that are left of a worker: by session, environment token, output, parent.

Rules
- A descendant that left the session (a daemon, a nested launcher's worker) still has the token of every launcher above
  it in its environment. A process older than the launcher can't be a descendant, and its files are not read.
- A descendant that dropped its environment too is found in three ways: by its stdout or stderr, if this is a pipe or a
  terminal that only workers got; by its parent; or as an orphan that became a child of this process
  (`multiprocessing.process.subreaper`).
- Reading /proc/PID/environ takes the process's memory lock. A process in uninterruptible sleep may hold this lock for
  ever, so its file is never opened.
- The module uses little of the standard library: the guardian runs it after the launcher has died.
"""

from __future__ import annotations

import os

from elastic_run.multiprocessing.process.process_table import GONE_STATES, list_pids, read_stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from elastic_run.multiprocessing.process.process_table import ProcessStat


def find_survivors(
    sessions: Collection[int],
    token: str,
    *,
    since: int,
    ignored: Collection[int] = (),
    spared: Collection[int] = (),
    outputs: Collection[tuple[int, int]] = (),
    adopted: Collection[int] = (),
) -> list[int]:
    """Find the living processes of some workers, with all descendants.

    Args:
        sessions: Sessions of the workers.
        token: The launcher's token; empty to look at sessions only.
        since: Start time of the launcher in clock ticks; older processes are not descendants.
        ignored: Pids that don't count.
        spared: Sessions that don't count.
        outputs: Device and inode of pipes and terminals that only the workers got as stdout or stderr.
        adopted: Orphans that are known to be descendants.

    Returns:
        Pids, in no order.
    """
    needle = token.encode()
    living = {
        pid: stat for pid, stat in _read_living(since).items() if pid not in ignored and stat.session not in spared
    }
    found = {
        pid
        for pid, stat in living.items()
        if stat.session in sessions
        or pid in adopted
        or (stat.state != b"D" and ((needle and _carries(pid, needle)) or (outputs and _writes_to(pid, outputs))))
    }
    return [*_with_descendants(found, living)]


def find_descendants(sessions: Collection[int], *, since: int) -> list[int]:
    """Find the living processes of some sessions, and their descendants as far as the parents between them live."""
    living = _read_living(since)
    return [*_with_descendants({pid for pid, stat in living.items() if stat.session in sessions}, living)]


def find_orphans(session: int, *, since: int) -> list[int]:
    """Find children of this process in other sessions than its own: it started them, or they came to it."""
    me = os.getpid()
    return [pid for pid, stat in _read_living(since).items() if stat.parent == me and stat.session != session]


def find_sessions_by_stderr(device: int, inode: int, *, since: int) -> dict[int, int]:
    """Find the sessions of processes that have a pipe or a terminal as stderr.

    Returns:
        When their leaders were born, in clock ticks, by session.
    """
    found = {}
    for name in list_pids():
        try:
            stderr = os.stat(f"/proc/{name}/fd/2")
        except OSError:
            continue
        process = read_stat(int(name)) if (stderr.st_dev, stderr.st_ino) == (device, inode) else None
        leader = None if process is None else read_stat(process.session)
        if process is not None and leader is not None and leader.started_at >= since:
            found[process.session] = leader.started_at
    return found


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


def _writes_to(pid: int, outputs: Collection[tuple[int, int]]) -> bool:
    for fd in (1, 2):
        try:
            status = os.stat(f"/proc/{pid}/fd/{fd}")
        except OSError:
            continue
        if (status.st_dev, status.st_ino) in outputs:
            return True
    return False


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
