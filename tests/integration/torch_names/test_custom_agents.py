"""Agents and launchers that users have derived from torch's classes: under torch, through compat, and on ours."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_run.compat.alias import PATHS
from tests.support.launch import Launched
from tests.support.processes import wait_gone
from tests.support.programs import write_program
from tests.support.torch_python import TorchPython

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.launch import Launch

    Run = Callable[..., Launched]


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
        pytest.param(_OWN_AGENT, "work", "spawn", id="own-restart", marks=pytest.mark.soak),
        pytest.param(_OWN_AGENT, "work", "fork", id="own-restart-fork", marks=pytest.mark.long),
        pytest.param(_OWN_AGENT, "fail", "spawn", id="own-failure", marks=pytest.mark.soak),
        pytest.param(_LOCAL_AGENT, "work", "spawn", id="local-restart", marks=pytest.mark.soak),
        pytest.param(_LOCAL_AGENT, "fail", "forkserver", id="local-failure", marks=pytest.mark.long),
    ],
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


@pytest.mark.long
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


@pytest.mark.long
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


# --- a handler, a launcher and an agent of one's own ------------------------------------------------------------------
# Twins of what torch's documentation shows. Each runs on torch first, which shows that it is written for torch, and
# then on elastic-run: through compat without a change, and with nothing but its imports changed.
PROGRAMS = Path(__file__).parents[2] / "data" / "torch_style"
ROOT = Path(__file__).parents[3]

#: Fails in its first life on rank 1, if there is another one; otherwise the ranks are added up.
WORKER = """
import os, sys
import torch, torch.distributed as dist
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] < os.environ["LIVES"]:
    sys.exit(9)
dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(total)
os.write(1, f"rank {dist.get_rank()}: {total.item():g}\\n".encode())
dist.destroy_process_group()
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Copy the programs, with the handler's package installed as an installer would."""
    directory = tmp_path / "programs"
    shutil.copytree(PROGRAMS, directory)
    metadata = directory / "meeting-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: meeting\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text("[torchrun.handlers]\nmeeting = meeting:get_handler\n", encoding="utf-8")
    (directory / "worker.py").write_text(WORKER, encoding="utf-8")
    return directory


@pytest.fixture
def run_program(programs: Path, launch: Launch) -> Launch:
    """Run one of the programs: on `torch`, on elastic-run through `compat`, or with its `imports` changed."""

    def start(how: str, program: str, *words: str, lives: int = 0) -> Launched:
        if how == "imports":
            for path in (programs / program, programs / "meeting" / "__init__.py"):
                path.write_text(_with_our_imports(path.read_text(encoding="utf-8")), encoding="utf-8")
        interpreter = [sys.executable, "-m", "elastic_run.compat"] if how == "compat" else [sys.executable]
        # RES_OPTIONS: torch's store looks up every peer's name, and mustn't wait for a name server.
        environment = {"PYTHONPATH": f"{programs}{os.pathsep}{ROOT}", "LIVES": str(lives), "RES_OPTIONS": "attempts:0"}
        return launch(programs / program, *words, program=interpreter, env=environment, cwd=programs)

    return start


def _with_our_imports(source: str) -> str:
    """Replace torch's paths by ours, the longest first."""
    for path in sorted(PATHS, key=len, reverse=True):
        source = source.replace(f"from {path} import", f"from {PATHS[path]} import")
    assert "torch.distributed.elastic" not in source
    return source


#: The program as it is, on torch's own agent: what the others are compared with, and it changes with torch only.
UNDER_TORCH = pytest.param("torch", "torch", marks=pytest.mark.soak)
#: How the program is run, and whose agent it gets.
WAYS = pytest.mark.parametrize(
    ("how", "whose"),
    [UNDER_TORCH, ("compat", "elastic_run"), pytest.param("imports", "elastic_run", marks=pytest.mark.soak)],
)


@pytest.mark.long
@WAYS
def test_a_launcher_of_ones_own(how: str, whose: str, run_program: Launch) -> None:
    """A local agent made by hand, with a registered handler, runs a function and returns what the workers returned."""
    job = run_program(how, "launcher.py", "2", "1")
    assert job.wait_exit(deadline=60) == 0, job.stderr
    assert job.stdout == f"returned: [(0, 3.0), (1, 3.0)]\nagent: {whose}\n"


@pytest.mark.soak
@pytest.mark.parametrize(("how", "whose"), [UNDER_TORCH, ("compat", "elastic_run")])
def test_a_launcher_with_torchs_own_rendezvous(how: str, whose: str, run_program: Launch) -> None:
    """A program that makes torch's dynamic handler and its store by hand gets our agent with them through compat."""
    job = run_program(how, "dynamic.py")
    assert job.wait_exit(deadline=60) == 0, job.stderr
    assert job.stdout == f"SUCCEEDED: {{0: 3.0, 1: 3.0}}\nagent: {whose}\n"


@pytest.mark.long
@WAYS
def test_an_agent_of_ones_own(how: str, whose: str, run_program: Launch) -> None:
    """A subclass of SimpleElasticAgent that starts workers its own way restarts them and succeeds as under torch."""
    job = run_program(how, "agent.py", "worker.py", "2", "2", lives=1)
    assert job.wait_exit(deadline=60) == 0, job.stderr
    lines = job.stdout.splitlines()
    assert lines[-2:] == ["SUCCEEDED [0, 1] [] 1", f"agent: {whose}"]
    assert sorted(lines[:-2]) == ["rank 0: 3", "rank 1: 3"]


@pytest.mark.long
@pytest.mark.parametrize(
    "through",
    [pytest.param([], id="plain"), pytest.param(["-m", "elastic_run.compat"], id="compat", marks=pytest.mark.soak)],
)
def test_a_package_with_a_handler(through: list[str], programs: Path, launch: Launch) -> None:
    """A package that brings a handler derived from torch's class serves elastic-run as it serves torchrun."""
    environment = {
        "PYTHONPATH": f"{programs}{os.pathsep}{ROOT}",
        "LIVES": "1",
        "RES_OPTIONS": "attempts:0",
    }
    words = ("--rdzv-backend=meeting", "--rdzv-endpoint=127.0.0.1", "--rdzv-id=j", "--nproc-per-node=2")
    program = [sys.executable, *through, "-m", "elastic_run"]
    flags = ("--max-restarts=1", "--preload=torch", programs / "worker.py")
    job = launch(*words, *flags, program=program, env=environment, cwd=programs)
    assert job.wait_exit(deadline=60) == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == ["rank 0: 3", "rank 1: 3"]
