"""The guardian: a small process that outlives the launcher by a moment, so that no other process does (law 6).

- The launcher writes orders into a file without a name. The guardian and a second one (`guardian_process`) read it when
  the launcher has ended, so nobody waits for another. Orders are lines: `+ PID BORN` a worker leads a session (BORN:
  its start time), `= PID ENDED` it had ended by a time, `- PID` nothing of it is left, `directory HEX` a temporary
  directory, `keep` nothing is to be killed any more, `bye`.
- It has its own session, a name in `ps` that `pkill -f train.py` or `pkill -f elastic` doesn't find, and none of the
  launcher's descriptors but a link: otherwise `elastic-run … | cat` would never end.
- If the launcher is the whole process, it is forked right before the first worker: after a fork each page that the
  launcher writes to is copied first, and the launcher's imports write to most of its pages. Inside another program's
  process, whose threads and memory must not be copied, it is exec'd. A program without an interpreter forks it all the
  same: to execute `sys.executable` would start the program a second time.
- In a job of several nodes it holds a duplicate of the agent's connection to the coordinator, which comes through the
  link, until the workers are gone: its end proves to the other nodes that nothing of this node is left.
- On busy cores a worker may run before the launcher can write its pid. The guardian finds it by its environment.
"""

from __future__ import annotations

import _socket
import os
import sys
from struct import pack

from elastic_run import contract, signals
from elastic_run.multiprocessing.fork_exec import (
    find_interpreter,
    inheritable_descriptors,
    open_unnamed,
    running_interpreter,
    start_process,
    start_time,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from elastic_run.loop import Loop

_TRIES = 5
_FIRST_PAUSE = 0.1
#: Seconds that the guardian gets to leave after the farewell.
_FAREWELL = 2.0
_MAX_FD = 1 << 16
_IGNORED = (signals.SIGTERM, signals.SIGINT, signals.SIGHUP, signals.SIGQUIT, signals.SIGUSR1, signals.SIGUSR2)
_PROCESS = "elastic_run.multiprocessing.guardian_process"
_CODE = "import sys; sys.path.insert(0, sys.argv[1]); from elastic_run.multiprocessing import guardian; guardian.main()"


class _Pair:
    """The launcher's ends to a guardian and its second one: the file of orders, and a link to each."""

    def __init__(self, orders: bytes) -> None:
        self.orders = open_unnamed(orders)
        os.lseek(self.orders, 0, os.SEEK_END)
        self.links: list[_socket.socket] = []
        self.theirs: list[_socket.socket] = []
        try:
            for _ in range(2):
                reading, writing = make_link()
                self.theirs.append(reading)
                self.links.append(writing)
        except OSError:
            self.abandon()
            raise

    def read(self) -> bytes:
        return os.pread(self.orders, os.fstat(self.orders).st_size, 0)

    def send(self, *descriptors: int) -> None:
        for link in self.links:
            send_on_link(link, *descriptors)

    def close(self, *, is_over: bool) -> None:
        """Let both act, or go if all is over."""
        if is_over:
            os.write(self.orders, b"bye\n")
        self.send()  # a fork of the program around us may hold the links open
        self.abandon()

    def abandon(self) -> None:
        os.close(self.orders)
        for link in (*self.links, *self.theirs):
            link.close()


class Guardian:
    """The launcher's side of the guardian; `is_exec` starts a fresh interpreter rather than a fork."""

    def __init__(self, *, is_exec: bool) -> None:
        #: By the token of this launcher its workers are found; theirs has the tokens of the launchers above, too.
        self.token = f"{os.getpid():x}-{os.urandom(8).hex()}"
        outer = os.environ.get(contract.ENV_TOKEN)
        self.worker_token = f"{outer}:{self.token}" if outer else self.token
        self.is_exec = is_exec
        #: The guardian's pid; 0 before it was started.
        self.pid = 0
        #: Sessions that a round's end leaves alone, and that end with the launcher: of templates, of guardians, and of
        #: the process that passes on the output of background processes.
        self.spared: set[int] = set()
        self._pair: _Pair | None = None
        #: Orders before the start.
        self._early = b""
        self._held = -1
        self._loop: Loop
        self._say: Callable[[str], None]
        self._losses = 0
        self._is_present = self._is_over = False

    def start(self) -> int:
        """Start the guardian, or another one after it died; the new one has all orders."""
        former = self._pair
        pair = _Pair(self._early if former is None else former.read())
        if self._held >= 0:
            pair.send(self._held)
        try:
            interpreter = (running_interpreter() or find_interpreter()) if self.is_exec else ""
            if self.is_exec and not interpreter:
                from importlib import import_module

                import_module(_PROCESS)  # a fork of a program with threads imports nothing
            start = _spawn if interpreter else _fork
            self.pid = start(interpreter, pair, self.token, start_time("self"))
        except OSError:
            pair.abandon()
            raise
        for link in pair.theirs:
            link.close()
        self._pair = pair
        self.spared.add(self.pid)
        # A second guardian that stands in leaves after the new one stands: the launcher may be killed in between.
        if former is not None:
            former.close(is_over=True)
        return self.pid

    def watch(self, session: int, born: int) -> None:
        """Tell it that a worker's session began, led by a process that was born at a time in clock ticks."""
        self.spared.discard(session)
        self._order(f"+ {session} {born}")

    def report_end(self, session: int, ended: int) -> None:
        """Tell it that a session's leader had ended at a time in clock ticks; other processes of it may live."""
        self._order(f"= {session} {ended}")

    def forget(self, session: int) -> None:
        """Tell it that a session is gone, before its number can be used again."""
        self.spared.discard(session)
        self._order(f"- {session}")

    def remove_at_end(self, directory: str) -> None:
        """Tell it which temporary directory to remove should the launcher die; empty for none."""
        # In hexadecimal: a path may hold a newline, and what follows one must not be taken for another directory.
        self._order(f"directory {os.fsencode(directory).hex()}")

    def spare_all(self) -> None:
        """Tell the guardian that the job has succeeded: running processes live on, even if the launcher is killed."""
        self._order("keep")

    def hold(self, descriptor: int) -> None:
        """Let it hold a connection until the launcher's workers are gone, in place of the one before."""
        before, self._held = self._held, os.dup(descriptor)  # kept here too, for another guardian in this one's place
        if before >= 0:
            os.close(before)
        if self._pair is not None:
            self._pair.send(self._held)

    def abandon(self) -> None:
        """In a forked child of the launcher: close the pair, since the guardian is not the child's."""
        if self._pair is not None:
            self._pair.abandon()
            self._pair = None

    def let_go(self, *, is_over: bool) -> None:
        """Let the guardian leave if the launcher has cleaned up, or let it clean up now; the caller reaps it."""
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.close(is_over=is_over)
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def _order(self, order: str) -> None:
        line = order.encode() + b"\n"
        if self._pair is not None:
            os.write(self._pair.orders, line)
        elif not self.pid:
            self._early += line

    # --- in the agent's loop -----------------------------------------------------------------------------------------
    def attach(self, loop: Loop, say: Callable[[str], None]) -> None:
        """Start the guardian unless that was done, and replace it from now on when it dies.

        If it can't be kept alive (an embedding program without an interpreter, a process limit), it is started again
        `_TRIES` times, after pauses that double. Then the job goes on without a guardian, and the user is told.
        """
        self._loop, self._say = loop, say
        self._watch_process(self.pid or self.start())

    def _watch_process(self, pid: int) -> None:
        self._is_present = True
        self._loop.watch_exit(pid, lambda _: self._lost())

    def _lost(self) -> None:
        self._is_present = False
        if self._is_over:
            return
        self._losses += 1
        if self._losses == 1:
            self._say("the guardian process was killed; starting another")
            self._replace()
        elif self._losses <= _TRIES:
            self._loop.call_later(_FIRST_PAUSE * 2.0**self._losses, self._replace)
        else:
            self._say("each guardian process was killed: if the launcher is killed as well, its workers keep running")

    def _replace(self) -> None:
        if self._is_over:
            return
        try:
            self._watch_process(self.start())
        except OSError:
            self._lost()

    def close(self, *, is_clean: bool) -> None:
        """Let the guardian go, and wait a moment until it has gone; if not all is clean it does its work first."""
        self._is_over = True
        self.let_go(is_over=is_clean)
        # Until it was reaped: a program that launches again and again must not collect zombies.
        if not self._wait_gone() and is_clean:
            from elastic_run.multiprocessing.process_table import signal_children

            signal_children((self.pid,), signals.SIGKILL)  # it was stopped
            self._wait_gone()

    def _wait_gone(self) -> bool:
        return self._loop.run_until(lambda: not self._is_present, self._loop.now() + _FAREWELL)


def _fork(_: str, pair: _Pair, token: str, since: int) -> int:
    launcher = os.getpid()
    ready, unready = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(ready)
        os.close(unready)
        raise
    if pid:
        os.close(unready)
        # No worker starts before the guardian ignores signals, and has left the launcher's process group, which may be
        # killed as a whole.
        os.read(ready, 1)
        os.close(ready)
        return pid
    try:
        os.setsid()
        ignore_signals()
        os.close(unready)
        _guard(pair.orders, [link.fileno() for link in pair.theirs], launcher, token, since)
    finally:
        # Never back into the launcher's code, whatever happened.
        os._exit(0)


def _spawn(interpreter: str, pair: _Pair, token: str, since: int) -> int:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    kept = (pair.orders, *(link.fileno() for link in pair.theirs))
    argv = [interpreter, "-I", "-S", "-c", _CODE, root, str(os.getpid()), token, str(since), *map(str, kept)]
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        closed = inheritable_descriptors()
        return start_process(argv, os.environ, stdin=null, stdout=null, stderr=null, closed=closed, kept=kept)
    finally:
        os.close(null)


def main() -> None:
    """Run as a fresh interpreter, with the arguments of `_spawn`."""
    orders, *links = map(int, sys.argv[5:])
    _guard(orders, links, int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))


