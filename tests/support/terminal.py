"""A pseudo-terminal for tests: what a program sees and writes when a person sits before it."""

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
