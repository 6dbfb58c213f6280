"""The guardian: a small process that outlives the launcher by a moment, so that nothing else does (law 6).

Rules
- It holds the read end of a pipe from the launcher, and the launcher's pidfd (a fork of the program around us may hold
  the pipe's other end). When either ends without a farewell the launcher has died, by whatever signal: the guardian
  kills every session that it was told of, then sweeps by session and by environment token until nothing is left,
  removes the launcher's temporary directory, and ends.
- It has its own session, a name in `ps` that `pkill -f train.py` or `pkill -f elastic` doesn't find, and none of the
  launcher's descriptors but the pipe: else `elastic-run … | cat` would never end.
- PDEATHSIG for the workers was rejected: it needs code between fork and exec, is bound to a thread, and misses
  grandchildren.
- It is forked where the launcher is the whole process (quick, and pages are shared), and exec'd where we run
  inside somebody's process, whose threads and memory must not be copied. A program that has no interpreter (frozen, or
  one that embeds Python) forks it all the same: to execute `sys.executable` would begin the program a second time.
- Of one node's job it is forked right before the first worker: after a fork each page that the launcher writes to is
  copied first, and to import the launcher writes to most of what it has.
- In a job of several nodes it also tells the others that this one is gone, last: nothing stands before the killing.
- On busy cores a worker may run for a while before the launcher, which has just started it, gets to tell its pid. If it
  drops its environment meanwhile, it is known by its stderr, a pipe or a terminal of ours that the guardian was told of
  before the start.
- Messages are lines: `|DEVICE INODE` the next worker's stderr, `+PID BORN` a worker's session began (BORN: its start
  time), `-PID` it is gone, `dir HEX` a temporary directory, `farewell MODULE HEX` whose `say_farewell` is to be called
  with which document, `keep` nothing is to be killed
  any more, `bye`. Each is one write below PIPE_BUF, so a torn line can only be the last one.
"""

from __future__ import annotations

import os
import select
import stat
import sys
import time

from elastic_run import signals
from elastic_run.multiprocessing import processes
from elastic_run.multiprocessing.interpreter import find_interpreter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

#: Seconds that the guardian goes on killing; what then lives is in uninterruptible sleep.
PATIENCE = 10.0
#: Seconds between two looks while killed processes disappear (a case of law 2's list).
_LOOK = 0.005
_EMPTY_LOOKS = 2
_MAX_FD = 1 << 16
#: Milliseconds in which workers boot: until then orders wait in the pipe, which holds those of two thousand workers.
_NO_ORDERS = 1000
#: The launcher's own, which others may have as well.
_STDERR = 2
_IGNORED = (signals.SIGTERM, signals.SIGINT, signals.SIGHUP, signals.SIGQUIT, signals.SIGUSR1, signals.SIGUSR2)


