"""A wall clock of its own for each virtual host, that a test may set at any moment.

The kernel gives hosts their own monotonic clock, and there is one wall clock for all. A preloaded library stands
between programs and that clock (`wall_clock.c`). libfaketime does much the same; with it the monotonic sleeps of
Python fail, and waits of C++ libraries take as much longer as the clock is ahead.
"""

from __future__ import annotations

import functools
import struct
import subprocess
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).with_name("wall_clock.c")
_NANOSECONDS = struct.Struct("=q")


@functools.cache
def _library() -> tuple[Path, tempfile.TemporaryDirectory[str]]:
    """Compile the library, once; it lives as long as the test run."""
    directory = tempfile.TemporaryDirectory(prefix="wall-clock-")
    library = Path(directory.name) / "wall_clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, _SOURCE, "-ldl", "-pthread"], check=True)
    return library, directory


class HostClock:
    """What a host's programs see as the time of day.

    Args:
        path: The file that holds the difference.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def install(self) -> None:
        """Let programs that are started from now on see this clock. It is right until it is set."""
        self._path.write_bytes(_NANOSECONDS.pack(0))

    def set(self, seconds: float) -> None:
        """Set the clock, for programs that run as well.

        Args:
            seconds: Ahead of the true time; negative for behind it.
        """
        with self._path.open("r+b") as file:  # in place: programs have it mapped
            file.write(_NANOSECONDS.pack(round(seconds * 1e9)))

    def environment(self) -> dict[str, str]:
        """Return the variables with which a program sees this clock; none before it is installed."""
        if not self._path.exists():
            return {}
        return {"LD_PRELOAD": str(_library()[0]), "WALL_CLOCK_FILE": str(self._path)}
