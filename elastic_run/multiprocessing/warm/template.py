"""The template: a worker that stops before its script, imports modules, and forks workers from itself.

- It is started with the workers' command line, environment and flags. A line of a .pth file calls `begin`, which leaves
  an audit hook; Python raises the event that the hook waits for when it is about to open the program, with `sys.path`
  complete and nothing of ours on the stack. The template never returns from the hook. Its forks do, and run the
  program. Rejected: to imitate Python's start of a program (runpy runs beneath frames of ours, and differs in
  `__spec__`, in tracebacks, in the look of a SyntaxError); to call Py_Main a second time (it keeps the frames, too).
- A **fork helper**, a fork of the template, forks the workers and ends. They become the agent's children, since the
  agent is a subreaper. Rejected: to report exit codes from the template (lost when it is killed, and `os.getppid()`
  isn't the launcher), a fork each in between (twice the price), CLONE_PARENT (the C library's fork handlers don't run,
  and OpenBLAS's threads need theirs).
- A fork sets what exec would have set: values that differ between workers, and the random values of a new process.
- Nothing is imported here that Python hasn't imported itself by then: a worker has the modules of an executed worker,
  and the modules that the user named.
"""

from __future__ import annotations

import marshal
import os
import sys

from elastic_run import contract
from elastic_run.multiprocessing.fork_exec import place_descriptor
from elastic_run.multiprocessing.process_table import ProcessTitle
from elastic_run.multiprocessing.warm import messages
from elastic_run.multiprocessing.warm.fork_safety import ImportWatch
from elastic_run.utils import describe_exception
from elastic_run.worker_start import begin_diagnosis, register_for_pipe, show_rank

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from collections.abc import Sequence
    from typing import Any

#: Begin of the audit events before Python runs a file, a module, a command or stdin.
_RUNS_PROGRAM = "cpython.run_"
_MOST_TEXT = 4000
_LIST_ITERATOR: type = type(iter([]))
#: c10::detail::kDefaultSeed; releases that draw one use 64 random bits.
_TORCH_CONSTANT_SEED = 67280421310721


def begin() -> None:
    """Make this process a template; called by the .pth file where the variable says so."""
    # Popped first: Python reads the .pth files of a virtual environment twice, and imports may start processes.
    channel = messages.adopt(int(os.environ.pop(contract.ENV_TEMPLATE)))
    watch = ImportWatch()
    os.set_inheritable(channel.fileno(), False)
    sys.addaudithook(_Hook(channel, watch))


class _Hook:
    """Waits for the program, and stops there."""

    #: Let coverage and debuggers see what is imported in here, as they would in a worker.
    __cantrace__ = True

    def __init__(self, channel: _socket.socket, watch: ImportWatch) -> None:
        self._channel: _socket.socket | None = channel
        self._watch = watch

    def __call__(self, event: str, _arguments: tuple[Any, ...]) -> None:
        if self._channel is None or not event.startswith(_RUNS_PROGRAM):
            return
        channel, self._channel = self._channel, None
        try:
            self._forget()
            Template(channel, self._watch).serve()
        except BaseException as error:  # noqa: BLE001 - never on to the program
            sys.excepthook(type(error), error, error.__traceback__)
            os._exit(1)

    def _forget(self) -> None:
        """Take this hook away: Python has no call for that, and every worker would pay for it at each event.

        The list of hooks is hidden from the garbage collector, but not the iterator that goes over it at this moment.
        """
        import gc

        for iterator in gc.get_objects():
            if type(iterator) is _LIST_ITERATOR:
                hooks: Any = iterator.__reduce__()[1][0]
                if hooks and hooks[-1] is self:
                    hooks.pop()


