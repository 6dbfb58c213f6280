"""A memory limit for one program: a control group of its own. Needs root."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.system import require_marker, starter

if TYPE_CHECKING:
    from collections.abc import Iterator

_MEMORY = Path("/sys/fs/cgroup/memory")
_MEGABYTE = 1 << 20


@starter
@contextlib.contextmanager
def memory_limit(megabytes: int) -> Iterator[list[str]]:
    """Give the command that puts another one into a memory cgroup of its own; nothing to put before it where 0.

    Args:
        megabytes: The limit, or 0 for none.
    """
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
