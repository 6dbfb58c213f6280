"""Warm workers (`--preload`): jobs whose workers are forked from a template."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.commands.test_imports import imported_before_the_last_worker
from tests.support.launch import ELASTIC_RUN
from tests.support.processes import children_of, is_gone
from tests.support.programs import ENDS_AT_THE_GATE, SAYS_HOW, wait_template, wait_titled
from tests.support.sessions import free_port
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.support.launch import Launch, Worker
    from tests.support.programs import Module


def test_a_module_is_imported_once_for_all_workers_and_restarts(
    launch: Launch, worker: Worker, module: Module, tmp_path: Path
) -> None:
    """Four workers in three rounds come from one import; each has the module before its first line."""
    env = module("import os\nopen(os.environ['COUNT'], 'a').write('x')")
    env["COUNT"] = str(tmp_path / "count")
    path = worker(SAYS_HOW + "if attempt < 2: sys.exit(9) if rank == 3 else signal.pause()")
    job = launch("--nproc-per-node=4", "--max-restarts=2", "--preload=heavy", path, env=env)
    assert job.wait_exit() == 0
    said = set(job.stdout.splitlines())  # some were stopped before they could say anything
    assert {f"warm 3 {attempt}" for attempt in range(3)} | {f"warm {rank} 2" for rank in range(4)} <= said
    assert not [line for line in said if not line.startswith("warm")]
    assert (tmp_path / "count").read_text() == "x"


def test_the_variable_asks_for_it_too(launch: Launch, worker: Worker, module: Module) -> None:
    """PET_PRELOAD stands in for the flag."""
    job = launch(worker(SAYS_HOW), env=module() | {"PET_PRELOAD": "heavy"})
    assert job.wait_exit() == 0
    assert job.stdout == "warm 0 0\n"


def test_a_program_launches_warm_workers(launch: Launch, worker: Worker, module: Module, tmp_path: Path) -> None:
    """`AgentConfig.preload` is for programs; a function is told that it is not for functions."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom elastic_run import AgentConfig, LaunchConfig, elastic_launch\n"
        "config = LaunchConfig(1, 1, 2, rdzv_backend='local', agent_config=AgentConfig(preload='heavy'))\n"
        "if __name__ == '__main__':\n"
        f"    elastic_launch(config, sys.executable)('-u', {str(worker(SAYS_HOW))!r})\n"
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


@pytest.mark.soak
def test_more_workers_than_descriptors_go_in_one_message(launch: Launch, worker: Worker, module: Module) -> None:
    """The kernel passes 253 descriptors at once; 260 workers are forked all the same."""
    job = launch("--nproc-per-node=260", "--preload=heavy", worker(SAYS_HOW), env=module())
    assert job.wait_exit(deadline=90) == 0
    assert job.stdout.count("warm") == 260


def test_nodes_of_one_job_have_warm_workers_each(launch: Launch, worker: Worker, module: Module) -> None:
    """Two nodes restart together, warm; a third one makes them start again, warm."""
    env = module()
    path = worker(SAYS_HOW + "world = os.environ['WORLD_SIZE']\nsay('world', world)\n"
                  "if world == '2' and attempt == 0: sys.exit(3) if rank == 1 else signal.pause()\n"
                  "if world == '2': signal.pause()\n")  # fmt: skip
    rendezvous = ("--nnodes=2:3", "--rdzv-backend=c10d", "--rdzv-id=j", f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    flags = (
        *rendezvous,
        "--max-restarts=1",
        "--scale-up-delay=0",
        "--rdzv-conf=last_call_timeout=0.2",
        "--preload=heavy",
    )
    first = launch(*flags, path, env=env)
    second = launch(*flags, path, env=env)
    first.wait_line("warm . 1")
    second.wait_line("warm . 1")
    third = launch(*flags, path, env=env)
    assert [job.wait_exit() for job in (first, second, third)] == [0, 0, 0]
    assert "cold" not in first.stdout + second.stdout + third.stdout
    assert "world 3" in first.stdout


def test_workers_share_memory(launch: Launch, worker: Worker, module: Module) -> None:
    """What a module has built isn't copied into a worker, even when the worker collects garbage."""
    env = module("data = [[number] for number in range(400_000)]")
    path = worker(
        "import gc, heavy\n"
        "gc.collect()\n"
        "lines = (line.split() for line in open('/proc/self/smaps_rollup') if line.endswith(' kB\\n'))\n"
        "sizes = {words[0]: int(words[1]) for words in lines}\n"
        "say('shares', sizes['Anonymous:'] - sizes['Pss_Anon:'])"
    )
    job = launch("--nproc-per-node=1", "--preload=heavy", path, env=env)
    assert job.wait_exit() == 0
    assert int(job.wait_line(r"shares (\d+)")[1]) > 15_000


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


def test_nothing_of_it_is_imported_without_the_flag(launch: Launch, tmp_path: Path) -> None:
    """Who doesn't ask for warm workers doesn't pay for them."""
    imported = imported_before_the_last_worker(["--standalone"], launch, tmp_path)
    assert "elastic_run.agent.worker_launch" in imported
    assert not [name for name in imported if "warm" in name]


def test_an_ordinary_python_isnt_touched(tmp_path: Path) -> None:
    """The line in the start file imports nothing where its variable isn't set."""
    code = "import sys; print([name for name in sys.modules if 'elastic_run' in name])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert shown.stdout == "[]\n"


# --- keeping warm between rounds -----------------------------------------------------------------------------------


def test_the_next_generation_waits_before_the_old_one_is_gone(launch: Launch, worker: Worker, module: Module) -> None:
    """While a worker takes its time to stop, the forks of the next round wait already, and `ps` says so."""
    path = worker(ENDS_AT_THE_GATE + SAYS_HOW)
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
    assert Path(env["COUNT"]).read_text(encoding="utf-8") == "xx"  # the fork helper, and the worker


def test_a_worker_looks_like_its_command(launch: Launch, worker: Worker, module: Module) -> None:
    """`ps` shows a warm worker's script and arguments and the interpreter's name, with its own local rank."""
    path = worker("say('there')\nsignal.pause()")
    job = launch("--nproc-per-node=11", "--preload=heavy", path, "rank ${local_rank}", env=module())
    job.wait_lines("there", count=11)
    for rank in (0, 9, 10):
        shown = f"rank {rank}: "
        (pid,) = wait_titled(job.pid, f"{shown}{sys.executable[len(shown) :]} -u {path} rank {rank}")
        assert Path(f"/proc/{pid}/comm").read_text(encoding="utf-8") == f"python rank {rank}\n"
        assert os.getsid(pid) == pid
    wait_template(job.pid)
    job.send(signal.SIGTERM)
    assert job.wait_exit() == 128 + signal.SIGTERM


# --- limits and odd surroundings --------------------------------------------------------------------------------------
@pytest.mark.long
def test_a_low_limit_of_descriptors_makes_nobody_cold(launch: Launch, worker: Worker, module: Module) -> None:
    """A template that may open 64 files forks 100 workers, in parts, and each of them has that limit."""
    path = worker("import resource\n" + SAYS_HOW + "say('limit', resource.getrlimit(resource.RLIMIT_NOFILE)[0])")
    program = ("sh", "-c", 'ulimit -Sn 64; exec "$@"', "sh", *ELASTIC_RUN)
    job = launch("--nproc-per-node=100", "--preload=heavy", path, env=module(), program=program)
    assert job.wait_exit(deadline=60) == 0
    assert [job.stdout.count(word) for word in ("warm", "cold", "limit 64")] == [100, 0, 100], job.stderr
