"""Starts a function's process by spawn, fork or forkserver; multiprocessing is imported only for that (law 1).

- spawn starts a fresh interpreter exactly as a command is started. The function is passed in a file without a name, not
  through a pipe, so that the next worker's start does not wait until this worker has read it.
- fork copies this process. The child counts as started once it has closed the launcher's descriptors.
- forkserver leaves the start to multiprocessing's server. The process is the server's child, not ours: a descriptor
  tells of its end. It takes its streams, environment and session after the program's main module was imported.
- A worker calls its function after `StartedFunction.begin`: the guardian must know of the process first.
- Only a child that this process started can write to a result's file, so the launcher may unpickle the result (law 5).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
from multiprocessing import resource_tracker, spawn, util

from elastic_run.multiprocessing import fork_exec
from elastic_run.multiprocessing.fork_exec import find_interpreter, open_unnamed, stack_variables
from elastic_run.multiprocessing.functions.worker import (
    HOW_TO_SEND,
    TRACEBACK,
    VALUE,
    FunctionWorker,
    become_as_executed,
    pickle_for_child,
    refuse,
)
from elastic_run.signals import block_signals, restore_signals, set_wakeup_fd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from typing import Any

    from elastic_run.multiprocessing.fork_exec import SpawnOptions

#: The byte that a forked worker writes when it has closed the launcher's descriptors.
_READY = b"+"
_BEGIN = b"+"
#: Errors of pickle for an object that can't be pickled; they differ by kind of object and release of Python.
_REFUSALS = (pickle.PicklingError, AttributeError, TypeError)


class StartedFunction:
    """A function worker that runs; its result is in a file until it has ended."""

    def __init__(self, pid: int, result: int, start_pipe: int, served: Any = None) -> None:
        self.pid = pid
        #: multiprocessing's object that observes a fork server's child, or None for a child of this process.
        self.served = served
        self._result = result
        self._content = b""
        self._start_pipe = start_pipe

    def begin(self) -> None:
        """Let it call its function: the guardian knows of it now."""
        try:
            os.write(self._start_pipe, _BEGIN)
        except BrokenPipeError:
            pass  # it has ended already, and its exit code will tell
        finally:
            os.close(self._start_pipe)

    def give_up(self) -> None:
        """Let it end without having called its function: this process can't watch it."""
        os.close(self._start_pipe)
        self.finish()

    def finish(self) -> None:
        """Read the result of the worker, which has ended, and close the file; harmless when closed."""
        if self._result >= 0:
            with os.fdopen(self._result, "rb") as file:
                self._content = file.read()
            self._result = -1

    @property
    def has_returned(self) -> bool:
        """Whether there is a value; a function can end its process by `os._exit(0)`, too."""
        return self._content[:1] == VALUE

    @property
    def traceback(self) -> str:
        """The traceback that the worker has left, or ""."""
        is_traceback = self._content[:1] == TRACEBACK
        return self._content[1:].decode(errors="replace") if is_traceback else ""

    def read_value(self, rank: int) -> Any:
        """Return the value, or None where there is none; `rank` is for the message of an UnpicklingError."""
        if not self.has_returned:
            return None
        try:
            return pickle.loads(memoryview(self._content)[1:])  # noqa: S301 - from our own child (law 5)
        except Exception as error:
            message = f"what rank {rank} returned can't be unpickled here: {type(error).__name__}: {error}"
            raise pickle.UnpicklingError(message) from error


