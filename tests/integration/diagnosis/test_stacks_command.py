"""`elastic-run stacks`, and the permission for tools that read a worker by ptrace."""

from __future__ import annotations

import json
import signal
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import elastic_run.compat
from elastic_run.core.failure.stacks import Dump
from elastic_run.report.stack_lines import summary
from tests.support.launch import launch as start
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.support.launch import Launch, Launched, Worker


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


@pytest.mark.long
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


@pytest.mark.parametrize(("value", "calls"), [("1", 1), ("0", 0), ("", 0)])
def test_a_worker_permits_it_if_asked(value: str, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of the .pth file calls prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY) in a worker, and only on request."""
    called: list[tuple[int, ...]] = []
    library = types.SimpleNamespace(prctl=lambda *words: called.append(words))
    fake = types.SimpleNamespace(CDLL=lambda _: library, c_ulong=lambda number: number % (1 << 64))
    monkeypatch.setitem(sys.modules, "ctypes", fake)
    monkeypatch.setenv("ELASTIC_RUN_PTRACE", value)
    monkeypatch.setenv("ELASTIC_RUN_STACK_PIPE", "9:9:9")
    path = Path(elastic_run.compat.__file__).with_name("elastic-run-compat.pth")
    (line,) = [line for line in path.read_text(encoding="utf-8").splitlines() if "ELASTIC_RUN_STACK_PIPE" in line]
    exec(line, {})  # noqa: S102 - as Python itself does with it
    assert called == [(0x59616D61, (1 << 64) - 1, 0, 0, 0)] * calls