class Template:
    """The main program of the template process."""

    def __init__(self, channel: _socket.socket, watch: ImportWatch) -> None:
        self._channel = channel
        self._watch = watch
        self._title = ProcessTitle()
        # Before the imports, which may change `sys.argv` and `os.environ`.
        self._argument_count = len(sys.argv) - 1
        with open("/proc/self/environ", "rb") as file:
            self._env = dict(os.fsdecode(entry).partition("=")[::2] for entry in file.read().split(b"\0") if entry)

    def serve(self) -> None:
        """Import, then fork on demand; returns in a worker only."""
        self._title.show("elastic-run: template", "template")
        order = messages.receive(self._channel)
        if order is None or not self._import(**order[0]):
            os._exit(0)
        _freeze()
        while (order := messages.receive(self._channel)) is not None:
            document, places = order
            if document["kind"] == "fork" and self._fork(places):
                return
        os._exit(0)

    def _import(self, modules: Sequence[str], own: Sequence[str]) -> bool:
        """Import the modules, and report the progress to the agent; return whether workers can be forked."""
        import importlib

        if hazard := self._watch.find_hazard(variables=own):
            self._send("failed", f"Python's own start can't be preloaded (sitecustomize, a .pth file): it {hazard}")
            return False
        for name in modules:
            self._send("importing", name)
            try:
                importlib.import_module(name)
            except BaseException as error:  # noqa: BLE001 - whatever the module's code raises
                self._send("failed", f"{name} can't be imported ({describe_exception(error)})")
                return False
            if hazard := self._watch.find_hazard(variables=own):
                self._send("failed", f"{name} can't be preloaded: it {hazard}")
                return False
        self._watch.close()
        self._send("ready")
        return True

    def _fork(self, places: list[int]) -> bool:
        """Fork a worker for each place; return True in one of them."""
        if hazard := self._watch.find_hazard(places):
            self._send("failed", f"the template can't be forked any more: it {hazard}")
            os._exit(0)
        _flush()
        helper = self._try_fork()
        if helper == 0:
            return self._deliver(places)
        if helper is not None:
            try:
                os.waitpid(helper, 0)  # afterwards its children are the agent's
            except ChildProcessError:
                pass  # SIGCHLD was inherited as ignored, or a module collects children: it has ended all the same
        for place in places:
            os.close(place)
        self._send("done")
        return False

    def _deliver(self, places: list[int]) -> bool:
        """In the fork helper: fork all workers, send their pids, and end."""
        pids = []
        for place in places:
            pid = self._try_fork()
            if pid == 0:
                return self._wait(place, places)
            if pid is None:
                break
            pids.append(pid)
        self._send("born", pids=pids)
        os._exit(0)

    def _try_fork(self) -> int | None:
        """Fork; where the system refuses, tell the agent and return None."""
        try:
            return _fork_quietly()
        except (OSError, MemoryError) as error:
            self._send("refused", getattr(error, "strerror", None) or describe_exception(error))
            return None

    def _send(self, kind: str, text: str = "", **more: object) -> None:
        try:
            messages.send(self._channel, {"kind": kind, "text": text[:_MOST_TEXT], **more})
        except OSError:
            os._exit(0)  # the agent has gone

    def _wait(self, place: int, places: list[int]) -> bool:
        """In a fork: wait for the order to become a worker, and become a worker."""
        self._title.show("elastic-run: waiting", "waiting")
        self._channel.close()
        for other in places:
            if other != place:
                os.close(other)
        channel = messages.adopt(place)
        order = messages.receive(channel)
        channel.close()
        if order is None:
            os._exit(0)
        _, (file, stdout, stderr, *stacks) = order
        os.setsid()
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        for descriptor in {stdout, stderr}:
            os.close(descriptor)
        with os.fdopen(file, "rb") as orders:
            document = marshal.load(orders)  # noqa: S302 - from our own process, see `messages`
        pipe = document["env"].pop(contract.ENV_STACK_PIPE.encode(), b"").decode()
        if stacks:
            place_descriptor(stacks[0], int(pipe.partition(":")[0]))
        self._become_worker(document, pipe)
        return True

    def _become_worker(self, document: dict[str, Any], pipe: str) -> None:
        """Become a worker. The document has all its variables and its whole command line, in bytes.

        Changes of the imports to the environment or to the arguments stay, as in a worker that imports by itself.
        """
        has_stacks = bool(pipe) and register_for_pipe(pipe)
        _change_environment(
            self._env, {os.fsdecode(name): os.fsdecode(value) for name, value in document["env"].items()}
        )
        argv = [*map(os.fsdecode, document["argv"])]
        if argv != sys.orig_argv:  # there is a ${local_rank} in it
            sys.argv[1:] = argv[-self._argument_count :]
            sys.orig_argv[:] = argv
        self._title.show_command(argv)
        if has_stacks and os.environ.get(contract.ENV_TITLE) != "0":
            show_rank(int(os.environ["RANK"]))
        _renew_stream(sys.__stdout__, 1, "<stdout>")
        _renew_stream(sys.__stderr__, 2, "<stderr>")
        _draw_anew()
        begin_diagnosis()


