"""The guardian: a small process that outlives the launcher by a moment, so that no other process does (law 6).

Rules
- The guardian holds one end of a pipe from the launcher (a socket pair, which can carry descriptors), and the
  launcher's pidfd (a fork of the program around us may hold the other end of the pipe). If either ends without `bye`,
  the launcher has died of any signal. Then the guardian kills every session that it was told of, sweeps by session and
  by environment token until nothing is left, removes the launcher's temporary directory, and ends.
- It has its own session, a name in `ps` that `pkill -f train.py` or `pkill -f elastic` doesn't find, and none of the
  launcher's descriptors except the pipe: otherwise `elastic-run … | cat` would never end.
- A second guardian stands behind it (`guardian_process` is the module of both processes).
- It is forked if the launcher is the whole process, which is quick and shares pages. It is exec'd inside another
  program's process, whose threads and memory must not be copied. A program without an interpreter (frozen, or one that
  embeds Python) forks it nevertheless: to execute `sys.executable` would start the program a second time.
- In a job of one node it is forked right before the first worker: after a fork each page that the launcher writes to is
  copied first, and the launcher's imports write to most of its pages.
- In a job of several nodes it holds a duplicate of the agent's connection to the coordinator until the workers are
  gone. So the end of that connection is the proof, for the other nodes, that nothing of this node's job is left.
- On busy cores a worker may run for a while before the launcher, which has just started it, can tell its pid. The
  guardian finds such a worker by its environment.
- Messages are lines: `+PID BORN ENDED` a worker leads a session (BORN: its start time; ENDED: the time at which it had
  ended, 0 while it runs), `-PID` it is gone, `dir HEX` a temporary directory, `hold` the descriptor that comes with it
  is the connection to hold, `keep` nothing is to be killed any more, `bye`. They come in order, so only the last line
  can be torn.
- The launcher never waits for the guardian. Orders that do not fit into the pipe (the guardian was stopped) are kept
  here.
"""

from __future__ import annotations

import os
import sys

from elastic_run import contract
from elastic_run.multiprocessing.process import descendants, process_table
from elastic_run.multiprocessing.process.guardian_process import (
    become_daemon,
    ignore_signals,
    make_pipe,
    send_descriptor,
    stand_guard,
)
from elastic_run.multiprocessing.process.interpreter import find_interpreter, running_interpreter
from elastic_run.signals import SIGKILL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.loop import Loop