class Functions:
    """A function and its arguments for each worker, ready to be started.

    What can't be started is refused with TypeError, ValueError, RuntimeError, or what pickle raises.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Mapping[int, Sequence[Any]],
        start_method: str = "spawn",
        *,
        is_recorded: bool = True,
        daemon: bool | None = None,
    ) -> None:
        refuse(start_method, function)
        self._method = start_method
        #: Open as long as this process lives: how forked workers know that it does.
        self._parent_alive_pipes: list[int] = []
        self._result_files: list[int] = []
        self._workers = {
            rank: FunctionWorker(
                function, tuple(own), start_method=start_method, is_recorded=is_recorded, daemon=daemon
            )
            for rank, own in args.items()
        }
        if start_method != "fork":
            for rank, worker in self._workers.items():
                _refuse_unsendable(worker, rank)

    def start(
        self, local_rank: int, options: SpawnOptions, *, on_fork: Callable[[], None] = lambda: None
    ) -> StartedFunction:
        """Start one worker, up to the call of its function: that waits for `StartedFunction.begin`."""
        worker = self._workers[local_rank]
        with contextlib.ExitStack() as lent, contextlib.ExitStack() as own:
            worker.result = open_unnamed(b"")
            own.callback(os.close, worker.result)
            worker.start_pipe, start_pipe = os.pipe()
            own.callback(os.close, start_pipe)
            lent.callback(os.close, worker.start_pipe)

            def give_up() -> None:
                on_fork()
                for fd in (*self._parent_alive_pipes, *self._result_files, start_pipe):
                    os.close(fd)

            served = None
            if self._method == "fork":
                pid = self._fork(worker, options, give_up)
            elif self._method == "spawn":
                pid = _spawn(worker, options)
            else:
                served = _serve(worker, options)
                pid = served.pid
            own.pop_all()
        self._result_files.append(worker.result)
        return StartedFunction(pid, worker.result, start_pipe, served)

    def close(self) -> None:
        """Close the descriptors that are open for running workers, after these have ended; harmless when closed."""
        for fd in self._parent_alive_pipes:
            os.close(fd)
        self._parent_alive_pipes.clear()

    def _fork(self, worker: FunctionWorker, options: SpawnOptions, on_fork: Callable[[], None]) -> int:
        with contextlib.ExitStack() as lent, contextlib.ExitStack() as own:
            ready, tell_ready = os.pipe()
            own.callback(os.close, ready)
            lent.callback(os.close, tell_ready)
            alive, stay_alive = os.pipe()
            own.callback(os.close, stay_alive)
            lent.callback(os.close, alive)
            util._flush_std_streams()  # type: ignore[attr-defined]  # noqa: SLF001 - else both would write what is buffered
            mask = block_signals(signal.valid_signals())
            try:
                pid = os.fork()
                if not pid:
                    os.close(stay_alive)
                    os.close(ready)
                    _become_worker(worker, options, on_fork, mask, tell_ready, alive)
            finally:
                restore_signals(mask)
            own.pop_all()
        self._parent_alive_pipes.append(stay_alive)
        os.read(ready, 1)  # or the end of the file: it has ended already, and its exit code will tell
        os.close(ready)
        return pid


def _refuse_unsendable(worker: FunctionWorker, rank: int) -> None:
    """Pickle a worker's function and arguments one by one, so that the message names what can't be pickled."""
    arguments = [(f"argument {number} of local rank {rank}", each) for number, each in enumerate(worker.args)]
    for what, part in (("the function", worker.function), *arguments):
        try:
            pickle_for_child(part)
        except Exception as error:
            kind = type(part)
            advice = f": {HOW_TO_SEND}" if part is worker.function else ""
            message = (
                f"{what} (of type {kind.__module__}.{kind.__qualname__}) can't be sent to a worker: {error}{advice}"
            )
            raised = type(error) if type(error) in _REFUSALS else pickle.PicklingError
            raise raised(message) from error


def _spawn(worker: FunctionWorker, options: SpawnOptions) -> int:
    worker.env = options.env
    preparation = spawn.get_preparation_data(worker.name)
    if not os.path.exists(preparation.get("init_main_from_path") or os.curdir):
        del preparation["init_main_from_path"]  # the program came through stdin
    payload, kept = pickle_for_child(preparation, worker)
    file = open_unnamed(payload)
    try:
        with _interpreter():
            tracker = resource_tracker.getfd()  # so that shared memory of a worker outlives the worker
            argv = spawn.get_command_line(pipe_handle=file, tracker_fd=tracker)
        lent = (file, worker.result, worker.start_pipe, options.stacks, tracker or -1)
        kept = sorted({*kept, *lent} - {-1})
        return fork_exec.start_process(
            argv,
            {**fork_exec.inherited_environment(), **options.env, **stack_variables(options.stacks)},
            stdout=options.stdout,
            stderr=options.stderr,
            affinity=options.affinity,
            closed=[fd for fd in options.closed if fd not in kept],
            kept=kept,
        )
    finally:
        os.close(file)


def _serve(worker: FunctionWorker, options: SpawnOptions) -> Any:
    from multiprocessing.popen_forkserver import Popen

    worker.options = options
    try:
        with _interpreter():
            return Popen(worker)
    except EOFError as error:
        message = "multiprocessing's fork server has ended"
        raise OSError(message) from error


@contextlib.contextmanager
def _interpreter() -> Iterator[None]:
    """Let multiprocessing execute an interpreter also where `sys.executable` is none."""
    before = spawn.get_executable()
    spawn.set_executable(find_interpreter())
    try:
        yield
    finally:
        spawn.set_executable(before)


def _become_worker(
    worker: FunctionWorker,
    options: SpawnOptions,
    on_fork: Callable[[], None],
    mask: Collection[int],
    ready: int,
    alive: int,
) -> None:
    """Run a worker in the process that was just forked; never returns."""
    import atexit

    code = 1
    try:
        # Functions that the program has registered for its exit must not run in the worker.
        atexit._clear()  # noqa: SLF001 - as multiprocessing itself does in newer releases
        # Workers have no stdin, as with multiprocessing. That closes `sys.stdin`, and would wait for ever where another
        # thread of the program is just reading from it.
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        sys.stdin = os.fdopen(null, encoding="utf-8")
        # No exit waits for threads of the program's executors: they aren't here, and one may have forked us. Newer
        # releases of Python do so themselves.
        if executors := sys.modules.get("concurrent.futures.thread"):
            executors._threads_queues.clear()  # noqa: SLF001 - ditto
        become_as_executed(options)
        on_fork()
        set_wakeup_fd(-1)
        restore_signals(mask)
        os.write(ready, _READY)
        os.close(ready)
        code = worker._bootstrap(parent_sentinel=alive)  # type: ignore[attr-defined]  # noqa: SLF001 - what every start method of multiprocessing runs
        atexit._run_exitfuncs()  # noqa: SLF001 - ditto
    except BaseException:  # noqa: BLE001 - nothing may go back into the launcher's code
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)
