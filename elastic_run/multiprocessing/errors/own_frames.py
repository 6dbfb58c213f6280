"""Where a user's traceback begins: how we called the user's code is of no use to its author."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def skip_own_frames(error: BaseException) -> TracebackType | None:
    """Return an exception's traceback without the frames at its beginning that are ours."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        trace = trace.tb_next
    return error.__traceback__ if trace is None else trace
