"""A function as a worker: the part that runs in the worker's own process.

Rules
- The process object is the standard library's, so that `current_process`, `parent_process`, exit functions, threads and
  finalizers in the worker behave as any program expects of multiprocessing. Only the start and the way of the result
  are ours.
- An exception is recorded in error.json, as `record` does, and goes to stderr. A result goes to the launcher through a
  pipe of this worker's own: a byte for the kind, the length, then as many bytes. The length marks the end, not the end
  of the file: a process that the worker left behind may hold the pipe open. A result that can't be pickled is an
  exception of the worker.
- An interrupt is recorded, too, but not shown: Ctrl-C in a notebook would print a traceback for each worker.
- A guardian can't find a forked process by its environment (/proc shows the program's). So the function is called only
  after the launcher has told its guardian of the process, and never if the launcher died first.
- No other module is imported before the function's own: a function that needs torch imports it there.
"""

from __future__ import annotations

import os
import pickle
import sys
from multiprocessing import process
from multiprocessing.context import Process

from elastic_run import contract
from elastic_run.multiprocessing.process import stack_pipe
from elastic_run.records import dataclass
from elastic_run.signals import STACK_SIGNAL
from elastic_run.worker_start import register, tell_uncaught

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from typing import Any

#: The exit code of a program that was interrupted, as shells have it.
_INTERRUPTED = 128 + 2
#: Kinds of a result: a pickled return value, and the text of a traceback.
VALUE = b"V"
TRACEBACK = b"T"
#: Bytes of a result's length, which follows the kind.
LENGTH_BYTES = 8
_PIPE_SIZE = 1 << 20


@dataclass(frozen=True, slots=True)
class ForkSetup:
    """The steps by which a forked process becomes a worker; an exec'd process needs none of them."""

    #: Variables in addition to the parent's environment.
    env: Mapping[str, str]
    #: Descriptors that become 1 and 2; None for a stream that it keeps. Plain numbers, or, for a fork server, objects
    #: of `multiprocessing.reduction.DupFd`.
    streams: tuple[Any, Any]
    #: See `SpawnOptions`.
    replaced: Collection[int] = ()
    affinity: frozenset[int] | None = None
    #: Descriptor for its stacks, in the form of `streams`, and its number in the worker; or None.
    stacks: tuple[Any, int] | None = None

    def perform(self) -> None:
        """Begin a session, take the streams, the variables and the CPUs."""
        os.setsid()
        sources = {}
        for target, source in enumerate(self.streams, start=1):
            if source is not None:
                sources[target] = source if isinstance(source, int) else source.detach()
                os.dup2(sources[target], target)
        for fd in set(sources.values()):
            os.close(fd)
        for target in self.replaced:
            _redirect_stream(target)
        os.environ.update(self.env)
        os.environ.pop(contract.ENV_RDZV_TOKEN, None)  # as in `fork_exec.inherited_environment`
        if self.affinity is not None:
            os.sched_setaffinity(0, self.affinity)
        if self.stacks is not None:
            source, number = self.stacks
            if isinstance(source, int) or stack_pipe.move(source.detach(), number):
                register(number, STACK_SIGNAL)


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
        #: Descriptor for the result: a number, or an object of `DupFd`.
        self.result: Any = None
        #: Descriptor of a pipe, in the same form: a byte comes when the function may be called.
        self.start_pipe: Any = None
        #: What a forked process does first, or None.
        self.fork_setup: ForkSetup | None = None
        #: Variables of a spawned process, which are set again: its import of the main file may have replaced them.
        self.env: Mapping[str, str] = {}

    def run(self) -> None:
        """Call the function, and tell the launcher; runs in the worker."""
        if self.fork_setup is not None:
            self.fork_setup.perform()
        os.environ.update(self.env)
        result, start_pipe = (fd if isinstance(fd, int) else fd.detach() for fd in (self.result, self.start_pipe))
        os.set_inheritable(result, False)
        if self._start_method == "spawn":
            _watch_parent()
        is_known = os.read(start_pipe, 1)
        os.close(start_pipe)
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
        try:
            _send_result(result, kind, payload)
        except BrokenPipeError:
            return  # the launcher has gone
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


def _watch_parent() -> None:
    """Let `parent_process().is_alive()` tell the truth: the file that a spawned worker began with can't."""
    parent = process.parent_process()
    if parent is None:
        return
    try:
        parent._sentinel = os.pidfd_open(os.getppid())  # type: ignore[attr-defined]  # noqa: SLF001 - it has no setter
    except (AttributeError, OSError):
        return


def _send_result(fd: int, kind: bytes, payload: bytes) -> None:
    """Write a result, and close the pipe.

    Raises:
        BrokenPipeError: The launcher is gone.
    """
    if len(payload) > _PIPE_SIZE:
        import fcntl

        try:
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        except (AttributeError, OSError):
            pass  # not Linux, or the user's share of pipes is used up: it only takes more turns
    for data in (kind + len(payload).to_bytes(LENGTH_BYTES, "little"), payload):
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    os.close(fd)
