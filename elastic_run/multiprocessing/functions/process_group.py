"""Processes that are started together; a loop in a thread of its own watches them.

`start_processes` and `spawn` return objects that are built on it. Our agent has a loop of its own and does not need it.
A program that goes on with other work while its processes run has no loop. But their output must be taken, and their
exits and results must be read, at any moment. Waiting threads use a condition, so nothing polls.

Signals stay with the program: it stops the processes through `stop`.
"""

from __future__ import annotations

import errno
import logging
import signal
import subprocess
import threading

from elastic_run.contract import LONGEST_TIME
from elastic_run.core.agent.shutdown import KILL_LIMIT, KILL_WAIT
from elastic_run.loop import Loop
from elastic_run.multiprocessing import process_table
from elastic_run.multiprocessing.guardian import Guardian
from elastic_run.multiprocessing.workers import Workers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import FrameType
    from typing import Any

    from elastic_run.multiprocessing.functions.launch import StartedFunction
    from elastic_run.multiprocessing.starter import StartedWorker

#: Seconds beyond all others that the thread gets to answer.
_MOMENT = 5.0


class ProcessGroup:
    """Processes of one program, from their start until none of them nor of their descendants lives.

    With `is_daemon` the program may end while they run, which ends them; otherwise it waits for them.
    """

    def __init__(self, *, is_daemon: bool = True) -> None:
        #: Only before the start and in callbacks.
        self.loop = Loop()
        self.guardian = Guardian(is_exec=True)
        #: Exit codes by local rank, in the order of the ends; the ranks that ended because they were told to.
        self.ended: dict[int, int] = {}
        self.stopped: set[int] = set()
        #: Function workers by local rank.
        self.functions: dict[int, StartedFunction] = {}
        self._workers = Workers(self.loop, self.guardian, on_exit=self._on_exit)
        self._news = threading.Condition()
        self._is_gone = False
        self._is_stopping = False
        self._on_end: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._serve, name="elastic-run processes", daemon=is_daemon)

    @property
    def pids(self) -> dict[int, int]:
        """Pids by local rank."""
        return dict(self._workers.pids)

    def start(
        self, count: int, launch: Callable[[int], StartedWorker], *, before_watch: Callable[[], None] = lambda: None
    ) -> None:
        """Start processes by a function of their local ranks, and watch them in the group's thread from now on.

        After any error the processes that run by then are watched, too; the caller stops the group. Without a thread
        nothing runs any more.
        """
        try:
            self.guardian.attach(self.loop, logging.getLogger(__name__).warning)
            for local_rank in range(count):
                self._adopt(local_rank, launch(local_rank))
        finally:
            before_watch()
            try:
                self._thread.start()
            except RuntimeError as error:
                self._stop(signal.SIGKILL, 0.0)
                self._serve()
                reason = "no thread can be started to watch the processes (limit of processes, or memory)"
                raise OSError(errno.EAGAIN, reason) from error

    def _adopt(self, local_rank: int, started: StartedWorker) -> None:
        function = started.function
        if function is None:
            self._workers.adopt(local_rank, started)
            return
        self.functions[local_rank] = function
        try:
            self._workers.adopt(local_rank, started)
        except OSError:
            function.give_up()
            raise
        function.begin()

    def abandon(self) -> None:
        """Let go of the group in a forked worker."""
        self.loop.abandon()
        self.guardian.abandon()

    def at_end(self, call: Callable[[], None]) -> None:
        """Call a function in the group's thread when no process lives any more, before waiting threads are woken."""
        self._on_end.append(call)

    @property
    def is_decided(self) -> bool:
        """Whether all have ended, or one has failed."""
        return self._is_gone or len(self.ended) == len(self._workers.pids) or any(self.ended.values())

    def wait(self, is_done: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait for a change of `ended` that makes a condition true."""
        with self._news:
            return self._news.wait_for(is_done, None if timeout is None else min(timeout, LONGEST_TIME))

    def stop(self, number: int = signal.SIGTERM, grace: float = 30.0) -> None:
        """Stop every process with all its descendants, and wait until they are gone; harmless when they are."""
        grace = min(grace, LONGEST_TIME)
        self.loop.call_soon_threadsafe(lambda: self._stop(number, grace))
        if self._thread.ident is not None:  # it was refused otherwise, and nothing is left
            self._thread.join(grace + KILL_LIMIT + _MOMENT)

    def _serve(self) -> None:
        try:
            self.loop.run_until(lambda: self._is_gone)
            for call in self._on_end:
                call()
        finally:
            # After a defect too: waiting threads must not wait for ever. The guardian ends processes that still run.
            for function in self.functions.values():
                function.finish()
            self.guardian.close(is_clean=self._is_gone)
            self.loop.close()
            with self._news:
                self._is_gone = True
                self._news.notify_all()

    def _on_exit(self, local_rank: int, code: int) -> None:
        if self._workers.was_stopped(local_rank):
            self.stopped.add(local_rank)
        if local_rank in self.functions:
            self.functions[local_rank].finish()
        with self._news:
            self.ended[local_rank] = code
            self._news.notify_all()
        if len(self.ended) == len(self._workers.pids):
            # Processes that they left in the background end with them.
            self._stop(signal.SIGTERM, 0.0 if self._is_stopping else KILL_WAIT)

    def _stop(self, number: int, grace: float) -> None:
        if self._is_stopping or self._is_gone:
            return
        self._is_stopping = True
        self._workers.stop(number, grace, self._gone)

    def _gone(self, _survivors: list[int]) -> None:
        self._is_gone = True


class GroupProcess:
    """A process of a group, with the names of `subprocess.Popen` and of a started `multiprocessing.Process`.

    The group's thread waits for the process, so this object asks the group instead of the kernel.
    """

    def __init__(self, group: ProcessGroup, local_rank: int, pid: int, args: tuple[str, ...] = ()) -> None:
        self._group = group
        self._local_rank = local_rank
        self.args = args
        self.pid = pid

    def poll(self) -> int | None:
        """Return the exit code, minus the number of the signal that ended the process, or None while it runs."""
        return self._group.ended.get(self._local_rank)

    returncode = exitcode = property(poll)

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.poll() is None

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, for this many seconds or without a limit."""
        self._group.wait(lambda: not self.is_alive(), timeout)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code.

        Raises:
            subprocess.TimeoutExpired: The process still runs.
        """
        self.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.is_alive():
            process_table.signal_children((self.pid,), sig)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class HeldSignals:
    """Holds signals back while processes are started, until this program has noted each new process.

    A signal mask of the main thread would not be enough: in a notebook another thread takes the signal, and Python
    still runs its handler in the main thread, between a fork and the line that notes the new process. Does nothing
    outside the main thread, where Python answers no signal. After the start `then` answers the signals, if it is given,
    until `restore`.
    """

    def __init__(self, numbers: Iterable[int], then: Callable[[int, FrameType | None], None] | None = None) -> None:
        self._numbers = tuple(numbers)
        self._then = then
        #: What answered each before.
        self._previous: dict[int, Any] = {}
        self._pending: list[int] = []

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                previous = signal.signal(number, self._remember)
                # None: code in C answers it, which can't be put back.
                self._previous[number] = signal.SIG_DFL if previous is None else previous

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self._pending.append(number)

    def __exit__(self, kind: object, *_: object) -> None:
        """Answer the signals again, first those that came; this may raise, as a handler does."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._remember:
                signal.signal(number, self._then if self._then is not None and kind is None else previous)
        while self._pending:
            signal.raise_signal(self._pending.pop(0))

    def restore(self) -> None:
        """Put back what answered the signals before; harmless when that was done."""
        if threading.current_thread() is threading.main_thread():
            for number, previous in self._previous.items():
                if signal.getsignal(number) is self._then:
                    signal.signal(number, previous)
            self._previous.clear()

    def leave(self) -> None:
        """In a process that was forked during the hold: answer the signals as before, or as if this was no launcher."""
        for number, previous in self._previous.items():
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default if previous is self._then else previous)
