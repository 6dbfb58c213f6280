"""The first workers run before the launcher has imported what watches over them: nothing is lost in that time."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.launch import ELASTIC_RUN
from tests.support.processes import processes_with_environment, wait_gone
from tests.support.system import as_pid_1
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path
    from typing import IO

    from tests.support.launch import Launch, Launched, Worker

    Hold = Callable[..., tuple[Launched, IO[str]]]

#: Stands in for a module of the standard library that the launcher imports after its first workers were started, and
#: keeps it waiting there until a worker has opened the gate.
SLOW_MODULE = """
import os, sys
gates = os.environ.get("GATES")
if gates and "RANK" not in os.environ:
    open(os.path.join(gates, __name__)).read()
place = os.path.dirname(__file__)
sys.path.remove(place)
del sys.modules[__name__]
__import__(__name__)
sys.path.insert(0, place)
"""
#: The same, but it can't be imported.
BROKEN_MODULE = """
import os
gates = os.environ.get("GATES")
if gates and "RANK" not in os.environ:
    open(os.path.join(gates, __name__)).read()
    raise ImportError("a launcher that is broken")
"""
#: Keeps the launcher waiting when it is about to import a module, until the test has opened the gate and closed it.
GATE_KEEPER = """
import os, sys
module, gate = os.environ.pop("CLOSED_MODULE", None), os.environ.pop("GATE", None)
if module:
    sys.addaudithook(lambda event, found: open(gate).read() if event == "import" and found[0] == module else None)
"""
OPEN_THE_GATE = "open(os.environ['GATES'] + '/heapq', 'w').close()\n"


def surroundings(directory: Path, module: str, names: Iterable[str] = ("heapq",)) -> dict[str, str]:
    """Put a module before some of the standard library's, each with a gate."""
    for name in ("shadow", "gates"):
        (directory / name).mkdir()
    for name in names:
        (directory / "shadow" / f"{name}.py").write_text(module, encoding="utf-8")
        os.mkfifo(directory / "gates" / name)
    return {"PYTHONPATH": str(directory / "shadow"), "GATES": str(directory / "gates")}


@pytest.fixture
def hold(tmp_path: Path, launch: Launch) -> Hold:
    """Start a launcher that waits before it imports a module; return it and the gate, an open file."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (tmp_path / "sitecustomize.py").write_text(GATE_KEEPER, encoding="utf-8")

    def start(module: str, *arguments: str | Path, program: Sequence[str] = ELASTIC_RUN) -> tuple[Launched, IO[str]]:
        env = {"PYTHONPATH": str(tmp_path), "CLOSED_MODULE": module, "GATE": str(gate)}
        job = launch(*arguments, env=env, program=program)
        return job, gate.open("w")  # which waits until the launcher is there

    return start


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"])
def test_a_signal_before_the_first_worker(hold: Hold, worker: Worker, name: str) -> None:
    """A stop signal that comes before there are workers ends the launcher as it would any program, with one line."""
    number = signal.Signals[name]
    job, gate = hold("elastic_run.multiprocessing.starter", worker("say('begun')"))
    with gate:
        job.send(number)
        assert job.wait_exit() == -number
    assert (job.stdout, job.stderr) == ("", f"elastic-run: stopped by {name}\n")


def test_a_signal_while_modules_are_preloaded(hold: Hold, worker: Worker, environment_token: str) -> None:
    """The same goes when a template runs already, and it doesn't outlive the launcher."""
    job, gate = hold("elastic_run.agent.local_elastic_agent", "--preload=colorsys", worker("say('begun')"))
    with gate:
        assert len(processes_with_environment(environment_token)) > 1
        job.send(signal.SIGTERM)
        assert job.wait_exit() == -signal.SIGTERM
    assert (job.stdout, job.stderr) == ("", "elastic-run: stopped by SIGTERM\n")
    wait_until(lambda: not processes_with_environment(environment_token), deadline=2.0)


def test_a_signal_before_the_first_worker_that_is_ignored(hold: Hold, worker: Worker) -> None:
    """A stop signal that the launcher inherited as ignored (nohup) stays ignored while it starts, too."""
    program = ("sh", "-c", "trap '' HUP; exec \"$@\"", "sh", *ELASTIC_RUN)
    job, gate = hold("elastic_run.multiprocessing.starter", worker("say('begun')"), program=program)
    with gate:
        job.send(signal.SIGHUP)
    assert job.wait_exit() == 0
    assert (job.stdout, job.stderr) == ("begun\n", "")


def test_a_signal_before_the_handlers_stand(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """A stop signal that comes while the launcher still imports reaches the workers as any other does."""
    path = worker(
        "def stop(number, _):\n    say('told', signal.Signals(number).name)\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n" + OPEN_THE_GATE + "while True:\n    signal.pause()\n"
    )
    job = launch("--nproc-per-node=1", path, env=surroundings(tmp_path, SLOW_MODULE))
    assert job.wait_exit() == 128 + signal.SIGTERM
    assert job.stdout.splitlines() == ["told SIGTERM"]
    assert "SIGTERM" in job.stderr


def test_what_workers_said_and_how_they_ended_before_anybody_listened(
    launch: Launch, worker: Worker, tmp_path: Path
) -> None:
    """A worker that failed while the launcher still imported is reported with its exception and its exit code."""
    path = worker(OPEN_THE_GATE + "raise ValueError('too early')")
    job = launch("--nproc-per-node=1", path, env=surroundings(tmp_path, SLOW_MODULE))
    assert job.wait_exit() == 1
    assert "ValueError: too early" in job.stderr


def test_a_launcher_that_breaks_leaves_no_worker(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """When the launcher can't go on after it has started its workers, they end with it."""
    path = worker("say('pid', os.getpid())\n" + OPEN_THE_GATE + "while True:\n    signal.pause()\n")
    job = launch("--nproc-per-node=1", path, env=surroundings(tmp_path, BROKEN_MODULE))
    pid = int(job.wait_line(r"pid (\d+)")[1])
    assert job.wait_exit() == 205
    assert "a launcher that is broken" in job.stderr
    wait_gone(pid, deadline=2.0)


def test_a_launcher_killed_by_its_first_worker_takes_it_along(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """The guardian stands before the first worker: no kill of the launcher comes too early for it."""
    path = worker("say('pid', os.getpid())\nos.kill(os.getppid(), signal.SIGKILL)\nwhile True:\n    signal.pause()\n")
    job = launch("--nproc-per-node=1", path, env=surroundings(tmp_path, SLOW_MODULE))
    pid = int(job.wait_line(r"pid (\d+)")[1])
    assert job.wait_exit() == -signal.SIGKILL
    wait_gone(pid, deadline=2.0)


def test_workers_begin_with_the_signals_of_the_launchers_parent(launch: Launch, worker: Worker) -> None:
    """The signals that the launcher holds back for that time are not held back from its workers."""
    job = launch("--nproc-per-node=1", worker("say(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))"))
    assert job.wait_exit() == 0
    assert job.stdout.splitlines() == ["[]"]


def test_as_pid_1_a_worker_that_ends_early_keeps_its_exit_code(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """As PID 1, which collects orphans, the launcher still learns how a worker ended while it was importing."""
    path = worker(OPEN_THE_GATE + "os._exit(7)")
    program = as_pid_1(ELASTIC_RUN)
    job = launch("--nproc-per-node=1", path, env=surroundings(tmp_path, SLOW_MODULE), program=program)
    assert job.wait_exit() == 7
