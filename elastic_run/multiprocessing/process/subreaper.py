"""Makes this process a subreaper, so that orphaned descendants of its workers become its children and stay known.

A subreaper replaces PID 1 for all its descendants. The command becomes a subreaper when its first workers boot, unless
it is PID 1 or began with children: orphans of other programs would come to it too. Inside another program nothing
changes: the setting holds for the whole process, which would have to collect foreign children.
"""

from __future__ import annotations

from elastic_run import libc

_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> bool:
    """Make this process a subreaper."""
    try:
        return libc.call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    except (ImportError, AttributeError, OSError):
        return False  # another system, or a Python without it
