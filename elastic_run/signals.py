"""Signals by number and name, without the standard `signal` module on the way to the first worker.

That module wraps this C module's functions and numbers in enums, and its import takes a good part of the time in which
two workers are started. Everything here takes and gives plain numbers. Code that runs when the workers do may import
`signal` itself. `call_libc` is here for the same reason: ctypes takes 5 to 9 ms.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the interpreter's own module has no type stub
import os
import sys

from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    #: A function, a number for the default action or for none, None for code in C.
    Handler = Callable[[int, FrameType | None], object] | int | None

SIGHUP: int = _signal.SIGHUP
SIGINT: int = _signal.SIGINT
SIGQUIT: int = _signal.SIGQUIT
SIGKILL: int = _signal.SIGKILL
SIGUSR1: int = _signal.SIGUSR1
SIGUSR2: int = _signal.SIGUSR2
SIGSTOP: int = _signal.SIGSTOP
SIGTERM: int = _signal.SIGTERM
SIGCHLD: int = _signal.SIGCHLD
SIGWINCH: int = _signal.SIGWINCH


def _numbers(names: str) -> tuple[int, ...]:
    return tuple(getattr(_signal, name) for name in names.split() if hasattr(_signal, name))


#: Stop the launcher also where no flag names them: a limit, a timer or the machine's end.
ENDING: tuple[int, ...] = _numbers("SIGTERM SIGINT SIGHUP SIGQUIT SIGALRM SIGVTALRM SIGPROF SIGXCPU SIGPWR")
#: Say something to a program that handles them, and end any other one.
OFFERED: tuple[int, ...] = (
    *_numbers("SIGUSR1 SIGUSR2 SIGIO SIGSTKFLT"),
    *range(getattr(_signal, "SIGRTMIN", 0), getattr(_signal, "SIGRTMAX", -1) + 1),
)
#: Lets a worker write its stacks: a real-time signal of which no program is known that uses it. 0 where there is none.
STACK_SIGNAL: int = _signal.SIGRTMAX - 4 if hasattr(_signal, "SIGRTMAX") else 0
#: The same for its main thread alone, and, asked first, by a handler in Python; see `worker_start`.
MAIN_STACK_SIGNAL: int = STACK_SIGNAL - 1 if STACK_SIGNAL else 0
PYTHON_STACK_SIGNAL: int = STACK_SIGNAL - 2 if STACK_SIGNAL else 0
#: The same handler in Python, for a main thread that waits for a lock: the system call does not go on by itself.
LOCK_STACK_SIGNAL: int = STACK_SIGNAL - 3 if STACK_SIGNAL else 0
#: signalfd(2) with SFD_CLOEXEC and SFD_NONBLOCK, whose numbers are those of open(2).
_SIGNALFD_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK
#: signalfd_siginfo: so many bytes, which begin with number, errno, code, pid and uid in 32 bits each.
_SIGINFO_BYTES = 128
#: Size of a sigset_t of the C library: room for 1024 signals.
_SIGNAL_SET_BYTES = 128
_WORD = 4
_STDERR = 2

#: CPython ignores these at start; a program that we exec expects the default action.
IGNORED_BY_PYTHON: tuple[int, ...] = _numbers("SIGPIPE SIGXFSZ SIGXFZ")

#: Second names of signals, which `signal.Signals` doesn't use.
_ALIASES = frozenset(("SIGCLD", "SIGPOLL", "SIGIOT"))
#: Names by number, filled when the first name is asked for. Names that are no signal share the key None.
_names: dict[int | None, str] = {}


def signal_number(name: str) -> int | None:
    """Return the number of a signal given by name, such as `SIGTERM`, or None where there is no such signal."""
    is_name = name.startswith("SIG") and not name.startswith("SIG_")
    number = getattr(_signal, name, None) if is_name else None
    return number if isinstance(number, int) else None


def signal_name(number: int) -> str:
    """Return a signal's name as `signal.Signals` gives it, or its number where it has none."""
    if not _names:
        _names.update((signal_number(name), name) for name in dir(_signal) if name not in _ALIASES)
    return _names.get(number, str(number))


def block_signals(numbers: Iterable[int]) -> frozenset[int]:
    """Hold signals of this thread back, on top of those that are; returns those that were held back before."""
    return frozenset(_signal.pthread_sigmask(_signal.SIG_BLOCK, tuple(numbers)))


def restore_signals(numbers: Iterable[int]) -> None:
    """Block exactly the signals that `block_signals` returned; others that came meanwhile are delivered."""
    _signal.pthread_sigmask(_signal.SIG_SETMASK, tuple(numbers))


