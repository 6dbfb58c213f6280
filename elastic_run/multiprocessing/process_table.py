"""What /proc tells of processes: their state, signals to them, and which of them are left of a worker.

- A process is gone if it is absent or a zombie: a slow PID 1 leaves zombies for some time.
- Only evidence counts that no stranger can have: a session that a worker leads or led, the launcher's token in the
  environment (a descendant that left the session has it, too), a parent with such evidence, or the launcher as the
  subreaper that an orphan of the workers came to. A process older than the launcher can't be a descendant.
- Reading /proc/PID/environ takes the process's memory lock. A process in uninterruptible sleep may hold this lock for
  ever, so its file is never opened.
- The module uses little of the standard library: the guardian runs it after the launcher has died.
"""

from __future__ import annotations

import os
import time

from elastic_run.multiprocessing.fork_exec import read_proc, start_time
from elastic_run.records import dataclass
from elastic_run.signals import SIGKILL, call_libc, signal_pidfd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

#: Letters of `ProcessStat.state` of a process that has ended.
GONE_STATES = (b"Z", b"X", b"x")
#: PF_EXITING of include/linux/sched.h.
_EXITING = 4
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


@dataclass(slots=True)
class ProcessStat:
    """The fields of /proc/PID/stat that we use."""

    #: At most 15 bytes.
    name: bytes
    #: One letter; `D` is uninterruptible sleep.
    state: bytes
    parent: int
    group: int
    session: int
    #: Whether it is in the kernel's exit, where it has given back its descriptors and is not yet a zombie.
    is_exiting: bool
    #: Clock ticks since boot, resident pages, and clock ticks of processor time.
    started_at: int
    memory: int
    cpu: int


def read_stat(pid: int | str) -> ProcessStat | None:
    """Return a process's state, or None when there is no such process or no /proc."""
    # The name in parentheses may hold spaces and parentheses itself: fields count from the last one.
    before, _, behind = read_proc(f"{pid}/stat").rpartition(b")")
    if not behind:
        return None
    fields = behind.split()
    parent, group, session = (int(field) for field in fields[1:4])
    return ProcessStat(
        name=before.partition(b"(")[2],
        state=fields[0],
        parent=parent,
        group=group,
        session=session,
        is_exiting=bool(int(fields[6]) & _EXITING),
        started_at=int(fields[19]),
        memory=int(fields[21]),
        cpu=int(fields[11]) + int(fields[12]),
    )


def ticks_since_boot() -> int:
    """Return the time in the unit of `ProcessStat.started_at`."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def list_running_threads(pid: int, *, besides: bytes | None = None) -> list[str]:
    """Return the threads of a process that have a processor or wait for one, each as `12/task/13`, its place in /proc.

    Its first thread may have ended already. Threads with the name `besides` do not count.
    """
    try:
        tasks = [f"{pid}/task/{thread}" for thread in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []
    stats = {task: read_stat(task) for task in tasks}
    return [task for task, stat in stats.items() if stat is not None and stat.state == b"R" and stat.name != besides]


def wait_channel(pid: int) -> str:
    """Return the kernel function in which a process sleeps, or an empty string."""
    text = read_proc(f"{pid}/wchan").strip().decode()
    return "" if text == "0" else text


def set_subreaper(*, is_on: bool) -> bool:
    """Let orphaned descendants of this process become its children, or those of PID 1; return whether that is possible.

    A subreaper has to collect foreign children, too.
    """
    try:
        return call_libc("prctl", _PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0) == 0
    except (ImportError, AttributeError, OSError):
        return False  # another system, or a Python without it


def is_subreaper() -> bool:
    """Whether orphaned descendants become children of this process."""
    try:
        import ctypes

        value = ctypes.c_int()
        ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(value), 0, 0, 0)
    except (ImportError, AttributeError, OSError):
        return False
    return bool(value.value)


# --- signals ---------------------------------------------------------------------------------------------------------
def has_group(group: int) -> bool:
    """Whether a process group has a member."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def signal_groups(groups: Iterable[int], number: int) -> None:
    """Send a signal to process groups; groups that are gone are skipped."""
    for group in groups:
        try:
            os.killpg(group, number)
        except (ProcessLookupError, PermissionError):
            pass


