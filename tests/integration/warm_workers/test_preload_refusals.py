"""Warm workers (`--preload`): what can't be preloaded, and modules that read the environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.launch import ELASTIC_RUN
from tests.support.programs import SAYS_HOW

if TYPE_CHECKING:
    from tests.support.launch import Launch, Worker
    from tests.support.programs import Module


_ROOT = Path(__file__).parents[3]
_HAZARDS = {
    "import nowhere": "heavy can't be imported (ModuleNotFoundError: No module named 'nowhere')",
    "1 / 0": "heavy can't be imported (ZeroDivisionError: division by zero)",
    "import sys; sys.exit(3)": "heavy can't be imported (SystemExit: 3)",
    "raise MemoryError": "heavy can't be imported (MemoryError): ",
    "x =": "heavy can't be imported (SyntaxError: invalid syntax",
    "import threading\nthreading.Thread(target=threading.Event().wait, name='pump', daemon=True).start()": (
        "heavy can't be preloaded: it starts a thread (pump)"
    ),
    # A thread without `threading`, which counts from its first step on.
    "import _thread, time\nlock = _thread.allocate_lock()\nlock.acquire()\n"
    "_thread.start_new_thread(lambda: (lock.release(), time.sleep(60)), ())\nlock.acquire()": (
        "heavy can't be preloaded: it starts a "
    ),
    (
        "import ctypes\nlibc, thread = ctypes.CDLL(None), ctypes.c_ulong()\n"
        "assert not libc.pthread_create(ctypes.byref(thread), None, libc.pause, None)"
    ): "heavy can't be preloaded: it starts a native thread",
    "import socket\ns = socket.create_server(('127.0.0.1', 0))": "heavy can't be preloaded: it leaves a socket open",
    "import asyncio\nloop = asyncio.new_event_loop()": "heavy can't be preloaded: it leaves a ",
    "import os\nends = os.pipe()": "heavy can't be preloaded: it leaves a pipe open (pipe:",
    "import multiprocessing\nlock = multiprocessing.Lock()": "heavy can't be preloaded: it has shared memory or a lock",
    "import os\nrank = os.environ.get('RANK', '0')": "heavy can't be preloaded: it reads RANK, whose value",
    "import subprocess\np = subprocess.Popen(['sleep', '60'])": "heavy can't be preloaded: it starts a process",
}


#: Each second one takes long, for what it adds.
_MARKED = [
    pytest.param(body, told, marks=[pytest.mark.long] * (number % 2))
    for number, (body, told) in enumerate(_HAZARDS.items())
]


@pytest.mark.parametrize(("body", "told"), _MARKED)
def test_a_module_that_cant_be_preloaded_is_named_once(
    body: str, told: str, launch: Launch, worker: Worker, module: Module
) -> None:
    """The user is told the module and the reason in one line, and the job starts cold, also after a restart."""
    path = worker("say('runs', rank, attempt, 'math' in sys.modules)\nsys.exit(attempt == 0)")
    flags = ("--nproc-per-node=2", "--max-restarts=1", "--preload=json,heavy")
    job = launch(*flags, path, env=module(body))
    assert job.wait_exit() == 0
    lines = [line for line in job.stderr.splitlines() if "--preload" in line]
    assert len(lines) == 1, job.stderr
    assert lines[0].startswith(f"elastic-run: --preload: {told}")
    assert lines[0].endswith("workers start cold")
    assert job.stdout.count("runs") in {3, 4}


def test_a_thread_that_comes_later_is_told_too(launch: Launch, worker: Worker, module: Module) -> None:
    """Where the template gets a thread after its imports, the next generation starts cold instead of hanging."""
    env = module(
        "import os, threading\n"
        "def begin(): threading.Thread(target=threading.Event().wait, name='late', daemon=True).start()\n"
        "os.register_at_fork(after_in_parent=begin)"
    )
    job = launch("--max-restarts=1", "--preload=heavy", worker(SAYS_HOW + "sys.exit(attempt == 0)"), env=env)
    assert job.wait_exit() == 0
    assert job.stdout == "warm 0 0\ncold 0 1\n"
    assert "--preload: the template can't be forked any more: it starts a thread (late)" in job.stderr


def test_a_gpu_in_the_template_is_refused(launch: Launch, worker: Worker, module: Module) -> None:
    """A module that has initialised CUDA, as torch tells, is named for that, and not for the driver's threads."""
    thread = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    env = module(f"{thread}import torch\ntorch.cuda.is_initialized = lambda: True")
    job = launch("--preload=heavy", worker("say('runs')"), env=env)
    assert job.wait_exit() == 0
    assert "--preload: heavy can't be preloaded: it initialises CUDA, which a fork doesn't survive" in job.stderr


