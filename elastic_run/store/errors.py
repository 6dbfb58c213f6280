"""What can go wrong between a store and its clients."""

from __future__ import annotations

#: Why a store was not reached, as `StoreConnectionError.reason` says it; short forms for users where room is scarce.
REFUSED = "nobody listens"  # the host refuses the connection
UNRESOLVED = "unknown name"  # the name has no address, or no name server answers
SILENT = "no answer"  # nothing comes back: the host is dark, or the server hangs
CLOSED = "connection closed"  # the connection was there and broke, or we closed it
UNREACHABLE = "no route"  # the network knows no way to the host
FOREIGN = "not a store"  # what answers there speaks another protocol
UNREADY = "not ready"  # the store answers that it can't serve now: it elects a leader, or is too busy
FULL = "no room"  # the server has no descriptor left for one more connection


class StoreError(Exception):
    """Something went wrong between a store and its client."""


class StoreConnectionError(StoreError, ConnectionError):
    """The store can't be reached, or closed the connection.

    Args:
        message: What happened, to which store.
        reason: One of the words above.
        cause: The same for users, with the address where it happened; `message` if not given.
        answer: If several attempts failed: why the store could not serve, as it said in one of them last; or "".
    """

    def __init__(self, message: str, reason: str = CLOSED, *, cause: str = "", answer: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.cause = cause or message
        self.answer = answer


class StoreTimeoutError(StoreError, TimeoutError):
    """The store did not answer, or the keys did not appear, in time."""


class StoreAccessError(StoreError):
    """The store refuses us, and would refuse us again: user, password, certificate, or a right that is missing."""


class StoreTokenError(StoreAccessError):
    """One of the two sides has a token and the other has another one or none; or their protocols differ."""


class QueueEmptyError(StoreError):
    """There is nothing in the queue."""


class WireError(StoreError):
    """The peer sent what the protocol doesn't allow."""


class LimitError(WireError):
    """The peer asks for more than we give.

    Args:
        message: How much it was, and the bound.
        kind: Which bound was met, one word for each.
    """

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class ServerDefectError(WireError):
    """The server failed while it served a client: memory ran out, or its code is wrong. That client is closed."""


class UnknownOperationError(WireError):
    """A client that speaks the protocol asked for an operation that this server doesn't know.

    Args:
        operation: The byte that names it.
    """

    def __init__(self, operation: int) -> None:
        super().__init__(f"operation {operation} is unknown to this store")
        self.operation = operation


def make_full_error(limit: int) -> StoreConnectionError:
    """Return the error of a client for which the server has no descriptor left.

    Args:
        limit: Number of files that the server's process may open.
    """
    message = f"takes no more connections: its process may open {limit} files, so raise ulimit -n on that node"
    return StoreConnectionError(message, FULL)
