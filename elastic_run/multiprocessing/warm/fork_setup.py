"""Turns a waiting fork of the template into a worker: sets everything that exec would have set.

The template got the workers' command line, environment and flags from its own exec. So this module sets only the values
that differ between workers, and the random values that a new process draws at its start or at an import.
"""

from __future__ import annotations

import os
import sys

from elastic_run import contract
from elastic_run.worker_start import begin_diagnosis, register_for_pipe, show_rank

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elastic_run.multiprocessing.process.process_title import ProcessTitle


#: c10::detail::kDefaultSeed; releases that draw one use 64 random bits.
_TORCH_CONSTANT_SEED = 67280421310721


class TemplateStart:
    """The state at the template's start; made before the imports, which may change `os.environ` and `sys.argv`.

    `script` is the path of its program, or "" where that is no script.
    """

    __slots__ = ("_real_script", "_script", "argument_count", "env")

    def __init__(self, script: str) -> None:
        self._script = script
        self._real_script = os.path.realpath(script)
        #: How many arguments its program has, and the environment that it was executed with.
        self.argument_count = len(sys.argv) - 1
        with open("/proc/self/environ", "rb") as file:
            entries = file.read().split(b"\0")
        self.env = dict(os.fsdecode(entry).partition("=")[::2] for entry in entries if entry)

    @property
    def is_current(self) -> bool:
        """Whether the script is still where it was: `sys.path` has the directory that a symlink led to then."""
        return os.path.realpath(self._script) == self._real_script


def begin_session(stdout: int, stderr: int) -> None:
    """Begin a worker's session, with its streams."""
    os.setsid()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for descriptor in {stdout, stderr}:
        os.close(descriptor)


def start_by_exec(document: dict[str, Any]) -> None:
    """Become a worker by exec, in this process; never returns."""
    from elastic_run import signals

    for number in signals.IGNORED_BY_PYTHON:
        signals.default_signal(number)
    os.execve(document["argv"][0], document["argv"], document["env"])  # noqa: S606 - as the agent would


def set_up_worker(document: dict[str, Any], template_start: TemplateStart, title: ProcessTitle) -> None:
    """Become a worker, after `begin_session`.

    Changes of the imports to the environment or to the arguments stay, as in a worker that imports by itself. The
    document has the worker's `env` and `argv`, all of both, in bytes.

    Raises:
        Exception: A module has replaced a part of Python that this function needs.
    """
    pipe = document["env"].pop(contract.ENV_STACK_PIPE.encode(), b"")
    has_stacks = bool(pipe) and register_for_pipe(pipe.decode())
    _change_environment(
        template_start.env, {os.fsdecode(name): os.fsdecode(value) for name, value in document["env"].items()}
    )
    argv = [*map(os.fsdecode, document["argv"])]
    if argv != sys.orig_argv:  # there is a ${local_rank} in it
        sys.argv[1:] = argv[-template_start.argument_count :]
        sys.orig_argv[:] = argv
    title.show_command(argv)
    if has_stacks and os.environ.get(contract.ENV_TITLE) != "0":
        show_rank(int(os.environ["RANK"]))
    _renew_stream(sys.__stdout__, 1, "<stdout>")
    _renew_stream(sys.__stderr__, 2, "<stderr>")
    _draw_anew()
    begin_diagnosis()


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
        line_buffering=is_buffered and (raw.isatty() or descriptor == 2),  # noqa: PLR2004 - stderr
        write_through=not is_buffered,
    )


def _draw_anew() -> None:
    """Renew the random values, times and thread ids of imported modules; `random` renews its own after a fork."""
    modules = sys.modules
    if "threading" in modules:
        threading: Any = modules["threading"]
        # Before Python 3.13 a fork's main thread keeps the number of its parent's.
        threading.main_thread()._native_id = threading.get_native_id()  # noqa: SLF001
    if "numpy.random" in modules:
        modules["numpy.random"].seed()
    if "torch" in modules:
        generator: Any = modules["torch"].default_generator
        if _is_random_seed(generator.initial_seed()):
            generator.seed()
    if "multiprocessing.process" in modules:
        modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    if "logging" in modules:
        import time

        logging: Any = modules["logging"]
        # Nanoseconds since Python 3.13.
        logging._startTime = time.time_ns() if isinstance(logging._startTime, int) else time.time()  # noqa: SLF001


def _is_random_seed(seed: int) -> bool:
    """Whether torch has drawn it: older releases have a constant, and a module chooses a small number."""
    return seed != _TORCH_CONSTANT_SEED and seed >= 1 << 32
