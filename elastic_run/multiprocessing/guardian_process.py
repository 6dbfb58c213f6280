"""The guardian's own process, and a second one behind it: they wait for the launcher's end, and clean up after it.

- Each sees the end of the launcher by its pidfd, since a fork of the program around us may hold the link open.
- The second guardian does what the first one does, half a second later, or as soon as the first one has ended: it acts
  where the first one was killed, even at the same moment as the launcher, or was stopped. Usually it finds nothing.
  Measured: when launcher and guardian were killed together, 12 of 12 workers lived on without it, and none with it.
- The second guardian stays in the session of the first, so the launcher recognises it, but has its own process group.
- When the launcher and both guardians are killed at the same moment, no process is left to act. docs/processes.md says
  why PR_SET_PDEATHSIG and cgroup.kill were rejected. A pipe whose closing sends SIGKILL to the group (F_SETSIG) gives
  each worker a descriptor that it does not have under torchrun.
"""

from __future__ import annotations

import _socket
import os
import select
import time
from struct import unpack

from elastic_run import signals
from elastic_run.multiprocessing import process_table
from elastic_run.records import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

#: Seconds that a guardian goes on killing; what then lives is in uninterruptible sleep.
WAIT_LIMIT = 10.0
#: Seconds between two looks while killed processes disappear.
_LOOK = 0.005
_EMPTY_LOOKS = 2
#: Seconds until the second guardian is forked: no worker that boots loses a processor to it.
_ALONE = 0.2
#: Seconds after the launcher's end in which the first guardian is left alone.
_HEAD_START = 0.5


@dataclass(slots=True)
class Orders:
    """The launcher's orders."""

    sessions: dict[int, process_table.Session] = field(default_factory=dict)
    directory: str = ""
    is_over: bool = False
    is_dismissed: bool = False


def read_orders(file: int) -> Orders:
    """Return the orders in a file; its last line may be torn, if the launcher was killed."""
    orders = Orders()
    for line in os.pread(file, os.fstat(file).st_size, 0).split(b"\n")[:-1]:
        match line.split():
            case [b"+", session, born]:
                orders.sessions[int(session)] = process_table.Session(int(born))
            case [b"=", session, ended] if int(session) in orders.sessions:
                orders.sessions[int(session)].ended = int(ended)
            case [b"-", session]:
                orders.sessions.pop(int(session), None)
            case [b"directory", *path]:
                orders.directory = os.fsdecode(bytes.fromhex(b"".join(path).decode()))
            case [b"keep"]:
                orders.is_over = True
            case [b"bye"]:
                orders.is_dismissed = True
    return orders


class _Watch:
    """The launcher as a guardian sees it: its end, and the connection that came through its link."""

    def __init__(self, link: int, launcher: int) -> None:
        self.held = -1
        self.link = _socket.socket(fileno=link)
        self._pidfd = _open_pidfd(launcher)

    def wait_end(self, seconds: float | None = None) -> bool:
        """Wait for the end of the launcher or of the link; return whether it came in time."""
        poll = select.poll()
        poll.register(self.link, select.POLLIN)
        if self._pidfd is not None:
            poll.register(self._pidfd, select.POLLIN)
        while ready := {fd for fd, _ in poll.poll(None if seconds is None else seconds * 1000)}:
            if self._read_link() or self._pidfd in ready:
                return True
        return False

    def _read_link(self) -> bool:
        """Take all connections that have come, the last of which counts; return whether the link has ended."""
        try:
            while descriptors := _receive(self.link):
                self.release(is_replaced=True)
                self.held = descriptors[-1]
        except BlockingIOError:
            return False
        return True

    def release(self, *, is_replaced: bool = False) -> None:
        """Close the connection that is held; end it, so that the others know, unless another one replaces it."""
        if self.held >= 0 and is_replaced:
            os.close(self.held)
        elif self.held >= 0:
            _end_connection(self.held)
        self.held = -1


