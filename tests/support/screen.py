r"""A terminal's screen for tests: what a person sees of the bytes that were written, with nothing that scrolls away.

It knows what elastic-run's own lines use: text, line ends, ``\r``, and ``\x1b[J`` (erase from the cursor on). A line
that is too long breaks into rows, as on a real terminal; so does a row, when the window becomes narrower.
"""

from __future__ import annotations

import re

_PIECE = re.compile(r"\x1b\[J|\r|\n|[^\x1b\r\n]+")


class Screen:
    """A screen.

    Args:
        columns: Its width.

    Attributes:
        widest: The widest row that ever was.
    """

    def __init__(self, columns: int = 80) -> None:
        self.columns = columns
        self.widest = 0
        self._rows = [""]
        self._row = 0
        self._column = 0

    @property
    def rows(self) -> list[str]:
        """What stands there, without the empty rows at the end."""
        return "\n".join(row.rstrip() for row in self._rows).rstrip("\n").split("\n")

    def feed(self, data: bytes) -> Screen:
        """Take what was written; returns this screen."""
        text = data.decode()
        end = 0
        for match in _PIECE.finditer(text):
            assert match.start() == end, f"unknown to this screen: {text[end : match.start()]!r}"
            end = match.end()
            self._take(match[0])
        assert end == len(text), f"unknown to this screen: {text[end:]!r}"
        return self

    def resize(self, columns: int) -> None:
        """Change the width: rows that are too long for it are broken; the cursor stays at its place in the text."""
        rows: list[str] = []
        for number, row in enumerate(self._rows):
            if number == self._row:
                self._row = len(rows)
                self._row, self._column = self._row + self._column // columns, self._column % columns
            rows += [row[start : start + columns] for start in range(0, max(1, len(row)), columns)]
        self._rows, self.columns = rows, columns

    def _take(self, piece: str) -> None:
        if piece == "\r":
            self._column = 0
        elif piece == "\n":
            self._row, self._column = self._row + 1, 0
        elif piece == "\x1b[J":
            self._rows[self._row] = self._rows[self._row][: self._column]
            del self._rows[self._row + 1 :]
        else:
            for character in piece:
                self._put(character)
        while len(self._rows) <= self._row:
            self._rows.append("")

    def _put(self, character: str) -> None:
        if self._column == self.columns:
            self._row, self._column = self._row + 1, 0
            self._rows[self._row :] = self._rows[self._row :] or [""]
        row = self._rows[self._row].ljust(self._column)
        self._rows[self._row] = row[: self._column] + character + row[self._column + 1 :]
        self._column += 1
        self.widest = max(self.widest, self._column)