def signal_children(pids: Iterable[int], number: int) -> None:
    """Send a signal to children that were not reaped: no other process has their pids. Ended children are skipped."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            pass


def signal_processes(processes: Mapping[int, ProcessStat], number: int) -> None:
    """Send a signal to processes that were found before; a process that has got a pid since then gets none."""
    for pid, stat in processes.items():
        try:
            pidfd = os.pidfd_open(pid)
            try:
                if start_time(pid) == stat.started_at:
                    signal_pidfd(pidfd, number)
            finally:
                os.close(pidfd)
        except ProcessLookupError:
            continue
        except (AttributeError, OSError):  # pidfds are refused, or signals through them
            if start_time(pid) == stat.started_at:
                signal_children((pid,), number)


def kill_all(groups: Iterable[int], processes: Mapping[int, ProcessStat]) -> None:
    """Send SIGKILL to process groups and to processes that were found before."""
    signal_groups(groups, SIGKILL)
    signal_processes(processes, SIGKILL)


# --- what is left of workers -----------------------------------------------------------------------------------------
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
    """Find the living processes of some workers, with all descendants, which are no older than `since`, the launcher.

    Without a token only sessions count. `ignored` are pids, and `spared` sessions, that don't count. `is_adopted` says
    of a process whether it is an orphan that is known to be a descendant.
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
        or (needle and stat.state != b"D" and needle in read_proc(f"{pid}/environ"))
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
    return {number for number, session in present.items() if not _is_recycled(number, session.born)}


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
    return {number for number in own if not _is_recycled(number, sessions[number].born)}


def _is_recycled(session: int, born: int) -> bool:
    """Whether a session's number belongs to a stranger by now.

    A pid is not given out again while it is the number of a session or group with members. So when there is a process
    of that number which began at another time than the leader that we started (`born`, in clock ticks; 0 if unknown),
    our session was empty long ago.
    """
    stat = read_stat(session)
    return stat is not None and bool(born) and stat.started_at != born


def _read_living(since: int) -> dict[int, ProcessStat]:
    """Return the living processes that began at a time, in clock ticks since boot, or later."""
    try:
        stats = {int(name): read_stat(name) for name in os.listdir("/proc") if name.isdigit()}
    except OSError:
        return {}
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


# --- what ps shows ---------------------------------------------------------------------------------------------------
class ProcessTitle:
    """The command line of this process, as it is when this object is made.

    It is in the process's memory; /proc/self/stat names the place, for which there is no call without ctypes. A
    template was executed with its workers' command line, so there is always enough room. Every failure is harmless:
    `ps` shows the old words.
    """

    __slots__ = ("_comm", "_size", "_start")

    def __init__(self) -> None:
        fields = read_proc("self/stat").rpartition(b")")[2].split()
        self._start, end = (int(fields[place]) for place in (45, 46)) if fields else (0, 0)  # arg_start, arg_end
        self._size = end - self._start
        self._comm = read_proc("self/comm").rstrip(b"\n")

    def show(self, words: str, name: str) -> None:
        """Show words instead of the command line (`ps -f`), and a name of at most 15 bytes (`ps`, `top`)."""
        self._write(words.encode()[: max(0, self._size - 1)], name.encode())

    def show_command(self, argv: Sequence[str]) -> None:
        """Show a command line, and the name that this process began with."""
        self._write(b"".join(os.fsencode(word) + b"\0" for word in argv)[: self._size], self._comm)

    def _write(self, text: bytes, name: bytes) -> None:
        if not self._size:
            return
        try:
            with open("/proc/self/mem", "r+b", buffering=0) as memory:
                memory.seek(self._start)
                memory.write(text.ljust(self._size, b"\0"))
            with open("/proc/self/comm", "wb", buffering=0) as comm:
                comm.write(name)
        except OSError:
            pass
