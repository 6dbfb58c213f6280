"""Tells the agent that another program has removed or renamed one of its files, or its directory: a cleaner, a user.

Nothing polls: the kernel reports the removal (inotify(7)), and an idle watch costs a descriptor. If the kernel refuses
this descriptor (a user may have 128 of them by default), the agent does not learn of a removal.
"""

from __future__ import annotations

import os
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.loop import Loop, Timer

__all__ = ["RemovalWatch"]

#: A change of the number of names is one of the attributes. The file itself lives on: this process has it open.
_ATTRIBUTES = 0x4
_MOVED = 0x800  # this file or directory, not one in it
#: Seconds until `on_removed` is called: a program that removes a directory must not find a new file in it.
_PAUSE = 0.2
_CHUNK = 4096


class RemovalWatch:
    """Calls back, once, when a path no longer leads to its file.

    Args:
        loop: The agent's loop.
        path: Path of a file that this process holds open.
        on_removed: Called in the loop, a moment after the removal.
    """

    def __init__(self, loop: Loop, path: str, on_removed: Callable[[], None]) -> None:
        self._loop = loop
        self._path = path
        self._on_removed = on_removed
        self._timer: Timer | None = None
        self._fd = _open_watch(path)
        if self._fd >= 0:
            loop.add_reader(self._fd, self._read)

    def close(self) -> None:
        """Forget the file; harmless when that was done."""
        if self._timer is not None:
            self._timer.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> None:
        with suppress(BlockingIOError):  # the event was one of a descriptor that had this number before
            os.read(self._fd, _CHUNK)
        if not os.path.lexists(self._path):
            self.close()
            self._timer = self._loop.call_later(_PAUSE, self._on_removed)


def _open_watch(path: str) -> int:
    """Return a descriptor that is readable when the file's attributes change, or it or its directory moves; or -1."""
    from elastic_run import libc

    try:
        fd = libc.call("inotify_init1", os.O_NONBLOCK | os.O_CLOEXEC)
        if fd >= 0 and libc.call("inotify_add_watch", fd, os.fsencode(path), _ATTRIBUTES | _MOVED) < 0:
            os.close(fd)
            return -1
        if fd >= 0:  # a directory that this user may not read can't be watched
            libc.call("inotify_add_watch", fd, os.fsencode(os.path.dirname(path) or os.curdir), _MOVED)
    except (ImportError, AttributeError, OSError):
        return -1  # a Python without ctypes, or a kernel without inotify
    return fd
