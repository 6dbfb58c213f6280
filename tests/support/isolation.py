"""A disk and a process namespace for one test. Both need root."""

from __future__ import annotations

import contextlib
import subprocess
from typing import TYPE_CHECKING

from tests.support.system import require_marker, starter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


@starter
@contextlib.contextmanager
def small_disk(directory: Path, kibibytes: int) -> Iterator[Path]:
    """Mount a disk below a directory."""
    require_marker("root, for a mount")
    disk = directory / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "none", disk], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


@starter
def as_pid_1(command: Sequence[str]) -> tuple[str, ...]:
    """Return the command line that runs a command as the first process of a process namespace, as in a container."""
    require_marker("root, for a process namespace")
    return ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *command)
