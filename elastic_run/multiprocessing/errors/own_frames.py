"""Whose frames a traceback has: how we called the user's code is of no use to its author, and ours is no plug-in's."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_ROOT = os.path.dirname(_PACKAGE.rstrip(os.sep)) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_INSTALLED = ("site-packages" + os.sep, "dist-packages" + os.sep)
#: Packages that our own code calls.
_DEPENDENCIES = ("etcd", "prometheus_client", "psutil", "urllib3")


def skip_own_frames(error: BaseException) -> TracebackType | None:
    """Return an exception's traceback without the frames at its beginning that are ours."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        trace = trace.tb_next
    return error.__traceback__ if trace is None else trace


def find_foreign_place(error: BaseException) -> str:
    """Find where code that is not ours, such as a plug-in's, raised an exception.

    The standard library and our dependencies count to the code that called them.

    Args:
        error: The exception, as it was caught.

    Returns:
        ``FILE:LINE``, or "" where our own code raised it.
    """
    place, trace = "", error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if path.startswith(_ROOT):
            place = ""
        elif not _is_neutral(path):
            place = f"{path}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _is_neutral(path: str) -> bool:
    if path.startswith("<"):  # code that was made from a text, such as a constructor
        return True
    for directory in _INSTALLED:
        _, found, below = path.rpartition(os.sep + directory)
        if found:
            return below.partition(os.sep)[0] in _DEPENDENCIES
    return path.startswith(_STANDARD_LIBRARY)
