"""What a Python worker does before its program: it lets the agent ask for its stacks and hear of its exception.

A line of our .pth file calls `begin` before the program begins; a fork does it when it becomes a worker. Each worker
imports this module and the package at its start, and both import no other file, since each file delays every worker.
So this module has no `from __future__`, and repeats names of `contract`; a test compares them. No error in here may
keep the program from its start. What the worker executes has neither handlers nor pipe.

- faulthandler's handler is C: it answers while a C function holds the interpreter's lock, and changes nothing but the
  system call that it interrupts. But it reads frames without a lock: a thread that runs Python may end the process by
  SIGSEGV (one dump of 20 to 1,000 with Python 3.11 to 3.13, if C code calls Python functions there).
- So there are four signals. The first has a handler in Python, which is always safe. Only if the main thread is in C
  code, and does not come to it, the agent sends another one: faulthandler's for all threads, or, if any of the others
  runs, for the main thread alone. The first interrupts no system call, since C code may not expect that; a main thread
  that waits for a lock, as in `Thread.join`, gets the fourth, which does and has the same handler.
- Only the worker knows that an exception has ended its main thread; a traceback on stderr may be of an exception that
  the program has handled. So `sys.excepthook` and `sys.__excepthook__` tell the agent first. A program may call them
  itself, or a fork or another thread: then the outermost call is the program, the process another one, or the thread.
  Rejected: an audit hook, which sees a replaced hook too, but runs at each `id()`, `open()` and import.
"""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

#: As in `contract`, see above.
ENV_STACK_PIPE, ENV_TITLE, ENV_PTRACE = "ELASTIC_RUN_STACK_PIPE", "ELASTIC_RUN_TITLE", "ELASTIC_RUN_PTRACE"
ENV_FLIGHT_RECORDER, ENV_FAULTS = "ELASTIC_RUN_FLIGHT_RECORDER", "ELASTIC_RUN_FAULTS"
STACK_HANDLER_FILE = "<frozen importlib elastic_run>"
#: Threads, and frames of each, that a worker writes; as faulthandler.
_MOST = 100
#: Outermost functions of a program: of `python train.py`, of `python -m train`, and of a fork that a thread has made.
_PROGRAMS = ("<module>", "_run_module_as_main", "_bootstrap")
#: Characters of an exception's message, and threads, that the agent is told.
_MOST_MESSAGE, _MOST_NAMES = 2000, 20
#: What the handler's own calls raise.
_OWN_ERRORS = (OSError, MemoryError, RecursionError)
#: Position of `arg_start` behind the name in /proc/PID/stat; bytes that hold it; the longest path.
_ARG_START, _STAT_SIZE, _PATH_SIZE = 45, 1024, 4096
#: Bytes of a process's name.
_NAME_SIZE = 15
#: The function of this process that tells the agent of an exception; empty in a process that is no worker.
_tellers: "list[Callable[..., None]]" = []


def begin() -> None:
    """Do all that the variables of this worker ask for; the .pth file calls it if one of these variables is set."""
    for part in (_begin_stacks, _begin_recorder, _begin_faults):
        try:
            part()
        except Exception:  # noqa: BLE001, S110 - the program starts in any case
            pass


def begin_diagnosis() -> None:
    """Start the flight recorder and the faults, if they are asked for; called in a fork that has become a worker."""
    _begin_recorder()
    _begin_faults()


def _begin_stacks() -> None:
    # Popped first: Python reads the .pth files of a virtual environment twice.
    pipe = os.environ.pop(ENV_STACK_PIPE, "")
    if not pipe:
        return
    if os.environ.get(ENV_PTRACE) == "1":
        _permit_tracing()
    if os.getsid(0) == os.getpid() and register_for_pipe(pipe) and os.environ.get(ENV_TITLE) != "0":
        show_rank(int(os.environ["RANK"]))


def _permit_tracing() -> None:
    import ctypes

    set_tracer, any_process = 0x59616D61, ctypes.c_ulong(-1)  # PR_SET_PTRACER, PR_SET_PTRACER_ANY
    ctypes.CDLL(None).prctl(set_tracer, any_process, 0, 0, 0)


def _begin_recorder() -> None:
    if ENV_FLIGHT_RECORDER in os.environ:
        from elastic_run.diagnosis import recorder

        recorder.begin()


def _begin_faults() -> None:
    if ENV_FAULTS in os.environ:
        from elastic_run.diagnosis import fault_thread

        fault_thread.begin()


