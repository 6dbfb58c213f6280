"""The lines that the workers of `tee` write, and what became of them on the way. Every line is looked at."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

WORKERS = 2
_LINE = re.compile(rb"\[default(\d)\]:([oe])\1 (\d{9}) \.{83}\r?\n")
_LINE_BYTES = 97
_STREAMS = 2


@dataclass(frozen=True)
class Damage:
    """What became of the lines on the way.

    Args:
        lost: Lines that never came whole.
        repeated: Lines that came again.
        cut: Lines on the console that no worker wrote like that.
    """

    lost: int
    repeated: int
    cut: int

    @property
    def total(self) -> int:
        """Lines that are not as they were written; one that came in pieces is lost and cut, and counts once."""
        return max(self.lost, self.cut) + self.repeated

    def text(self) -> str:
        """Return it in words."""
        return f"{self.lost} lost, {self.repeated} repeated, {self.cut} cut"


def lines_of(megabytes: int) -> int:
    """Return how many lines a worker has to write to one stream, for all of them to write so much."""
    return megabytes * 1_000_000 // (WORKERS * _STREAMS * _LINE_BYTES)


def look_for_damage(received: bytes, numbers: int) -> Damage:
    """Look at every line.

    Args:
        received: What came to the console. Lines of the launcher itself are no damage.
        numbers: How many lines each worker wrote to each stream.

    Returns:
        What is missing, what is there twice, and what is not a line of a worker.
    """
    seen = {(rank, name): bytearray(numbers) for rank in (b"0", b"1") for name in (b"o", b"e")}
    lost = WORKERS * _STREAMS * numbers
    repeated = whole = 0
    for match in _LINE.finditer(received):
        rank, name, number = match.groups()
        stream = seen[rank, name]
        index = int(number)
        whole += match.end() - match.start()
        if stream[index]:
            repeated += 1
        else:
            stream[index] = 1
            lost -= 1
    cut = 0 if whole == len(received) else sum(map(_is_cut, _LINE.sub(b"", received).splitlines()))
    return Damage(lost=lost, repeated=repeated, cut=cut)


def _is_cut(line: bytes) -> bool:
    """Tell a piece of a worker's line from a line that the launcher wrote itself."""
    return b"...." in line or line.startswith(b"[default")


def are_logs_whole(logs: Path, numbers: int) -> bool:
    """Tell whether each log file holds exactly what its worker wrote.

    Args:
        logs: The log directory.
        numbers: How many lines each worker wrote to each stream.
    """
    files = {name: sorted(logs.rglob(f"{stream}.log")) for stream, name in (("stdout", b"o"), ("stderr", b"e"))}
    return all(
        len(paths) == WORKERS
        and all(path.read_bytes() == _text_written(name, rank, numbers) for rank, path in enumerate(paths))
        for name, paths in files.items()
    )


def _text_written(name: bytes, rank: int, numbers: int) -> bytes:
    padding = b"." * 83
    return b"".join([b"%s%d %09d %s\n" % (name, rank, line, padding) for line in range(numbers)])
