"""Asks the workers of one round for their stacks, and hears of their exceptions: sends signals, and reads their pipes.

Rules
- A worker gets a signal only if it has a handler for it and its pipe is still open under its number: the signal would
  end a program without the handler, and the text would go into another file. Nor does it get one that all of its
  threads block: the program may be another one, or have other files, when it takes the signal.
- The pipes are always read, and unexpected text is dropped: a full pipe would block a worker.
- Marks enclose the text of Python's handler; nothing marks the end of faulthandler's. The text of faulthandler is
  complete when the worker has written something and no thread of it runs the handler. The kernel shows a thread in the
  handler: it blocks the signal. Python writes a few characters at a time, so after the first of them the pipe is not
  read for `_GATHERING` seconds: otherwise each write would wake this process.
- After `wait_limit` seconds, missing stacks are explained. A worker that has taken the signal and does not run our
  handler has a handler of its own, and is not waited for that long.
"""

from __future__ import annotations

import itertools
import os
import time
from contextlib import suppress

from elastic_run import contract
from elastic_run.core.failure.stacks import Dump
from elastic_run.diagnosis import kernel_view
from elastic_run.records import dataclass, field
from elastic_run.signals import LOCK_STACK_SIGNAL, MAIN_STACK_SIGNAL, PYTHON_STACK_SIGNAL, STACK_SIGNAL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elastic_run.loop import Loop, Timer
    from elastic_run.multiprocessing.fork_exec import StackPipe

#: Seconds from a worker's first characters to a look at whether that was all, and between two looks.
_GATHERING = 0.002
_READ_SIZE = 1 << 16
#: Before and behind what the worker's handler in Python writes.
_MARKS = b"\x02\x03"
#: The same of what a worker tells, at any time, of the exception that has ended its main thread; bytes of it at most.
_TOLD_MARKS = b"\x05\x06"
_MOST_TOLD = 1 << 16
#: Seconds that the handler in Python gets; it may have to wait for the GIL.
_FIRST = 0.02
#: How often a worker is looked at until no thread but the main one runs, and the seconds in between.
_TRIES = 4
_PAUSE = 0.005
#: Seconds that the handler gets where a wait for a lock was interrupted for it, while another thread has the GIL.
_SECOND = 0.1
#: Part of the wait limit after which a worker that has taken the signal must have begun to write.
_EARLY = 1 / 3
#: Bytes of one worker that are kept: 100 threads of 100 frames.
_MOST_BYTES = 1 << 21


@dataclass(slots=True)
class _Request:
    """A request to one worker."""

    pid: int
    blocking: frozenset[str]  # Threads that blocked the signals before
    problem: str
    insists: bool
    spares: bool
    until: float  # Monotonic seconds up to which the handler in Python is waited for
    text: bytearray = field(default_factory=bytearray, init=False)
    is_sent: bool = field(default=False, init=False)

    @property
    def is_cut(self) -> bool:
        """Whether the end of what Python's handler writes is missing."""
        return self.text.rfind(_MARKS[:1]) > self.text.rfind(_MARKS[1:])

    @property
    def stacks(self) -> bytearray:
        """What Python's handler has written, also where faulthandler has written before or behind it; else all."""
        _, begin, text = self.text.partition(_MARKS[:1])
        text, end, _ = text.partition(_MARKS[1:])
        return text if begin and end else self.text.translate(None, _MARKS)