class Guardian:
    """The launcher's side of the guardian.

    Args:
        is_exec: Start a fresh interpreter rather than a fork.

    Attributes:
        token: What the launcher's workers carry in their environment.
        pid: The guardian's pid; 0 before it was started.
        spared: Sessions that belong to no round, so that a round's end leaves them alone; they end with the launcher.
    """

    def __init__(self, *, is_exec: bool) -> None:
        self.token = f"{os.getpid():x}-{os.urandom(8).hex()}"
        self.is_exec = is_exec
        self.pid = 0
        self.spared: set[int] = set()
        self._pipe = -1
        self._sessions: dict[int, int] = {}
        self._directory = ""
        self._farewell = ""
        self._is_over = False

    def start(self) -> int:
        """Start it, or start another one after it died; it learns what its predecessor knew.

        Returns:
            Its pid.

        Raises:
            OSError: The system refuses a process.
        """
        self._close_pipe()
        reader, self._pipe = os.pipe()
        since = processes.start_time("self")
        interpreter = find_interpreter() if self.is_exec else ""
        # They wait for it in the pipe: a launcher that is killed while it starts leaves no directory.
        if self._directory:
            self.remove_at_end(self._directory)
        if self._farewell:
            self._send(self._farewell)
        try:
            own = (reader, self.token, since)
            self.pid = _spawn(interpreter, *own) if interpreter else _fork(*own)
        finally:
            os.close(reader)
        # As many as there are workers, and a pipe that nobody reads yet has an end.
        for session, born in self._sessions.items():
            self._send(f"+{session} {born}")
        if self._is_over:
            self._send("keep")
        return self.pid

    def expect(self, stderr: int) -> None:
        """Tell it of a worker that is about to start, until `watch` tells its session.

        Args:
            stderr: Descriptor that the worker gets as 2. The launcher's own or a file says nothing: others may have it.
        """
        status = os.fstat(stderr)
        if stderr != _STDERR and (stat.S_ISFIFO(status.st_mode) or os.isatty(stderr)):
            self._send(f"|{status.st_dev} {status.st_ino}")

    def watch(self, session: int, born: int) -> None:
        """Tell it that a worker's session began, led by a process that was born at a time in clock ticks."""
        self._sessions[session] = born
        self.spared.discard(session)
        self._send(f"+{session} {born}")

    def forget(self, session: int) -> None:
        """Tell it that a session is gone, before its number can be used again."""
        self._sessions.pop(session, None)
        self.spared.discard(session)
        self._send(f"-{session}")

    def remove_at_end(self, directory: str) -> None:
        """Tell it which temporary directory to remove should the launcher die; empty for none."""
        self._directory = directory
        # In hexadecimal: a path may hold a newline, and what follows one must not be taken for another directory.
        self._send(f"dir {os.fsencode(directory).hex()}")

    def say_at_end(self, module: str, document: str) -> None:
        """Tell it whom to tell of the launcher's death.

        Args:
            module: Name of a module with a function `say_farewell`.
            document: Its argument, as JSON.
        """
        self._farewell = f"farewell {module} {document.encode().hex()}"
        self._send(self._farewell)

    def spare_all(self) -> None:
        """Tell it that the job has succeeded: what still runs lives on, even if the launcher is killed."""
        self._is_over = True
        self._send("keep")

    def abandon(self) -> None:
        """Let go of it in a forked child of the launcher: it is not the child's."""
        self._close_pipe()

    def dismiss(self) -> None:
        """Let it go: the launcher has cleaned up itself. The caller reaps it."""
        self._send("bye")
        self._close_pipe()

    def alarm(self) -> None:
        """Let it do its work now: the launcher ends in a way that was not foreseen."""
        self._close_pipe()

    def _send(self, line: str) -> None:
        if self._pipe < 0:
            return
        try:
            os.write(self._pipe, line.encode() + b"\n")
        except BrokenPipeError:
            # It was killed. The loop sees its exit and starts another, which is told everything.
            pass

    def _close_pipe(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1


def _fork(reader: int, token: str, since: int) -> int:
    launcher = os.getpid()
    ready, unready = os.pipe()
    pid = os.fork()
    if pid:
        os.close(unready)
        # Until it has left the launcher's process group, which may be killed as a whole, no worker may start.
        os.read(ready, 1)
        os.close(ready)
        return pid
    try:
        os.setsid()
        os.dup2(reader, 0)
        become_daemon(f"guardian of {launcher}", "guardian", {0})
        stand_guard(0, launcher, token, since)
    finally:
        # Never back into the launcher's code, whatever happened.
        os._exit(0)


def _spawn(interpreter: str, reader: int, token: str, since: int) -> int:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from elastic_run.multiprocessing import guardian; guardian.main()"
    )
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        from elastic_run.multiprocessing.children import spawn  # noqa: PLC0415 - a fork needs neither
        from elastic_run.multiprocessing.descriptors import inheritable_descriptors  # noqa: PLC0415

        argv = [interpreter, "-I", "-S", "-c", code, root, str(os.getpid()), token, str(since)]
        closed = inheritable_descriptors()
        return spawn(argv, os.environ, stdin=reader, stdout=null, stderr=null, closed=closed)
    finally:
        os.close(null)


def main() -> None:
    """Run as a fresh interpreter: the pipe is descriptor 0; launcher, token and start time are arguments."""
    launcher, token, since = int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    become_daemon(f"guardian of {launcher}", "guardian", {0, 1, 2})
    stand_guard(0, launcher, token, since)


def become_daemon(title: str, name: str, kept: Collection[int]) -> None:
    """Let go of what is the launcher's, in a process of its own session.

    Args:
        title: Its command line from now on.
        name: The short form.
        kept: Descriptors that stay open; the standard ones lead to /dev/null otherwise.
    """
    _ignore_signals()
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
    _set_process_title(title, name)


def _ignore_signals() -> None:
    """A signal to everybody (`kill -TERM -1`, a site's clean-up) must not take the guardian before the workers."""
    signals.set_wakeup_fd(-1)
    for number in _IGNORED:
        signals.ignore_signal(number)
    signals.default_signal(signals.SIGCHLD)


def _set_process_title(title: str, name: str) -> None:
    """Write over this process's command line, which is memory of its own.

    /proc/self/stat gives the place; there is no call for it without ctypes. Failure is harmless.
    """
    try:
        with open("/proc/self/stat", "rb") as status:
            fields = status.read().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        size = end - start
        if size > 1:
            with open("/proc/self/mem", "r+b", buffering=0) as memory:
                memory.seek(start)
                memory.write(title.encode()[: size - 1].ljust(size, b"\0"))
        with open("/proc/self/comm", "wb", buffering=0) as comm:
            comm.write(name.encode())
    except (OSError, IndexError, ValueError):
        pass


