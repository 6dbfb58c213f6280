"""A pseudo-terminal for tests, with the screen that a person would see."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import termios
import time
from typing import TYPE_CHECKING

from tests.support.launch import ELASTIC_RUN, clean_environment
from tests.support.processes import descendants_of, kill_processes
from tests.support.wait import DEADLINE, DeadlinePassedError, stretched

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType


class Terminal:
    """A terminal of a size; programs started in it have it as their controlling terminal.

    Args:
        rows: Its height.
        columns: Its width.
    """

    def __init__(self, *, rows: int = 24, columns: int = 80) -> None:
        self.master, self.slave = os.openpty()
        self.output = bytearray()
        self.process: subprocess.Popen[bytes] | None = None
        self.resize(rows, columns)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def resize(self, rows: int, columns: int) -> None:
        """Change the size, as dragging a window's corner does: the foreground group gets SIGWINCH."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def start(
        self,
        *arguments: str | Path,
        env: Mapping[str, str | None] | None = None,
        program: Sequence[str] = ELASTIC_RUN,
    ) -> subprocess.Popen[bytes]:
        """Start a launcher in the terminal, in the foreground of a new session."""
        slave = self.slave
        self.process = subprocess.Popen(
            [*program, *map(str, arguments)],
            env=clean_environment(env),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - nothing else sets the terminal
        )
        return self.process

    def type(self, text: str) -> None:
        r"""Send keys; ``\x03`` is Ctrl-C, ``\x1a`` Ctrl-Z."""
        os.write(self.master, text.encode())

    def wait_output(self, pattern: str, *, deadline: float = DEADLINE) -> re.Match[bytes]:
        """Wait until a regular expression is found in all that was written, control characters included."""
        deadline = stretched(deadline)
        end = time.monotonic() + deadline
        expression = re.compile(pattern.encode())
        while True:
            match = expression.search(bytes(self.output))
            if match:
                return match
            if not self._read(end - time.monotonic()):
                message = f"not within {deadline} s: {pattern!r} in {bytes(self.output)!r}"
                raise DeadlinePassedError(message)

    def wait_exit(self, *, deadline: float = DEADLINE) -> int:
        """Wait for the program's end, reading on so that it can't block, and return its exit code."""
        if self.process is None:
            message = "nothing was started in this terminal"
            raise ValueError(message)
        deadline = stretched(deadline)
        end = time.monotonic() + deadline
        while self.process.poll() is None:
            self._read(0.02)  # poll() has no descriptor; output has
            if time.monotonic() > end:
                message = f"still running after {deadline} s: {bytes(self.output)!r}"
                raise DeadlinePassedError(message)
        while self._read(0.0):
            pass
        return self.process.returncode

    def close(self) -> None:
        """Kill what still runs and close the terminal."""
        if self.process is not None and self.process.poll() is None:
            kill_processes([self.process.pid, *descendants_of(self.process.pid)])
            self.process.wait(DEADLINE)
        os.close(self.master)
        os.close(self.slave)

    def _read(self, timeout: float) -> bool:
        """Read what is there within `timeout` seconds, and tell whether there was anything."""
        ready, _, _ = select.select([self.master], [], [], max(0.0, timeout))
        if ready:
            self.output += os.read(self.master, 65536)
        return bool(ready)


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