_TRIES = 5
_FIRST_PAUSE = 0.1
#: Seconds that the guardian gets to leave after the farewell.
_FAREWELL = 2.0


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
        #: Sessions that belong to no round, so that a round's end leaves them alone; they end with the launcher.
        self.spared: set[int] = set()
        #: Sessions of the guardians, and of the process that passes on the output of background processes. The end of a
        #: round leaves them alone.
        self.own_sessions: set[int] = set()
        self._pipe = -1
        self._sessions: dict[int, descendants.Session] = {}
        self._directory = ""
        self._held = -1
        self._holds_anew = False
        self._is_over = False
        self._loop: Loop | None = None
        self._waiting = bytearray()

    def attach(self, loop: Loop) -> None:
        """Let a loop write the orders that do not fit into the pipe now."""
        self._loop = loop

    def start(self) -> int:
        """Start the guardian, or another one after it died; the new one gets all orders that still count."""
        reader, writer = make_pipe()
        # A second guardian that stands in is dismissed after the new one knows all: the launcher may be killed in
        # between.
        former, before, self._pipe = self.pid, self._take_pipe(), writer
        since = process_table.start_time("self")
        interpreter = (running_interpreter() or find_interpreter()) if self.is_exec else ""
        # These orders are in the pipe first: so a launcher that is killed during the start leaves no directory.
        if self._directory:
            self.remove_at_end(self._directory)
        self._holds_anew = self._held >= 0
        self._write()
        try:
            own = (reader, self.token, since)
            self.pid = _spawn(interpreter, *own) if interpreter else _fork(*own)
        except OSError:
            self._close_pipe()
            self._pipe, self._waiting = before
            self._write()
            raise
        finally:
            os.close(reader)
        self.own_sessions.add(self.pid)
        for session, known in self._sessions.items():
            self._send(_order(session, known))
        if self._is_over:
            self._send("keep")
        if not _say_bye(*before):
            _kill_guardians(former)
        _close(before[0])
        return self.pid

    def watch(self, session: int, born: int) -> None:
        """Tell it that a worker's session began, led by a process that was born at a time in clock ticks."""
        self._sessions[session] = descendants.Session(born)
        self.spared.discard(session)
        self.own_sessions.discard(session)
        self._send(_order(session, self._sessions[session]))

    def report_end(self, session: int, ended: int) -> None:
        """Tell it that a session's leader had ended at a time in clock ticks; other processes of it may live."""
        if session in self._sessions:
            self._sessions[session].ended = ended
            self._send(_order(session, self._sessions[session]))

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

    def hold(self, descriptor: int) -> None:
        """Let it hold a connection until the launcher's workers are gone, in place of the one before."""
        _close(self._held)
        # A duplicate is kept here, for another guardian in this one's place.
        self._held = os.dup(descriptor) if descriptor >= 0 else -1
        self._holds_anew = self._held >= 0
        self._write()

    def spare_all(self) -> None:
        """Tell the guardian that the job has succeeded: running processes live on, even if the launcher is killed."""
        self._is_over = True
        self._send("keep")

    def abandon(self) -> None:
        """In a forked child of the launcher: close the pipe, since the guardian is not the child's."""
        self._close_pipe()

    def dismiss(self) -> None:
        """Dismiss the guardian: the launcher has cleaned up itself. The caller reaps it, and then calls `close`."""
        self._send("bye")
        if not self._waiting:
            self._close_pipe()

    def close(self) -> None:
        """Close the pipe. A second guardian that can't be told `bye`, as the pipe is full, is killed before."""
        if self._waiting and self.pid:
            _kill_guardians(self.pid)
        self._close_pipe()

    def alarm(self) -> None:
        """Let the guardian clean up now: the launcher ends because of a defect."""
        self._close_pipe()

    def _send(self, order: str) -> None:
        if self._pipe < 0:
            return
        is_first = not self._waiting
        self._waiting += order.encode() + b"\n"
        if is_first:
            self._write()

    def _write(self) -> None:
        """Write the waiting orders; if the pipe is full, the loop calls again."""
        if self._pipe < 0:
            return
        try:
            if self._waiting:
                del self._waiting[: os.write(self._pipe, self._waiting)]
            if self._holds_anew and not self._waiting:
                send_descriptor(self._pipe, b"hold\n", self._held)
                self._holds_anew = False
        except BlockingIOError:
            pass
        except BrokenPipeError:
            # It was killed. The loop sees its exit and starts another, which is told everything.
            self._waiting.clear()
        if self._loop is None:
            return
        if self._waiting or self._holds_anew:
            self._loop.add_writer(self._pipe, self._write)
        else:
            self._loop.remove_writer(self._pipe)

    def _close_pipe(self) -> None:
        pipe, _ = self._take_pipe()
        _close(pipe)

    def _take_pipe(self) -> tuple[int, bytearray]:
        """Return the pipe, or -1, and the orders that wait for room in it; this object gives both up."""
        taken = self._pipe, self._waiting
        if self._pipe >= 0 and self._loop is not None:
            self._loop.remove_writer(self._pipe)
        self._pipe, self._waiting = -1, bytearray()
        return taken


