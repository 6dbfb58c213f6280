"""Warm workers (`--preload`): what the user is told, what happens when a template dies, and that nothing is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.test_imports import imported_before_the_last_worker
from tests.support.processes import catches, children_of, descendants_of, is_gone, wait_gone
from tests.support.sessions import free_port
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]
    Module = Callable[..., dict[str, str]]

_ROOT = Path(__file__).parents[2]
#: Keeps a template waiting, until the test opens the gate.
_SLOW = "import os\nopen(os.environ['GATE']).read()\n"
#: In the first attempt the others fail when the gate is opened; rank 0, told to stop, goes when it is opened again.
_ENDS_AT_THE_GATE = (
    "if attempt == 0 and rank == 0:\n"
    "    signal.signal(signal.SIGTERM, lambda *_: say('stopping'))\n"
    "    say('there')\n    signal.pause()\n    open(os.environ['GATE']).read()\n    sys.exit(0)\n"
    "if attempt == 0: open(os.environ['GATE']).read(); sys.exit(1)\n"
)
_SAYS_HOW = "say('warm' if 'heavy' in sys.modules else 'cold', rank, attempt)\n"


@pytest.fixture
def module(tmp_path: Path) -> Module:
    """Write the module `heavy`, and return the variables with which it can be imported."""

    def write(body: str = "") -> dict[str, str]:
        directory = tmp_path / "modules"
        directory.mkdir(exist_ok=True)
        (directory / "heavy.py").write_text(textwrap.dedent(body), encoding="utf-8")
        return {"PYTHONPATH": f"{directory}:{_ROOT}", "GATE": str(tmp_path / "gate"), "OMP_NUM_THREADS": "1"}

    os.mkfifo(tmp_path / "gate")
    return write


def title_of(pid: int) -> str:
    """Return a process's command line as `ps` shows it."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").rstrip("\0").replace("\0", " ")
    except OSError:
        return ""


def wait_titled(launcher: int, title: str, count: int = 1) -> list[int]:
    """Wait until so many descendants of a launcher have a title; return their pids."""

    def find() -> list[int]:
        return [pid for pid in descendants_of(launcher) if title_of(pid) == title]

    return wait_until(lambda: len(found := find()) == count and found, what=f"{count} x {title!r}") or []


def wait_template(launcher: int) -> int:
    """Wait for a launcher's template; return its pid."""
    return wait_titled(launcher, "elastic-run: template")[0]


# --- what it is for ----------------------------------------------------------------------------------------------


def test_a_module_is_imported_once_for_all_workers_and_restarts(
    launch: Launch, worker: Worker, module: Module, tmp_path: Path
) -> None:
    """Four workers in three rounds come from one import; each has the module before its first line."""
    env = module("import os\nopen(os.environ['COUNT'], 'a').write('x')")
    env["COUNT"] = str(tmp_path / "count")
    path = worker(_SAYS_HOW + "if attempt < 2: sys.exit(9) if rank == 3 else signal.pause()")
    job = launch("--nproc-per-node=4", "--max-restarts=2", "--preload=heavy", path, env=env)
    assert job.wait_exit() == 0
    said = set(job.stdout.splitlines())  # some were stopped before they could say anything
    assert {f"warm 3 {attempt}" for attempt in range(3)} | {f"warm {rank} 2" for rank in range(4)} <= said
    assert not [line for line in said if not line.startswith("warm")]
    assert (tmp_path / "count").read_text() == "x"


def test_the_variable_asks_for_it_too(launch: Launch, worker: Worker, module: Module) -> None:
    """PET_PRELOAD stands in for the flag."""
    job = launch(worker(_SAYS_HOW), env=module() | {"PET_PRELOAD": "heavy"})
    assert job.wait_exit() == 0
    assert job.stdout == "warm 0 0\n"


