"""The guardian's own process, and a second one behind it: they wait for the launcher's end, and clean up after it.

Rules
- The guardian forks the second one when the workers have booted, and passes on every order that it reads. The second
  one acts where the first can't: when it was killed, even at the same moment as the launcher, and when it doesn't begin
  to clean up within `_SILENCE` of the launcher's end (it was stopped, or gets no processor). It kills the first one
  then, so that no two act on different orders, and reads from the launcher's pipe what the first one has left there.
  Measured: when launcher and guardian were killed together, 12 of 12 workers lived on without it, and none with it.
- When the guardian dies while the launcher lives the second one stands in, until the launcher has started another and
  says `bye` to what was there before.
- The second one is in the session of the first, by which the launcher knows it, and in a process group of its own.
- When the launcher and both guardians are killed at the same moment, no process is left to act. Three ways to prevent
  that were rejected; docs/processes.md has the measurements. PR_SET_PDEATHSIG kills the workers before a guardian can
  see which processes are their children, so a child that left session and environment would outlive every SIGKILL of
  the launcher; it also costs 1 ms for each worker. A pipe whose closing sends SIGKILL to the group (F_SETSIG) gives
  each worker a descriptor that it does not have under torchrun. cgroup.kill needs a guardian that writes to it, and a
  cgroup that the user may write to, which schedulers and containers seldom give.
"""

from __future__ import annotations

import _socket
import os
import select
import time
from struct import pack, unpack

from elastic_run import signals
from elastic_run.multiprocessing.process import descendants, process_table
from elastic_run.multiprocessing.process.process_title import ProcessTitle

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

#: Seconds that the guardian goes on killing; what then lives is in uninterruptible sleep.
WAIT_LIMIT = 10.0
#: Seconds between two looks while killed processes disappear (a case of law 2's list).
_LOOK = 0.005
_EMPTY_LOOKS = 2
#: Seconds in which workers boot: until then orders wait in the pipe, which has room for two thousand workers' orders.
_NO_ORDERS = 1.0
#: Seconds until the second guardian is forked: no worker that boots loses a processor to it.
_ALONE = 0.2
#: Seconds after the launcher's end in which the first guardian has to say that it cleans up.
_SILENCE = 0.5
#: Seconds that it has from there until nothing is left.
_CLEAN_UP = WAIT_LIMIT + 10.0
#: Seconds for its own end after that.
_MARGIN = 10.0
#: Seconds from the end of a process's descriptors to its own end.
_DYING = 1.0
#: Bytes that a pipe of orders takes, as far as the kernel allows it, and descriptors that come at a time.
_PIPE_SIZE = 1 << 20
_MOST_DESCRIPTORS = 16
_BYE = b"bye"
_CLEANS_UP = b"cleans up"
_SWEPT = b"swept"
_MAX_FD = 1 << 16
_IGNORED = (signals.SIGTERM, signals.SIGINT, signals.SIGHUP, signals.SIGQUIT, signals.SIGUSR1, signals.SIGUSR2)


class _Orders:
    """The launcher's orders so far."""

    def __init__(self) -> None:
        self.sessions: dict[int, descendants.Session] = {}
        self.directory = ""
        self.held: list[int] = []
        self.is_dismissed = False
        self.is_cleaning = False
        self.is_over = False
        self.is_swept = False
        self.rest = b""

    @property
    def limit(self) -> float:
        """Seconds that the first guardian has for what it does now; 0 before the launcher's end."""
        if self.is_swept:
            return _MARGIN
        return _CLEAN_UP if self.is_cleaning else 0.0

    def release(self) -> None:
        """End the connection that is held: the other nodes know then that nothing of this one is left."""
        for held in self.held:
            end_connection(held)
        self.held.clear()

    def take(self, chunk: bytes, held: Sequence[int] = ()) -> None:
        """Read the lines of a piece of the pipe, and the descriptors that came with it: the last one counts."""
        if held:
            for former in (*self.held, *held[:-1]):
                os.close(former)
            self.held = [held[-1]]
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        for line in lines:
            self._read_line(line)

    def _read_line(self, line: bytes) -> None:
        if line.startswith(b"+"):
            session, born, ended = map(int, line[1:].split())
            self.sessions[session] = descendants.Session(born, ended)
        elif line.startswith(b"-"):
            self.sessions.pop(int(line[1:]), None)
        elif line == _BYE:
            self.is_dismissed = True
        elif line == _CLEANS_UP:
            self.is_cleaning = True
        elif line == _SWEPT:
            self.is_swept = True
            self.release()
        elif line == b"keep":
            self.is_over = True
        elif line.startswith(b"dir "):
            self.directory = os.fsdecode(bytes.fromhex(line[4:].decode()))


