"""Agents that were written for torch: the same classes on torch's base classes and, with other imports, on ours."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.launch import Launched
from tests.support.processes import wait_gone
from tests.support.programs import write_program
from tests.support.torch_python import TorchPython

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Run = Callable[..., Launched]

pytestmark = pytest.mark.long  # each runs under torch as well

#: What a user changes: where the names come from.
_TORCHS = {
    "agent": "torch.distributed.elastic.agent.server",
    "elastic": "torch.distributed.elastic",
}
_OURS = {"agent": "elastic_run.agent", "elastic": "elastic_run"}

_HEAD = """
import os, signal, sys, time
from {agent} import RunResult, SimpleElasticAgent, Worker, WorkerSpec, WorkerState
from {agent}.local_elastic_agent import LocalElasticAgent
from {elastic}.events import EventSource
from {elastic}.metrics import MetricHandler, configure
from {elastic}.multiprocessing import DefaultLogsSpecs, SignalException, start_processes
from {elastic}.rendezvous import RendezvousParameters
from {elastic}.rendezvous.registry import get_rendezvous_handler

def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def make_spec(entrypoint, *args, max_restarts=1):
    parameters = RendezvousParameters("c10d", "localhost:0", "job", 1, 1)
    handler = get_rendezvous_handler(parameters)
    return WorkerSpec("trainer", 2, handler, entrypoint=entrypoint, args=args, max_restarts=max_restarts,
                      monitor_interval=0.05, master_addr="localhost")

def work(text):
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
    if attempt == 0 and rank == "1":
        raise ValueError("the first attempt fails")
    if attempt == 0:
        time.sleep(1000)
    return text, attempt, rank, os.environ["WORLD_SIZE"]

def fail(text):
    if os.environ["RANK"] == "1":
        raise ValueError(text)
    time.sleep(1000)
"""

#: As users write one that starts workers in a way of its own: torch's four hooks, and a look into the steps between.
_OWN_AGENT = """
class OwnAgent(SimpleElasticAgent):
    def __init__(self, spec, logs_specs):
        super().__init__(spec, exit_barrier_timeout=5)
        self._logs_specs = logs_specs
        self._context = None
        self.calls = []

    def _rendezvous(self, worker_group):
        super()._rendezvous(worker_group)
        self.calls.append(f"round {worker_group.group_rank}/{worker_group.group_world_size} {worker_group.master_addr}")

    def _assign_worker_ranks(self, store, group_rank, group_world_size, spec):
        workers = super()._assign_worker_ranks(store, group_rank, group_world_size, spec)
        self.calls.append(f"ranks {[(w.local_rank, w.global_rank, w.role_rank, w.world_size) for w in workers]}")
        return workers

    def _initialize_workers(self, worker_group):
        self.calls.append(f"initialize {worker_group.state.name}")
        super()._initialize_workers(worker_group)
        self.calls.append(f"initialized {worker_group.state.name}")

    def _restart_workers(self, worker_group):
        self.calls.append(f"restart, {self._remaining_restarts} left")
        super()._restart_workers(worker_group)

    def _exit_barrier(self):
        self.calls.append("barrier")
        super()._exit_barrier()

    def _start_workers(self, worker_group):
        spec = worker_group.spec
        attempt = spec.max_restarts - self._remaining_restarts
        envs = {w.local_rank: {"RANK": str(w.global_rank), "WORLD_SIZE": str(w.world_size),
                "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
                "TORCHELASTIC_RESTART_COUNT": str(attempt)} for w in worker_group.workers}
        args = {rank: spec.args for rank in envs}
        self._context = start_processes(spec.role, spec.entrypoint, args, envs, self._logs_specs, start_method=METHOD)
        self.calls.append("start")
        return self._context.pids()

    def _stop_workers(self, worker_group):
        self.calls.append("stop")
        self._context.close(signal.SIGTERM)

    def _monitor_workers(self, worker_group):
        assert {w.id for w in worker_group.workers} == set(self._context.pids().values())
        found = self._context.wait(0)
        if found is None:
            return RunResult(state=WorkerState.HEALTHY)
        ranks = {w.local_rank: w.global_rank for w in worker_group.workers}
        if found.is_failed():
            return RunResult(WorkerState.FAILED, failures={ranks[r]: f for r, f in found.failures.items()})
        return RunResult(WorkerState.SUCCEEDED, {ranks[r]: v for r, v in found.return_values.items()})

    def _shutdown(self, death_sig=signal.SIGTERM, timeout=30):
        self.calls.append(f"shutdown {death_sig.name}")
        if self._context:
            self._context.close(death_sig, timeout)
"""

#: As users write one that keeps the processes and replaces steps around them.
_LOCAL_AGENT = """
class OwnAgent(LocalElasticAgent):
    def __init__(self, spec, logs_specs):
        super().__init__(spec, logs_specs, METHOD, exit_barrier_timeout=5)
        self.calls = []

    def _assign_worker_ranks(self, store, group_rank, group_world_size, spec):
        self.calls.append("ranks")
        return super()._assign_worker_ranks(store, group_rank, group_world_size, spec)

    def _start_workers(self, worker_group):
        ids = super()._start_workers(worker_group)
        self.calls.append(f"start {sorted(ids)} {sorted(ids.values()) == sorted(self._pcontext.pids().values())}")
        return ids

    def _monitor_workers(self, worker_group):
        result = super()._monitor_workers(worker_group)
        if result.state != WorkerState.HEALTHY:
            self.calls.append(f"{result.state.name} {sorted(result.failures)} {sorted(result.return_values)}")
        return result

    def _restart_workers(self, worker_group):
        self.calls.append("restart")
        super()._restart_workers(worker_group)
