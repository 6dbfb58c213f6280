"""Programs on `elastic_run.compat`: torch's names, whichever way they are imported."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import elastic_run
from tests.support.launch import clean_environment
from tests.support.torch_python import PTH, VARIABLE, run

if TYPE_CHECKING:
    from tests.support.launch import Launch, Worker


WORKER = """
import os, sys
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint._experimental.barriers
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.utils.data import ElasticDistributedSampler

@record
def main():
    import elastic_run
    assert record is elastic_run.record
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    dcp.save({"model": model.state_dict()}, checkpoint_id=sys.argv[1])
    dcp.load({"model": model.state_dict()}, checkpoint_id=sys.argv[1])
    # Not async_save: a worker that has called it hangs at its end once in a while, whoever started it.
    assert dcp.async_save
    assert dist.is_torchelastic_launched()
    os.write(1, f"rank {dist.get_rank()} is done\\n".encode())
    # If DDP were the last to let the group go, it would wait for gloo's thread, which may wait for Python: for ever.
    del model
    dist.destroy_process_group()

import elastic_run.compat
assert elastic_run.compat.is_installed()
main()
"""


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment with the wheel's .pth file, on top of that of the tests."""
    root = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True)
    (site,) = root.glob("lib/python*/site-packages")
    # As plain paths: the .pth files in them are not read again.
    places = [Path(torch.__file__).parents[1], PTH.parents[2]]
    (site / "a_base.pth").write_text("".join(f"{place}\n" for place in places), encoding="utf-8")
    for pth in (PTH, Path(__file__).parents[2] / "support" / "elastic-run-tests.pth"):
        shutil.copy(pth, site)
    return root / "bin" / "python"


def test_without_the_variable_the_pth_file_imports_nothing(environment: Path) -> None:
    """The wheel's .pth file costs a start of Python no import; 0 is the same as nothing."""
    for value in (None, "0", ""):
        code = "import sys; print([name for name in sys.modules if name.startswith('elastic_run.compat.')])"
        done = run(environment, "-c", code, env={"ELASTIC_RUN_COMPAT": value})
        assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_value_that_is_neither_is_told(environment: Path) -> None:
    """Whatever else the variable says is told in one line, and changes nothing."""
    done = run(environment, "-c", "import elastic_run.compat as c; print(c.is_installed())", env={VARIABLE: "yes"})
    assert done.stdout == "False\n"
    assert done.stderr == "elastic-run: ELASTIC_RUN_COMPAT: 'yes' is neither 1 nor 0: it counts as 0\n"


@pytest.mark.long
def test_with_the_variable_torchs_command_is_ours(environment: Path) -> None:
    """`python -m torch.distributed.run` and torch's own script `torchrun` run elastic-run."""
    script = "import sys; from torch.distributed.run import main; sys.exit(main())"
    for command in (["-m", "torch.distributed.run"], ["-c", script]):
        done = run(environment, *command, "--version", env={VARIABLE: "1"})
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"elastic-run {elastic_run.__version__}\n"


@pytest.mark.long
def test_workers_under_the_variable_train_and_save(environment: Path, launch: Launch, tmp_path: Path) -> None:
    """Workers that torch's own command starts can use DDP, checkpoints and `record`."""
    (tmp_path / "train.py").write_text(WORKER, encoding="utf-8")
    words = ("--nproc-per-node=2", "--preload=torch._dynamo,torch.distributed.checkpoint", tmp_path / "train.py")
    program = [str(environment), "-m", "torch.distributed.run"]
    job = launch(*words, tmp_path / "saved", program=program, env={VARIABLE: "1"}, cwd=tmp_path)
    assert job.wait_exit(deadline=100) == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == ["rank 0 is done", "rank 1 is done"]


SHOW = """
import os, subprocess, sys
from torch.distributed.elastic.multiprocessing.errors import record
import elastic_run.compat
print(record.__module__.partition(".")[0], __name__, sys.argv[1:], os.path.basename(sys.argv[0]), flush=True)
code = "import sys; print([name for name in sys.modules if name.startswith('elastic_run.compat.')] != [])"
subprocess.run([sys.executable, "-c", code], check=True)
"""


@pytest.mark.long
def test_a_program_is_run_as_python_would_run_it(environment: Path, tmp_path: Path) -> None:
    """`python -m elastic_run.compat` runs a script, a module and a command in a process with torch's paths changed."""
    (tmp_path / "mine.py").write_text(SHOW, encoding="utf-8")
    command = environment.with_name("my-command")
    command.write_text(f"#!{environment}\n{SHOW}", encoding="utf-8")
    command.chmod(0o755)
    for words, name in (
        (["mine.py"], "mine.py"),
        (["-m", "mine"], "mine.py"),
        (["my-command"], "my-command"),
    ):
        done = run(environment, "-m", "elastic_run.compat", *words, "-x", "--children", cwd=tmp_path)
        assert done.stdout == f"elastic_run __main__ ['-x', '--children'] {name}\nFalse\n", done.stderr