def _guard(orders: int, links: list[int], launcher: int, token: str, since: int) -> None:
    # Not before: the launcher needs none of it, and its workers wait for each import.
    from elastic_run.multiprocessing.guardian_process import stand_guard

    become_daemon(f"guardian of {launcher}", "guardian", {orders, *links})
    stand_guard(orders, links, launcher, token, since)


# --- links and descriptors -------------------------------------------------------------------------------------------
def make_link() -> tuple[_socket.socket, _socket.socket]:
    """Return a guardian's and the launcher's end of a link that carries descriptors; neither end blocks."""
    reading, writing = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    reading.setblocking(False)
    writing.setblocking(False)
    return reading, writing


def send_on_link(link: _socket.socket, *descriptors: int) -> None:
    """Send a descriptor, or none to end the link; nothing if the guardian was killed or has been stopped for long."""
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, pack("i", fd)) for fd in descriptors]
    try:
        link.sendmsg([b"."], rights, _socket.MSG_NOSIGNAL)
    except OSError:
        pass


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
    from elastic_run.multiprocessing.process_table import ProcessTitle

    ProcessTitle().show(title, name)


def ignore_signals() -> None:
    """Ignore signals to all processes (`kill -TERM -1`, a site's clean-up): the guardian must outlive the workers."""
    signals.set_wakeup_fd(-1)
    for number in _IGNORED:
        signals.ignore_signal(number)
    signals.default_signal(signals.SIGCHLD)