"""

_MAIN = """
names = set()
class Keep(MetricHandler):
    def emit(self, metric_data): names.add(metric_data.name)
configure(Keep())
agent = OwnAgent(make_spec({entrypoint}, "text"), DefaultLogsSpecs())
result = agent.run()
group = agent.get_worker_group()
for call in agent.calls:
    say(call)
say(result.state.name, result.is_failed(), sorted(result.return_values.items()))
say([(rank, f.exitcode, f.message["message"]) for rank, f in sorted(result.failures.items())][:1])
say(group.state.name, agent._remaining_restarts, [agent._get_worker_state(w, result) for w in group.workers][1:])
event = agent.get_event_succeeded()
say(event.name, event.source == EventSource.AGENT, event.metadata["agent_restarts"], event.metadata["rdzv_backend"])
say(*sorted(name for name in names if name != "workers.trainer.healthy"))  # they may be done at the first look
"""


def _parts(classes: str, main: str, packages: dict[str, str], method: str) -> tuple[str, str, str]:
    """Return the parts of a program, with torch's names or ours."""
    return f"{_HEAD.format(**packages)}\nMETHOD = {method!r}", classes, main


@pytest.fixture(scope="module")
def torch_python() -> Iterator[TorchPython]:
    """Start the interpreter of torch's side."""
    with TorchPython() as python:
        yield python


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Run a program made of classes and what it does as the main program, with torch's names or ours."""
    started: list[Launched] = []

    def start(classes: str, main: str, packages: dict[str, str], method: str = "spawn") -> Launched:
        place = tmp_path / f"program_{packages['elastic'].replace('.', '_')}.py"
        path = write_program(place, *_parts(classes, main, packages, method))
        started.append(Launched((sys.executable, path), env=dict(os.environ)))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.mark.parametrize(
    ("agent", "entrypoint", "method"),
    [
        (_OWN_AGENT, "work", "spawn"),
        (_OWN_AGENT, "work", "fork"),
        (_OWN_AGENT, "fail", "spawn"),
        (_LOCAL_AGENT, "work", "spawn"),
        (_LOCAL_AGENT, "fail", "forkserver"),
    ],
    ids=["own-restart", "own-restart-fork", "own-failure", "local-restart", "local-failure"],
)
def test_an_agent_written_for_torch(
    agent: str, entrypoint: str, method: str, run: Run, torch_python: TorchPython, tmp_path: Path
) -> None:
    """The same class sees the same calls in the same order, and has the same result, restarts, states and events."""
    path = tmp_path / "program.py"
    # torch's workers are forked: spawned ones import torch, each of them in each round.
    write_program(path, *_parts(agent, _MAIN.format(entrypoint=entrypoint), _TORCHS, "fork"))
    theirs = torch_python.run(path, deadline=90)
    assert theirs.returncode == 0, theirs.stderr
    job = run(agent, _MAIN.format(entrypoint=entrypoint), _OURS, method)
    assert job.wait_exit(deadline=90) == 0, job.stderr
    said = job.stdout.splitlines()
    assert theirs.stdout.splitlines() == said
    assert ("SUCCEEDED False" in "\n".join(said)) == (entrypoint == "work")


@pytest.mark.long
def test_a_stop_signal_shuts_the_agent_down(run: Run) -> None:
    """SIGTERM raises SignalException out of `run` after `_shutdown` with that signal, on torch's class and on ours."""
    main = """
class Telling(OwnAgent):
    def _monitor_workers(self, worker_group):
        result = super()._monitor_workers(worker_group)
        say("looked")
        return result
agent = Telling(make_spec("/bin/sh", "-c", "echo ready $$; sleep 1000"), DefaultLogsSpecs())
try:
    agent.run()
except SignalException as error:
    say("stopped", error.sigval.name, agent.calls[-1])
"""
    for packages in (_TORCHS, _OURS):
        job = run(_OWN_AGENT, main, packages)
        pids = [int(match[1]) for match in job.wait_lines(r"^ready (\d+)", count=2, deadline=90)]
        # Before that it could come between the start of the workers and the agent's knowing of them.
        job.wait_line("looked")
        job.send(signal.SIGTERM)
        assert job.wait_exit() == 0, job.stderr
        assert job.stdout.splitlines()[-1] == "stopped SIGTERM shutdown SIGTERM"
        for pid in pids:
            wait_gone(pid)


def test_our_own_agent_is_not_driven_by_hooks(run: Run) -> None:
    """A subclass that replaces no step is waited for, not looked at: its hooks are never called."""
    classes = """
class Quiet(LocalElasticAgent):
    def note(self): return "a method of its own is no hook"
"""
    main = """
def never(*_): raise AssertionError("the hooks were called")
SimpleElasticAgent.run = never
result = Quiet(make_spec(work, "text"), DefaultLogsSpecs()).run()
say(result.state.name, result.return_values)
"""
    job = run(classes, main, _OURS)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "SUCCEEDED {0: ('text', 1, '0', '2'), 1: ('text', 1, '1', '2')}\n"


def test_a_program_that_patches_a_step_of_the_class_is_heard(run: Run) -> None:
    """A step that a program replaces in one of the classes is called as a subclass's is."""
    main = """
import functools
for owner, name in ((SimpleElasticAgent, "_invoke_run"), (LocalElasticAgent, "_start_workers")):
    @functools.wraps(getattr(owner, name))
    def call(*args, step=getattr(owner, name), name=name):
        say(name)
        return step(*args)
    setattr(owner, name, call)
result = LocalElasticAgent(make_spec("true", max_restarts=0), logs_specs=DefaultLogsSpecs()).run()
say(result.state.name)
"""
    job = run("", main, _OURS)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout.splitlines() == ["_invoke_run", "_start_workers", "SUCCEEDED"]
