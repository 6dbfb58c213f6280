"""The state of a process as the kernel shows it: torch's names."""

from __future__ import annotations

__all__ = ["is_uninterruptible_state", "read_proc_state"]


def read_proc_state(pid: int) -> str | None:
    """Return a process's state.

    Args:
        pid: The process.

    Returns:
        One letter, `S` for a process that sleeps, or None where there is no such process or no /proc.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may hold spaces and parentheses itself.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode() if fields else None


def is_uninterruptible_state(state: str | None) -> bool:
    """Return whether a state is uninterruptible sleep: waiting for a driver or a file system.

    Args:
        state: What `read_proc_state` returned.
    """
    return state is not None and state.startswith("D")
