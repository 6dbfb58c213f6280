"""The files of --duplicate-stdout-filters and --duplicate-stderr-filters: lines of all tee'd ranks that hold a text."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from elastic_run.multiprocessing.output.logfile import LogFile


_NEWLINE = 10


class FilteredCopy:
    """Writes the lines that contain any of some texts to a file, each after its rank's prefix.

    Of a line longer than the limit (see `outlet.Lines`) the first part decides.
    """

    def __init__(self, file: LogFile, filters: Iterable[str]) -> None:
        self._file = file
        self._needles = tuple(text.encode("utf-8", "surrogateescape") for text in filters)
        #: The sources that are within a long line, and whether that line is copied.
        self._inside: dict[object, bool] = {}

    def take(self, source: object, prefix: bytes, data: bytes) -> None:
        """Look through the next lines of a source."""
        text = b""
        if source in self._inside:
            end = data.find(b"\n") + 1 or len(data)
            text = data[:end] if self._inside[source] else b""
            if data[end - 1] == _NEWLINE:
                del self._inside[source]
            data = data[end:]
        if data and (data[-1] != _NEWLINE or self._is_wanted(data)):
            text += self._matching(source, prefix, data)
        if text:
            self._file.write(text)

    def _is_wanted(self, text: bytes) -> bool:
        return any(needle in text for needle in self._needles)

    def _matching(self, source: object, prefix: bytes, data: bytes) -> bytes:
        lines = data.split(b"\n")
        last = lines.pop()
        text = b"".join([prefix + line + b"\n" for line in lines if self._is_wanted(line)])
        if last:
            self._inside[source] = self._is_wanted(last)
            text += prefix + last if self._inside[source] else b""
        return text

    def close(self) -> None:
        """Close the file."""
        self._file.close()
