"""A function as a worker: which functions can be sent to a process, and the part that runs in that process.

- The process object is the standard library's, so that `current_process`, `parent_process`, exit functions, threads and
  finalizers in the worker behave as any program expects. Only the start and the way of the result are ours.
- An exception is recorded in error.json, as `record` does, and goes to stderr; not shown is an interrupt: Ctrl-C in a
  notebook would print a traceback for each worker. A result goes into a file without a name, which the launcher reads
  when the worker has ended: so it may have any size. A result that can't be pickled is an exception of the worker.
- A guardian can't find a forked process by its environment (/proc shows the program's). So the function is called only
  after the launcher has told its guardian of the process, and never if the launcher died first.
- A process that `spawn` or `forkserver` starts looks the function up by its name. A lambda, a function inside another
  function and a function of a notebook are refused before the start, and the message says what to do then. A function
  of a notebook can be pickled, but not found.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from multiprocessing import context, process, reduction
from multiprocessing.context import Process

from elastic_run import contract
from elastic_run.multiprocessing.fork_exec import find_interpreter, place_descriptor
from elastic_run.records import replace
from elastic_run.signals import STACK_SIGNAL
from elastic_run.worker_start import register, tell_uncaught

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from elastic_run.multiprocessing.fork_exec import SpawnOptions

#: The exit code of a program that was interrupted, as shells have it.
_INTERRUPTED = 128 + 2
#: Kinds of a result, its first byte: a pickled return value, and the text of a traceback.
VALUE = b"V"
TRACEBACK = b"T"
START_METHODS = ("spawn", "fork", "forkserver")
#: Devices that a forked process can't use once they were initialised; torch's modules of these names say so.
_DEVICES = ("cuda", "xpu")
#: What to do with a function that can't be sent.
HOW_TO_SEND = (
    "define the function at the top level of a module (in a notebook: of a file beside it), or use start_method='fork'"
)
#: Where a main module without a file is.
_NO_FILE = "in an interactive session or on the command line"


class FunctionWorker(Process):
    """A process that calls a function.

    `is_recorded` says whether an exception is recorded and shown, as a launched job's worker does; if not its traceback
    goes to the launcher only, as with `elastic_run.spawn`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        start_method: str,
        is_recorded: bool = True,
        daemon: bool | None = None,
    ) -> None:
        super().__init__(daemon=daemon)
        self._start_method = start_method
        self.function = function
        self.args = args
        self.is_recorded = is_recorded
        #: Descriptor of the file for the result, and of a pipe: a byte comes when the function may be called.
        self.result = self.start_pipe = -1
        #: Variables of a spawned process, which are set again: its import of the main file may have replaced them.
        self.env: Mapping[str, str] = {}
        #: What the child of a fork server takes when it calls the function, and its pipe for stacks.
        self.options: SpawnOptions | None = None
        self._stacks: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Give a fork server's child the descriptors together with the pickled function."""
        options: Any = self.options
        if options is None:
            return self.__dict__
        passed = {name: reduction.DupFd(getattr(self, name)) for name in ("result", "start_pipe")}
        streams = {name: reduction.DupFd(getattr(options, name)) for name in ("stdout", "stderr")}
        stacks = None if options.stacks < 0 else reduction.DupFd(options.stacks)
        return {**self.__dict__, **passed, "options": replace(options, closed=(), **streams), "_stacks": stacks}

    def _begin_as_executed(self, options: Any) -> None:
        """In the child of a fork server: take what `__getstate__` has passed."""
        passed: Any = self
        self.result, self.start_pipe = passed.result.detach(), passed.start_pipe.detach()
        has_stacks = self._stacks is not None and place_descriptor(self._stacks.detach(), options.stacks)
        streams = {name: getattr(options, name).detach() for name in ("stdout", "stderr")}
        become_as_executed(replace(options, **streams, stacks=options.stacks if has_stacks else -1))

    def run(self) -> None:
        """Call the function, and tell the launcher; runs in the worker."""
        if self.options is not None:
            self._begin_as_executed(self.options)
        os.environ.update(self.env)
        os.set_inheritable(self.result, False)
        if self._start_method == "spawn":
            _watch_parent()
        is_known = os.read(self.start_pipe, 1)
        os.close(self.start_pipe)
        if not is_known:
            return  # the launcher is gone
        try:
            kind, payload = self._call_recorded() if self.is_recorded else self._call_plainly()
        except Exception as error:  # noqa: BLE001 - the function's; it is recorded by now
            from elastic_run.multiprocessing.errors.error_handler import skip_own_frames

            shown = error.with_traceback(skip_own_frames(error))
            tell_uncaught(shown)
            sys.last_value = shown  # as the interpreter does, so that exit functions can see the failure
            sys.excepthook(type(shown), shown, shown.__traceback__)
            sys.exit(1)
        _leave_result(self.result, kind, payload)
        if kind == TRACEBACK:
            sys.exit(1)

    def _call_recorded(self) -> tuple[bytes, bytes]:
        from elastic_run.multiprocessing.errors import get_error_handler, record

        try:
            payload = record(self._call)()
        except KeyboardInterrupt as error:
            get_error_handler().record_exception(error)
            sys.exit(_INTERRUPTED)
        return VALUE, pickle.dumps(None) if payload is None else payload

    def _call_plainly(self) -> tuple[bytes, bytes]:
        try:
            return VALUE, self._call()
        except KeyboardInterrupt:
            return VALUE, pickle.dumps(None)  # as torch's: the user who interrupts the workers knows it
        except Exception as error:  # noqa: BLE001 - the function's, which is told
            import traceback

            from elastic_run.multiprocessing.errors.error_handler import skip_own_frames

            text = "".join(traceback.format_exception(type(error), error, skip_own_frames(error)))
            sys.last_value = error  # as above
            return TRACEBACK, text.encode(errors="backslashreplace")

    def _call(self) -> bytes:
        value = self.function(*self.args)
        try:
            # Plain pickle, not multiprocessing's: that would put tensors into memory that ends with this process.
            return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # noqa: BLE001 - of the value's own pickling
            kind = type(value)
            rank = os.environ.get(contract.ENV_RANK, "")
            who = f"rank {rank}" if rank and self.is_recorded else self.name
            message = (
                f"{who} returned a value of type {kind.__module__}.{kind.__qualname__} that can't be pickled "
                f"({type(error).__name__}: {error}): return plain data, or save it to a file"
            )
            raise pickle.PicklingError(message) from None