@pytest.mark.long
def test_children_of_a_program_are_changed_on_request(environment: Path, tmp_path: Path) -> None:
    """With `--children` the Python processes that the program starts have torch's paths changed as well."""
    (tmp_path / "mine.py").write_text(SHOW, encoding="utf-8")
    done = run(environment, "-m", "elastic_run.compat", "--children", "mine.py", cwd=tmp_path)
    assert done.stdout == "elastic_run __main__ [] mine.py\nTrue\n", done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "no program given (see --help)"),
        (["--child"], 2, "'--child' is not a program (see --help)"),
        (["-m"], 2, "'-m' is not a program (see --help)"),
        (["no-such-program"], 127, "'no-such-program' is neither a script nor a command"),
        (["./no-such-program"], 127, "'./no-such-program' is neither a script nor a command"),
        (["sh"], 2, "is not a Python program; with ELASTIC_RUN_COMPAT=1 set its Python children change too"),
        (["--install-torchrun"], 2, "--install-torchrun takes one directory"),
        (["--install-torchrun", ""], 2, "--install-torchrun takes one directory"),
        (["--install-torchrun", "a:b"], 2, "--install-torchrun: 'a:b' can't stand on PATH: it has a ':'"),
    ],
)
def test_bad_words_get_one_line(words: list[str], code: int, said: str) -> None:
    """What can't be run is told in one line that names it."""
    done = run(Path(sys.executable), "-m", "elastic_run.compat", *words)
    assert done.returncode == code
    assert done.stderr.startswith("elastic_run.compat: error: ")
    assert done.stderr.endswith(f"{said}\n")
    assert done.stderr.count("\n") == 1


def test_a_torchrun_of_ours_is_found_before_torchs(tmp_path: Path) -> None:
    """`--install-torchrun DIR` writes a torchrun that runs elastic-run where DIR comes first; again is fine."""
    directory = tmp_path / "with blank" / "bin"
    for _ in range(2):
        done = run(Path(sys.executable), "-m", "elastic_run.compat", "--install-torchrun", str(directory))
        assert done.returncode == 0, done.stderr
        assert str(directory / "torchrun") in done.stdout
    path = os.pathsep.join([str(directory), str(Path(sys.executable).parent), os.environ["PATH"]])
    # A module of the working directory must not hide one of the launcher's.
    (tmp_path / "elastic_run.py").write_text("raise SystemExit('hidden')", encoding="utf-8")
    done = subprocess.run(
        ["sh", "-c", "torchrun --version"],
        check=False,
        capture_output=True,
        text=True,
        env=clean_environment({"PATH": path}),
        cwd=tmp_path,
    )
    assert done.stdout == f"elastic-run {elastic_run.__version__}\n", done.stderr


def test_a_foreign_torchrun_is_not_overwritten(tmp_path: Path) -> None:
    """A torchrun that somebody else wrote, torch's above all, stays."""
    (tmp_path / "torchrun").write_text("#!/bin/sh\n", encoding="utf-8")
    done = run(Path(sys.executable), "-m", "elastic_run.compat", "--install-torchrun", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == (
        "elastic_run.compat: error: --install-torchrun: "
        f"{tmp_path / 'torchrun'} exists and is not ours: choose another directory\n"
    )
    assert (tmp_path / "torchrun").read_text(encoding="utf-8") == "#!/bin/sh\n"


def test_a_program_that_does_not_ask_imports_no_multiprocessing(environment: Path) -> None:
    """With the variable, which children have as well, the start of Python pays for no hook."""
    code = "import sys; print('multiprocessing' in sys.modules, 'elastic_run.compat.alias' in sys.modules)"
    assert run(environment, "-c", code, env={VARIABLE: "1"}).stdout == "False True\n"
    assert run(environment, "-c", code).stdout == "False False\n"


# --- wrappers ---------------------------------------------------------------------------------------------------------
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


_TRACERS = {
    "method": """
begin = subprocess.Popen.__init__
@functools.wraps(begin)
def traced(self, *args, **options):
    begin(self, *args, **options)
subprocess.Popen.__init__ = traced
""",
    "class": """
class Traced(subprocess.Popen):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
subprocess.Popen = Traced
""",
}


@pytest.mark.parametrize("kind", ["method", "class"])
def test_a_tracer_that_wraps_popen(launch: Launch, worker: Worker, tmp_path: Path, kind: str) -> None:
    """The user of a tracer that follows `subprocess.Popen` (viztracer) reads that it sees no worker, and what does."""
    program = tmp_path / "tracer.py"
    start = "runpy.run_module('elastic_run', run_name='__main__', alter_sys=True)\n"
    program.write_text(f"import functools, runpy, subprocess\n{_TRACERS[kind]}{start}", encoding="utf-8")
    job = launch("--standalone", worker("say('done')\n"), program=(sys.executable, str(program)))
    assert job.wait_exit() == 0, job.stderr
    assert job.stderr.count("workers start without it; to trace them: elastic-run --no-python viztracer") == 1