class StackRequests:
    """The pipes of one round's workers by local rank; this object closes them.

    `on_uncaught` gets a local rank, and what its worker tells of the exception that has ended its main thread.
    `received` counts the bytes that came so far, by local rank: a worker's own count of what it has written includes
    them.
    """

    def __init__(
        self,
        loop: Loop,
        pipes: Mapping[int, StackPipe],
        on_uncaught: Callable[[int, str], None] = lambda *_: None,
    ) -> None:
        self._loop = loop
        self._on_uncaught = on_uncaught
        self._told: dict[int, bytes] = {}
        self._pipes = dict(pipes)
        self.received = dict.fromkeys(self._pipes, 0)
        self._open: set[int] = set()
        self._requests: dict[int, _Request] = {}
        self._missing: set[int] = set()
        self._waiting: list[Callable[[dict[int, Dump]], None]] = []
        self._timers: list[Timer] = []
        for rank in self._pipes:
            self._watch(rank)

    def ask(
        self,
        pids: Mapping[int, int],
        wait_limit: float,
        on_done: Callable[[dict[int, Dump]], None],
        *,
        insists: bool = False,
        spares: bool = False,
    ) -> None:
        """Ask workers for their stacks; `spares` leaves those alone that wait for any signal."""
        self._waiting.append(on_done)
        if len(self._waiting) > 1:
            return
        for rank in self._open.copy():
            self._read(rank)
        until = self._loop.now() + wait_limit * _EARLY
        self._requests = {}
        for rank, pid in pids.items():
            problem = kernel_view.find_obstacle(pid, self._pipes.get(rank))
            blocking = frozenset[str]() if problem else kernel_view.threads_that_block(pid)
            self._requests[rank] = _Request(pid, blocking, problem, insists, spares, until)
        self._missing = {rank for rank, request in self._requests.items() if not request.problem}
        self._timers = [
            self._loop.call_later(wait_limit * _EARLY, self._look_early),
            self._loop.call_later(wait_limit if self._missing else 0.0, self._finish),
        ]
        for rank in self._missing.copy():
            self._begin(rank, self._requests[rank])

    def close(self) -> None:
        """Close the pipes; a request that still waits gets the stacks that have come."""
        self._finish()
        for rank in self._open.copy():
            self._read(rank)
        for rank in self._open:
            self._loop.remove_reader(self._pipes[rank].reading)
        for pipe in self._pipes.values():
            os.close(pipe.reading)
        self._open.clear()
        self._pipes.clear()

    def has_handler(self, rank: int, pid: int) -> bool:
        """Whether a worker can be asked, and tells of the exception that ends its main thread."""
        return not kernel_view.find_obstacle(pid, self._pipes.get(rank))

    def _begin(self, rank: int, request: _Request) -> None:
        """Ask a worker by the signal for Python's handler, as soon as one of its threads takes that."""
        if not self._is_awaited(rank, request):
            return
        if request.spares and kernel_view.waits_for_signal(request.pid):
            # By another thread than the main one, whose wait any signal would end; or leave the worker alone.
            if kernel_view.is_calm(request.pid) and kernel_view.send_beside_main(request.pid, STACK_SIGNAL):
                request.is_sent = True
            else:
                self._answered(rank, kernel_view.PAUSED)
        elif kernel_view.takes_signal(request.pid, PYTHON_STACK_SIGNAL):
            self._kill(rank, request, PYTHON_STACK_SIGNAL)
            self._loop.call_later(_FIRST, lambda: self._insist(rank, request))
        elif self._loop.now() < request.until:
            self._loop.call_later(_PAUSE, lambda: self._begin(rank, request))
        else:
            self._answered(rank, kernel_view.BLOCKS)

    def _insist(self, rank: int, request: _Request) -> None:
        """Ask a worker whose main thread is in C code by a signal that needs no Python."""
        if not self._is_awaited(rank, request):
            return
        if kernel_view.is_main_running(request.pid) and self._loop.now() < request.until:
            self._loop.call_later(_PAUSE, lambda: self._insist(rank, request))
        else:
            self._send(rank, request, _TRIES)

    def _is_awaited(self, rank: int, request: _Request) -> bool:
        return self._requests.get(rank) is request and rank in self._missing and not request.text

    def _send(self, rank: int, request: _Request, tries: int) -> None:
        """Ask for all threads when none but the main one runs; if one always does, for the main thread.

        Before that, a main thread that waits for a lock is sent to the handler in Python.
        """
        if not self._is_awaited(rank, request):
            return
        problem = kernel_view.find_obstacle(request.pid, self._pipes[rank])
        is_calm = kernel_view.is_calm(request.pid) and not (request.insists and tries > 1)
        number = STACK_SIGNAL if is_calm else MAIN_STACK_SIGNAL
        takes_signal = kernel_view.takes_signal(request.pid, number)
        if problem or not (takes_signal or tries > 1):
            self._answered(rank, problem or kernel_view.BLOCKS)
        elif not (is_calm and takes_signal) and tries > 1:
            is_last_but_one = tries - 1 == 1
            waits_for_lock = is_last_but_one and kernel_view.waits_for_lock(request.pid)
            pause = _PAUSE
            if waits_for_lock and kernel_view.takes_signal(request.pid, LOCK_STACK_SIGNAL):
                pause = _SECOND
                self._kill(rank, request, LOCK_STACK_SIGNAL)
            self._loop.call_later(pause, lambda: self._send(rank, request, tries - 1))
        else:
            request.is_sent = True
            self._kill(rank, request, number)

    def _kill(self, rank: int, request: _Request, number: int) -> None:
        try:
            os.kill(request.pid, number)
        except OSError:
            self._answered(rank, "has ended")

    def _watch(self, rank: int) -> None:
        self._open.add(rank)
        self._loop.add_reader(self._pipes[rank].reading, lambda: self._on_readable(rank))

    def _on_readable(self, rank: int) -> None:
        if rank in self._missing:
            self._loop.remove_reader(self._pipes[rank].reading)
            self._loop.call_later(_GATHERING, lambda: self._gather(rank))
        else:
            self._read(rank)

    def _gather(self, rank: int) -> None:
        if rank not in self._pipes:
            return
        if rank not in self._missing:
            self._read(rank)
            if rank in self._open:
                self._watch(rank)
            return
        request = self._requests[rank]
        # Before the pipe is read: then the pipe has all text that was written before the handler ended.
        is_writing = self._is_handling(request)
        request.text += self._read(rank)
        if rank in self._open and (is_writing or request.is_cut):
            self._loop.call_later(_GATHERING, lambda: self._gather(rank))
            return
        if rank in self._open:
            self._watch(rank)
        if request.text:
            self._answered(rank)
        elif rank not in self._open:
            pipe = self._pipes[rank]
            self._answered(rank, kernel_view.find_obstacle(request.pid, pipe) or "has ended")

    def _answered(self, rank: int, problem: str = "") -> None:
        self._requests[rank].problem = problem
        self._missing.discard(rank)
        if not self._missing:
            self._timers.append(self._loop.call_later(0.0, self._finish))

    def _look_early(self) -> None:
        for rank in self._missing.copy():
            request = self._requests[rank]
            is_taken = request.is_sent and not kernel_view.is_pending(request.pid)
            if is_taken and not request.text and not self._is_handling(request):
                request.text += self._read(rank)
                self._answered(rank, "" if request.text else kernel_view.explain_silence(request.pid))

    def _is_handling(self, request: _Request) -> bool:
        """Whether a thread of a worker runs the handler."""
        return bool(kernel_view.threads_that_block(request.pid) - request.blocking)

    def _read(self, rank: int) -> bytes:
        """Return the bytes in a pipe; at its end, stop watching it."""
        found = b""
        fd = self._pipes[rank].reading
        try:
            while len(found) < _MOST_BYTES:
                data = os.read(fd, _READ_SIZE)
                if not data:
                    self._open.discard(rank)
                    self._loop.remove_reader(fd)
                    break
                found += data
        except BlockingIOError:
            pass
        self.received[rank] += len(found)
        return self._take_told(rank, found)

    def _take_told(self, rank: int, text: bytes) -> bytes:
        """Take what a worker tells of its exception out of a text, and return the rest; it may come in two parts."""
        text, rest = self._told.pop(rank, b"") + text, b""
        begin, end = _TOLD_MARKS[:1], _TOLD_MARKS[1:]
        while begin in text:
            before, _, text = text.partition(begin)
            told, is_whole, after = text.partition(end)
            rest += before
            if not is_whole:
                self._told[rank] = begin + told[:_MOST_TOLD]
                return rest
            text = after
            self._on_uncaught(rank, told.decode(errors="replace"))
        return rest + text

    def _finish(self) -> None:
        if not self._waiting:
            return
        for timer in self._timers:
            timer.cancel()
        for rank in self._missing:
            request = self._requests[rank]
            is_slow = request.text or self._is_handling(request)
            request.problem = "is slow to write its stacks" if is_slow else kernel_view.explain_silence(request.pid)
        self._missing.clear()
        found = {
            rank: Dump(
                text=request.stacks.decode(errors="replace"),
                problem=request.problem,
                details=kernel_view.describe_threads(request.pid) if request.problem else "",
            )
            for rank, request in self._requests.items()
        }
        waiting, self._waiting = self._waiting, []
        for on_done in waiting:
            on_done(found)


