"""The counters of one worker's process that the hang detection reads at each tick: bytes written, and processor time.

The two files of /proc stay open: a tick that opened them anew would take twice the time, and 8 idle workers would cost
more than the bound, 0.1 % of a core. psutil takes longer still, and opens its files at each reading.
"""

from __future__ import annotations

import os

_TICK = os.sysconf("SC_CLK_TCK")
_WRITTEN = b"\nwchar: "
#: Bytes of /proc/PID/stat and of /proc/PID/io at most.
_LIMIT = 4096
#: Position of `utime` and `stime` behind the name in /proc/PID/stat.
_USER, _SYSTEM = 11, 12


class ProcessCounters:
    """The counters of a process.

    Args:
        pid: The process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._files: dict[str, int] = {}

    def read(self) -> tuple[int | None, float] | None:
        """Read both counters.

        Returns:
            The bytes written, None where the kernel does not tell, and the processor time in seconds; None instead of
            both if the process is gone.
        """
        # The name in parentheses may hold spaces and parentheses itself: fields count from the last one.
        fields = self._read("stat").rpartition(b")")[2].split(None, _SYSTEM + 1)
        if len(fields) <= _SYSTEM:
            return None
        written = self._read("io").partition(_WRITTEN)[2].partition(b"\n")[0]
        return int(written) if written else None, (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICK

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _read(self, name: str) -> bytes:
        try:
            fd = self._files.get(name)
            if fd is None:
                fd = self._files[name] = os.open(f"/proc/{self._pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
            return os.pread(fd, _LIMIT, 0)
        except OSError:
            return b""