@pytest.mark.parametrize(
    ("flags", "env", "told"),
    [
        (("--no-python", "/bin/true"), {}, "the workers run /bin/true, which is not the Python of elastic-run"),
        (("script.py",), {"PYTHON_EXEC": "/bin/true"}, "the workers run /bin/true, which is not the Python"),
        (("script${local_rank}.py",), {}, "script${local_rank}.py differs from worker to worker"),
    ],
    ids=["no-python", "PYTHON_EXEC", "macro"],
)
def test_a_command_that_cant_have_warm_workers_is_told(
    flags: tuple[str, ...], env: dict[str, str], told: str, launch: Launch, module: Module, tmp_path: Path
) -> None:
    """One line says why --preload can't apply, and the job runs."""
    for name in ("script.py", "script0.py"):
        (tmp_path / name).touch()
    job = launch("--preload=heavy", *flags, env=module() | env, cwd=tmp_path)
    assert job.wait_exit() == 0
    lines = [line for line in job.stderr.splitlines() if "--preload" in line]
    assert len(lines) == 1
    assert f"--preload=heavy can't apply: {told}" in lines[0]


def test_without_the_start_file_the_script_never_runs_as_a_template(
    launch: Launch, worker: Worker, tmp_path: Path
) -> None:
    """An interpreter that wouldn't become a template isn't started as one: the user is told what to install.

    It would not where the file is in a directory of PYTHONPATH either: Python doesn't read it there.
    """
    shutil.copy(_ROOT / "elastic_run/compat/elastic-run-compat.pth", tmp_path)
    job = launch(
        "--preload=json",
        worker("say('runs')"),
        program=(sys.executable, "-c", _WITHOUT_SITE),
        env={"PYTHONPATH": f"{tmp_path}:{_ROOT}"},
    )
    assert job.wait_exit() == 0
    assert job.stdout == "runs\n"
    assert "install elastic-run into" in job.stderr


#: Runs the launcher as if its environment had no .pth file of ours.
_WITHOUT_SITE = """
import sys
sys.path = [path for path in sys.path if not path.endswith("-packages")]
from elastic_run.__main__ import main
main()
"""


def test_a_wrong_list_is_refused(launch: Launch, worker: Worker) -> None:
    """A name that no module can have is bad input: one line, exit code 2."""
    job = launch("--preload=torch,,numpy", worker(""))
    assert job.wait_exit() == 2
    assert job.stderr == "elastic-run: error: --preload: 'torch,,numpy' is not a list of modules (torch,numpy)\n"