@dataclass(frozen=True, slots=True)
class SignalInfo:
    """A signal that came, as the kernel tells of it: a `code` of 0 and below is of a process, one above of the kernel.

    The `pid` is 0 where the kernel has sent it, or a process that can't be seen from here.
    """

    number: int
    code: int
    pid: int
    uid: int


def signal_pidfd(pidfd: int, number: int) -> None:
    """Send a signal to the process that a pidfd stands for."""
    _signal.pidfd_send_signal(pidfd, number)


def open_signal_descriptor(numbers: Iterable[int]) -> int:
    """Open a descriptor from which blocked signals are read without waiting; -1 where the system has none."""
    # A sigset_t: words of the size of a C long, with a bit for each signal from 1 on.
    bits = sum(1 << number - 1 for number in numbers)
    size = sys.maxsize.bit_length() // 8 + 1
    words = (bits >> 8 * start & 2 * sys.maxsize + 1 for start in range(0, _SIGNAL_SET_BYTES, size))
    mask = b"".join(word.to_bytes(size, sys.byteorder) for word in words)
    try:
        return call_libc("signalfd", -1, mask, _SIGNALFD_FLAGS)
    except (ImportError, OSError, AttributeError):
        return -1


def call_libc(name: str, *arguments: int | bytes) -> int:
    """Call a function of the C library that takes C ints and pointers to bytes to read, and returns a C int.

    It raises an ImportError if this Python was built without ctypes, an AttributeError or OSError without the function.
    """
    import _ctypes

    function = _ctypes.dlsym(_ctypes.dlopen(None, 0), name)  # type: ignore[arg-type]  # None as in CDLL(None)
    return int(_ctypes.call_function(function, arguments))


def read_signals(descriptor: int) -> list[SignalInfo]:
    """Return the signals that have come since at an `open_signal_descriptor`, without waiting."""
    found = []
    try:
        while record := os.read(descriptor, _SIGINFO_BYTES):
            words = [record[start : start + _WORD] for start in range(0, 5 * _WORD, _WORD)]
            number, _, code, pid, uid = (int.from_bytes(word, sys.byteorder) for word in words)
            # The code is signed: SI_TKILL is -6.
            found.append(SignalInfo(number, code=code - (code >> 31 << 32), pid=pid, uid=uid))
    except BlockingIOError:
        pass
    return found


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
    """Let something answer a signal, and return what answered it until now; ValueError outside the main thread.

    Code in C, which can't be named, becomes the default action.
    """
    previous: Handler = _signal.signal(number, _signal.SIG_DFL if handler is None else handler)
    return previous


def set_wakeup_fd(fd: int) -> int:
    """Write a byte to a non-blocking descriptor at each signal; -1 is none; returns the descriptor until now."""
    previous: int = _signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
    return previous


def is_answered(number: int) -> bool:
    """Whether a signal is ignored, or a Python function handles it."""
    handler = _signal.getsignal(number)
    return handler == _signal.SIG_IGN or callable(handler)


def is_unanswered(number: int) -> bool:
    """Whether a signal does what it does in every Python program: nobody has ignored it or installed a handler."""
    return _signal.getsignal(number) in (_signal.SIG_DFL, _signal.default_int_handler)


def end_process(number: int, _: object) -> None:
    """Answer a stop signal before the loop does: end as the signal would have it, but not without a word.

    The guardian ends the processes that run by now (`--preload`).
    """
    default_signal(number)  # so that a second one ends also a launcher whose stderr nobody reads
    try:
        os.write(_STDERR, f"elastic-run: stopped by {signal_name(number)}\n".encode())
    except OSError:
        pass  # stderr is closed
    os.kill(os.getpid(), number)
    # It still lives as PID 1 of a container, or where the signal has come right before it is held back.
    os._exit(128 + number)


def has_usual_handler(number: int) -> bool:
    """Whether the handler of a signal is the one of every Python program, or of the launcher at its start."""
    return _signal.getsignal(number) in (_signal.default_int_handler, end_process)


# --- the children for which SIGCHLD has come ----------------------------------------------------------------------


def list_ended_children() -> Iterator[int]:
    """Yield the children of this process that have ended; other threads may collect some meanwhile."""
    last = None
    while (pid := _find_ended(os.P_ALL, 0)) not in (None, last):
        yield pid
        last = pid
    if pid is None:
        return
    # The kernel shows the one that was not collected again and again, so the others are looked for one by one.
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/children", encoding="ascii") as children:
                found = [int(child) for child in children.read().split()]
        except OSError:
            continue  # the thread has ended
        for child in found:
            if child != last and _find_ended(os.P_PID, child) is not None:
                yield child


def _find_ended(kind: int, pid: int) -> int | None:
    """Return a child that has ended and is not collected yet, or None."""
    try:
        found = os.waitid(kind, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if found is None else found.si_pid
