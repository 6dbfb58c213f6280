"""Inherited descriptors: the standard ones, which may be closed, and descriptors that a child would inherit in turn.

Also files without a name, which exist as a descriptor only.
"""

from __future__ import annotations

import os


def ensure_standard_descriptors() -> None:
    """Open /dev/null as descriptors 0, 1 and 2 where these are closed.

    Otherwise the next file that is opened gets that number, and the workers write into it.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(opened, True)


def inheritable_descriptors() -> list[int]:
    """Return this process's descriptors above 2 that a child would inherit."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return []
    found = []
    for name in names:
        fd = int(name)
        try:
            if fd > 2 and os.get_inheritable(fd):  # noqa: PLR2004 - above the standard ones
                found.append(fd)
        except OSError:
            pass  # the descriptor of the listing itself, closed by now
    return found


def allowed_descriptors() -> int:
    """Return this process's soft limit of descriptors, which takes no import; their numbers are below it."""
    return os.sysconf("SC_OPEN_MAX")


def open_unnamed() -> int:
    """Open a file that has no name; it is gone when its last descriptor is, which is closed on exec."""
    try:
        return os.memfd_create("elastic-run")
    except (AttributeError, OSError):
        # Not in a Python that was built for an old C library, as conda's.
        import tempfile

        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
