"""`elastic-run stacks`: the stacks of a running job's workers, asked from another terminal."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.launch import launch as start
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


def _stacks(*words: str) -> Launched:
    """Run the command to its end."""
    with start("stacks", *words) as command:
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


def test_the_document(job: Launched) -> None:
    """--json has the same for programs."""
    document = json.loads(_stacks("--json").stdout)
    assert [worker["rank"] for worker in document["workers"]] == [0, 1, 2]
    assert (document["version"], document["run"]) == (1, str(job.pid))
    assert "load_batch" in document["workers"][1]["text"]


def test_a_rank_that_is_not_there(job: Launched) -> None:
    """The line names the ranks that run on this machine."""
    command = _stacks("--rank=7")
    assert command.process.returncode == 2
    assert command.stderr == "elastic-run: error: stacks: --rank: 7 does not run here: this machine has ranks 0-2\n"
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