def stand_guard(orders: int, links: list[int], launcher: int, token: str, since: int) -> None:
    """Be the first guardian: wait for the launcher's end, and clean up after it unless it said farewell."""
    own, others = links
    watch = _Watch(own, launcher)
    if not watch.wait_end(_ALONE):
        signals.ignore_signal(signals.SIGCHLD)  # the second one leaves no zombie should it be killed
        first = os.getpid()
        try:
            is_second = not os.fork()
        except OSError:
            is_second = False  # where the system refuses it, one guardian has to do
        if is_second:
            try:
                watch.release(is_replaced=True)
                watch.link.close()
                _stand_behind(first, orders, others, launcher, token, since)
            finally:
                os._exit(0)
        os.close(others)
        watch.wait_end()
    _clean_up(orders, watch, token, since)


def _stand_behind(first: int, orders: int, link: int, launcher: int, token: str, since: int) -> None:
    """Be the second guardian."""
    os.setpgid(0, 0)
    process_table.ProcessTitle().show(f"second guardian of {launcher}", "second guardian")
    watch, end_of_first = _Watch(link, launcher), select.poll()
    pidfd = _open_pidfd(first)
    if pidfd is not None:
        end_of_first.register(pidfd, select.POLLIN)
    watch.wait_end()
    if not read_orders(orders).is_dismissed:
        end_of_first.poll(_HEAD_START * 1000)
        _clean_up(orders, watch, token, since)
        if os.getppid() == first:
            os.kill(first, signals.SIGKILL)  # it was stopped, or gets no processor


def _clean_up(file: int, watch: _Watch, token: str, since: int) -> None:
    """Kill what the launcher has left, remove its directory, and tell its job, unless the launcher said farewell."""
    orders = read_orders(file)
    if orders.is_dismissed:
        return
    if not orders.is_over:
        sweep(orders.sessions, token, since, time.monotonic)
    if orders.directory:
        import shutil

        shutil.rmtree(orders.directory, ignore_errors=True)
    watch.release()


def sweep(sessions: dict[int, process_table.Session], token: str, since: int, clock: Callable[[], float]) -> None:
    """Kill until nothing is left, at two looks in a row: a process that is being born is easily missed by one.

    For the first three arguments see `process_table.find_survivors`.
    """
    # The groups at once: no scan stands between a dead launcher and its running workers. They are stopped before they
    # are killed, so that their children are still theirs for the look at who descends from whom.
    groups = process_table.find_groups(sessions)
    process_table.signal_groups(groups, signals.SIGSTOP)
    for group in groups:
        sessions[group].ended = 0  # the number stays theirs for the time of a sweep
    below = process_table.find_survivors(sessions, "", since=since)
    process_table.kill_all(groups, below)
    give_up_at = clock() + WAIT_LIMIT
    me = (os.getpid(),)
    empty_looks = 0
    while empty_looks < _EMPTY_LOOKS and clock() < give_up_at:
        left = process_table.find_survivors(sessions, token, since=since, ignored=me)
        process_table.kill_all((), left)
        empty_looks = 0 if left else empty_looks + 1
        select.select((), (), (), _LOOK)


# --- the link --------------------------------------------------------------------------------------------------------
def _receive(link: _socket.socket) -> list[int]:
    """Return the descriptors of a message; none if the link has ended."""
    try:
        _, ancillary, _, _ = link.recvmsg(1, _socket.CMSG_SPACE(4), _socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return []
    return [fd for _, _, packed in ancillary for fd in unpack("i", packed)]


def _end_connection(descriptor: int) -> None:
    """End a connection that this process holds: the other side reads the end of the stream, and not an error."""
    connected = _socket.socket(fileno=descriptor)
    try:
        connected.setblocking(False)
        # What nobody has read would make the kernel reset the connection.
        while connected.recv(1 << 16):
            pass
    except OSError:
        pass
    try:
        connected.shutdown(_socket.SHUT_RDWR)
    except OSError:
        pass
    connected.close()


def _open_pidfd(pid: int) -> int | None:
    """Return a process's pidfd; where there are none the end of its link has to do."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        # It died meanwhile. Its end of the link may live on in a fork: a descriptor that is always readable.
        return os.open(os.devnull, os.O_RDONLY)
    except (AttributeError, OSError):
        return None