def test_a_program_launches_warm_workers(launch: Launch, worker: Worker, module: Module, tmp_path: Path) -> None:
    """`LaunchConfig.preload` is for programs; a function is told that it is not for functions."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom elastic_run import LaunchConfig, elastic_launch\n"
        "config = LaunchConfig(1, 1, 2, rdzv_backend='local', preload='heavy')\n"
        "if __name__ == '__main__':\n"
        f"    elastic_launch(config, sys.executable)('-u', {str(worker(_SAYS_HOW))!r})\n"
        "    elastic_launch(config, print)()\n",
        encoding="utf-8",
    )
    job = launch(program=(sys.executable, str(program)), env=module())
    assert job.wait_exit() == 0, job.stderr
    assert sorted(job.stdout.split("\n"))[-2:] == ["warm 0 0", "warm 1 0"]
    assert "--preload=heavy can't apply: functions are no commands" in job.stderr


def test_what_an_import_prints_is_not_lost(launch: Launch, worker: Worker, module: Module) -> None:
    """Output of imports goes to the launcher's stderr, once; no worker's stdout has it."""
    env = module("import sys, warnings\nprint('a banner')\nwarnings.warn('a warning')\nsys.stderr.write('an error\\n')")
    job = launch("--nproc-per-node=3", "--preload=heavy", worker("import heavy"), env=env)
    assert job.wait_exit() == 0
    assert job.stdout == ""
    assert [job.stderr.count(text) for text in ("a banner", "UserWarning: a warning", "an error")] == [1, 1, 1]


def test_what_an_import_sets_in_the_environment_stays(launch: Launch, worker: Worker, module: Module) -> None:
    """A module sets, changes and takes away variables when it is imported; a worker has that, cold or warm."""
    env = module("""
        import os
        os.environ["SET"] = os.environ["CHANGED"] = "by the module"
        del os.environ["TAKEN"]
    """) | {"CHANGED": "before", "TAKEN": "before"}
    path = worker("import heavy\nsay({name: os.environ.get(name) for name in ('SET', 'CHANGED', 'TAKEN', 'RANK')})")
    cold, warm = (launch(*flags, path, env=env) for flags in ((), ("--preload=heavy",)))
    assert [cold.wait_exit(), warm.wait_exit()] == [0, 0]
    assert warm.stdout == cold.stdout
    assert warm.stdout.count("by the module") == 2


def test_what_an_import_does_to_the_arguments_stays(launch: Launch, worker: Worker, module: Module) -> None:
    """A module takes its own argument away and adds another; a worker's script has that, cold or warm."""
    env = module("import sys\nsys.argv.remove('--its')\nsys.argv += ['--added', '--other']")
    path = worker("import heavy\nsay(sys.argv)")
    cold, warm = (launch(*flags, path, "--its", "own", env=env) for flags in ((), ("--preload=heavy",)))
    assert [cold.wait_exit(), warm.wait_exit()] == [0, 0]
    assert warm.stdout == cold.stdout == f"{[str(path), 'own', '--added', '--other']}\n"


