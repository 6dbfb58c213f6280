"""A program that embeds Python, built for the tests: its `sys.executable` is itself, and no interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.support.system import require_marker, starter

_SOURCE = Path(__file__).with_name("embedding.c")


@starter
class EmbeddingProgram:
    """The built program, and how it is started.

    Args:
        directory: For the program and its notes.
        name: Its name.
    """

    def __init__(self, directory: Path, name: str = "simulator") -> None:
        require_marker("a C compiler")
        self.path = directory / name
        self._starts = directory / "starts"
        libraries = [str(sysconfig.get_config_var(name)) for name in ("LIBDIR", "LIBPL")]
        paths = [flag for path in libraries for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
        version = f"{sys.version_info[0]}.{sys.version_info[1]}{getattr(sys, 'abiflags', '')}"
        rest = [f"-lpython{version}", "-ldl", "-lm", "-lpthread", "-lutil", "-Wl,-export-dynamic"]
        flags = [f"-I{sysconfig.get_paths()['include']}", *paths, *rest]
        subprocess.run(["cc", str(_SOURCE), "-o", str(self.path), *flags], check=True)

    @property
    def starts(self) -> int:
        """How often it was started."""
        return self._starts.stat().st_size

    def forget_starts(self) -> None:
        """Begin to count anew."""
        self._starts.write_bytes(b"")

    def environment(self, script: str) -> dict[str, str]:
        """Return what its environment needs.

        Args:
            script: The Python program that it runs, whatever its arguments.
        """
        return {
            "EMBEDDING_STARTS": str(self._starts),
            "EMBEDDING_HOME": sys.base_prefix,
            "EMBEDDING_PROGRAM": script,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
