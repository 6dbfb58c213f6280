"""Orphans of this process's descendants come to it: a process that left session, environment and parent stays known.

A subreaper stands for PID 1 to all that descends from it. The command is one from the moment its first workers boot;
inside somebody's program nothing is changed, since being one is the whole process's and means to collect strangers.
"""

from __future__ import annotations

_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> bool:
    """Make this process a subreaper.

    Returns:
        Whether it is one now.
    """
    try:
        # Not ctypes, which takes 9 ms to import; this is the part of it that calls.
        import _ctypes  # noqa: PLC0415 - not before the first worker

        prctl = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]  # as CDLL(None) does
        return bool(_ctypes.call_function(prctl, (_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) == 0)
    except (ImportError, AttributeError, OSError):
        return False  # another system, or a Python without it