class _Launcher:
    """The launcher as its guardians see it: the pipe with its orders, and its end."""

    def __init__(self, pipe: int, pid: int, token: str, since: int) -> None:
        os.set_blocking(pipe, False)
        self.pipe = pipe
        self.pid = pid
        self.pidfd = _open_pidfd(pid)
        self.token = token
        self.since = since
        self.orders = _Orders()

    def make_poll(self, events: int) -> select.poll:
        """Return a poll object that sees the launcher's end, and orders where `events` says so."""
        poll = select.poll()
        if self.pidfd is not None:
            poll.register(self.pidfd, select.POLLIN)
        poll.register(self.pipe, events)
        return poll

    def wait_end(self, seconds: float) -> bool:
        """Wait for its end alone; return whether it came. To wake up for orders would cost booting workers time."""
        return bool(self.make_poll(0).poll(seconds * 1000))

    def follow(self, second: _Second) -> None:
        """Take its orders until it ends or says `bye`."""
        poll, is_over = self.make_poll(select.POLLIN), False
        while not is_over and not self.orders.is_dismissed:
            is_over = any(fd == self.pidfd for fd, _ in poll.poll())
            is_over = self._read_orders(second) or is_over

    def _read_orders(self, second: _Second) -> bool:
        """Take all that is in the pipe; return whether the launcher has closed it."""
        while True:
            chunk, held = _read(self.pipe)
            if not chunk:
                return chunk is not None
            self.orders.take(chunk, held)
            second.send(chunk, held)

    def clean_up(self, on_swept: Callable[[], None]) -> None:
        """Kill what it has left, remove its directory, and tell its job."""
        orders = self.orders
        if not orders.is_over:
            sweep(orders.sessions, self.token, self.since, time.monotonic)
        if orders.directory:
            import shutil

            shutil.rmtree(orders.directory, ignore_errors=True)
        orders.release()
        on_swept()


class _Second:
    """The second guardian, as the first one sees it."""

    def __init__(self) -> None:
        self._pipe = -1

    def start(self, launcher: _Launcher) -> None:
        """Fork it; where the system refuses that, one guardian has to do."""
        reading, writing = make_pipe()
        first = os.getpid()
        signals.ignore_signal(signals.SIGCHLD)  # it leaves no zombie should it be killed
        try:
            pid = os.fork()
        except OSError:
            pid = -1
        if not pid:
            try:
                os.close(writing)
                _stand_behind(first, reading, launcher)
            finally:
                os._exit(0)
        os.close(reading)
        self._pipe = writing

    def send(self, orders: bytes, held: Sequence[int] = ()) -> None:
        """Pass orders on; one that was killed, or that reads nothing, is let go."""
        if self._pipe < 0:
            return
        try:
            is_told = send_descriptor(self._pipe, orders, *held[-1:]) == len(orders)
        except OSError:
            is_told = False
        if not is_told:
            os.close(self._pipe)
            self._pipe = -1


def stand_guard(pipe: int, launcher: int, token: str, since: int) -> None:
    """Wait for the launcher's end, and clean up after it unless it said farewell."""
    watched = _Launcher(pipe, launcher, token, since)
    second = _Second()
    if not watched.wait_end(_ALONE):
        second.start(watched)
    watched.wait_end(_NO_ORDERS - _ALONE)
    watched.follow(second)
    if watched.orders.is_dismissed:
        return
    second.send(_CLEANS_UP + b"\n")
    watched.clean_up(lambda: second.send(_SWEPT + b"\n"))
    second.send(_BYE + b"\n")


def _stand_behind(first: int, pipe: int, launcher: _Launcher) -> None:
    """Be the second guardian."""
    signals.default_signal(signals.SIGCHLD)
    os.setpgid(0, 0)
    ProcessTitle().show(f"second guardian of {launcher.pid}", "second guardian")
    orders = launcher.orders
    if not _outlasts_first(_open_pidfd(first), pipe, launcher) or orders.is_dismissed:
        return
    if os.getppid() == first:
        os.kill(first, signals.SIGKILL)
    launcher.follow(_Second())
    if not orders.is_dismissed:
        launcher.clean_up(lambda: None)


