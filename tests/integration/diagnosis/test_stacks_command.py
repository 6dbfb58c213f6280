"""`elastic-run stacks`: the stacks of a running job's workers, asked from another terminal."""

from __future__ import annotations

import json
import signal
from functools import partial
from typing import TYPE_CHECKING

import pytest

from elastic_run.contract import ENV_CONTROL_DIR, ENV_RDZV_TOKEN
from elastic_run.control.socket_directory import find_sockets
from elastic_run.core.diagnosis.stacks import Dump
from elastic_run.report.stack_lines import summary
from tests.support.launch import launch as start
from tests.support.sessions import free_port
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]

_SLEEPS = """
import threading
def load_batch():
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    say("ready")
    while True: signal.pause()
def step():
    say("ready")
    while True: signal.pause()
load_batch() if rank == 1 else step()
"""


def _stacks(*words: str, env: dict[str, str] | None = None) -> Launched:
    """Run the command to its end."""
    with start("stacks", *words, env=env) as command:
        command.wait_exit()
    return command


@pytest.fixture
def job(launch: Launch, worker: Worker) -> Launched:
    """Start a job of three ranks, one of which is elsewhere; return it when commands find it."""
    launched = launch("--nproc-per-node=3", worker(_SLEEPS))
    launched.wait_lines("ready", count=3)
    wait_until(lambda: _stacks().process.returncode == 0, what="the job's socket")
    return launched


def test_the_places_are_shown(job: Launched) -> None:
    """One line says which ranks are where, and the main thread of each group follows; the job goes on."""
    first, *others = _stacks().stdout.splitlines()
    assert first.startswith("ranks 0, 2 are in step (worker1.py:")
    assert "; rank 1 is in load_batch (worker1.py:" in first
    assert "rank 1, innermost call first:" in others
    assert job.process.poll() is None
    assert "elastic-run:" not in job.stderr.replace("elastic-run: OMP_NUM_THREADS", "")


def test_one_rank_is_shown_with_all_threads(job: Launched) -> None:
    """--rank shows every thread of that rank."""
    text = _stacks(str(job.pid), "--rank=1").stdout
    assert text.startswith("rank 1 is in load_batch")
    assert text.count("(most recent call first):") == 2


_RUNS = """
import threading
def add(number):
    return number + 1
def run():
    say("ready")
    while True:
        sorted(range(10), key=add)
        list(map(add, range(10)))
threading.Thread(target=run, daemon=True).start()
run()
"""


def test_workers_that_run_python_live_on(launch: Launch, worker: Worker) -> None:
    """Whatever their threads do, Python itself writes the stacks: faulthandler would end some of them by SIGSEGV."""
    job = launch(worker(_RUNS))
    job.wait_lines("ready", count=2)
    wait_until(lambda: _stacks().process.returncode == 0, what="the job's socket")
    for _ in range(20):
        asked = _stacks("--rank=0")
        text = asked.stdout
        assert text.startswith("rank 0 is in "), asked.stderr
        assert "in run\n" in text
    assert job.process.poll() is None
    assert "SIGSEGV" not in job.stderr


def test_the_document(job: Launched) -> None:
    """--json has the same for programs."""
    document = json.loads(_stacks("--json").stdout)
    assert [worker["rank"] for worker in document["workers"]] == [0, 1, 2]
    assert (document["version"], document["run"]) == (1, str(job.pid))
    assert "load_batch" in document["workers"][1]["text"]


def has_socket(environment: dict[str, str]) -> bool:
    """Whether an agent has opened its control socket there."""
    return bool(find_sockets(environment)[0])


@pytest.mark.parametrize("token", [None, "secret of this job"], ids=["no token", "token"])
def test_the_ranks_of_all_nodes_are_shown_on_each(
    token: str | None, launch: Launch, worker: Worker, tmp_path: Path
) -> None:
    """Each node has a directory of sockets of its own, as another machine has, so the store is the only way."""
    place = (f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-backend=c10d", "--rdzv-id=j", "--nnodes=2")
    directories = [tmp_path / "0", tmp_path / "1"]
    nodes, path = [], worker(_SLEEPS)
    for rank, directory in enumerate(directories):
        directory.mkdir()
        env = {ENV_CONTROL_DIR: str(directory), ENV_RDZV_TOKEN: token}
        nodes.append(launch("--nproc-per-node=2", f"--node-rank={rank}", *place, path, env=env))
    for node in nodes:
        node.wait_lines("ready", count=2)
    for directory in directories:
        place_of_sockets = {ENV_CONTROL_DIR: str(directory)}
        wait_until(partial(has_socket, place_of_sockets), what="the control socket")
        first, *_ = _stacks(env=place_of_sockets).stdout.splitlines()
        assert first.startswith("ranks 0, 2-3 are in step (worker1.py:")
        assert "; rank 1 is in load_batch (worker1.py:" in first
        assert _stacks("--rank=3", env=place_of_sockets).stdout.startswith("rank 3 is in step")
    nodes[1].send(signal.SIGSTOP)
    asked = _stacks(env={ENV_CONTROL_DIR: str(directories[0])})
    nodes[1].send(signal.SIGCONT)
    assert asked.stderr == "elastic-run: 1 of 2 nodes have not answered\n"
    assert "rank 1 is in load_batch" in asked.stdout


def test_the_silence_of_a_rank_is_told() -> None:
    """Only a long one, and only where it is known of each rank of the group."""
    text = 'Thread 0x01 (most recent call first):\n  File "/home/u/a.py", line 1 in {}\n'

    def describe(*silences: float | None) -> str:
        return summary({rank: Dump(text.format("f"), silence=silence) for rank, silence in enumerate(silences)})

    assert describe(62.4) == "rank 0 is in f (a.py:1), no output for 62 s"
    assert describe(62.4, 61.2) == "ranks 0-1 are in f (a.py:1), no output for 61 s"
    assert describe(62.4, 1.0) == describe(62.4, None) == "ranks 0-1 are in f (a.py:1)"


def test_a_rank_that_is_not_there(job: Launched) -> None:
    """The line names the ranks that run on this machine."""
    command = _stacks("--rank=7")
    assert command.process.returncode == 2
    assert (
        command.stderr
        == "elastic-run: error: stacks: --rank: 7 does not run now, or its node has not answered: there are ranks 0-2\n"
    )
    assert job.process.poll() is None


def test_many_that_ask_at_once(job: Launched) -> None:
    r"""Commands and Ctrl-\ at the same moment all get an answer."""
    commands = [start("stacks") for _ in range(4)]
    job.send(signal.SIGQUIT)
    assert [command.wait_exit() for command in commands] == [0] * 4
    for command in commands:
        command.close()
        assert "load_batch" in command.stdout
    job.wait_line("the job goes on")
