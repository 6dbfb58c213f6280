"""Makes this process a subreaper: orphaned descendants of its workers become its children and stay known.

A subreaper replaces PID 1 for all its descendants, and has to collect foreign children from then on. The command
becomes a subreaper when its first workers boot, unless it is PID 1 or began with children: orphans of other programs
would come to it too. Inside another program the setting, which holds for the whole process, is changed only for the
moment in which a template's fork helper ends (`--preload`), less than a millisecond: so the agent becomes the parent of
its warm workers. A program may run an agent in each of several threads, so the holders are counted: the first of them
sets it, and the last of them restores it.
"""

from __future__ import annotations

import _thread
import os

from elastic_run.signals import call_libc

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


def become_subreaper() -> bool:
    """Make this process a subreaper."""
    try:
        return call_libc("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    except (ImportError, AttributeError, OSError):
        return False  # another system, or a Python without it


class _Holders:
    """The templates of all agents whose fork helpers are about to end, and the setting of this process without them."""

    __slots__ = ("before", "lock", "templates")

    def __init__(self) -> None:
        self.lock = _thread.allocate_lock()
        self.templates: set[int] = set()
        self.before = 0


#: A module's global, since it describes the whole process.
_HOLDERS = _Holders()


class Subreaper:
    """Makes this process a subreaper for a moment.

    Raises:
        OSError: This system or Python can't.
    """

    def __init__(self) -> None:
        try:
            import ctypes
        except ImportError as error:
            message = "this Python has no ctypes"
            raise OSError(message) from error
        self._ctypes = ctypes
        self._library = ctypes.CDLL(None, use_errno=True)
        self._read()  # it fails here, or never

    def begin(self, holder: int) -> None:
        """Take the children of descendants that end."""
        with _HOLDERS.lock:
            if not _HOLDERS.templates:
                _HOLDERS.before = self._read()
            _HOLDERS.templates.add(holder)
            self._call(_PR_SET_CHILD_SUBREAPER, 1)

    def end(self, holder: int) -> None:
        """Restore the setting, unless another template's fork helper is about to end."""
        with _HOLDERS.lock:
            if _HOLDERS.templates == {holder}:
                self._call(_PR_SET_CHILD_SUBREAPER, _HOLDERS.before)
            _HOLDERS.templates.discard(holder)

    def _read(self) -> int:
        value = self._ctypes.c_int()
        self._call(_PR_GET_CHILD_SUBREAPER, self._ctypes.byref(value))
        return value.value

    def _call(self, option: int, argument: object) -> None:
        ctypes = self._ctypes
        value = ctypes.c_ulong(argument) if isinstance(argument, int) else argument
        if self._library.prctl(option, value, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
