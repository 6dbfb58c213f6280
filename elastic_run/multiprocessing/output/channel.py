"""One pipe or pseudo-terminal from a worker: reads it, and passes every byte to file, tail and console.

Rules
- The channel owns the reading end and the log file. It reads only while its outlet is ready, so a worker whose output
  is not taken waits at the full pipe.
- The stream ends with an end of file (EIO on a pseudo-terminal whose last user is gone), or with `finish`. At `finish`
  the worker and all its descendants are dead, so the pipe holds the last bytes, even if a stray process has it open.
  Such a process gets EPIPE from then on.
"""

from __future__ import annotations

import os

from elastic_run.multiprocessing.output.descriptors import bytes_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.loop import Loop
    from elastic_run.multiprocessing.output.activity import Activity
    from elastic_run.multiprocessing.output.interrupt_fold import FoldedOutlet, InterruptFold
    from elastic_run.multiprocessing.output.logfile import LogFile
    from elastic_run.multiprocessing.output.outlet import Outlet
    from elastic_run.multiprocessing.output.tail import Tail

#: Bytes per read. More doesn't make it faster; it makes batches that stall the loop for longer.
READ_SIZE = 1 << 18
#: No pseudo-terminal holds more than this, nor a pipe of ours, unless a worker has enlarged it.
CAPACITY = 1 << 20


class Channel:
    """The launcher's side of a stream that a worker writes."""

    def __init__(
        self,
        loop: Loop,
        fd: int,
        *,
        outlet: Outlet | None = None,
        file: LogFile | None = None,
        tail: Tail | None = None,
        activity: Activity | None = None,
    ) -> None:
        self.fd = fd
        self._loop = loop
        self._outlet: Outlet | FoldedOutlet | None = outlet
        self._file = file
        self._tail = tail
        self._activity = activity
        loop.add_reader(fd, self._on_readable)

    @property
    def is_open(self) -> bool:
        """Whether more may come."""
        return self.fd >= 0

    def fold(self, fold: InterruptFold, local_rank: int) -> None:
        """Let equal KeyboardInterrupts be shown once from now on."""
        if self.is_open and self._outlet is not None:
            self._outlet = fold.wrap(local_rank, self._outlet)

    def catch_up(self) -> None:
        """Take what is in the pipe, not what somebody goes on writing; harmless when it is closed."""
        if not self._read_until_empty(CAPACITY):
            self._read_until_empty(bytes_in(self.fd))  # the worker has enlarged its pipe

    def _read_until_empty(self, most: int) -> bool:
        """Read until nothing is there, or until that many bytes were; return whether nothing is."""
        while self.is_open and most > 0:
            size = self._read()
            if not size:
                return True
            most -= size
        return not self.is_open

    def finish(self) -> None:
        """Take what is in the pipe, and close it; harmless when it is closed."""
        self.catch_up()
        self._end()

    def _on_readable(self) -> None:
        outlet = self._outlet
        if outlet is not None and not outlet.is_ready:
            self._loop.remove_reader(self.fd)
            outlet.when_clear(self._resume)
            return
        self._read()

    def _resume(self) -> None:
        """Read once, so that waiting channels take turns, and go on as soon as these bytes are written."""
        if self.is_open:
            self._read()
        outlet = self._outlet
        if not self.is_open or outlet is None:
            return
        if outlet.is_ready:
            self._loop.add_reader(self.fd, self._on_readable)
        else:
            outlet.when_clear(self._resume)

    def _read(self) -> int:
        """Read once; return how much there was."""
        try:
            data = os.read(self.fd, READ_SIZE)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""  # EIO: the pseudo-terminal has no user any more
        if not data:
            self._end()
            return 0
        if self._activity is not None:
            self._activity.note(self._loop.now())
            self._activity.keep(data)
        if self._file is not None:
            self._file.write(data)
        if self._tail is not None:
            self._tail.add(data)
        if self._outlet is not None:
            self._outlet.take(data)
        return len(data)

    def _end(self) -> None:
        if not self.is_open:
            return
        self._loop.remove_reader(self.fd)
        os.close(self.fd)
        self.fd = -1
        if self._file is not None:
            self._file.close()
        if self._outlet is not None:
            self._outlet.end()