def become_as_executed(options: SpawnOptions) -> None:
    """Begin a session in a forked process; take the streams, the variables and the CPUs, as an executed one would."""
    os.setsid()
    os.dup2(options.stdout, 1)
    os.dup2(options.stderr, 2)
    for fd in {options.stdout, options.stderr} - {1, 2}:
        os.close(fd)
    for fd in options.replaced:
        _redirect_stream(fd)
    os.environ.update(options.env)
    os.environ.pop(contract.ENV_RDZV_TOKEN, None)  # as in `fork_exec.inherited_environment`
    if options.affinity is not None:
        os.sched_setaffinity(0, options.affinity)
    if options.stacks >= 0:
        register(options.stacks, STACK_SIGNAL)


def _redirect_stream(fd: int) -> None:
    """Let `print` write to a descriptor that was redirected, where it doesn't: a notebook's stdout is no descriptor."""
    name = "stdout" if fd == 1 else "stderr"
    try:
        is_there = getattr(sys, name).fileno() == fd
    except (AttributeError, OSError, ValueError):
        is_there = False
    if not is_there:
        # Not closed on purpose: it is the process's stream from now on.
        setattr(sys, name, os.fdopen(fd, "w", buffering=1, errors="backslashreplace", closefd=False))


def _watch_parent() -> None:
    """Let `parent_process().is_alive()` tell the truth: the file that a spawned worker began with can't."""
    parent = process.parent_process()
    if parent is None:
        return
    try:
        parent._sentinel = os.pidfd_open(os.getppid())  # type: ignore[attr-defined]  # noqa: SLF001 - it has no setter
    except (AttributeError, OSError):
        return


