"""What /proc tells of one process, and signals to processes and their groups.

Rules
- A process is gone if it is absent or a zombie: a slow PID 1 leaves zombies for some time.
- The module uses little of the standard library: the guardian runs it after the launcher has died.
- It is for the guardian, for the start and the stop of workers, and for what psutil does not tell.
"""

from __future__ import annotations

import os
import time

from elastic_run.records import dataclass
from elastic_run.signals import SIGKILL, has_usual_handler, signal_pidfd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: Letters of `ProcessStat.state` of a process that has ended.
GONE_STATES = (b"Z", b"X", b"x")
#: PF_EXITING of include/linux/sched.h.
_EXITING = 4


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
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # The name in parentheses may hold spaces and parentheses itself: fields count from the last one.
        before, _, behind = os.read(fd, 4096).rpartition(b")")
    except OSError:
        return None
    finally:
        os.close(fd)
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


def start_time(pid: int | str) -> int:
    """Return when a process began, in clock ticks since boot; 0 if unknown."""
    stat = read_stat(pid)
    return 0 if stat is None else stat.started_at


def ticks_since_boot() -> int:
    """Return the time in the unit of `ProcessStat.started_at`."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def is_running(pid: int) -> bool:
    """Whether any thread of a process has a processor or waits for one."""
    return bool(list_running_threads(pid))


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


def is_child(pid: int) -> bool:
    """Whether a process is a child of this one, so that its exit code can be had."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def has_children() -> bool:
    """Whether this process has any child, ended ones included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def list_pids() -> list[str]:
    """Return the pids of all processes, as text."""
    try:
        return [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def is_recycled(session: int, born: int) -> bool:
    """Whether a session's number belongs to a stranger by now.

    A pid is not given out again while it is the number of a session or group with members. So when there is a process
    of that number which began at another time than the leader that we started (`born`, in clock ticks; 0 if unknown),
    our session was empty long ago.
    """
    stat = read_stat(session)
    return stat is not None and bool(born) and stat.started_at != born


def has_handler(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal now; not where the system doesn't tell."""
    return number in list_handled(pid)


def list_handled(pid: int | str) -> frozenset[int]:
    """Return the signals for which a process has a handler now, in C too; none where the system doesn't tell."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            caught = next((line for line in file if line.startswith(b"SigCgt:")), b"SigCgt: 0")
    except OSError:
        return frozenset()
    bits = int(caught.split()[1], 16)
    return frozenset(number for number in range(1, bits.bit_length() + 1) if bits >> (number - 1) & 1)


def list_foreign_handled() -> frozenset[int]:
    """Return the signals that the program around the launcher, such as a profiler, handles in this process.

    Python does not know of a handler that code in C has installed since Python began; the kernel does.
    """
    return frozenset(number for number in list_handled("self") if not has_usual_handler(number))


def read_name(pid: int) -> str:
    """Return the short name of a process, or an empty string."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read().strip().decode(errors="replace")
    except OSError:
        return ""


def signal_groups(groups: Iterable[int], number: int) -> None:
    """Send a signal to process groups; groups that are gone are skipped."""
    for group in groups:
        try:
            os.killpg(group, number)
        except (ProcessLookupError, PermissionError):
            pass


def has_group(group: int) -> bool:
    """Whether a process group has a member."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


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


def wait_channel(pid: int) -> str:
    """Return the kernel function in which a process sleeps, or an empty string."""
    try:
        with open(f"/proc/{pid}/wchan", encoding="ascii") as file:
            text = file.read().strip()
    except OSError:
        return ""
    return "" if text == "0" else text
