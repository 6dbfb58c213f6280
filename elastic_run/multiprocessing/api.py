"""Torch's names for processes that are launched together.

Source: torch 2.13, torch.distributed.elastic.multiprocessing.api.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal

__all__ = ["SignalException"]


class SignalException(Exception):  # noqa: N818 - torch's name
    """The launcher was stopped by a signal.

    Args:
        msg: What happened.
        sigval: The signal.
    """

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval
