"""A stream of the console without a console: its loop, its clock and its reader do as the test says."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, cast

from elastic_run.multiprocessing.output.console import Stream
from elastic_run.multiprocessing.output.sink import Sink
from elastic_run.multiprocessing.output.tail import Activity
from elastic_run.multiprocessing.output.worker_lines import Captured, Teed
from elastic_run.multiprocessing.wiring import CAPTURED, STDERR, TEED, Line

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.loop import Loop
    from elastic_run.multiprocessing.output.sink import FilteredCopy, LogFile


class Clockwork:
    """A loop whose time stands still until `advance`."""

    def __init__(self) -> None:
        self.time = 0.0
        self.soon: list[Callable[[], None]] = []
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.readers: dict[int, Callable[[], None]] = {}
        self.writers: dict[int, Callable[[], None]] = {}

    def now(self) -> float:
        """Return the time."""
        return self.time

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call at the next `turn`."""
        self.soon.append(callback)

    def call_at(self, when: float, callback: Callable[[], None]) -> Clockwork:
        """Call once the time has come."""
        self.timers.append((when, callback))
        return self

    def call_later(self, delay: float, callback: Callable[[], None]) -> Clockwork:
        """Call after a delay."""
        return self.call_at(self.time + delay, callback)

    def cancel(self) -> None:
        """Stand in for a timer's method; the tests have no timer that is cancelled."""

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        """Keep what is called when bytes have come; a test calls it."""
        self.readers[fd] = callback

    def remove_reader(self, fd: int) -> None:
        """Forget it."""
        self.readers.pop(fd, None)

    def add_writer(self, fd: int, callback: Callable[[], None]) -> None:
        """Call at the next `turn`, again and again."""
        self.writers[fd] = callback

    def remove_writer(self, fd: int) -> None:
        """Stop that."""
        self.writers.pop(fd, None)

    def turn(self) -> None:
        """Call all that is due until nothing is."""
        while self.soon:
            soon, self.soon = self.soon, []
            for callback in soon:
                callback()

    def drain(self) -> None:
        """Tell those who want to write that they can."""
        for callback in tuple(self.writers.values()):
            callback()
        self.turn()

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.time += seconds
        due = [timer for timer in self.timers if timer[0] <= self.time]
        self.timers = [timer for timer in self.timers if timer[0] > self.time]
        for _, callback in due:
            callback()
        self.turn()


class Reader(Sink):
    """A descriptor that takes as many bytes as the test allows."""

    def __init__(self) -> None:
        super().__init__(-1)
        self.got = b""
        self.room = 1 << 30
        self.is_gone = False

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Take what there is room for."""
        if self.is_gone:
            raise BrokenPipeError
        if not self.room:
            raise BlockingIOError
        taken = bytes(data[: self.room])
        self.got += taken
        self.room -= len(taken)
        return len(taken)


class Bench:
    """A stream and those who write to it."""

    def __init__(self) -> None:
        self.loop = Clockwork()
        self.reader = Reader()
        self.errors: list[OSError] = []
        self.stream = Stream(cast("Loop", self.loop), self.reader, self.errors.append)
        self._activity = Activity(0, 0.0, lambda *_: None)

    def captured(self, *, reading: int = -1, is_terminal: bool = True) -> Captured:
        """Make a channel that passes bytes on; without a pipe, a test gives it its bytes with `add`."""
        reading = os.open(os.devnull, os.O_RDONLY) if reading < 0 else reading
        line = Line(STDERR, CAPTURED, reading, is_terminal=is_terminal)
        return Captured(cast("Loop", self.loop), self.stream, line, self._activity, None, None)

    def teed(
        self, prefix: bytes, *, limit: int = 100, file: LogFile | None = None, copy: FilteredCopy | None = None
    ) -> Teed:
        """Make a channel of whole lines; a test gives it its bytes with `add`."""
        line = Line(STDERR, TEED, os.open(os.devnull, os.O_RDONLY))
        common = (cast("Loop", self.loop), self.stream, line, self._activity, file, None)
        return Teed(*common, prefix=prefix, limit=limit, copy=copy)

    @property
    def got(self) -> bytes:
        """What has been read."""
        return self.reader.got
