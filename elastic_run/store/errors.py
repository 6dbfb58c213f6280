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

#: Kinds of `WireError` beside the bounds, which have a word each.
GARBAGE = "garbage"  # what came is no message
UNKNOWN = "unknown operation"  # a newer torch asks for what this server does not know
DEFECT = "defect"  # serving the client failed: memory ran out, or the code is wrong


class StoreError(Exception):
    """Something went wrong between a store and its client."""


class StoreConnectionError(StoreError, ConnectionError):
    """The store can't be reached, or closed the connection; `reason` is one of the words above.

    `cause` is the message for users, with the address where it happened.
    """

    def __init__(self, message: str, reason: str = CLOSED, *, cause: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.cause = cause or message


class StoreTimeoutError(StoreError, TimeoutError):
    """The store did not answer, or the keys did not appear, in time."""


class StoreAccessError(StoreError):
    """The store refuses us, and would refuse us again: a certificate, or a right that is missing."""


class StoreTokenError(StoreAccessError):
    """One of the two sides has a token and the other has another one or none; or their protocols differ."""


class WireError(StoreError):
    """A client's connection has to end: what it sent is not allowed, passes a bound, or could not be served.

    `kind` is one of the words above, or the bound that was passed.
    """

    def __init__(self, message: str, kind: str = GARBAGE) -> None:
        super().__init__(message)
        self.kind = kind
