"""One loop over epoll: descriptors, timers, child exits, signals, and wake-ups from other threads.

Rules
- One thread runs the loop and owns everything registered with it. Other threads may only `call_soon_threadsafe`, at any
  moment, also while the loop is closed: a lock keeps writing to the pipe and closing it apart.
- Callbacks never block. An exception in a callback is a defect and leaves `run_until`; what was due behind it is called
  in the next turn.
- Nothing polls. A child's exit is a readable pidfd; where the kernel or a seccomp filter refuses pidfds, one thread per
  child blocks in waitid(WNOWAIT). Rejected: SIGCHLD alone (coalesced, main thread only, and inside somebody's process
  it belongs to them), wait4(-1) (takes children that are not ours).
- Signal handlers only record the number; the wake-up descriptor wakes the loop, which then acts. A signal that was
  inherited as ignored stays ignored (`nohup`), and what was installed before is put back on `close`.
- Where the launcher is the whole process, the signals are blocked and read from a descriptor, which tells the sender of
  each (`find_senders`). The handlers stay: a thread of somebody else's that doesn't block them may get one.
- epoll itself, and not the `selectors` module above it: in a job of several nodes its imports would come before the
  first worker.
"""

from __future__ import annotations

import heapq
import os
import select
import time
from _thread import RLock

from elastic_run import signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType
    from typing import TypeVar

    from elastic_run.signals import Handler, SignalInfo

    T = TypeVar("T")

_READABLE = select.POLLIN | select.POLLPRI
_WRITABLE = select.POLLOUT
#: The other side has gone: reading and writing both tell more.
_BROKEN = select.POLLHUP | select.POLLERR | select.POLLNVAL
#: Seconds that one wait lasts: the kernel counts milliseconds in 32 bits. A timer beyond that is due in a later turn.
_LONGEST_WAIT = 86400.0
#: Seconds in which a plug-in that has started a process collects it itself.
_PLUGIN_WAIT = 2.0
_WAKE = b"\0"
_WAKE_BYTES = 4096
#: Stands for an exit status that other code of this process has taken; `Loop.lost_exits` tells it from a real 255.
UNKNOWN_EXIT_CODE = 255


class Timer:
    """A call that is due at a time; `cancel` takes it back."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Forget the call; harmless when it was made already."""
        self.callback = None