def write_stacks(directory: str, dumps: Mapping[int, Dump]) -> str:
    """Write stacks into a new file, as no log is overwritten: stacks.txt, stacks.1.txt and so on; return its path."""
    text = render_stacks(dumps, time.strftime("%Y-%m-%d %H:%M:%S %z"))
    name, _, ending = contract.STACKS_FILE.rpartition(".")
    for number in itertools.count():
        path = os.path.join(directory, f"{name}.{number}.{ending}" if number else contract.STACKS_FILE)
        try:
            with open(path, "x", encoding="utf-8", errors="replace") as file:
                file.write(text)
        except FileExistsError:
            continue
        except OSError:
            with suppress(OSError):
                if not os.path.getsize(path):  # a full disk: an empty file would tell nothing
                    os.unlink(path)
            raise
        return path
    raise AssertionError


def render_stacks(dumps: Mapping[int, Dump], taken_at: str) -> str:
    """Return the file's text."""
    parts = [f"Stacks of {len(dumps)} workers, {taken_at}"]
    for rank, dump in sorted(dumps.items()):
        problem = f": {dump.problem}" if dump.problem else ""
        lines = (f"=== rank {rank}{problem}", dump.text.rstrip(), dump.details)
        parts.append("\n".join(line for line in lines if line))
    return "\n\n".join(parts) + "\n"