def test_auto_takes_the_large_modules_of_others(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """Numpy is taken, also from inside a `try`; what lies beside the script, or is for type checkers, is not."""
    (tmp_path / "beside.py").write_text("x = b'" + "x" * (5 << 20) + "'", encoding="utf-8")
    path = worker(
        "known = set(sys.modules)\nimport json, beside\n"
        "if TYPE_CHECKING := False:\n    import torch\n"
        "try:\n    from numpy import array\nexcept ImportError: pass\n"
        "def later():\n    import hypothesis\n"
        "say([name for name in ('numpy', 'json', 'beside', 'torch', 'hypothesis') if name in known])"
    )
    job = launch("--preload=auto", path)
    assert job.wait_exit() == 0
    assert job.stdout == "['numpy']\n"


def test_auto_says_nothing_where_there_is_nothing_to_take(launch: Launch, worker: Worker) -> None:
    """A script without large modules starts as without the flag."""
    job = launch("--preload=auto", worker("import json\nsay(len(sys.modules) > 0)"))
    assert job.wait_exit() == 0
    assert (job.stdout, job.stderr) == ("True\n", "")


def test_more_workers_than_descriptors_go_in_one_message(launch: Launch, worker: Worker, module: Module) -> None:
    """The kernel passes 253 descriptors at once; 260 workers are forked all the same."""
    job = launch("--nproc-per-node=260", "--preload=heavy", worker(_SAYS_HOW), env=module())
    assert job.wait_exit(deadline=90) == 0
    assert job.stdout.count("warm") == 260


def test_nodes_of_one_job_have_warm_workers_each(launch: Launch, worker: Worker, module: Module) -> None:
    """Two nodes restart together, warm; a third one makes them start again, warm."""
    env = module()
    path = worker(_SAYS_HOW + "world = os.environ['WORLD_SIZE']\nsay('world', world)\n"
                  "if world == '2' and attempt == 0: sys.exit(3) if rank == 1 else signal.pause()\n"
                  "if world == '2': signal.pause()\n")  # fmt: skip
    meeting = ("--nnodes=2:3", "--rdzv-backend=c10d", "--rdzv-id=j", f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    flags = (*meeting, "--max-restarts=1", "--scale-up-delay=0", "--rdzv-conf=last_call_timeout=0.2", "--preload=heavy")
    first = launch(*flags, path, env=env)
    second = launch(*flags, path, env=env)
    first.wait_line("warm . 1")
    second.wait_line("warm . 1")
    third = launch(*flags, path, env=env)
    assert [job.wait_exit() for job in (first, second, third)] == [0, 0, 0]
    assert "cold" not in first.stdout + second.stdout + third.stdout
    assert "world 3" in first.stdout


def test_workers_share_memory_and_the_launcher_tells_how_much(launch: Launch, worker: Worker, module: Module) -> None:
    """What a module has built isn't copied into four workers, even when they collect garbage; one line says so."""
    env = module("data = [[number] for number in range(400_000)]")
    path = worker("import gc, heavy\ngc.collect()\nsignal.pause()")
    job = launch("--nproc-per-node=4", "--preload=heavy", path, env=env)
    told = job.wait_line(r"--preload: 4 warm workers and the template share memory: (\d+) MB saved so far")
    job.send(signal.SIGTERM)
    assert job.wait_exit() == 128 + signal.SIGTERM
    assert int(told[1]) > 60


def test_a_worker_pays_for_no_hook(launch: Launch, worker: Worker, module: Module) -> None:
    """What stopped the template before the script isn't called at each of the worker's events."""
    path = worker(
        "from elastic_run.multiprocessing.warm import template\n"
        "template._Hook.__call__ = lambda *_: say('called')\nsys.audit('anything')\nsay('over')"
    )
    job = launch("--preload=heavy", path, env=module())
    assert job.wait_exit() == 0
    assert job.stdout == "over\n"


def test_torch_reduces_in_warm_workers_round_after_round(launch: Launch, worker: Worker) -> None:
    """Torch is there before the script's first line, with a seed for each worker; gloo meets again after a death."""
    path = worker("""
        warm = "torch" in sys.modules
        import torch, torch.distributed as dist
        seed = torch.initial_seed()
        dist.init_process_group("gloo")
        total = torch.full((3,), rank + 1.0) @ torch.ones(3)
        dist.all_reduce(total)
        say(warm, seed, total.item(), attempt)
        dist.barrier()
        if attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else signal.pause()
        dist.destroy_process_group()
    """)
    job = launch("--nproc-per-node=2", "--max-restarts=1", "--preload=torch", path)
    assert job.wait_exit(deadline=100) == 0, job.stderr
    lines = [line.split() for line in job.stdout.splitlines()]
    assert sorted([warm, total, attempt] for warm, _, total, attempt in lines) == [["True", "9.0", n] for n in "0011"]
    seeds = {seed for _, seed, _, _ in lines}
    assert len(seeds) == 4 or seeds == {"67280421310721"}  # the same for every process in older releases


# --- keeping warm between rounds -----------------------------------------------------------------------------------


def test_the_next_generation_waits_before_the_old_one_is_gone(launch: Launch, worker: Worker, module: Module) -> None:
    """While a worker takes its time to stop, the forks of the next round wait already, and `ps` says so."""
    path = worker(_ENDS_AT_THE_GATE + _SAYS_HOW)
    env = module()
    job = launch("--nproc-per-node=3", "--max-restarts=1", "--preload=heavy", path, env=env)
    job.wait_line("there")
    Path(env["GATE"]).write_text("", encoding="utf-8")
    job.wait_line("stopping")
    waiting = wait_titled(job.pid, "elastic-run: waiting", 3)
    wait_until(lambda: set(waiting) <= set(children_of(job.pid)), what="the forks are the launcher's children")
    Path(env["GATE"]).write_text("", encoding="utf-8")
    assert job.wait_exit() == 0
    assert job.stdout.count("warm") == 3
    assert all(is_gone(pid) for pid in waiting)


def test_a_last_round_has_no_next_generation(launch: Launch, worker: Worker, module: Module) -> None:
    """When no restart is left, nothing is forked in vain, and a failure ends the job as ever."""
    env = module("import os\nos.register_at_fork(after_in_parent=lambda: open(os.environ['COUNT'], 'a').write('x'))")
    env["COUNT"] = f"{env['GATE']}.count"
    job = launch("--preload=heavy", worker("sys.exit(7)"), env=env)
    assert job.wait_exit() == 7
    assert Path(env["COUNT"]).read_text(encoding="utf-8") == "xx"  # the midwife, and the worker


def test_a_worker_looks_like_its_command(launch: Launch, worker: Worker, module: Module) -> None:
    """`ps` shows a warm worker's script and arguments and the interpreter's name, with its own local rank."""
    path = worker("say('there')\nsignal.pause()")
    job = launch("--nproc-per-node=11", "--preload=heavy", path, "rank ${local_rank}", env=module())
    job.wait_lines("there", count=11)
    for rank in (0, 9, 10):
        (pid,) = wait_titled(job.pid, f"{sys.executable} -u {path} rank {rank}")
        assert Path(f"/proc/{pid}/comm").read_text(encoding="utf-8") == f"{Path(sys.executable).name}\n"
        assert os.getsid(pid) == pid
    wait_template(job.pid)
    job.send(signal.SIGTERM)
    assert job.wait_exit() == 128 + signal.SIGTERM


# --- what can't be preloaded ---------------------------------------------------------------------------------------

_HAZARDS = {
    "import nowhere": "heavy can't be imported (ModuleNotFoundError: No module named 'nowhere')",
    "1 / 0": "heavy can't be imported (ZeroDivisionError: division by zero)",
    "import sys; sys.exit(3)": "heavy can't be imported (SystemExit: 3)",
    "x =": "heavy can't be imported (SyntaxError: invalid syntax",
    "import threading\nthreading.Thread(target=threading.Event().wait, name='pump', daemon=True).start()": (
        "heavy can't be preloaded: it starts a thread (pump)"
    ),
    "import _thread, select\n_thread.start_new_thread(select.select, ([], [], []))": (
        "heavy can't be preloaded: it starts a "
    ),
    (
        "import ctypes\nlibc, thread = ctypes.CDLL(None), ctypes.c_ulong()\n"
        "assert not libc.pthread_create(ctypes.byref(thread), None, libc.pause, None)"
    ): "heavy can't be preloaded: it starts a native thread",
    "import socket\ns = socket.create_server(('127.0.0.1', 0))": "heavy can't be preloaded: it leaves a socket open",
    "import asyncio\nloop = asyncio.new_event_loop()": "heavy can't be preloaded: it leaves a ",
    "import os\nends = os.pipe()": "heavy can't be preloaded: it leaves a pipe open (pipe:",
    "import os\nfile = os.open(__file__, os.O_RDONLY)": "heavy can't be preloaded: it leaves /",
    "import multiprocessing\nlock = multiprocessing.Lock()": "heavy can't be preloaded: it has shared memory or a lock",
    "import os\nrank = os.environ.get('RANK', '0')": "heavy can't be preloaded: it reads RANK, which each worker has",
    "import subprocess\np = subprocess.Popen(['sleep', '60'])": "heavy can't be preloaded: it starts a process",
}


@pytest.mark.parametrize(("body", "told"), _HAZARDS.items())
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
    job = launch("--max-restarts=1", "--preload=heavy", worker(_SAYS_HOW + "sys.exit(attempt == 0)"), env=env)
    assert job.wait_exit() == 0
    assert job.stdout == "warm 0 0\ncold 0 1\n"
    assert "--preload: the template can't be forked any more: it starts a thread (late)" in job.stderr


def test_what_python_s_own_start_leaves_is_no_modules_fault(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """A thread of sitecustomize isn't blamed on the first module."""
    (tmp_path / "sitecustomize.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, name='early', daemon=True).start()\n"
    )
    job = launch("--preload=json", worker("say('runs')"), env={"PYTHONPATH": f"{tmp_path}:{_ROOT}"})
    assert job.wait_exit() == 0
    told = "--preload: Python's own start can't be preloaded (sitecustomize, a .pth file): it starts a thread (early)"
    assert told in job.stderr


@pytest.mark.parametrize(
    "body",
    [
        "import sys\nsys.modules['torch'] = None",
        "import sys\nclass Tee:\n    write = flush = print\nsys.stdout = sys.__stdout__ = Tee()",
        "import sys, types\nsys.modules['logging'] = types.ModuleType('logging')",
    ],
    ids=["torch", "stdout", "logging"],
)
def test_a_fork_that_cant_become_a_worker_starts_cold(
    body: str, launch: Launch, worker: Worker, module: Module
) -> None:
    """Where a module has replaced what a fork needs of Python, its worker is exec'd, under the same pid."""
    path = worker(
        _SAYS_HOW + "import _signal\nsay(_signal.getsignal(_signal.SIGPIPE) == _signal.SIG_IGN, sys.argv[1:])"
    )
    job = launch("--nproc-per-node=2", "--preload=heavy", path, "--local=${local_rank}", env=module(body))
    assert job.wait_exit() == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == [
        *("True ['--local=0']", "True ['--local=1']"),
        *("cold 0 0", "cold 1 0"),
    ]
    assert job.stderr.count("elastic-run: --preload: this worker starts cold (") == 2


def test_a_directory_that_an_attempt_has_made_is_looked_into(
    launch: Launch, worker: Worker, module: Module, tmp_path: Path
) -> None:
    """A worker finds modules in a directory of PYTHONPATH that wasn't there when the template began."""
    path = worker("""
        made = sys.path[-1]
        if attempt == 0:
            os.mkdir(os.environ["MADE"])
            open(os.environ["MADE"] + "/generated.py", "w").write("value = 7")
            sys.exit(1)
        import generated
        say("heavy" in sys.modules, generated.value)
    """)
    env = module()
    made = str(tmp_path / "made")
    env |= {"MADE": made, "PYTHONPATH": f"{env['PYTHONPATH']}:{made}"}
    job = launch("--max-restarts=1", "--min-uptime=0", "--preload=heavy", path, env=env)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "True 7\n"


def test_a_release_that_was_switched_is_run_whole(
    launch: Launch, worker: Worker, module: Module, tmp_path: Path
) -> None:
    """Where a symlink on the script's path leads elsewhere after a restart, script and its modules are the new ones."""
    for name in ("v1", "v2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "helper.py").write_text(f"name = {name!r}\n")
        body = "import helper\nsay(__file__.split('/')[-2], helper.name, 'heavy' in sys.modules)\n"
        switch = "os.unlink(__file__.rpartition('/')[0])\nos.symlink('v2', __file__.rpartition('/')[0])\nsys.exit(1)\n"
        worker(body + (switch if name == "v1" else f"say({name!r})\n")).rename(tmp_path / name / "train.py")
    (tmp_path / "current").symlink_to("v1")
    script = tmp_path / "current" / "train.py"
    job = launch("--max-restarts=1", "--min-uptime=0", "--preload=heavy", script, env=module())
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "current v1 True\ncurrent v2 False\nv2\n"
    assert "--preload: this worker starts cold (its script's path leads elsewhere now)" in job.stderr


def test_a_gpu_in_the_template_is_refused(launch: Launch, worker: Worker, module: Module) -> None:
    """A module that has initialised CUDA, as torch tells, is named."""
    env = module("import torch\ntorch.cuda.is_initialized = lambda: True")
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
from elastic_run.run import main
main()
"""


def test_a_wrong_list_is_refused(launch: Launch, worker: Worker) -> None:
    """A name that no module can have is bad input: one line, exit code 2."""
    job = launch("--preload=torch,,numpy", worker(""))
    assert job.wait_exit() == 2
    assert (
        job.stderr == "elastic-run: error: --preload: 'torch,,numpy' is not a list of modules (torch,numpy), nor auto\n"
    )


# --- when the template dies, or hangs ------------------------------------------------------------------------------


def test_a_template_that_is_killed_while_it_imports(launch: Launch, worker: Worker, module: Module) -> None:
    """The workers start cold at once, and the user is told."""
    job = launch("--nproc-per-node=2", "--preload=heavy", worker(_SAYS_HOW), env=module(_SLOW))
    os.kill(wait_template(job.pid), signal.SIGKILL)
    assert job.wait_exit() == 0
    assert sorted(job.stdout.splitlines()) == ["cold 0 0", "cold 1 0"]
    assert "--preload: the workers' template was killed by SIGKILL: they start cold" in job.stderr


def test_a_template_that_was_killed_is_replaced(launch: Launch, worker: Worker, module: Module) -> None:
    """While the workers run on, another template comes, and the next round is warm again."""
    path = worker(_SAYS_HOW + "if attempt < 1: open(os.environ['GATE']).read(); sys.exit(1)")
    env = module()
    job = launch("--max-restarts=1", "--preload=heavy", path, env=env)
    job.wait_line("warm 0 0")
    first = wait_template(job.pid)
    os.kill(first, signal.SIGKILL)
    job.wait_line("was killed by SIGKILL")
    assert wait_template(job.pid) != first
    Path(env["GATE"]).write_text("", encoding="utf-8")
    assert job.wait_exit() == 0
    assert job.stdout.splitlines() == ["warm 0 0", "warm 0 1"]


def test_templates_that_always_die_are_given_up(launch: Launch, worker: Worker, module: Module, tmp_path: Path) -> None:
    """A machine that kills every template is not tried for ever."""
    count = tmp_path / "count"
    env = module(f"import os\nopen({str(count)!r}, 'a').write('x')\nos.kill(os.getpid(), 9)")
    job = launch("--preload=heavy", worker("open(os.environ['GATE']).read()"), env=env)
    job.wait_lines("the workers' template was killed by SIGKILL", count=4)
    Path(env["GATE"]).write_text("", encoding="utf-8")
    assert job.wait_exit() == 0
    assert count.read_text(encoding="utf-8") == "xxxx"


def test_a_worker_keeps_its_exit_code_when_the_template_is_killed(
    launch: Launch, worker: Worker, module: Module
) -> None:
    """Workers are the launcher's own children: how they end is known whatever becomes of the template."""
    path = worker("say('there')\nopen(os.environ['GATE']).read()\nsys.exit(7)")
    env = module()
    job = launch("--preload=heavy", path, env=env)
    job.wait_line("there")
    os.kill(wait_template(job.pid), signal.SIGKILL)
    Path(env["GATE"]).write_text("", encoding="utf-8")
    assert job.wait_exit() == 7


@pytest.mark.parametrize("victim", ["template", "midwife"])
@pytest.mark.parametrize("generation", [0, 1])
def test_a_template_that_is_killed_while_it_forks(
    victim: str, generation: int, launch: Launch, worker: Worker, module: Module
) -> None:
    """A template or midwife that dies in the middle of a generation costs the warmth of that round, not the job."""
    code = f"""
        import os, signal
        template, count = os.getpid(), 0
        def strike():
            global count
            if os.getpid() == template:
                count += 1
            elif count == {generation + 1} and os.environ.get("RANK") is None:
                os.kill(template if {victim!r} == "template" else os.getpid(), signal.SIGKILL)
        os.register_at_fork(before=strike)
    """
    path = worker(_SAYS_HOW + f"sys.exit(attempt < {generation})")
    flags = ("--nproc-per-node=3", f"--max-restarts={generation}", "--preload=heavy")
    job = launch(*flags, path, env=module(code))
    assert job.wait_exit() == 0
    last = [line for line in job.stdout.splitlines() if line.endswith(str(generation))]
    assert sorted(last) == [f"cold {rank} {generation}" for rank in range(3)]


def test_workers_whose_midwife_is_killed_keep_their_exit_codes(launch: Launch, worker: Worker, module: Module) -> None:
    """Forks that the launcher wasn't ready to take are not its children: they are no workers, but end."""
    code = """
        import os, signal
        from elastic_run.multiprocessing.warm import messages
        agent, send = os.getppid(), messages.send
        def strike(channel, document, descriptors=()):
            if document["kind"] == "born":
                print("forks:", *document["pids"])
                os.kill(agent, signal.SIGSTOP)
                while open(f"/proc/{agent}/stat").read().rpartition(")")[2].split()[0] != "T":
                    pass
                send(channel, document)
                os.kill(os.getpid(), signal.SIGKILL)
            if document["kind"] == "done":
                os.kill(agent, signal.SIGCONT)
            send(channel, document, descriptors)
        messages.send = strike
    """
    job = launch("--nproc-per-node=2", "--preload=heavy", worker("sys.exit(7)"), env=module(code))
    assert job.wait_exit() == 7
    for pid in job.wait_line(r"forks: (\d+) (\d+)").groups():
        wait_gone(int(pid))


def test_orphans_that_come_to_the_launcher_are_collected(launch: Launch, worker: Worker, module: Module) -> None:
    """Who loses its parent while the launcher takes its forks becomes the launcher's child, and no zombie for good."""
    code = """
        import os
        from elastic_run.multiprocessing.warm import messages
        template, receive = os.getpid(), messages.receive
        def orphan(channel):
            order = receive(channel)
            if order and order[0].get("kind") == "leave":
                child = os.fork()
                if child == 0:
                    os.fork() or print("orphan:", os.getpid())
                    os._exit(0)
                os.waitpid(child, 0)
            return order
        messages.receive = orphan
    """
    env = module(code)
    job = launch("--preload=heavy", worker(_SAYS_HOW + "open(os.environ['GATE']).read()"), env=env)
    orphan = Path("/proc", job.wait_line(r"orphan: (\d+)")[1])
    job.wait_line("warm 0 0")
    wait_until(lambda: not orphan.exists(), what="the orphan has been collected")
    Path(env["GATE"]).write_text("", encoding="utf-8")
    assert job.wait_exit() == 0


def test_where_ended_children_are_ignored_workers_are_warm(launch: Launch, worker: Worker, module: Module) -> None:
    """A launcher that inherits SIGCHLD as ignored has a template that does, and that forks all the same."""
    program = (
        "import os, signal, sys\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'elastic_run', *sys.argv[1:]])"
    )
    path = worker(_SAYS_HOW + "sys.exit(7)")
    flags = ("--max-restarts=1", "--max-backoff=0", "--preload=heavy")
    job = launch(*flags, path, env=module(), program=(sys.executable, "-c", program))
    assert job.wait_exit() == 7
    assert job.stdout.splitlines() == ["warm 0 0", "warm 0 1"]


def test_a_fork_that_is_killed_while_it_waits(launch: Launch, worker: Worker, module: Module) -> None:
    """Whoever isn't there when the round starts is started cold, the others are warm."""
    path = worker(_ENDS_AT_THE_GATE + _SAYS_HOW)
    env = module()
    job = launch("--nproc-per-node=2", "--max-restarts=1", "--preload=heavy", path, env=env)
    job.wait_line("there")
    Path(env["GATE"]).write_text("", encoding="utf-8")
    victim = wait_titled(job.pid, "elastic-run: waiting", 2)[0]
    os.kill(victim, signal.SIGKILL)
    wait_gone(victim)
    Path(env["GATE"]).write_text("", encoding="utf-8")
    assert job.wait_exit() == 0
    assert sorted(line.split()[0] for line in job.stdout.splitlines()[2:]) == ["cold", "warm"]


def test_a_system_that_refuses_a_fork(launch: Launch, worker: Worker, module: Module) -> None:
    """Without memory for a fork the reason is told, and workers are started by exec, which needs less."""
    code = """
        import errno, os
        fork, template = os.fork, os.getpid()
        def refuse():
            if os.getpid() == template: return fork()
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        os.fork = refuse
    """
    job = launch("--nproc-per-node=2", "--preload=heavy", worker(_SAYS_HOW), env=module(code))
    assert job.wait_exit() == 0
    assert sorted(job.stdout.splitlines()) == ["cold 0 0", "cold 1 0"]
    assert "--preload: the template can't fork (Cannot allocate memory): workers that are missing" in job.stderr


def test_a_stop_signal_while_the_template_imports(launch: Launch, worker: Worker, module: Module) -> None:
    """The job ends at once, without having started a worker, and nothing is left."""
    job = launch("--preload=heavy", worker(_SAYS_HOW), env=module(_SLOW))
    template = wait_template(job.pid)
    wait_until(lambda: title_of(template) and catches(job.pid, signal.SIGTERM))
    job.send(signal.SIGINT)
    assert job.wait_exit(deadline=5) in {-signal.SIGINT, 128 + signal.SIGINT}  # the loop answers it, or nobody does yet
    assert job.stdout == ""
    wait_gone(template, deadline=2)


def test_a_launcher_that_is_killed_leaves_nothing(launch: Launch, worker: Worker, module: Module) -> None:
    """Template, waiting forks and workers are gone with a launcher that was killed (law 6)."""
    path = worker(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay('there')\n"
        "sys.exit(open(os.environ['GATE']).read() or 1) if rank else signal.pause()"
    )
    env = module()
    job = launch("--nproc-per-node=2", "--max-restarts=1", "--preload=heavy", path, env=env)
    job.wait_lines("there", count=2)
    Path(env["GATE"]).write_text("", encoding="utf-8")
    wait_titled(job.pid, "elastic-run: waiting", 2)
    everybody = descendants_of(job.pid)
    job.send(signal.SIGKILL)
    for pid in everybody:
        wait_gone(pid, deadline=2)


def test_as_pid_1_workers_keep_their_exit_codes(launch: Launch, worker: Worker, module: Module) -> None:
    """In a container, where the launcher collects orphans, a warm worker's exit code is known, round after round."""
    isolated = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child")
    path = worker(_SAYS_HOW + "os._exit(7)")
    program = (*isolated, sys.executable, "-m", "elastic_run")
    job = launch("--max-restarts=2", "--max-backoff=0", "--preload=heavy", path, env=module(), program=program)
    assert job.wait_exit() == 7
    assert job.stdout.splitlines() == ["warm 0 0", "warm 0 1", "warm 0 2"]


def test_a_stopped_template_doesnt_stop_the_job(launch: Launch, worker: Worker, module: Module) -> None:
    """A template that hangs is waited for a while, then the round starts cold."""
    path = worker(_SAYS_HOW + "open(os.environ['GATE']).read() if attempt == 0 else None\nsys.exit(attempt == 0)")
    env = module()
    job = launch("--max-restarts=1", "--preload=heavy", path, env=env)
    job.wait_line("warm 0 0")
    os.kill(wait_template(job.pid), signal.SIGSTOP)
    Path(env["GATE"]).write_text("", encoding="utf-8")
    assert job.wait_exit() == 0
    assert job.stdout.splitlines()[-1] == "cold 0 1"


def test_nothing_of_it_is_imported_without_the_flag(launch: Launch, tmp_path: Path) -> None:
    """Who doesn't ask for warm workers doesn't pay for them."""
    imported = imported_before_the_last_worker(["--standalone"], launch, tmp_path)
    assert "elastic_run.agent.launched" in imported
    assert not [name for name in imported if "warm" in name]


def test_an_ordinary_python_isnt_touched(tmp_path: Path) -> None:
    """The line in the start file imports nothing where its variable isn't set."""
    code = "import sys; print([name for name in sys.modules if 'elastic_run' in name])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert shown.stdout == "[]\n"


@pytest.mark.parametrize("variable", ["nonsense", "999"])
def test_what_cant_become_a_template_doesnt_run_the_script_either(variable: str, worker: Worker) -> None:
    """A process that was meant to be a template and can't be one ends, with a line; it is never a worker of its own."""
    command = [sys.executable, "-u", str(worker("say('runs')"))]
    env = {**os.environ, "ELASTIC_RUN_TEMPLATE": variable, "RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("elastic-run: no template: ")