def _leave_result(file: int, kind: bytes, payload: bytes) -> None:
    """Write a result, and its kind last: a file that has a kind is whole."""
    view = memoryview(payload)
    while view:
        view = view[os.pwrite(file, view, 1 + len(payload) - len(view)) :]
    os.pwrite(file, kind, 0)
    os.close(file)


# --- what can be sent -------------------------------------------------------------------------------------------------
def refuse(start_method: str, function: object) -> None:
    """Refuse what can't be called, and a start method that there isn't, or that can't be used for a function or now."""
    if not callable(function):
        kind = type(function)
        message = f"{function!r} (of type {kind.__module__}.{kind.__qualname__}) is neither a function nor a command"
        raise TypeError(message)
    if start_method not in START_METHODS:
        message = f"start_method {start_method!r} is none of {', '.join(START_METHODS)}"
        raise ValueError(message)
    device = _find_initialised_device() if start_method == "fork" else ""
    if device:
        message = (
            f"this process has initialised {device}, and forked workers can't use {device} then: launch "
            f"with start_method='spawn', or use {device} in the workers only"
        )
        raise RuntimeError(message)
    if start_method == "fork":
        return
    if not find_interpreter():
        message = (
            f"start_method={start_method!r} needs a Python interpreter, and {sys.executable or 'sys.executable'} is "
            "none: name one by multiprocessing.set_executable(path), or launch with start_method='fork'"
        )
        raise RuntimeError(message)
    refuse_unguarded_main()
    inner: Any = getattr(function, "func", function)  # of functools.partial
    if where := _unreachable_main(inner):
        name = getattr(inner, "__qualname__", "the function")
        message = f"{name}, which is defined {where}, can't be found by another process: {HOW_TO_SEND}"
        raise pickle.PicklingError(message)


def refuse_unguarded_main() -> None:
    """Refuse to launch in a worker that is importing its main module; a root cause is known by this function's name."""
    if getattr(process.current_process(), "_inheriting", False):
        message = (
            "this program launches workers while it is being imported by one: put the launch below "
            "`if __name__ == '__main__':`, so that a worker can import the program without launching it again"
        )
        raise RuntimeError(message)


def _find_initialised_device() -> str:
    """Return the kind of device that this process has initialised, or ""."""
    modules = ((device, sys.modules.get(f"torch.{device}")) for device in _DEVICES)
    return next((device.upper() for device, module in modules if module is not None and module.is_initialized()), "")


def choose_start_method(function: Callable[..., Any]) -> str:
    """Return the start method of a function for which the program has left the default.

    It is `fork` for a function of a notebook's cell or of an interactive session, which no other interpreter can find,
    and `spawn` for all others, and where this process can't fork any more.
    """
    inner = getattr(function, "func", function)  # of functools.partial
    return "fork" if _unreachable_main(inner) == _NO_FILE and not _find_initialised_device() else "spawn"


def _unreachable_main(function: object) -> str:
    """Return where a function of the main module is defined, if another interpreter doesn't import that; or ""."""
    main = sys.modules.get("__main__")
    spec: Any = getattr(main, "__spec__", None)
    if getattr(function, "__module__", None) != "__main__":
        return ""
    if spec is not None:
        # multiprocessing leaves the main files of packages and archives alone: many have no guard.
        return "in a __main__.py" if str(spec.name).rpartition(".")[2] == "__main__" else ""
    return "" if os.path.isfile(getattr(main, "__file__", None) or "") else _NO_FILE


def pickle_for_child(*things: object) -> tuple[bytes, list[int]]:
    """Pickle things, one after the other, as multiprocessing does for a child; return the descriptors that go along."""
    from multiprocessing.popen_spawn_posix import Popen

    # Not constructed, which would start a process: pickling asks this object which descriptors the child gets.
    sender: Any = Popen.__new__(Popen)
    descriptors = sender._fds = []  # noqa: SLF001 - ditto
    buffer = io.BytesIO()
    context.set_spawning_popen(sender)
    try:
        for thing in things:
            reduction.dump(thing, buffer)
    finally:
        context.set_spawning_popen(None)
    return buffer.getvalue(), descriptors
