"""What can go wrong in a rendezvous: torch's tree of errors.

The class says whose fault it is: the job's end (closed), time, the connection, or the state in the store. They live in
a file of their own because everything else here raises them.
"""

from __future__ import annotations


class RendezvousError(Exception):
    """The root of everything that a rendezvous raises."""


class RendezvousClosedError(RendezvousError):
    """The rendezvous is closed: the job is over, nobody can join any more."""


class RendezvousTimeoutError(RendezvousError):
    """The nodes did not come together in time."""


class RendezvousConnectionError(RendezvousError):
    """The backend can't be reached, or the connection to it was lost."""


class RendezvousStateError(RendezvousError):
    """The values in the backend's store make no sense."""


class BackendNameError(ValueError, RuntimeError):
    """A handler belongs to another backend than the one that was asked for (torch: RuntimeError)."""


class RendezvousGracefulExitError(RendezvousError):
    """This node is not needed and leaves; that is not a failure."""


def is_kind(error: BaseException, kind: type[RendezvousError]) -> bool:
    """Tell whether an exception is of one of these classes, or of torch's class of that name.

    A foreign handler raises torch's errors, which have nothing in common with ours but the name.

    Args:
        error: What a handler raised.
        kind: A class of this module.

    Returns:
        Whether `except kind` would have caught it, if torch's classes were ours.
    """
    return any(base.__name__ == kind.__name__ for base in type(error).__mro__)
