"""Requests to stop a job that may come from any thread, and before there is a receiver.

Each request reaches the receiver once, whichever thread passes it on: a second SIGINT means that the workers are killed
at once. A list does without a lock, which a signal handler of the program might find taken by its own thread.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class StopRequests:
    """The signals that ask to stop a job."""

    __slots__ = ("_receiver", "_waiting")

    def __init__(self) -> None:
        self._waiting: list[int] = []
        self._receiver: Callable[[int], None] | None = None

    def put(self, number: int) -> None:
        """Request a stop as if this signal had come."""
        self._waiting.append(number)
        self._pass_on()

    def connect(self, receiver: Callable[[int], None] | None) -> None:
        """Pass all requests to a receiver from now on, waiting ones too; with None they wait again."""
        self._receiver = receiver
        self._pass_on()

    def _pass_on(self) -> None:
        receiver = self._receiver
        while receiver is not None:
            try:
                number = self._waiting.pop(0)
            except IndexError:
                return
            receiver(number)
