"""Signals by number and name, without the standard `signal` module on the way to the first worker.

That module wraps this C module's functions and numbers in enums, and its import takes a good part of the time in which
two workers are started. Everything here takes and gives plain numbers. Code that runs when the workers do may import
`signal` itself.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the interpreter's own module has no type stub

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import FrameType

    #: A function, a number for the default action or for none, None for code in C.
    Handler = Callable[[int, FrameType | None], object] | int | None

SIGHUP: int = _signal.SIGHUP
SIGINT: int = _signal.SIGINT
SIGQUIT: int = _signal.SIGQUIT
SIGKILL: int = _signal.SIGKILL
SIGUSR1: int = _signal.SIGUSR1
SIGUSR2: int = _signal.SIGUSR2
SIGTERM: int = _signal.SIGTERM
SIGCHLD: int = _signal.SIGCHLD

#: CPython ignores these at start; a program that we exec expects the default action.
IGNORED_BY_PYTHON: tuple[int, ...] = tuple(
    getattr(_signal, name) for name in ("SIGPIPE", "SIGXFSZ", "SIGXFZ") if hasattr(_signal, name)
)

#: Second names of signals, which `signal.Signals` doesn't use.
_ALIASES = frozenset(("SIGCLD", "SIGPOLL", "SIGIOT"))


def signal_number(name: str) -> int | None:
    """Return the number of a signal given by name, or None where there is no such signal.

    Args:
        name: Such as `SIGTERM`.
    """
    is_name = name.startswith("SIG") and not name.startswith("SIG_")
    number = getattr(_signal, name, None) if is_name else None
    return number if isinstance(number, int) else None


def signal_name(number: int) -> str:
    """Return a signal's name as `signal.Signals` gives it, or its number where it has none.

    Args:
        number: The signal.
    """
    names = [name for name in dir(_signal) if signal_number(name) == number]
    return next((name for name in names if name not in _ALIASES), str(number))


def block_signals(numbers: Iterable[int]) -> frozenset[int]:
    """Hold signals of this thread back.

    Args:
        numbers: The signals, on top of those that are held back already; none to change nothing.

    Returns:
        Those that were held back before.
    """
    return frozenset(_signal.pthread_sigmask(_signal.SIG_BLOCK, tuple(numbers)))


def restore_signals(numbers: Iterable[int]) -> None:
    """Hold exactly these signals of this thread back; others that came meanwhile are delivered.

    Args:
        numbers: What `block_signals` returned.
    """
    _signal.pthread_sigmask(_signal.SIG_SETMASK, tuple(numbers))


def ignore_signal(number: int) -> None:
    """Ignore a signal from now on."""
    _signal.signal(number, _signal.SIG_IGN)


def default_signal(number: int) -> None:
    """Give a signal its default action."""
    _signal.signal(number, _signal.SIG_DFL)


def is_ignored(number: int) -> bool:
    """Whether a signal is ignored."""
    return _signal.getsignal(number) == _signal.SIG_IGN  # type: ignore[no-any-return]  # two plain numbers


def install_handler(number: int, handler: Handler) -> Handler:
    """Let something answer a signal.

    Args:
        number: The signal.
        handler: Code in C, which can't be named, becomes the default action.

    Returns:
        What answered it until now.

    Raises:
        ValueError: Outside the main thread.
    """
    previous: Handler = _signal.signal(number, _signal.SIG_DFL if handler is None else handler)
    return previous


def set_wakeup_fd(fd: int) -> int:
    """Write a byte to a descriptor whenever a signal comes, unless it can't take more.

    Args:
        fd: A non-blocking descriptor, or -1 for none.

    Returns:
        The one until now, or -1.

    Raises:
        ValueError: Outside the main thread.
    """
    previous: int = _signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
    return previous


def is_answered(number: int) -> bool:
    """Whether a signal is ignored, or a Python function handles it."""
    handler = _signal.getsignal(number)
    return handler == _signal.SIG_IGN or callable(handler)


def is_unanswered(number: int) -> bool:
    """Whether a signal does what it does in every Python program: nobody has ignored it or installed a handler."""
    return _signal.getsignal(number) in (_signal.SIG_DFL, _signal.default_int_handler)