def _fork_quietly() -> int:
    """Fork without a warning of threads, which newer Pythons give: there are no others than those let through."""
    warnings: Any = sys.modules.get("warnings")
    if warnings is None:
        return os.fork()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return os.fork()


def _freeze() -> None:
    """Keep shared memory shared: a garbage collection writes into every object that it visits.

    Up to a worker's end: there Python finds what nobody has closed by a collection, and `__main__` is among what is
    frozen. So files would keep what wasn't written yet, and finalizers wouldn't run.
    """
    import atexit
    import gc

    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)


def _flush() -> None:
    """Write the buffered output, else every fork would write it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # noqa: BLE001, S110 - there is none, or it is a module's own and has none
            pass


# --- becoming a worker ------------------------------------------------------------------------------------------------
def _change_environment(before: dict[str, str], now: dict[str, str]) -> None:
    """Set the worker's variables in its order, except variables that only the imports have changed."""
    kept = {name for name in (*os.environ, *before) if os.environ.get(name) != before.get(name) == now.get(name)}
    imported = {name: value for name, value in os.environ.items() if name in kept}
    os.environ.clear()
    os.environ.update({name: value for name, value in now.items() if name not in kept or name in imported} | imported)


def _renew_stream(stream: Any, descriptor: int, name: str) -> None:
    """Set up a standard stream for its descriptor as Python does at start: a terminal, a pipe and a file differ.

    The text stream stays the same object, since modules may hold it; what is beneath notes for ever whether it can be
    sought, so it is made anew. Source: create_stdio in CPython's Python/pylifecycle.c.
    """
    if stream is None:
        return
    is_buffered = not stream.write_through
    buffer: Any = open(descriptor, "wb", -1 if is_buffered else 0, closefd=False)  # noqa: SIM115 - for good
    raw = buffer.raw if is_buffered else buffer
    raw.name = name
    stream.__init__(
        buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        newline="\n",
        line_buffering=is_buffered and (raw.isatty() or stream is sys.__stderr__),
        write_through=not is_buffered,
    )


def _draw_anew() -> None:
    """Renew the random values, times and thread ids of imported modules; `random` renews its own after a fork."""
    modules: dict[str, Any] = {**sys.modules}
    if threading := modules.get("threading"):
        # Before Python 3.13 a fork's main thread keeps the number of its parent's.
        threading.main_thread()._native_id = threading.get_native_id()  # noqa: SLF001
    if random := modules.get("numpy.random"):
        random.seed()
    if torch := modules.get("torch"):
        seed = torch.default_generator.initial_seed()
        # Whether torch has drawn it: older releases have a constant, and a module chooses a small number.
        if seed != _TORCH_CONSTANT_SEED and seed >= 1 << 32:
            torch.default_generator.seed()
    if process := modules.get("multiprocessing.process"):
        process.current_process().authkey = os.urandom(32)
    if logging := modules.get("logging"):
        import time

        # Nanoseconds since Python 3.13.
        logging._startTime = time.time_ns() if isinstance(logging._startTime, int) else time.time()  # noqa: SLF001
