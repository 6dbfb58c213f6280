"""Processes that are started together; a loop in a thread of its own watches them.

`start_processes` and `spawn` return objects that are built on it. Our agent has a loop of its own and does not need it.
A program that goes on with other work while its processes run has no loop. But their output must be taken, and their
exits and results must be read, at any moment. Waiting threads use a condition, so nothing polls.

Signals stay with the program: it stops the processes through `stop`.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading

from elastic_run.contract import LONGEST_TIME
from elastic_run.core.agent.shutdown import KILL_LIMIT, KILL_WAIT
from elastic_run.loop import Loop
from elastic_run.multiprocessing.process.guardian import Guardian, GuardianKeeper
from elastic_run.multiprocessing.process.workers import Workers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import FrameType
    from typing import Any

    from elastic_run.multiprocessing.functions.launch import Result
    from elastic_run.multiprocessing.starter import StartedWorker

#: Seconds beyond all others that the thread gets to answer.
_MOMENT = 5.0


class ProcessGroup:
    """Processes of one program, from their start until none of them nor of their descendants lives.

    Args:
        is_daemon: Whether the program may end while they run, which ends them; if not it waits for them.
        say: Tells the user one line.
    """

    def __init__(self, *, is_daemon: bool = True, say: Callable[[str], None] = lambda _: None) -> None:
        #: Only before the start and in callbacks.
        self.loop = Loop()
        self.guardian = Guardian(is_exec=True)
        #: Exit codes by local rank, in the order of the ends; the ranks that ended because they were told to.
        self.ended: dict[int, int] = {}
        self.stopped: set[int] = set()
        #: Results of function workers by local rank.
        self.results: dict[int, Result] = {}
        self._workers = Workers(self.loop, self.guardian, on_exit=self._on_exit)
        self._guardian_keeper = GuardianKeeper(self.loop, self.guardian, say=say)
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

        After any error the processes that run by then are watched, too; the caller stops the group.

        Raises:
            OSError: The system refuses a process, a descriptor or a thread; after that of the thread nothing runs.
        """
        try:
            self._guardian_keeper.start()
            for local_rank in range(count):
                self._adopt(local_rank, launch(local_rank))
        finally:
            before_watch()
            self._watch()

    def _watch(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:
            self._stop(signal.SIGKILL, 0.0)
            self._serve()
            reason = "no thread can be started to watch the processes (limit of processes, or memory)"
            raise OSError(errno.EAGAIN, reason) from error

    def _adopt(self, local_rank: int, started: StartedWorker) -> None:
        function = started.function
        if function is not None:
            self.results[local_rank] = function.result
        try:
            self._workers.adopt(local_rank, started)
        except OSError:
            if function is not None:
                function.give_up()
            raise
        if function is not None:
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
            for result in self.results.values():
                result.finish()
            self._guardian_keeper.close(is_clean=self._is_gone)
            self.loop.close()
            with self._news:
                self._is_gone = True
                self._news.notify_all()

    def _on_exit(self, local_rank: int, code: int) -> None:
        if self._workers.was_stopped(local_rank):
            self.stopped.add(local_rank)
        result = self.results.get(local_rank)
        if result is not None:
            result.finish()
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

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the number of the signal that ended the process, or None while it runs."""
        return self._group.ended.get(self._local_rank)

    @property
    def exitcode(self) -> int | None:
        """The same."""
        return self.returncode

    def poll(self) -> int | None:
        """Return `returncode`."""
        return self.returncode

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.returncode is None

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, for this many seconds or without a limit."""
        self._group.wait(lambda: not self.is_alive(), timeout)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end.

        Raises:
            subprocess.TimeoutExpired: The process still runs.
        """
        self.join(timeout)
        code = self.returncode
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.is_alive():
            try:
                os.kill(self.pid, sig)
            except ProcessLookupError:
                return

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
    outside the main thread, where Python answers no signal.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        #: What answered each before `hold`.
        self.handlers: dict[int, Any] = {}
        self._numbers = tuple(numbers)
        self._pending: list[int] = []

    def hold(self) -> None:
        """Take note of the signals from now on instead of answering them."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._numbers:
            previous = signal.signal(number, self._remember)
            # None: code in C answers it, which can't be put back.
            self.handlers[number] = signal.SIG_DFL if previous is None else previous

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self._pending.append(number)

    def give_back(self) -> None:
        """Restore the signal handlers, also in a process that was forked during the hold."""
        for number, handler in self.handlers.items():
            if signal.getsignal(number) == self._remember:
                signal.signal(number, handler)

    def deliver(self) -> None:
        """Send the held signals again, to the restored handlers; it may raise, as a handler does."""
        while self._pending:
            signal.raise_signal(self._pending.pop(0))

    def release(self) -> None:
        """Restore the signal handlers, and deliver the held signals."""
        self.give_back()
        self.deliver()
