"""What can go wrong between a store and its clients."""

from __future__ import annotations


class StoreError(Exception):
    """Something went wrong between a store and its client."""


class StoreConnectionError(StoreError, ConnectionError):
    """The store can't be reached, or closed the connection."""


class StoreTimeoutError(StoreError, TimeoutError):
    """The store did not answer, or the keys did not appear, in time."""


class QueueEmptyError(StoreError):
    """There is nothing in the queue."""


class WireError(StoreError):
    """The peer sent what the protocol doesn't allow."""


class UnknownOperationError(WireError):
    """A client that speaks the protocol asked for an operation that this server doesn't know.

    Args:
        operation: The byte that names it.
    """

    def __init__(self, operation: int) -> None:
        super().__init__(f"operation {operation} is unknown to this store")
        self.operation = operation
