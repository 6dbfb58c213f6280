"""Programs that run the command as their `__main__`, as profilers and tracers do, and want something of their own."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]

_RUN = """
try:
    runpy.run_module("elastic_run", run_name="__main__", alter_sys=True)
finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    print("ticks", ticks, flush=True)
"""
#: A handler in Python, and one in C that Python knows nothing of: abs() of the C library.
_HANDLERS = {
    "python": """
import runpy, signal, sys
ticks = 0
def tick(number, frame):
    global ticks
    ticks += 1
signal.signal(signal.{name}, tick)
""",
    "c": """
import ctypes, runpy, signal, sys
ticks = "uncounted"
library = ctypes.CDLL(None)
library.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
library.signal(signal.{name}, ctypes.cast(library.abs, ctypes.c_void_p))
""",
}
#: The agent gets the signal while it starts, while the workers run, and from one of them.
_WORKER = """
for _ in range(3):
    os.kill(os.getppid(), signal.{name})
    time.sleep(0.05)
say("done")
"""


@pytest.mark.parametrize("handler", ["python", "c"])
@pytest.mark.parametrize("name", ["SIGALRM", "SIGPROF", "SIGUSR1", "SIGWINCH"])
def test_a_signal_of_the_program_around_it(
    launch: Launch, worker: Worker, tmp_path: Path, handler: str, name: str
) -> None:
    """A signal that no flag names goes to the handler that was there first, in Python or in C, and stops nothing."""
    program = tmp_path / "wrapper.py"
    timer = "signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)" if name == "SIGALRM" else ""
    program.write_text(_HANDLERS[handler].format(name=name) + timer + _RUN, encoding="utf-8")
    job = launch("--nproc-per-node=2", worker(_WORKER.format(name=name)), program=(sys.executable, str(program)))
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout.count("done") == 2
    assert name not in job.stderr
    ticks = job.stdout.partition("ticks ")[2]
    assert ticks == "uncounted\n" if handler == "c" else int(ticks) >= 1


def test_a_signal_that_a_flag_names(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """A flag that names the signal takes it from the handler that was there first."""
    program = tmp_path / "wrapper.py"
    program.write_text(_HANDLERS["python"].format(name="SIGUSR1") + _RUN, encoding="utf-8")
    flags = ("--standalone", "--signals-to-handle=SIGUSR1")
    job = launch(*flags, worker("say('ready')\nsignal.pause()\n"), program=(sys.executable, str(program)))
    job.wait_line("ready")
    job.send(signal.SIGUSR1)
    assert job.wait_exit() == 138
    assert job.stdout.endswith("ticks 0\n")


def test_a_child_of_the_program_around_it(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """A handler of SIGCHLD in the program around the launcher goes on to hear of every child."""
    program = tmp_path / "wrapper.py"
    program.write_text(_HANDLERS["python"].format(name="SIGCHLD") + _RUN, encoding="utf-8")
    job = launch("--standalone", worker("sys.exit(3)"), program=(sys.executable, str(program)))
    assert job.wait_exit() == 3, job.stderr
    assert int(job.stdout.partition("ticks ")[2]) >= 1


_TRACER = """
import functools, runpy, subprocess, sys
def start(program):
    return [program[0], "-c", "import runpy, sys; print('traced', flush=True); sys.argv = sys.argv[1:];"
            "runpy.run_path(sys.argv[0], run_name='__main__')", *program[2:]]
"""
_WRAPPED = {
    "method": """
begin = subprocess.Popen.__init__
@functools.wraps(begin)
def traced(self, args, **options):
    begin(self, start(args), **options)
subprocess.Popen.__init__ = traced
""",
    "class": """
class Traced(subprocess.Popen):
    def __init__(self, args, **options):
        super().__init__(start(args), **{**options, "env": {**options["env"], "TRACED": "yes"}})
subprocess.Popen = Traced
""",
}


@pytest.mark.parametrize("kind", ["method", "class"])
def test_a_tracer_that_wraps_popen(launch: Launch, worker: Worker, tmp_path: Path, kind: str) -> None:
    """A tracer that changes the commands of `subprocess.Popen` (viztracer) traces each worker."""
    program = tmp_path / "tracer.py"
    code = _TRACER + _WRAPPED[kind] + "runpy.run_module('elastic_run', run_name='__main__', alter_sys=True)\n"
    program.write_text(code, encoding="utf-8")
    path = worker("say('rank', rank, sys.argv[1:], os.environ.get('TRACED'))\n")
    job = launch("--nproc-per-node=2", path, "word", program=(sys.executable, str(program)))
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout.count("traced") == 2
    assert f"rank 1 ['word'] {'yes' if kind == 'class' else None}" in job.stdout
