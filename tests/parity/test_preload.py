"""One probe started by exec and forked from a template (`--preload`): what it sees of its process, and how it ends.

What differs from one run to the next by nature is told apart by name; everything else has to be the same.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.launch import ELASTIC_RUN
from tests.support.sessions import free_port

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.launch import Launch

    Observe = Callable[..., list[dict[str, Any]]]

_ROOT = Path(__file__).parents[2]
_PROBE = Path(__file__).with_name("programs") / "process.py"
#: The probe imports them as well, so that the same modules are there in both runs.
_MODULES = "numpy.random,logging,multiprocessing,tempfile,uuid"
_WARM = f"--preload={_MODULES}"
#: Variables that are new in each run.
_NEW_EACH_TIME = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "ELASTIC_RUN_TOKEN")
_WORKERS = 2
#: One node doesn't wait for another.
_QUICK = "--rdzv-conf=last_call_timeout=0.1"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Give a directory with the probe in each form that Python can run."""
    for path in ("script.py", "packaged/worker.py", "packaged/__main__.py", "folder/__main__.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(_PROBE, tmp_path / path)
    (tmp_path / "packaged" / "__init__.py").touch()
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.write(_PROBE, "__main__.py")
    return tmp_path


@pytest.fixture
def observe(launch: Launch, programs: Path) -> Observe:
    """Run the probe, and return what each of its workers has seen."""

    def run(
        *arguments: str, env: dict[str, str] | None = None, shell: str = "", program: tuple[str, ...] = ELASTIC_RUN
    ) -> list[dict[str, Any]]:
        surroundings = ("sh", "-c", f'{shell if "exec nice" in shell else shell + " exec"} "$@"', "sh") if shell else ()
        variables = {"PYTHONUNBUFFERED": None, "PYTHONPATH": str(_ROOT), "PROBE_OUT": str(programs), **(env or {})}
        job = launch(*arguments, env=variables, cwd=programs, program=(*surroundings, *program))
        assert job.wait_exit() == 0, job.stderr
        assert "start cold" not in job.stderr
        paths = [programs / f"{rank}.json" for rank in range(_WORKERS)]
        seen = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        for path in paths:
            path.unlink()
        return seen

    return run


def without_the_new(seen: dict[str, Any]) -> dict[str, Any]:
    """Return what must be the same in each run."""
    seen = {name: value for name, value in seen.items() if name not in {"drawn", "modules"}}
    seen["environment"] = [pair for pair in seen["environment"] if pair[0] not in _NEW_EACH_TIME]
    lines = seen["C environment"].splitlines()
    seen["C environment"] = [line for line in lines if not line.startswith(_NEW_EACH_TIME)]
    return seen


def compare(cold: list[dict[str, Any]], warm: list[dict[str, Any]]) -> None:
    """Check that nothing differs but what was drawn, and that only our own modules are there as well."""
    for executed, forked in zip(cold, warm, strict=True):
        assert without_the_new(forked) == without_the_new(executed)
        more = set(forked["modules"]) - set(executed["modules"])
        assert {name for name in more if name.partition(".")[0] != "elastic_run"} == set()
        assert set(executed["modules"]) <= set(forked["modules"])


@pytest.mark.parametrize(
    "command",
    [
        ("script.py", "a", "${local_rank}"),
        pytest.param(("-m", "packaged.worker", "a b"), marks=pytest.mark.soak),
        pytest.param(("-m", "packaged"), marks=pytest.mark.long),
        pytest.param(("folder", "--x=${local_rank}"), marks=pytest.mark.long),
        pytest.param(("archive.zip",), marks=pytest.mark.long),
        pytest.param(("--run-path", "script.py", "a"), marks=pytest.mark.soak),
    ],
    ids=" ".join,
)
def test_a_forked_worker_is_what_exec_gives(command: tuple[str, ...], observe: Observe) -> None:
    """A script, a module, a package, a directory and a zip file find the same process, in each of two workers."""
    flags, env = ("--nproc-per-node=2", *command), {"PROBE_CHILDREN": "spawn fork"}
    cold, warm = observe(*flags, env=env), observe(_WARM, *flags, env=env)
    compare(cold, warm)
    assert warm[0]["argv"][1:] == [word.replace("${local_rank}", "0") for word in warm[0]["argv"][1:]]
    for source in warm[0]["drawn"]:
        assert warm[0]["drawn"][source] != warm[1]["drawn"][source], f"two workers drew the same from {source}"


@pytest.mark.long
@pytest.mark.parametrize(
    "env",
    [
        {"PYTHONFAULTHANDLER": "1", "PYTHONHASHSEED": "7", "PYTHONWARNINGS": "ignore::UserWarning", "LC_ALL": "C"},
        {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "latin-1:replace", "PYTHONOPTIMIZE": "1", "TZ": "Asia/Kathmandu"},
    ],
    ids=" ".join,
)
def test_pythons_own_variables_hold(env: dict[str, str], observe: Observe) -> None:
    """What variables make of an interpreter holds for a forked worker as well."""
    flags = ("--nproc-per-node=2", "script.py")
    compare(observe(*flags, env=env), observe(_WARM, *flags, env=env))


@pytest.mark.long
@pytest.mark.parametrize(
    "flags",
    [
        ("--tee=0:1,1:3", "--log-dir=logs", "--local-ranks-filter=1"),
        ("--redirects=3", "--log-dir=logs", "--signals-to-handle=SIGTERM,SIGUSR1", "--forward-signals=SIGUSR2"),
        ("--no-capture", "--virtual-local-rank", "--standalone", "--role=trainer", "--max-restarts=3"),
        ("--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-id=7", "--rdzv-endpoint=127.0.0.1:{port}", _QUICK),
    ],
    ids=" ".join,
)
def test_flags_hold(flags: tuple[str, ...], observe: Observe) -> None:
    """Streams, ranks and variables of a forked worker are those that the flags ask for."""
    flags = ("--nproc-per-node=2", *(flag.format(port=free_port()) for flag in flags), "script.py")
    compare(observe(*flags), observe(_WARM, *flags))


@pytest.mark.long
@pytest.mark.parametrize(
    "shell",
    ["umask 027; ulimit -n 300; ulimit -c 0; trap '' HUP USR1; exec nice -n 3", "exec <&- 7</dev/zero 2>&1;"],
)
def test_what_the_launcher_was_started_with_holds(shell: str, observe: Observe) -> None:
    """Limits, umask, ignored signals, priority and closed or merged streams come through the template."""
    flags = ("--nproc-per-node=2", "script.py")
    compare(observe(*flags, shell=shell), observe(_WARM, *flags, shell=shell))


_PROGRAM = """
import sys
from elastic_run import AgentConfig, LaunchConfig, elastic_launch

config = LaunchConfig(1, 1, 2, rdzv_backend="local", agent_config=AgentConfig(preload=sys.argv[1]))
elastic_launch(config, sys.executable)(*sys.argv[2:])
"""


@pytest.mark.long
@pytest.mark.parametrize("options", [(), ("-OOB", "-d")])
def test_any_options_of_python_hold(options: tuple[str, ...], observe: Observe, programs: Path) -> None:
    """Python's own options without a value and buffered streams hold for warm workers through the API too."""
    program = programs / "launch.py"
    program.write_text(_PROGRAM, encoding="utf-8")
    env = {"OMP_NUM_THREADS": "1"}
    cold, warm = (
        observe(preload, *options, "script.py", env=env, program=(sys.executable, str(program)))
        for preload in ("", _MODULES)
    )
    compare(cold, warm)


def test_stdin_is_the_workers(launch: Launch, programs: Path) -> None:
    """A template leaves the launcher's stdin alone: the worker reads all of it."""
    reading, writing = os.pipe()
    os.write(writing, b"first\nsecond\n")
    os.close(writing)
    (programs / "reader.py").write_text("import sys; print(sys.stdin.readlines())", encoding="utf-8")
    job = launch(_WARM, "reader.py", cwd=programs, stdin=reading)
    os.close(reading)
    assert job.wait_exit() == 0
    assert job.stdout == "['first\\n', 'second\\n']\n"


#: Programs that fail, each in its own way. A job restarts through all of them.
_FAILURES = (
    "import sys; sys.exit(3)",
    "import sys; sys.exit(258)",
    "import sys; sys.exit(-1)",
    "import sys; sys.exit('that was it')",
    "import sys; sys.exit(['a', 1])",
    "import sys; sys.exit(True)",
    "def f():\n    raise SystemExit(4)\nf()",
    "import os; os._exit(5)",
    "import atexit, sys; atexit.register(print, 'at exit'); print('unflushed', end=''); sys.exit(6)",
    "def f(x):\n    return 1 / x\n\nf(0)",
    "try:\n    {}['a']\nexcept KeyError as error:\n    raise RuntimeError('outer') from error",
    "e = ValueError('x')\ngetattr(e, 'add_note', print)('a note')\nraise e",
    "raise KeyboardInterrupt",
    "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nsignal.pause()",
    "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nsignal.pause()",
    "import os\nr, w = os.pipe()\nos.close(r)\nos.write(w, b'x')",
    "import os; os.abort()",
    "import faulthandler\nfaulthandler.enable()\nimport ctypes\ndef f():\n    ctypes.string_at(0)\nf()",
    "import nowhere.at_all",
    "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__)\nraise ValueError",
    "import sys\nsys.excepthook = lambda *a: 1 / 0\nraise ValueError(3)",
    "import sys\nsys.setrecursionlimit(60)\ndef f(): f()\nf()",
    "import threading\nthreading.Thread(target=print, args=('thread',)).start()\nraise ValueError(8)",
    "import pdb\npdb.set_trace()\nx = 1",
    "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'import sys; print(7); sys.exit(7)'])",
    "import os\nif not os.fork():\n    raise ValueError('in a child')\nos.wait()\n1 / 0",
)
#: Chooses one of them by the number of restarts.
_CHOOSER = """
import os
name = os.environ["TORCHELASTIC_RESTART_COUNT"] + ".py"
exec(compile(open(name).read(), name, "exec"))
"""
#: What a program may do on its way to a good end.
_HAPPENINGS = """
import atexit, concurrent.futures, dataclasses, logging, multiprocessing, os, pickle, signal, sys, threading, time
import traceback, warnings, weakref

atexit.register(print, "first in, last out")
atexit.register(lambda: 1 / 0)
class Thing: pass
thing = Thing()
weakref.finalize(thing, print, "finalized")

def deep(n):
    deep(n - 1) if n else traceback.print_stack()
def warn(): warnings.warn("deep", stacklevel=5)
def fail(): 1 / 0
def square(x): return x * x
@dataclasses.dataclass
class Point:
    x: int

deep(3)
warn()
warnings.warn("here")
logging.warning("to stderr")
logging.getLogger("a").error("with its stack", stack_info=True)
print(pickle.loads(pickle.dumps(Point(3))), Point.__module__)
try:
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()
except KeyboardInterrupt:
    print("caught")
os.register_at_fork(after_in_child=lambda: print("in child", flush=True))
if not os.fork():
    sys.exit(0)
print(os.wait()[1])
failing = threading.Thread(target=fail)
failing.start()
failing.join()
if __name__ == "__main__":
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        print(list(pool.map(square, range(3))))
def last():
    threading.main_thread().join()
    print("a thread ends last")
threading.Thread(target=last).start()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
sys.stdout.write("no newline")
sys.exit(None)
"""
#: What a program may leave to the end of Python: it never closes its files. The function keeps them in a cycle.
_LEFT_OPEN = """
import atexit, gc, gzip, json, os, tempfile, weakref, zipfile
atexit.unregister(gc.freeze)  # so that the last garbage collection sees all objects
class Note:
    def __del__(self):
        os.write(1, b"note over\\n")
kept = [Note(), open("text", "w"), gzip.open("text.gz", "wt"), zipfile.ZipFile("files.zip", "w")]
scratch = tempfile.NamedTemporaryFile(dir=".")
def main():
    for file in kept[1:3]:
        file.write("kept to the end")
    kept[3].writestr("member", "kept to the end")
    Note.itself = [Note]
main()
"""


@pytest.fixture
def rehearse(launch: Launch, tmp_path: Path) -> Callable[..., list[Any]]:
    """Run `script.py`, and return its exit code, what the launcher tells, and every byte of its streams."""

    def run(*flags: str) -> list[Any]:
        logs = tmp_path / f"logs{len(list(tmp_path.glob('logs*')))}"
        job = launch(*flags, "-r3", f"--log-dir={logs}", "script.py", cwd=tmp_path)
        code = job.wait_exit()
        assert "start cold" not in job.stderr
        streams = {str(path.relative_to(logs)).partition("/")[2]: path for path in sorted(logs.rglob("std*.log"))}
        texts = [[name, _ADDRESS.sub("", path.read_text(encoding="utf-8"))] for name, path in streams.items()]
        told = [line for line in job.stderr.splitlines() if "; restarting" in line]
        return [code, *(_NUMBERS.sub("N", line) for line in told), *sorted(texts)]

    return run


#: Where an object lies, and what else of a crash's report goes by all modules that are there.
_ADDRESS = re.compile(r"0x[0-9a-f]+|\n+Extension modules: .*")
#: A pid, and how long an attempt ran.
_NUMBERS = re.compile(r"pid \d+|[\d.]+ s\b")


@pytest.mark.long
def test_each_failure_is_as_of_an_executed_worker(rehearse: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Exit codes, tracebacks and signals of failing programs are the same, restart after restart."""
    (tmp_path / "script.py").write_text(_CHOOSER, encoding="utf-8")
    for number, program in enumerate(_FAILURES):
        (tmp_path / f"{number}.py").write_text(program, encoding="utf-8")
    flags = (f"--max-restarts={len(_FAILURES) - 1}", "--max-backoff=0")
    cold, warm = rehearse(*flags), rehearse(_WARM, *flags)
    assert len([line for line in cold if isinstance(line, str)]) == len(_FAILURES) - 1
    assert warm == cold


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(_HAPPENINGS, id="happenings"),
        pytest.param("x = 1\nif x\n    pass\n", id="syntax", marks=pytest.mark.long),
        pytest.param("# coding: nonsense\n", id="encoding", marks=pytest.mark.soak),
        pytest.param("", id="empty", marks=pytest.mark.soak),
    ],
)
def test_a_program_runs_as_an_executed_one(program: str, rehearse: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Every byte that a program writes is the same, also in its children, at its exit, and where it can't be read."""
    (tmp_path / "script.py").write_text(program, encoding="utf-8")
    cold = rehearse()
    assert rehearse(_WARM) == cold


def test_a_script_that_vanishes_meanwhile(launch: Launch, tmp_path: Path) -> None:
    """Python's own words say that the script can't be opened, and its exit code is 2."""
    script = tmp_path / "script.py"
    (tmp_path / "remover.py").write_text(f"import os\nos.remove({str(script)!r})", encoding="utf-8")
    script.touch()
    env = {"PYTHONPATH": f"{tmp_path}:{_ROOT}"}
    job = launch("--preload=remover", script, env=env)
    assert job.wait_exit() == 2
    assert f"can't open file '{script}': [Errno 2] No such file or directory" in job.stderr


@pytest.mark.parametrize("ending", ["", "1 / 0", "import sys; sys.exit(3)"])
def test_what_a_program_leaves_open_is_finished(launch: Launch, tmp_path: Path, ending: str) -> None:
    """Files that nobody closes are whole at the end, temporary ones are gone, and finalizers have run."""
    found = []
    for flags in ((), ("--preload=json",)):
        place = tmp_path / f"place{len(flags)}"
        place.mkdir()
        (place / "script.py").write_text(_LEFT_OPEN + ending, encoding="utf-8")
        job = launch(*flags, "script.py", cwd=place)
        code = job.wait_exit()
        assert "start cold" not in job.stderr
        with gzip.open(place / "text.gz", "rt") as text, zipfile.ZipFile(place / "files.zip") as files:
            contents = [(place / "text").read_text(), text.read(), files.read("member").decode()]
        names = sorted(path.name for path in place.iterdir())
        found.append([code, job.stdout, contents, names])
    assert found[1] == found[0]
    assert found[0][1:3] == ["note over\n", ["kept to the end"] * 3]