class GuardianKeeper:
    """Keeps a guardian process running: starts it, replaces it when it dies, dismisses it at the end.

    If it can't be kept alive (an embedding program without an interpreter, a process limit), it is started again
    `_TRIES` times, after pauses that double. Then the job goes on without a guardian, and the user is told.
    """

    def __init__(self, loop: Loop, guardian: Guardian, *, say: Callable[[str], None]) -> None:
        self._loop = loop
        self._guardian = guardian
        self._say = say
        self._losses = 0
        self._is_present = False
        self._is_over = False

    def start(self) -> None:
        """Watch the guardian; start it unless that was done already."""
        self._guardian.attach(self._loop)
        self._watch(self._guardian.pid or self._guardian.start())

    def _watch(self, pid: int) -> None:
        self._is_present = True
        self._loop.watch_exit(pid, lambda _: self._lost())

    def _lost(self) -> None:
        self._is_present = False
        if self._is_over:
            return
        self._losses += 1
        if self._losses == 1:
            self._say("the guardian process was killed; starting another")
        if self._losses > _TRIES:
            self._say("each guardian process was killed: if the launcher is killed as well, its workers keep running")
        elif self._losses == 1:
            self._replace()
        else:
            self._loop.call_later(_FIRST_PAUSE * 2.0**self._losses, self._replace)

    def _replace(self) -> None:
        if self._is_over:
            return
        try:
            self._watch(self._guardian.start())
        except OSError:
            self._lost()

    def close(self, *, is_clean: bool) -> None:
        """Let the guardian go, and wait a moment until it has gone; if not all is clean it does its work first."""
        self._is_over = True
        if is_clean:
            self._guardian.dismiss()
        else:
            self._guardian.alarm()
        # Until it was reaped: a program that launches again and again must not collect zombies.
        if not self._wait_gone() and is_clean:
            # It was stopped, and would do harm if it went on one day. The second one reads the farewell then.
            process_table.signal_children((self._guardian.pid,), SIGKILL)
            self._wait_gone()
        self._guardian.close()

    def _wait_gone(self) -> bool:
        return self._loop.run_until(lambda: not self._is_present, self._loop.now() + _FAREWELL)


def _order(session: int, known: descendants.Session) -> str:
    return f"+{session} {known.born} {known.ended}"


def _say_bye(pipe: int, waiting: bytearray) -> bool:
    """Let the guardian go that reads a pipe, if any does; return whether there was room to tell it."""
    farewell = waiting + b"bye\n"
    try:
        return os.write(pipe, farewell) == len(farewell)
    except BlockingIOError:
        return False
    except OSError:
        return True  # there is none, or nobody reads it any more


def _kill_guardians(session: int) -> None:
    """Kill the guardians of a session: at the end of a pipe without `bye` they would kill the workers."""
    known = {session: descendants.Session(0)}
    process_table.kill_all((), descendants.find_survivors(known, "", since=process_table.start_time("self")))


def _close(pipe: int) -> None:
    if pipe >= 0:
        os.close(pipe)


def _fork(reader: int, token: str, since: int) -> int:
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
        os.dup2(reader, 0)
        become_daemon(f"guardian of {launcher}", "guardian", {0})
        stand_guard(0, launcher, token, since)
    finally:
        # Never back into the launcher's code, whatever happened.
        os._exit(0)


def _spawn(interpreter: str, reader: int, token: str, since: int) -> int:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); "
        "from elastic_run.multiprocessing.process import guardian; guardian.main()"
    )
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        from elastic_run.multiprocessing.process.fork_exec import inheritable_descriptors, start_process

        argv = [interpreter, "-I", "-S", "-c", code, root, str(os.getpid()), token, str(since)]
        closed = inheritable_descriptors()
        return start_process(argv, os.environ, stdin=reader, stdout=null, stderr=null, closed=closed)
    finally:
        os.close(null)


def main() -> None:
    """Run as a fresh interpreter: the pipe is descriptor 0; launcher, token and start time are arguments."""
    launcher, token, since = int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    become_daemon(f"guardian of {launcher}", "guardian", {0, 1, 2})
    stand_guard(0, launcher, token, since)