def register_for_pipe(value: str) -> bool:
    """Let this process write its stacks from now on, if it has the pipe; return whether it does.

    Args:
        value: The value of `contract.ENV_STACK_PIPE`: descriptor, inode and signal.
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
    import _signal  # type: ignore[import-not-found]
    import atexit
    import faulthandler
    import sys

    os.set_inheritable(fd, False)
    # When Python ends, faulthandler restores the handlers that it has replaced, and Python sets its own ones to the
    # default, which kills the process: a signal in that moment must not kill a worker that has ended well.
    for each in (number, number - 1):
        _signal.signal(each, _signal.SIG_IGN)
        faulthandler.register(each, fd, all_threads=each == number)
    tell = _make_teller(fd)
    for name in ("excepthook", "__excepthook__"):
        setattr(sys, name, _make_hook(tell, getattr(sys, name)))
    _tellers[:] = (tell,)
    handler = _make_handler(fd, tell)
    for each in (number - 2, number - 3):
        _signal.signal(each, handler)
        atexit.register(_signal.signal, each, _signal.SIG_IGN)
    _signal.siginterrupt(number - 2, False)


def tell_uncaught(error: BaseException) -> None:
    """Tell the agent that an exception ends this worker, whose function has raised it."""
    for tell in _tellers:
        tell(error, is_final=True)


def _make_hook(tell: "Callable[..., None]", show: "Callable[..., object]") -> "Callable[..., None]":
    """Return an excepthook that tells the agent of the exception before it shows the exception."""

    def excepthook(kind: type[BaseException], value: BaseException, trace: "TracebackType | None") -> None:
        try:
            tell(value)
        finally:
            show(kind, value, trace)

    return excepthook


def _make_teller(fd: int) -> "Callable[..., None]":
    """Return a function that writes, once, the exception that has ended the main thread, and the other threads.

    It writes nothing for an exception that has not ended the main thread, and never raises.
    """
    import _thread
    import sys

    me, pipe = (os.getpid(), _thread.get_ident()), os.fstat(fd)[1:3]  # inode and device
    told: list[bool] = []

    def has_ended_main(error: BaseException) -> bool:
        if told or (os.getpid(), _thread.get_ident()) != me or os.fstat(fd)[1:3] != pipe:
            return False
        frame, trace = sys._getframe(), error.__traceback__  # noqa: SLF001 - public by its documentation
        while frame.f_back is not None:
            frame = frame.f_back
        came_through = trace is None or trace.tb_frame.f_code.co_name in _PROGRAMS
        return came_through and frame.f_code.co_name not in _PROGRAMS

    def describe(error: BaseException) -> str:
        import time

        kind, threading = type(error), sys.modules.get("threading")
        place = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
        threads = [] if threading is None else [each for each in threading.enumerate() if not each.daemon]
        # A thread that is being started has no number yet.
        names = [f"{each.ident:x} {each.name}" for each in threads if each.ident not in (None, me[1])]
        fields = [str(time.monotonic()), place + kind.__qualname__, _text_of(error), *names[:_MOST_NAMES]]
        plain = ["".join(letter if letter >= " " or letter == "\n" else " " for letter in field) for field in fields]
        return "\x1f".join(plain)

    def tell(error: BaseException | None, *, is_final: bool = False) -> None:
        try:
            if error is not None and (is_final or has_ended_main(error)):
                told.append(True)
                os.write(fd, f"\x05{describe(error)}\x06".encode("utf-8", "backslashreplace"))
        except Exception:  # noqa: BLE001, S110 - of the program's own classes; the traceback follows in any case
            pass

    return tell


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:_MOST_MESSAGE]
    except Exception:  # noqa: BLE001 - any class's __str__ runs here
        return ""


def _make_handler(fd: int, tell: "Callable[..., None]") -> "Callable[[int, FrameType | None], None]":
    """Return a handler that writes the stacks of all threads in faulthandler's format, between two marks."""
    import _thread
    import sys

    main, pipe, hook = _thread.get_ident(), os.fstat(fd)[1:3], sys.excepthook  # inode and device of the pipe

    def write_stacks(_: int, interrupted: "FrameType | None") -> None:
        frames: dict[int, FrameType | None] = {}
        try:
            if os.fstat(fd)[1:3] != pipe:
                return
            if sys.excepthook is not hook:  # the program has replaced it; the interpreter has left the exception here
                tell(getattr(sys, "last_value", None))
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
            # The program's own handlers may run meanwhile: their exceptions, as a timeout by SIGALRM, are passed on.
            is_foreign = error.__traceback__.tb_next or not isinstance(error, _OWN_ERRORS)  # type: ignore[union-attr]
            if frames and is_foreign:
                raise

    write_stacks.__code__ = write_stacks.__code__.replace(co_filename=STACK_HANDLER_FILE)
    return write_stacks


def show_rank(rank: int) -> None:
    """Show this worker's global rank before its command line and behind its name; `ps` shows the old words otherwise.

    It takes the place of the beginning of the interpreter's path. All else stays where it is: the words behind it,
    which programs read, and the interpreter's name, to which the C library points.
    """
    words = b"rank %d" % rank
    try:
        # Some kernels let no process write to the first and the last of these files.
        with open("/proc/self/comm", "r+b", buffering=0) as comm:
            comm.write(comm.read(_NAME_SIZE + 1).strip()[: _NAME_SIZE - 1 - len(words)] + b" " + words)
        with open("/proc/self/stat", "rb", buffering=0) as stat:
            start = int(stat.read(_STAT_SIZE).rpartition(b")")[2].split()[_ARG_START])
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            path = os.pread(memory.fileno(), _PATH_SIZE, start).partition(b"\0")[0]
            if path.rfind(b"/") > len(words):
                os.pwrite(memory.fileno(), words + b": " + path[len(words) + 2 :], start)
    except (OSError, IndexError, ValueError):
        pass