@pytest.mark.parametrize("variable", ["nonsense", "999"])
def test_what_cant_become_a_template_doesnt_run_the_script_either(variable: str, worker: Worker) -> None:
    """A process that was meant to be a template and can't be one ends, with a line; it is never a worker of its own."""
    command = [sys.executable, "-u", str(worker("say('runs')"))]
    env = {**os.environ, "ELASTIC_RUN_TEMPLATE": variable, "RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("elastic-run: no template: ")


# --- what reads the environment at Python's own start, or when modules are imported -----------------------------------
_START_FILE = _ROOT / "elastic_run/compat/elastic-run-compat.pth"
_READ = "import builtins, os\nbuiltins.SEEN = os.environ.get('RANK')\n"
#: Says what Python's own start has seen, and the truth.
_SAYS_SEEN = "import builtins\nsay(builtins.SEEN == str(rank), 'json.tool' in sys.modules)\nsys.exit(attempt == 0)"
_READS = "it reads RANK, whose value differs from worker to worker"


@pytest.fixture
def interpreter(tmp_path: Path) -> tuple[Path, Path]:
    """Make an environment of Python that has elastic-run; return its interpreter and its directory of packages."""
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    (packages,) = home.glob("lib/python*/site-packages")
    shutil.copy(_START_FILE, packages)
    (packages / "_root.pth").write_text(f"{_ROOT}\n", encoding="utf-8")
    return home / "bin" / "python", packages


@pytest.mark.parametrize(
    ("files", "place"),
    [
        ({"sitecustomize.py": _READ}, "sitecustomize"),
        ({"sitecustomize.py": "import cluster", "cluster.py": _READ}, "cluster"),
        ({"zz.pth": _READ.replace("\n", "; ")}, "site"),
    ],
    ids=["sitecustomize", "its module", "a later .pth"],
)
def test_a_rank_that_python_s_own_start_reads_is_right(
    files: dict[str, str], place: str, launch: Launch, worker: Worker, interpreter: tuple[Path, Path]
) -> None:
    """RANK that sitecustomize or a later .pth file has read is right in each worker and round; one line says why."""
    python, packages = interpreter
    # Debian's Python has a sitecustomize of its own, which comes before the one of an environment.
    first = packages.parent / "first"
    first.mkdir()
    for name, text in files.items():
        ((packages if name.endswith(".pth") else first) / name).write_text(text, encoding="utf-8")
    flags = ("--nproc-per-node=2", "--max-restarts=1", "--min-uptime=0", "--preload=json.tool")
    job = launch(*flags, worker(_SAYS_SEEN), program=(str(python), *ELASTIC_RUN[1:]), env={"PYTHONPATH": str(first)})
    assert job.wait_exit() == 0, job.stderr
    assert set(job.stdout.splitlines()) == {"True False"}
    told = f"Python's own start can't be preloaded (sitecustomize, a .pth file): {_READS} (in {place})"
    assert [line for line in job.stderr.splitlines() if "--preload" in line] == [
        f"elastic-run: --preload: {told}: workers start cold"
    ]


def test_a_users_start_that_reads_nothing_of_the_workers_is_preloaded(
    launch: Launch, worker: Worker, interpreter: tuple[Path, Path]
) -> None:
    """Hooks that read other variables, before and after elastic-run's own, leave workers warm."""
    python, packages = interpreter
    (packages / "aa.pth").write_text("import os; os.environ.get('HOME'); print('once')\n", encoding="utf-8")
    body = "import os, subprocess\nsubprocess.run(['true'], env={**os.environ, 'LC_ALL': 'C'}, check=True)\n"
    (packages / "sitecustomize.py").write_text(body, encoding="utf-8")
    job = launch(
        "--preload=json.tool", worker(SAYS_HOW.replace("heavy", "json.tool")), program=(str(python), *ELASTIC_RUN[1:])
    )
    assert job.wait_exit() == 0, job.stderr
    assert [line for line in job.stdout.splitlines() if line != "once"] == ["warm 0 0"]
    assert "start cold" not in job.stderr


def test_what_python_s_own_start_leaves_open_is_told(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """A connection that sitecustomize keeps isn't shared by all workers: the user is told, and they start cold."""
    (tmp_path / "sitecustomize.py").write_text("import socket\nkept = socket.socket()\n", encoding="utf-8")
    env = {"PYTHONPATH": f"{tmp_path}:{_ROOT}"}
    job = launch("--preload=json.tool", worker("say('json.tool' in sys.modules)"), env=env)
    assert job.wait_exit() == 0
    assert job.stdout == "False\n"
    assert "Python's own start can't be preloaded (sitecustomize, a .pth file): it leaves a socket open" in job.stderr


@pytest.mark.parametrize("name", ["LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"])
@pytest.mark.parametrize("read", ["os.environ.get({!r})", "{!r} in os.environ", "os.environb.get({!r}.encode())"])
def test_each_variable_of_a_worker_s_own_is_watched(
    name: str, read: str, launch: Launch, worker: Worker, module: Module
) -> None:
    """A module that reads at import what only a worker has is named."""
    job = launch("--preload=heavy", worker(SAYS_HOW), env=module(f"import os\nvalue = {read.format(name)}"))
    assert job.wait_exit() == 0
    assert job.stdout == "cold 0 0\n"
    assert (
        f"heavy can't be preloaded: it reads {name}, whose value differs from worker to worker (in heavy)" in job.stderr
    )


@pytest.mark.parametrize(("flags", "how"), [((), "warm"), (("--virtual-local-rank",), "cold")])
def test_devices_are_a_worker_s_own_with_virtual_local_ranks(
    flags: tuple[str, ...], how: str, launch: Launch, worker: Worker, module: Module
) -> None:
    """CUDA_VISIBLE_DEVICES may be read at import, unless each worker has its own."""
    env = module("import os\ndevices = os.environ.get('CUDA_VISIBLE_DEVICES')")
    job = launch("--preload=heavy", *flags, worker(SAYS_HOW), env=env)
    assert job.wait_exit() == 0
    assert job.stdout == f"{how} 0 0\n"
    assert ("it reads CUDA_VISIBLE_DEVICES, whose value differs from worker to worker" in job.stderr) == (how == "cold")


@pytest.mark.parametrize(
    "body",
    [
        "import subprocess\nsubprocess.run(['true'], env={**os.environ, 'LC_ALL': 'C'}, check=True)",
        "proxies = {name: value for name, value in os.environ.items() if name.endswith('_proxy')}",
        "os.environ['NEW'] = 'value'\ndel os.environ['NEW']",
        pytest.param("import torch, numpy, torch.utils.data, torch.distributed.fsdp, networkx", marks=pytest.mark.long),
    ],
)
def test_other_reads_of_the_environment_are_no_hazard(
    body: str, launch: Launch, worker: Worker, module: Module
) -> None:
    """What goes through the environment at import, for a child of its own or for a few names, is preloaded."""
    job = launch("--preload=heavy", worker(SAYS_HOW), env=module(f"import os\n{body}"))
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "warm 0 0\n", job.stderr


def test_the_environment_is_itself_again_in_a_worker(launch: Launch, worker: Worker, module: Module) -> None:
    """Nothing watches a worker's own reads, and its copies are whole."""
    path = worker("say(os.environ.encodekey.__module__, dict(os.environ)['RANK'], *sorted(os.environ))")
    cold, warm = (launch(*flags, path, env=module("")) for flags in ((), ("--preload=heavy",)))
    assert [cold.wait_exit(), warm.wait_exit()] == [0, 0]
    assert warm.stdout == cold.stdout
    assert cold.stdout.startswith("os 0 ")
