"""Warm workers (`--preload`): templates, midwives and forks that die or hang; nothing is left of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.launch import ELASTIC_RUN
from tests.support.processes import catches, descendants_of, wait_gone
from tests.support.programs import ENDS_AT_THE_GATE, SAYS_HOW, shortened, title_of, wait_template, wait_titled
from tests.support.system import as_pid_1
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.support.launch import Launch, Worker
    from tests.support.programs import Module


#: Keeps a template waiting, until the test opens the gate.
_SLOW = "import os\nopen(os.environ['GATE']).read()\n"


def test_a_template_that_is_killed_while_it_imports(launch: Launch, worker: Worker, module: Module) -> None:
    """The workers start cold at once, and the user is told."""
    job = launch("--nproc-per-node=2", "--preload=heavy", worker(SAYS_HOW), env=module(_SLOW))
    os.kill(wait_template(job.pid), signal.SIGKILL)
    assert job.wait_exit() == 0
    assert sorted(job.stdout.splitlines()) == ["cold 0 0", "cold 1 0"]
    assert "--preload: the workers' template was killed by SIGKILL" in job.stderr


def test_a_long_import_is_told_and_given_up(launch: Launch, worker: Worker, module: Module) -> None:
    """The user hears what is waited for, and after a long time the round begins without it."""
    pool = "elastic_run.multiprocessing.warm.worker_pool"
    program = shortened({f"{pool}._NOTICE": 0.5, f"{pool}._IMPORT_WAIT": 1.0})
    job = launch("--preload=heavy", worker(SAYS_HOW), env=module(_SLOW), program=program)
    job.wait_line("still waiting for the workers' template after 0 s: it is importing heavy")
    job.wait_line("is still importing heavy after a wait of 1 s: workers start cold")
    assert job.wait_exit() == 0
    assert job.stdout == "cold 0 0\n"


def test_a_template_that_was_killed_is_not_replaced(launch: Launch, worker: Worker, module: Module) -> None:
    """While the workers run on, one line says that the next round will be cold."""
    path = worker(SAYS_HOW + "if attempt < 1: open(os.environ['GATE']).read(); sys.exit(1)")
    env = module()
    job = launch("--max-restarts=1", "--preload=heavy", path, env=env)
    job.wait_line("warm 0 0")
    os.kill(wait_template(job.pid), signal.SIGKILL)
    job.wait_line("was killed by SIGKILL: workers start cold from now on")
    Path(env["GATE"]).write_text("", encoding="utf-8")
    assert job.wait_exit() == 0
    assert job.stdout.splitlines() == ["warm 0 0", "cold 0 1"]


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


@pytest.mark.parametrize("victim", ["template", "fork helper"])
@pytest.mark.parametrize("generation", [0, 1])
def test_a_template_that_is_killed_while_it_forks(
    victim: str, generation: int, launch: Launch, worker: Worker, module: Module
) -> None:
    """A template or fork helper that dies in the middle of a generation costs the warmth of that round, not the job."""
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
    path = worker(SAYS_HOW + f"sys.exit(attempt < {generation})")
    flags = ("--nproc-per-node=3", f"--max-restarts={generation}", "--preload=heavy")
    job = launch(*flags, path, env=module(code))
    assert job.wait_exit() == 0
    last = [line for line in job.stdout.splitlines() if line.endswith(str(generation))]
    assert sorted(last) == [f"cold {rank} {generation}" for rank in range(3)]
    lines = {
        "template": "template was killed by SIGKILL",
        "fork helper": "--preload: workers that start cold, since their forks are missing: 3",
    }
    assert job.stderr.count(lines[victim]) == 1


def test_a_fork_that_is_killed_while_it_waits(launch: Launch, worker: Worker, module: Module) -> None:
    """Whoever isn't there when the round starts is started cold, the others are warm."""
    path = worker(ENDS_AT_THE_GATE + SAYS_HOW)
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
    assert "--preload: workers that start cold, since their forks are missing: 1" in job.stderr


def test_a_stop_signal_while_the_template_imports(launch: Launch, worker: Worker, module: Module) -> None:
    """The job ends at once, without having started a worker, and nothing is left."""
    job = launch("--preload=heavy", worker(SAYS_HOW), env=module(_SLOW))
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
    path = worker(SAYS_HOW + "os._exit(7)")
    program = as_pid_1(ELASTIC_RUN)
    job = launch("--max-restarts=2", "--max-backoff=0", "--preload=heavy", path, env=module(), program=program)
    assert job.wait_exit() == 7
    assert job.stdout.splitlines() == ["warm 0 0", "warm 0 1", "warm 0 2"]


def test_a_stopped_template_doesnt_stop_the_job(launch: Launch, worker: Worker, module: Module) -> None:
    """A template that hangs is waited for a while, then the round starts cold."""
    path = worker(SAYS_HOW + "open(os.environ['GATE']).read() if attempt == 0 else None\nsys.exit(attempt == 0)")
    env = module()
    program = shortened({"elastic_run.multiprocessing.warm.worker_pool._FORK_WAIT": 3.0})
    job = launch("--max-restarts=1", "--preload=heavy", path, env=env, program=program)
    job.wait_line("warm 0 0")
    os.kill(wait_template(job.pid), signal.SIGSTOP)
    Path(env["GATE"]).write_text("", encoding="utf-8")
    assert job.wait_exit() == 0
    assert job.stdout.splitlines()[-1] == "cold 0 1"


@pytest.mark.parametrize(
    ("body", "how"),
    [
        ("import os\nos._exit(3)", "ended with exit code 3"),
        ("import os\nos._exit(0)", "ended with exit code 0"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("import os\nos.abort()", "was killed by SIGABRT"),
    ],
)
def test_a_module_that_ends_the_template_is_named_once(
    body: str, how: str, launch: Launch, worker: Worker, module: Module
) -> None:
    """One line says which module was being imported and how that ended, and workers start cold, also in round two."""
    path = worker(SAYS_HOW + "sys.exit(attempt == 0)")
    job = launch("--nproc-per-node=2", "--max-restarts=1", "--preload=json,heavy", path, env=module(body))
    assert job.wait_exit() == 0
    assert [line for line in job.stderr.splitlines() if "--preload" in line] == [
        f"elastic-run: --preload: the workers' template {how} while it imported heavy: workers start cold from now on"
    ]
    assert "warm" not in job.stdout


def test_a_template_that_is_killed_from_outside_tells_where_it_was(
    launch: Launch, worker: Worker, module: Module
) -> None:
    """Who runs out of memory in an import learns of which module."""
    env = module("import os\nprint('imports')\nopen(os.environ['GATE']).read()")
    job = launch("--preload=heavy", worker(SAYS_HOW), env=env)
    job.wait_line("imports")
    os.kill(wait_template(job.pid), signal.SIGKILL)
    assert job.wait_exit() == 0
    assert job.stdout == "cold 0 0\n"
    assert "--preload: the workers' template was killed by SIGKILL while it imported heavy: workers start" in job.stderr
