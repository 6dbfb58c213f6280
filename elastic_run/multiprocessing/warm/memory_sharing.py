"""Measures how much memory warm workers share with their template, compared with separate processes.

psutil's PSS counts mapped files too.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

_KIB = 1024
#: To look through a process's pages takes milliseconds: of many workers these many are looked at.
_SAMPLE = 8


def measure_sharing(workers: Collection[int], templates: Collection[int]) -> int:
    """Return the bytes that workers don't need since they are forks; 0 where the kernel doesn't tell.

    Files that are mapped, such as libraries, are shared by any processes and don't count.
    """
    sample = list(workers)[:_SAMPLE]
    seen = [memory for memory in map(_read_memory, sample) if memory is not None]
    if not seen:
        return 0
    saved = sum(anonymous - own for anonymous, own in seen) * len(workers) // len(seen)
    costs = sum(memory[1] for memory in map(_read_memory, templates) if memory is not None)
    return max(0, saved - costs)


def _read_memory(pid: int) -> tuple[int, int] | None:
    """Return a process's anonymous memory, and the share of it that is its own (PSS), in bytes."""
    try:
        fd = os.open(f"/proc/{pid}/smaps_rollup", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        lines = os.read(fd, 1 << 14).decode().splitlines()[1:]
    except OSError:
        return None  # it has ended
    finally:
        os.close(fd)
    sizes = {name: int(rest.split()[0]) * _KIB for name, _, rest in (line.partition(":") for line in lines)}
    return (sizes["Anonymous"], sizes["Pss_Anon"]) if {"Anonymous", "Pss_Anon"} <= sizes.keys() else None
