"""A disk, a process namespace and a memory limit for one test. All need root."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.system import require_marker, starter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


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


_MEMORY = Path("/sys/fs/cgroup/memory")
_MEGABYTE = 1 << 20


@starter
@contextlib.contextmanager
def memory_limit(megabytes: int) -> Iterator[list[str]]:
    """Give the command that puts another one into a memory cgroup of its own; nothing to put before it where 0."""
    if not megabytes:
        yield []
        return
    require_marker("root, for a control group")
    group = _MEMORY / f"elastic-run-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(megabytes * _MEGABYTE), encoding="ascii")
        yield ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group)]
    finally:
        for pid in (group / "cgroup.procs").read_text(encoding="ascii").split():
            with contextlib.suppress(OSError):
                os.kill(int(pid), 9)
        for _ in range(100):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.02)