class _Orders:
    """What the launcher has told so far."""

    __slots__ = ("directory", "expected_stderr", "farewell", "is_dismissed", "is_over", "rest", "sessions")

    def __init__(self) -> None:
        self.sessions: dict[int, int] = {}
        self.expected_stderr: tuple[int, int] | None = None
        self.directory = ""
        self.farewell: tuple[str, bytes] | None = None
        self.is_dismissed = False
        self.is_over = False
        self.rest = b""

    def take(self, chunk: bytes) -> None:
        """Read the lines of a piece of the pipe."""
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        for line in lines:
            if line == b"bye":
                self.is_dismissed = True
            elif line == b"keep":
                self.is_over = True
            elif line.startswith(b"+"):
                session, born = line[1:].split()
                self.sessions[int(session)] = int(born)
                self.expected_stderr = None
            elif line.startswith(b"|"):
                device, inode = line[1:].split()
                self.expected_stderr = int(device), int(inode)
            elif line.startswith(b"-"):
                self.sessions.pop(int(line[1:]), None)
            elif line.startswith(b"dir "):
                self.directory = os.fsdecode(bytes.fromhex(line[4:].decode()))
            elif line.startswith(b"farewell "):
                _, module, document = line.decode().split()
                self.farewell = module, bytes.fromhex(document)


def stand_guard(pipe: int, launcher: int, token: str, since: int) -> None:
    """Wait for the launcher's end, and clean up after it unless it said farewell.

    Args:
        pipe: Read end of the launcher's pipe.
        launcher: The launcher's pid.
        token: What the launcher's descendants carry in their environment.
        since: Start time of the launcher in clock ticks.
    """
    orders = _Orders()
    os.set_blocking(pipe, False)
    pidfd = _open_launcher(launcher)
    poll = select.poll()
    if pidfd is not None:
        poll.register(pidfd, select.POLLIN)
    # First only its end is awaited (POLLHUP): to wake up for each order would take a processor from workers that boot.
    poll.register(pipe, 0)
    poll.poll(_NO_ORDERS)
    poll.modify(pipe, select.POLLIN)
    is_over = False
    while not is_over and not orders.is_dismissed:
        is_over = any(fd == pidfd for fd, _ in poll.poll())
        is_over = _read_orders(pipe, orders) or is_over
    if orders.is_dismissed:
        return
    if not orders.is_over:
        if orders.expected_stderr is not None:
            orders.sessions.update(processes.find_sessions_by_stderr(*orders.expected_stderr, since=since))
        sweep(orders.sessions, token, since, time.monotonic)
    if orders.directory:
        import shutil  # noqa: PLC0415 - only after a disaster

        shutil.rmtree(orders.directory, ignore_errors=True)
    if orders.farewell is not None:
        _say_farewell(*orders.farewell)


def _say_farewell(module: str, document: bytes) -> None:
    """Tell the job; it finds out by itself, later, if that can't be done."""
    import importlib  # noqa: PLC0415 - only after a disaster
    import json  # noqa: PLC0415

    try:
        importlib.import_module(module).say_farewell(json.loads(document))
    except Exception:  # noqa: BLE001 - nobody is left to be told
        return


def _open_launcher(launcher: int) -> int | None:
    """Return the launcher's pidfd; where there are none the pipe's end has to do."""
    try:
        return os.pidfd_open(launcher)
    except ProcessLookupError:
        # It died meanwhile. Its end of the pipe may live on in a fork: a descriptor that is always readable.
        return os.open(os.devnull, os.O_RDONLY)
    except (AttributeError, OSError):
        return None


def _read_orders(pipe: int, orders: _Orders) -> bool:
    """Take all that is in the pipe; return whether the launcher has closed it."""
    while True:
        try:
            chunk = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return False
        if not chunk:
            return True
        orders.take(chunk)


def sweep(sessions: Mapping[int, int], token: str, since: int, clock: Callable[[], float]) -> None:
    """Kill until nothing is left, at two looks in a row: a process that is being born is easily missed by one.

    Args:
        sessions: The workers' sessions, and when their leaders were born.
        token: What their descendants carry in their environment.
        since: Start time of the launcher in clock ticks.
        clock: Monotonic seconds.
    """
    # The groups first and at once: no scan stands between a dead launcher and its workers.
    ours = {session for session, born in sessions.items() if not processes.is_recycled(session, born)}
    processes.kill_all(ours, ours)  # the leaders by themselves too: one may not have begun its session yet
    give_up_at = clock() + PATIENCE
    me = (os.getpid(),)
    empty_looks = 0
    while empty_looks < _EMPTY_LOOKS and clock() < give_up_at:
        left = processes.find_survivors(ours, token, since=since, ignored=me)
        processes.kill_all((), left)
        empty_looks = 0 if left else empty_looks + 1
        select.select((), (), (), _LOOK)
