"""What `ps` shows of a process: a text of ours for a guardian or a waiting fork, the command line of a forked worker.

The command line is in the process's memory; /proc/self/stat names the place, for which there is no call without
ctypes. A template was executed with its workers' command line, so there is always enough room. Every failure is
harmless: `ps` shows the old words.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

#: Positions of `arg_start` and `arg_end` behind the name in /proc/PID/stat.
_ARG_START, _ARG_END = 45, 46


class ProcessTitle:
    """The command line of this process, as it is when this object is made."""

    __slots__ = ("_comm", "_size", "_start")

    def __init__(self) -> None:
        self._start = self._size = 0
        self._comm = b""
        try:
            with open("/proc/self/stat", "rb") as stat:
                fields = stat.read().rpartition(b")")[2].split()
            self._start = int(fields[_ARG_START])
            self._size = int(fields[_ARG_END]) - self._start
            with open("/proc/self/comm", "rb") as comm:
                self._comm = comm.read().rstrip(b"\n")
        except (OSError, IndexError, ValueError):
            pass

    def show(self, words: str, name: str) -> None:
        """Show words instead of the command line (`ps -f`), and a name of at most 15 bytes (`ps`, `top`)."""
        self._write(words.encode()[: max(0, self._size - 1)], name.encode())

    def show_command(self, argv: Sequence[str]) -> None:
        """Show a command line, and the name that this process began with."""
        self._write(b"".join(os.fsencode(word) + b"\0" for word in argv)[: self._size], self._comm)

    def _write(self, text: bytes, name: bytes) -> None:
        if not self._size:
            return
        try:
            with open("/proc/self/mem", "r+b", buffering=0) as memory:
                memory.seek(self._start)
                memory.write(text.ljust(self._size, b"\0"))
            with open("/proc/self/comm", "wb", buffering=0) as comm:
                comm.write(name)
        except OSError:
            pass