def _outlasts_first(first: int | None, pipe: int, launcher: _Launcher) -> bool:
    """Follow the first guardian; return whether it is gone, or silent though the launcher has ended."""
    orders = launcher.orders
    both, one = launcher.make_poll(0), select.poll()
    for poll in (both, one):
        poll.register(pipe, select.POLLIN)
    deadline = 0.0  # none before the launcher's end
    while not orders.is_dismissed:
        left = deadline - time.monotonic() if deadline else 0.0
        ready = {fd for fd, _ in (one.poll(max(0.0, left) * 1000) if deadline else both.poll())}
        if pipe in ready:
            (chunk, held), limit = _read(pipe), orders.limit
            if not chunk:
                return _has_ended(first)
            orders.take(chunk, held)
            if orders.limit != limit:
                deadline = time.monotonic() + orders.limit
        elif not deadline:
            deadline = time.monotonic() + _SILENCE
        elif left <= 0:
            return True
    return False


def _has_ended(pidfd: int | None) -> bool:
    """Whether a process whose descriptors are closed has ended; if not it has let go of this one."""
    if pidfd is None:
        return True
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(_DYING * 1000))


def make_pipe() -> tuple[int, int]:
    """Return both ends of a pipe that can carry descriptors; writing never blocks."""
    reading, writing = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
    writing.setblocking(False)
    writing.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF, _PIPE_SIZE)
    return reading.detach(), writing.detach()


def send_descriptor(pipe: int, data: bytes, *descriptors: int) -> int:
    """Write to a pipe of `make_pipe`, with descriptors that the reader gets; returns the number of bytes written.

    Raises:
        BlockingIOError: There is no room.
        OSError: Nobody reads.
    """
    if not descriptors:
        return os.write(pipe, data)
    writing = _socket.socket(fileno=pipe)
    try:
        return writing.sendmsg(
            [data], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, pack(f"{len(descriptors)}i", *descriptors))]
        )
    finally:
        writing.detach()


def end_connection(descriptor: int) -> None:
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
    """Return a process's pidfd; where there are none the end of its pipe has to do."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        # It died meanwhile. Its end of the pipe may live on in a fork: a descriptor that is always readable.
        return os.open(os.devnull, os.O_RDONLY)
    except (AttributeError, OSError):
        return None


def _read(pipe: int) -> tuple[bytes | None, list[int]]:
    """Return what is in a pipe, nothing at its end, or None where it is empty for now; and the descriptors with it."""
    reading = _socket.socket(fileno=pipe)
    try:
        data, extra, _, _ = reading.recvmsg(
            1 << 16, _socket.CMSG_SPACE(_MOST_DESCRIPTORS * 4), _socket.MSG_CMSG_CLOEXEC
        )
    except BlockingIOError:
        return None, []
    finally:
        reading.detach()
    found = [
        number for _, _, packed in extra for number in unpack(f"{len(packed) // 4}i", packed[: len(packed) // 4 * 4])
    ]
    return data, found


def sweep(sessions: Mapping[int, descendants.Session], token: str, since: int, clock: Callable[[], float]) -> None:
    """Kill until nothing is left, at two looks in a row: a process that is being born is easily missed by one.

    For the first three arguments see `descendants.find_survivors`.
    """
    # The groups at once: no scan stands between a dead launcher and its running workers. They are stopped before they
    # are killed, so that their children are still theirs for the look at who descends from whom.
    groups = descendants.find_groups(sessions)
    process_table.signal_groups(groups, signals.SIGSTOP)
    for group in groups:
        sessions[group].ended = 0  # the number stays theirs for the time of a sweep
    below = descendants.find_survivors(sessions, "", since=since)
    process_table.kill_all(groups, below)
    give_up_at = clock() + WAIT_LIMIT
    me = (os.getpid(),)
    empty_looks = 0
    while empty_looks < _EMPTY_LOOKS and clock() < give_up_at:
        left = descendants.find_survivors(sessions, token, since=since, ignored=me)
        process_table.kill_all((), left)
        empty_looks = 0 if left else empty_looks + 1
        select.select((), (), (), _LOOK)


def become_daemon(title: str, name: str, kept: Collection[int]) -> None:
    """Close the launcher's descriptors but for some, and change the title and its short form, in a session of its own.

    Standard descriptors that are not kept lead to /dev/null.
    """
    ignore_signals()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        if fd not in kept:
            os.dup2(null, fd)
    start = 3
    for fd in sorted(fd for fd in kept if fd >= start):
        os.closerange(start, fd)
        start = fd + 1
    os.closerange(start, _MAX_FD)
    os.chdir("/")
    ProcessTitle().show(title, name)


def ignore_signals() -> None:
    """Ignore signals to all processes (`kill -TERM -1`, a site's clean-up): the guardian must outlive the workers."""
    signals.set_wakeup_fd(-1)
    for number in _IGNORED:
        signals.ignore_signal(number)
    signals.default_signal(signals.SIGCHLD)
