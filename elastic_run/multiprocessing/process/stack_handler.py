"""The handlers in a worker that write its stacks to the agent's pipe, on four signals.

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
  the system call go on. If another thread runs, the agent sends a fourth signal, which interrupts the system call and
  has the same handler. The first signal interrupts no system call, since C code may not expect that.
- While the handler in Python runs, the program's handlers may run as well. Their exceptions, such as a timeout by
  SIGALRM, are passed on. The handler writes only if its descriptor is still the pipe.
- When Python ends, faulthandler restores the handlers that it has replaced, and Python sets its own handlers to the
  default, which kills the process. So the worker ignores the signals before it registers, and again at its end:
  otherwise a signal in that moment would kill a worker that has ended well.
- A process that is executed registers them by a line of our .pth file, before its program begins. A fork does it when
  it becomes a worker.
- Only the worker itself registers: it leads its session, and has the pipe of which its environment tells. A fork of the
  worker has the handlers as well, but the agent signals nobody but workers. What the worker executes has neither
  handlers nor pipe.
- Each worker imports this module, its packages and `process_title` at its start: they import nothing else but C
  modules. A text of the same code in the .pth file would be compiled at each start, which takes longer.
"""

from __future__ import annotations

import os

from elastic_run import contract

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

#: Threads, and frames of each, that a worker writes; as faulthandler.
_MOST = 100
#: What the handler's own calls raise.
_OWN_ERRORS = (OSError, MemoryError, RecursionError)


def begin(value: str) -> None:
    """Register the handlers in a process that was executed as a worker, and show its rank; called by the .pth file.

    Args:
        value: Of `contract.ENV_STACK_PIPE`.
    """
    if os.getsid(0) == os.getpid() and register_for_pipe(value) and os.environ.get(contract.ENV_TITLE) != "0":
        from elastic_run.multiprocessing.process.process_title import ProcessTitle  # noqa: PLC0415 - only here

        ProcessTitle().show_rank(int(os.environ["RANK"]))


def register_for_pipe(value: str) -> bool:
    """Let this process write its stacks from now on, if it has the pipe; return whether it does.

    Args:
        value: Of `contract.ENV_STACK_PIPE`: descriptor, inode and signal.
    """
    fd, inode, number = map(int, value.split(":"))
    is_ours = os.fstat(fd).st_ino == inode
    if is_ours:
        register(fd, number)
    return is_ours


def register(fd: int, number: int) -> None:
    """Let this process write its stacks to a descriptor from now on.

    Args:
        fd: The writing end of the pipe.
        number: The signal for all threads by faulthandler. The three below it are: for the main thread by faulthandler,
            for the handler in Python, and the same where the main thread waits for a lock; see `signals`.
    """
    import _signal  # type: ignore[import-not-found]  # noqa: PLC0415 - see `signals`; C modules, for workers only
    import atexit  # noqa: PLC0415
    import faulthandler  # noqa: PLC0415

    os.set_inheritable(fd, False)  # noqa: FBT003 - the function's own signature
    for each in (number, number - 1):
        _signal.signal(each, _signal.SIG_IGN)
        faulthandler.register(each, fd, all_threads=each == number)
    handler = _make_handler(fd)
    for each in (number - 2, number - 3):
        _signal.signal(each, handler)
        atexit.register(_signal.signal, each, _signal.SIG_IGN)
    _signal.siginterrupt(number - 2, False)  # noqa: FBT003 - the function's own signature


def _make_handler(fd: int) -> Callable[[int, FrameType | None], None]:
    """Return a handler that writes the stacks of all threads in faulthandler's format, between two marks."""
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
            frames.pop(main, None)  # the handler's own frame would keep the program's frames alive
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
