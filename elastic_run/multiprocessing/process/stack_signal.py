"""How a worker writes its stacks: on a signal, to a pipe of the agent's, by Python's faulthandler.

Rules
- faulthandler's handler is C: it needs no lock of the interpreter, so it also answers while a C function holds that
  lock, and it changes nothing that the program can see but the system call that it interrupts, which goes on. But it
  reads frames without a lock. Those of a thread that runs Python may be gone in that moment, and the process would end
  by SIGSEGV (one dump of 20 to 1,000 with Python 3.11 to 3.13, if C code calls Python functions there).
- So there are four signals. The first has a handler in Python, which is always safe: it runs between two instructions
  of the main thread, and meanwhile no other thread runs Python. Only if the main thread is in C code, and does not come
  to it, the agent sends another one: for all threads, or, if any of the others runs, for the main thread alone, which
  runs the handler.
- A main thread that waits for a lock, such as in `Thread.join`, does not come to the handler in Python: the kernel lets
  the system call go on. If another thread runs, it gets the handler by a fourth signal, which interrupts the call.
  That is not the first one, for C code may not expect it: only a wait for a lock is interrupted.
- While the handler in Python runs, the program's handlers may run as well. Their exceptions, such as a timeout by
  SIGALRM, are passed on. The handler writes only if its descriptor is still the pipe.
- When Python ends, faulthandler restores the handlers that it has replaced, and Python sets its own handlers to the
  default, which kills the process. So the worker ignores the signals before it registers, and again at its end:
  otherwise a signal in that moment would kill a worker that has ended well.
- A process that is executed registers it in the line of our .pth file, which repeats `register_by_environment` without
  an import of ours. A fork does it here.
- Only the worker itself registers: it leads its session, and has the pipe of which its environment tells. A fork of the
  worker has the handler as well, but the agent signals nobody but workers. What the worker executes has neither handler
  nor pipe.
- The descriptor's number is high: no program that opens some files, or closes the first few hundred, comes near it.
"""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.records import dataclass
from elastic_run.signals import LOCK_STACK_SIGNAL, MAIN_STACK_SIGNAL, PYTHON_STACK_SIGNAL, STACK_SIGNAL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping
    from types import FrameType

#: The pipe's number in a worker is this one or higher, where the limit of descriptors allows it.
LOWEST_DESCRIPTOR = 900
#: Threads, and frames of each, that a worker writes; as faulthandler.
_MOST = 100
#: What the handler's own calls raise.
_OWN_ERRORS = (OSError, MemoryError, RecursionError)


@dataclass(frozen=True, slots=True)
class StackPipe:
    """The agent's end of the pipe for one worker's stacks.

    Args:
        reading: The reading end, which does not block.
        number: The descriptor that the worker has.
    """

    reading: int
    number: int


def is_possible() -> bool:
    """Whether this system has such a signal, and the user wants it."""
    return STACK_SIGNAL > 0 and os.environ.get(contract.ENV_STACKS) != "0"


def variables(fd: int) -> dict[str, str]:
    """Return the variables for a worker that gets a descriptor; none for -1."""
    return {} if fd < 0 else {contract.ENV_STACK_PIPE: f"{fd}:{os.fstat(fd).st_ino}:{STACK_SIGNAL}"}


def place_descriptor(received: int, env: Mapping[bytes, bytes]) -> None:
    """Give a descriptor that came in a message the number of which the environment tells."""
    move(received, int(env[contract.ENV_STACK_PIPE.encode()].partition(b":")[0]))


def move(received: int, number: int) -> bool:
    """Give a descriptor that came in a message a number, unless another file has it; return whether it has it now."""
    try:
        os.fstat(number)
    except OSError:
        os.dup2(received, number)
        is_free = True
    else:
        is_free = False
    os.close(received)
    return is_free


def register_by_environment(env: MutableMapping[bytes, bytes]) -> bool:
    """Let this process write its stacks from now on, and remove the variable that says how; return whether it does."""
    value = env.pop(contract.ENV_STACK_PIPE.encode(), b"")
    if not value:
        return False
    fd, inode, _ = map(int, value.split(b":"))
    is_ours = os.fstat(fd).st_ino == inode
    if is_ours:
        register(fd)
    return is_ours


def register(fd: int) -> None:
    """Let this process write its stacks to a descriptor from now on."""
    import _signal  # type: ignore[import-not-found]  # noqa: PLC0415 - see `signals`; C modules, for workers only
    import atexit  # noqa: PLC0415
    import faulthandler  # noqa: PLC0415

    os.set_inheritable(fd, False)  # noqa: FBT003 - the function's own signature
    for number in (STACK_SIGNAL, MAIN_STACK_SIGNAL):
        _signal.signal(number, _signal.SIG_IGN)
        faulthandler.register(number, fd, all_threads=number == STACK_SIGNAL)
    handler = _make_handler(fd)
    for number in (PYTHON_STACK_SIGNAL, LOCK_STACK_SIGNAL):
        _signal.signal(number, handler)
        atexit.register(_signal.signal, number, _signal.SIG_IGN)
    _signal.siginterrupt(PYTHON_STACK_SIGNAL, False)  # noqa: FBT003 - the function's own signature


def _make_handler(fd: int) -> Callable[[int, FrameType | None], None]:
    """Return a handler that writes what faulthandler would, between two marks."""
    import _thread  # noqa: PLC0415 - C modules, for workers only
    import sys  # noqa: PLC0415

    main, pipe = _thread.get_ident(), os.fstat(fd)[1:3]  # inode and device

    def write_stacks(_: int, interrupted: FrameType | None) -> None:
        frames: dict[int, FrameType | None] = {}
        try:
            if os.fstat(fd)[1:3] != pipe:
                return
            text = "\x02"
            frames.update(sys._current_frames())  # noqa: SLF001 - public by its documentation
            frames.pop(main, None)  # this function's frame: it would keep itself, and with it the program's frames
            frames[main] = interrupted
            for ident, top in list(frames.items())[-_MOST:]:
                frame, count = top, 0
                text += f"Thread 0x{ident:016x} (most recent call first):\n"
                while frame is not None and count < _MOST:
                    code, count = frame.f_code, count + 1
                    text += f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}\n'
                    frame = frame.f_back
            data = f"{text}\x03".encode("ascii", "backslashreplace")
            while data:
                data = data[os.write(fd, data) :]
        except Exception as error:
            is_foreign = error.__traceback__.tb_next or not isinstance(error, _OWN_ERRORS)  # type: ignore[union-attr]
            if frames and is_foreign:
                raise

    write_stacks.__code__ = write_stacks.__code__.replace(co_filename=contract.STACK_HANDLER_FILE)
    return write_stacks
