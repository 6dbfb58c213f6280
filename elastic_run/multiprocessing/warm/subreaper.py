"""Who becomes the parent of a process whose own parent has ended: this one, for a moment, or whoever it was before.

A subreaper keeps that place for all of its descendants, and has to collect strangers from then on. So it is one only
while a template's midwife ends, which takes less than a millisecond.
"""

from __future__ import annotations

import os

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


class Subreaper:
    """Makes this process a subreaper, and what it was again.

    Raises:
        OSError: Not on this system.
    """

    def __init__(self) -> None:
        try:
            import ctypes  # noqa: PLC0415 - 5 ms that only warm workers need
        except ImportError as error:
            message = "this Python has no ctypes"
            raise OSError(message) from error
        self._ctypes = ctypes
        self._library = ctypes.CDLL(None, use_errno=True)
        was = ctypes.c_int()
        self._call(_PR_GET_CHILD_SUBREAPER, ctypes.byref(was))
        self._was = was.value
        self._holders: set[int] = set()

    def begin(self, holder: int) -> None:
        """Take the children of descendants that end.

        Args:
            holder: The template for whose midwife that is.
        """
        self._holders.add(holder)
        self._call(_PR_SET_CHILD_SUBREAPER, 1)

    def end(self, holder: int) -> None:
        """Leave them to whoever took them before, unless another template's midwife is about to end."""
        if holder in self._holders:
            self._holders.discard(holder)
            self._call(_PR_SET_CHILD_SUBREAPER, 1 if self._holders else self._was)

    def _call(self, option: int, argument: object) -> None:
        ctypes = self._ctypes
        value = ctypes.c_ulong(argument) if isinstance(argument, int) else argument
        if self._library.prctl(option, value, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
