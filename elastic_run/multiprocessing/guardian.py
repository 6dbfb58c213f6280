"""The guardian: a small process that outlives the launcher by a moment, so that nothing else does (law 6).

Rules
- It holds the read end of a pipe whose only write end is the launcher's. End of file without a farewell means that the
  launcher died, by whatever signal: the guardian kills every session that it was told of, then sweeps by session and by
  environment token until nothing is left, removes the launcher's temporary directory, and ends.
- It has its own session, its own name in `ps` (so that `pkill -f train.py` spares it), and none of the launcher's
  descriptors but the pipe: else `elastic-run … | cat` would never end.
- It is forked where the launcher is the whole process (half a millisecond, pages shared), and exec'd where we run
  inside somebody's process, whose threads and memory must not be copied.
- Messages are lines: `+PID` a worker's session began, `-PID` it is gone, `dir PATH` a temporary directory, `bye`.
  Each is one write below PIPE_BUF, so a torn line can only be the last one.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

from elastic_run.multiprocessing import processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

#: Seconds that the guardian goes on killing; what then lives is in uninterruptible sleep.
PATIENCE = 10.0
#: Seconds between two looks while killed processes disappear (a case of law 2's list).
_LOOK = 0.005
_MAX_FD = 1 << 16


class Guardian:
    """The launcher's side of the guardian.

    Args:
        token: The token that this launcher's workers carry in their environment.
        is_exec: Start a fresh interpreter rather than a fork.
    """

    def __init__(self, token: str, *, is_exec: bool) -> None:
        self.token = token
        self.is_exec = is_exec
        self.pid = 0
        self._pipe = -1
        self._sessions: set[int] = set()
        self._directory = ""

    def start(self) -> int:
        """Start it, or start another one after it died; it learns what its predecessor knew.

        Returns:
            Its pid.

        Raises:
            OSError: The system refuses a process.
        """
        self._close_pipe()
        reader, self._pipe = os.pipe()
        since = getattr(processes.read_stat("self"), "started_at", 0)
        start = _spawn if self.is_exec else _fork
        try:
            self.pid = start(reader, self.token, since)
        finally:
            os.close(reader)
        for session in self._sessions:
            self._send(f"+{session}")
        if self._directory:
            self._send(f"dir {self._directory}")
        return self.pid

    def watch(self, session: int) -> None:
        """Tell it that a worker's session began."""
        self._sessions.add(session)
        self._send(f"+{session}")

    def forget(self, session: int) -> None:
        """Tell it that a session is gone, before its number can be used again."""
        self._sessions.discard(session)
        self._send(f"-{session}")

    def remove_at_end(self, directory: str) -> None:
        """Tell it which temporary directory to remove should the launcher die; empty for none."""
        self._directory = directory
        self._send(f"dir {directory}")

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
            os.write(self._pipe, line.encode(errors="surrogateescape") + b"\n")
        except BrokenPipeError:
            # It was killed. The loop sees its exit and starts another, which is told everything.
            pass

    def _close_pipe(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1


def _fork(reader: int, token: str, since: int) -> int:
    name = f"elastic-run guardian of {os.getpid()}"
    pid = os.fork()
    if pid:
        return pid
    try:
        _become_daemon(reader)
        _set_process_title(name)
        stand_guard(0, token, since)
    finally:
        # Never back into the launcher's code, whatever happened.
        os._exit(0)


def _spawn(reader: int, token: str, since: int) -> int:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from elastic_run.multiprocessing import guardian; guardian.main()"
    )
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        from elastic_run.multiprocessing.children import spawn  # noqa: PLC0415 - the fork needs none of it

        argv = [sys.executable, "-I", "-S", "-c", code, root, token, str(since), f"guardian of {os.getpid()}"]
        return spawn(argv, os.environ, stdin=reader, stdout=null, stderr=null)
    finally:
        os.close(null)


def main() -> None:
    """Run as a fresh interpreter: the pipe is descriptor 0, the token and the start time are arguments."""
    os.chdir("/")
    _ignore_signals()
    stand_guard(0, sys.argv[2], int(sys.argv[3]))


def _become_daemon(reader: int) -> None:
    os.setsid()
    os.dup2(reader, 0)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.closerange(3, _MAX_FD)
    os.chdir("/")
    _ignore_signals()


def _ignore_signals() -> None:
    """A signal to everybody (`kill -TERM -1`, a site's clean-up) must not take the guardian before the workers."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _set_process_title(title: str) -> None:
    """Write over this process's command line, which is memory of its own since the fork.

    /proc/self/stat gives the place; there is no call for it without ctypes. Failure is harmless.
    """
    try:
        with open("/proc/self/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        size = end - start
        if size > 1:
            with open("/proc/self/mem", "r+b", buffering=0) as memory:
                memory.seek(start)
                memory.write(title.encode()[: size - 1].ljust(size, b"\0"))
        with open("/proc/self/comm", "wb", buffering=0) as comm:
            comm.write(b"er-guardian")
    except (OSError, IndexError, ValueError):
        pass


def stand_guard(pipe: int, token: str, since: int) -> None:
    """Wait for the launcher's end, and clean up after it unless it said farewell.

    Args:
        pipe: Read end of the launcher's pipe.
        token: What the launcher's descendants carry in their environment.
        since: Start time of the launcher in clock ticks.
    """
    sessions: set[int] = set()
    directory = ""
    rest = b""
    while chunk := os.read(pipe, 1 << 16):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line == b"bye":
                return
            if line.startswith(b"+"):
                sessions.add(int(line[1:]))
            elif line.startswith(b"-"):
                sessions.discard(int(line[1:]))
            elif line.startswith(b"dir "):
                directory = os.fsdecode(line[4:])
    sweep(sessions, token, since, time.monotonic)
    if directory:
        import shutil  # noqa: PLC0415 - only after a disaster

        shutil.rmtree(directory, ignore_errors=True)


def sweep(sessions: set[int], token: str, since: int, clock: Callable[[], float]) -> None:
    """Kill until nothing is left.

    Args:
        sessions: The workers' sessions.
        token: What their descendants carry in their environment.
        since: Start time of the launcher in clock ticks.
        clock: Monotonic seconds.
    """
    # The groups first and at once: no scan stands between a dead launcher and its workers.
    sessions = {session for session in sessions if not processes.is_recycled(session, token)}
    processes.kill_all(sessions)
    give_up_at = clock() + PATIENCE
    me = (os.getpid(),)
    while (left := processes.find_survivors(sessions, token, since=since, ignored=me)) and clock() < give_up_at:
        processes.kill_all((), left)
        select.select((), (), (), _LOOK)
