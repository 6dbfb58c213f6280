"""Torch's names for processes that are launched together.

Source: torch 2.13, torch.distributed.elastic.multiprocessing.api.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from typing import Any

__all__ = ["SignalException", "get_std_cm"]


class SignalException(Exception):  # noqa: N818 - torch's name
    """The launcher was stopped by a signal.

    Args:
        msg: What happened.
        sigval: The signal.
    """

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval


def get_std_cm(std_rd: str, redirect_fn: Callable[[str], AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """Return a context in which a stream goes to a file.

    Args:
        std_rd: Path of the file; empty for none.
        redirect_fn: Makes the context from the path.

    Returns:
        The context, or one that does nothing where there is no file.
    """
    from contextlib import nullcontext

    return redirect_fn(std_rd) if std_rd else nullcontext()