class Loop:
    """Waits for descriptors, timers, child exits and signals, and calls back, until `close`."""

    def __init__(self) -> None:
        self._wake_read, self._wake_write = os.pipe()
        try:
            self._poll = select.epoll()
        except OSError:
            os.close(self._wake_read)
            os.close(self._wake_write)
            raise
        self._registered: dict[int, int] = {}
        self._readers: dict[int, Callable[[], None]] = {}
        self._writers: dict[int, Callable[[], None]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._sequence = 0
        self._soon: list[Callable[[], None]] = []
        self._children: dict[int, Callable[[int], None]] = {}
        self._pidfds: dict[int, int] = {}
        #: Children whose exit status other code of this process has taken.
        self.lost_exits: set[int] = set()
        self._signals: list[int] = []
        #: Where the last signal of each number came from, as far as that is known.
        self.senders: dict[int, SignalInfo] = {}
        self._signal_descriptor = -1
        self._signal_callbacks: dict[int, Callable[[int], None]] = {}
        self._take_statuses: Callable[[int], None] = lambda _: None  # set by `keep_exits`
        self._previous_handlers: dict[int, Handler] = {}
        self._previous_wakeup_fd: int | None = None
        self._wake_lock = RLock()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self.add_reader(self._wake_read, self._drain_wake_ups)

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- time ----------------------------------------------------------------------------------------------------
    def now(self) -> float:
        """Return the monotonic clock in seconds."""
        return time.monotonic()

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Call once the clock has reached a time; returns the timer, which can be cancelled."""
        timer = Timer(callback)
        self._sequence += 1
        heapq.heappush(self._timers, (when, self._sequence, timer))
        return timer

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        """Call after a delay in seconds; returns the timer."""
        return self.call_at(time.monotonic() + delay, callback)

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call in the loop's next turn."""
        self._soon.append(callback)

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        """Call in the loop's next turn; may be used from any thread."""
        self._soon.append(callback)
        self._wake()

    # --- descriptors ---------------------------------------------------------------------------------------------
    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        """Call whenever a descriptor is readable, at end of file, or in error."""
        self._readers[fd] = callback
        self._register(fd)

    def remove_reader(self, fd: int) -> None:
        """Stop watching a descriptor for reading; harmless when it isn't watched."""
        if self._readers.pop(fd, None) is not None:
            self._register(fd)

    def add_writer(self, fd: int, callback: Callable[[], None]) -> None:
        """Call whenever a descriptor can take more."""
        self._writers[fd] = callback
        self._register(fd)

    def remove_writer(self, fd: int) -> None:
        """Stop watching a descriptor for writing; harmless when it isn't watched."""
        if self._writers.pop(fd, None) is not None:
            self._register(fd)

    def _register(self, fd: int) -> None:
        events = (_READABLE if fd in self._readers else 0) | (_WRITABLE if fd in self._writers else 0)
        before = self._registered.pop(fd, 0)
        if before and not events:
            try:
                self._poll.unregister(fd)
            except OSError:
                pass  # closed already, which takes it from epoll too
        elif before and events != before:
            self._poll.modify(fd, events)
        elif not before and events:
            self._poll.register(fd, events)
        if events:
            self._registered[fd] = events

    # --- children ------------------------------------------------------------------------------------------------
    def watch_exit(self, pid: int, callback: Callable[[int], None]) -> None:
        """Call once a child of this process has ended, after reaping it, with its code or minus the signal's number."""
        self._children[pid] = callback
        pidfd = open_pidfd(pid)
        if pidfd is None:
            self._watch_exit_in_thread(pid)
            return
        self._pidfds[pid] = pidfd
        self.add_reader(pidfd, lambda: self._reap(pid))

    def is_watching(self, pid: int) -> bool:
        """Whether a child's end is waited for."""
        return pid in self._children

    def _watch_exit_in_thread(self, pid: int) -> None:
        import threading

        def wait_exit() -> None:
            try:
                # WNOWAIT leaves the zombie, so the pid can't be reused before the loop's thread has reaped it.
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:
                pass
            self.call_soon_threadsafe(lambda: self._reap(pid))

        threading.Thread(target=wait_exit, name=f"wait-{pid}", daemon=True).start()

    def _reap(self, pid: int) -> None:
        status = self._collect(pid)
        if status is None:
            return
        pidfd = self._pidfds.pop(pid, None)
        if pidfd is not None:
            self.remove_reader(pidfd)
            os.close(pidfd)
        callback = self._children.pop(pid, None)
        if status < 0:
            self.lost_exits.add(pid)
        if callback is not None:
            callback(UNKNOWN_EXIT_CODE if status < 0 else os.waitstatus_to_exitcode(status))

    def _collect(self, pid: int) -> int | None:
        """Return a child's status; None while it runs, -1 where other code of this process has taken the status."""
        try:
            ended, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return -1
        return status if ended else None

    def keep_exits(self) -> None:
        """Take the statuses of watched children before this program's own answer to SIGCHLD takes or discards them.

        A handler of the program still gets every SIGCHLD, after the statuses were taken.
        """
        if not signals.is_answered(signals.SIGCHLD):
            return

        def take_statuses(number: int) -> None:
            try:
                for pid in [*self._children]:
                    self._reap(pid)
            finally:
                if callable(previous):
                    previous(number, None)

        # In the loop's turn, not in the signal's handler: a child that was just started is not watched yet.
        self._take_statuses = take_statuses
        self._install(signals.SIGCHLD, take_statuses)
        previous = self._previous_handlers[signals.SIGCHLD]

    def reap_strangers(self, *, own_session: int | None = None) -> None:
        """Collect ended children that nobody watches, as PID 1 of a container must.

        Call it when those that are not strangers are watched. The processes of `own_session` are left alone: plug-ins
        may have started them. Those of another session a plug-in may have started too, so they are collected
        `_PLUGIN_WAIT` seconds after their end.
        """
        waiting: set[int] = set()

        def collect_late(pid: int) -> None:
            waiting.discard(pid)
            if pid not in self._children:
                self._collect(pid)

        def reap_all(number: int = signals.SIGCHLD) -> None:
            self._take_statuses(number)
            for pid in signals.list_ended_children():
                if pid in self._children:
                    self._reap(pid)
                elif own_session is None:
                    self._collect(pid)
                elif pid not in waiting and _read_session(pid) not in (None, own_session):
                    waiting.add(pid)
                    self.call_later(_PLUGIN_WAIT, lambda pid=pid: collect_late(pid))  # type: ignore[misc]

        self._install(signals.SIGCHLD, reap_all)
        self.call_soon(reap_all)  # those that have ended before

    # --- signals -------------------------------------------------------------------------------------------------
    def watch_signals(self, numbers: Iterable[int], callback: Callable[[int], None]) -> None:
        """Call with the number for every one of these signals that was not inherited as ignored."""
        for number in numbers:
            if not signals.is_ignored(number):
                self._install(number, callback)

    def _install(self, number: int, callback: Callable[[int], None]) -> None:
        previous = signals.install_handler(number, self._record_signal)
        self._previous_handlers.setdefault(number, previous)
        self._signal_callbacks[number] = callback
        if self._previous_wakeup_fd is None:
            self._previous_wakeup_fd = signals.set_wakeup_fd(self._wake_write)

    def _record_signal(self, number: int, _frame: FrameType | None) -> None:
        self.senders.pop(number, None)
        self._signals.append(number)

    def find_senders(self) -> bool:
        """Block the signals that are watched by now in this thread, also after `close`, and learn their senders.

        Returns whether the system can do that; otherwise nothing has changed.
        """
        descriptor = signals.open_signal_descriptor(self._previous_handlers)
        if descriptor < 0:
            return False
        signals.block_signals(self._previous_handlers)
        self._signal_descriptor = descriptor
        self.add_reader(descriptor, self._read_signals)
        return True

    def _read_signals(self) -> None:
        for found in signals.read_signals(self._signal_descriptor):
            self.senders[found.number] = found
            self._signals.append(found.number)

    def ignore_signals(self) -> None:
        """Ignore the watched signals from now on, also after `close`: the answer is known, nothing may change it."""
        for number in self._previous_handlers:
            signals.ignore_signal(number)
        self._previous_handlers.clear()

    def end_at_second_signal(self, exit_code: int) -> None:
        """Ignore the first of the watched signals from now on, also after `close`; another one ends the process."""

        def end(number: int, _: FrameType | None) -> None:
            came.append(number)
            if len(came) > 1:
                os._exit(exit_code)

        came: list[int] = []
        for number in self._previous_handlers:
            signals.install_handler(number, end)
        self._previous_handlers.clear()

    def _restore_signals(self) -> None:
        for number, previous in self._previous_handlers.items():
            signals.install_handler(number, previous)
        self._previous_handlers.clear()
        if self._previous_wakeup_fd is not None:
            signals.set_wakeup_fd(self._previous_wakeup_fd)
            self._previous_wakeup_fd = None

    # --- running -------------------------------------------------------------------------------------------------
    def run_until(self, is_done: Callable[[], bool], deadline: float | None = None) -> bool:
        """Run the loop until a condition holds, or a monotonic time has come; returns whether the condition holds."""
        while not is_done():
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return False
            self._turn(self._timeout(now, deadline))
        return True

    def _timeout(self, now: float, deadline: float | None) -> float | None:
        if self._soon or self._signals:
            return 0.0
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        due = [when for when in (deadline, self._timers[0][0] if self._timers else None) if when is not None]
        return max(0.0, min(min(due) - now, _LONGEST_WAIT)) if due else None

    def _turn(self, timeout: float | None) -> None:
        for fd, events in self._poll.poll(timeout):
            # A callback earlier in this turn may have removed or replaced this one.
            if events & (_READABLE | _BROKEN) and (reader := self._readers.get(fd)) is not None:
                reader()
            if events & (_WRITABLE | _BROKEN) and (writer := self._writers.get(fd)) is not None:
                writer()
        # One by one from the front: an exception leaves the others there, and other threads append meanwhile.
        for number in _take_each(self._signals):
            self._signal_callbacks[number](number)
        for callback in _take_each(self._soon):
            callback()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.callback is not None:
                timer.callback()

    def _wake(self) -> None:
        with self._wake_lock:
            if self._wake_write < 0:
                return
            try:
                os.write(self._wake_write, _WAKE)
            except BlockingIOError:
                pass  # a wake-up is pending already

    def _drain_wake_ups(self) -> None:
        try:
            while os.read(self._wake_read, _WAKE_BYTES):
                pass
        except BlockingIOError:
            pass

    def abandon(self) -> None:
        """Let go of everything in a forked child of this process, whose own copy of the loop is not touched.

        The descriptors lead to /dev/null then, rather than being closed: what owns one would close somebody else's
        under that number later.
        """
        self._restore_signals()
        signals.set_wakeup_fd(-1)
        self._wake_lock = RLock()  # a thread that isn't here may hold the other
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        own = {self._poll.fileno(), self._wake_read, self._wake_write, *self._pidfds.values(), *self._registered}
        for fd in own - {-1, null}:
            os.dup2(null, fd, inheritable=False)
        os.close(null)

    def close(self) -> None:
        """Put the signal handlers back and close what the loop owns; children are not touched."""
        if self._wake_read < 0:
            return
        program = self._previous_handlers.get(signals.SIGCHLD)
        self._restore_signals()
        self._poll.close()
        with self._wake_lock:
            own = (*self._pidfds.values(), self._wake_read, self._wake_write, self._signal_descriptor)
            self._wake_read = self._wake_write = self._signal_descriptor = -1
        self._pidfds.clear()
        for fd in own:
            if fd >= 0:
                os.close(fd)
        # The end of a child of the program's own, which came after the last turn.
        if signals.SIGCHLD in self._signals and callable(program):
            program(signals.SIGCHLD, None)


def _take_each(queue: list[T]) -> Iterator[T]:
    """Take from the front what stands there now; a callback may turn the loop itself, and take some of it."""
    for _ in range(len(queue)):
        if queue:
            yield queue.pop(0)


def open_pidfd(pid: int) -> int | None:
    """Open a descriptor that becomes readable when a process ends; None where the system has none to give."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _read_session(pid: int) -> int | None:
    """Return the session of a child, or None where another thread has collected it."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
