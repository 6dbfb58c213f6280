"""`init_distributed` under every launcher, with real processes and gloo; what it says when a worker doesn't come."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.sessions import free_port
from tests.support.torch_python import TorchPython
from tests.support.torchrun import TORCHRUN, with_hosts_file, write_hosts_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.support.launch import Launch, Launched, Worker


PYTHON = (sys.executable, "-W", "error")
#: One thread each: no line about it, and no load.
QUIET = {"OMP_NUM_THREADS": "1"}
#: An import of torch takes each worker a second; that a script runs without this is the first test.
WARM = ("--standalone", "--preload=torch")
HEAD = """
import atexit, json, os, sys
import elastic_run.worker as worker
def say(**words): os.write(1, (json.dumps(words) + "\\n").encode())
"""
#: Goes on when all ranks have imported torch, however long that took them: what follows has a short timeout.
TOGETHER = """
import time, torch.distributed as dist
open(f"{__file__}.{os.environ['RANK']}", "w").close()
while not all(os.path.exists(f"{__file__}.{rank}") for rank in range(int(os.environ["WORLD_SIZE"]))):
    time.sleep(0.01)
"""
TELL = """
import torch.distributed as dist
before = worker.rank(), worker.world_size(), worker.local_rank(), worker.is_main()
atexit.register(lambda: say(is_left=not dist.is_initialized()))
context = worker.init_distributed()
say(
    rank=context.rank, world_size=context.world_size, local_rank=context.local_rank, device=str(context.device),
    backend=context.backend, launcher=context.launcher, is_main=context.is_main, mean=worker.reduce_mean(context.rank),
    is_same=worker.init_distributed("gloo") is context,
    is_known_before=before == (worker.rank(), worker.world_size(), worker.local_rank(), worker.is_main()),
)
"""


@pytest.fixture
def script(tmp_path: Path) -> Worker:
    """Write a training script; `worker` and `say` are there already."""

    def write(body: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(HEAD + textwrap.dedent(body), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="module")
def torch_python() -> Iterator[TorchPython]:
    """Start an interpreter for scripts that are started without a launcher."""
    with TorchPython("-W", "error", env=QUIET) as python:
        yield python


def told(job: Launched) -> list[dict[str, Any]]:
    """Return what the workers have said, by rank where they gave one."""
    words = [json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")]
    return sorted(words, key=lambda word: word.get("rank", -1))


def a_worker(rank: int, world_size: int, launcher: str) -> dict[str, Any]:
    """Return what TELL says on the CPU of one node."""
    return {
        "rank": rank,
        "world_size": world_size,
        "local_rank": rank,
        "device": "cpu",
        "backend": "gloo",
        "launcher": launcher,
        "is_main": rank == 0,
        "mean": (world_size - 1) / 2,
        "is_same": True,
        "is_known_before": True,
    }


@pytest.mark.parametrize(
    "launcher", ["elastic-run", *(pytest.param(launcher, marks=pytest.mark.long) for launcher in ("torchrun", "none"))]
)
def test_the_same_script_runs_everywhere(launch: Launch, script: Worker, tmp_path: Path, launcher: str) -> None:
    """Under elastic-run, torchrun and plain python a script learns what it is, and leaves without a word."""
    count = 1 if launcher == "none" else 2
    flags = [] if launcher == "none" else ["--standalone", f"--nproc-per-node={count}"]
    programs: dict[str, dict[str, Sequence[str]]] = {
        "none": {"program": PYTHON},
        "torchrun": {"program": with_hosts_file(TORCHRUN, write_hosts_file(tmp_path))},
        "elastic-run": {},
    }
    job = launch(*flags, script(TELL), env=QUIET, **programs[launcher])
    assert job.wait_exit() == 0, job.stderr
    words = told(job)
    assert words[:count] == [{"is_left": True}] * count
    assert words[count:] == [a_worker(rank, count, launcher) for rank in range(count)]
    assert not re.search("warn|destroy", job.stderr, re.IGNORECASE), job.stderr


def test_importing_it_imports_no_torch(launch: Launch) -> None:
    """What needs no torch doesn't wait for it: ranks, heartbeats and stop signals are there without."""
    code = """
import sys, elastic_run.worker as worker
worker.rank(), worker.is_main(), worker.heartbeat(1), worker.stop_requested()
print(sorted({"torch", "elastic_run.launcher", "elastic_run.agent"} & set(sys.modules)))
"""
    job = launch("-c", code, program=PYTHON)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "[]\n"


@pytest.mark.long
def test_a_model_that_outlives_its_group_is_no_matter(launch: Launch, script: Worker) -> None:
    """A DDP model that is there to the end neither hangs nor aborts a worker whose gloo thread is late."""
    path = script("""
        import gc, time, torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        atexit.unregister(gc.freeze)  # so that the last garbage collection sees the model
        class Model(DistributedDataParallel): pass
        worker.init_distributed()
        model = Model(torch.nn.Linear(3, 1))
        model(torch.ones(2, 3)).sum().backward()
        def end(future):
            time.sleep(0.5)  # a machine under load: the thread comes back to Python when the script is through
            say(is_late=1)
        late = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(end)
    """)
    job = launch("--standalone", "--nproc-per-node=2", path, env=QUIET)
    assert job.wait_exit(deadline=100) == 0, job.stderr
    assert (told(job), job.stderr) == ([{"is_late": 1}] * 2, "")


def test_torch_before_2_8_destroys_no_group_at_the_end(torch_python: TorchPython, script: Worker) -> None:
    """It would hold Python's lock, for which a thread of gloo may wait."""
    path = script("""
        import weakref, torch, torch.distributed as dist
        torch.__version__ = torch.torch_version.TorchVersion("2.7.1+cpu")
        atexit.register(lambda: say(is_left=not dist.is_initialized(), is_there=group() is not None))
        worker.init_distributed()
        group = weakref.ref(dist.group.WORLD)
    """)
    done = torch_python.run(path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"is_left": True, "is_there": True}


@pytest.mark.long
def test_a_small_reduction_keeps_its_tensor(launch: Launch, script: Worker) -> None:
    """Before torch 2.8, destroy_process_group may wait for ever for a thread that lets the tensor go."""
    path = script("""
        import weakref, torch.distributed as dist
        all_reduce, reduced = dist.all_reduce, []
        def note(tensor, *words, **named):
            reduced.append(weakref.ref(tensor))
            return all_reduce(tensor, *words, **named)
        dist.all_reduce = note
        mean, vote = lambda: worker.reduce_mean(1), lambda: worker.stop_requested(everywhere=True)
        for reduce in (worker.init_distributed, mean, vote):
            reduce()
            assert reduced.pop()() is not None
        assert not reduced
    """)
    job = launch(*WARM, "--nproc-per-node=2", path, env=QUIET)
    assert job.wait_exit() == 0, job.stderr


@pytest.mark.long
@pytest.mark.parametrize("how", ["script", pytest.param("function", marks=pytest.mark.soak)])
def test_who_fails_ends_though_a_collective_does_not(launch: Launch, script: Worker, how: str) -> None:
    """A rank that raises while others keep one of its collectives waiting ends at once, and so does the job."""
    path = script("""
        import threading, torch, torch.distributed as dist
        import elastic_run
        def train():
            global model
            context = worker.init_distributed()
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
            if context.is_main:
                dist.all_reduce(torch.ones(1), async_op=True)
                raise RuntimeError("bad data")
            threading.Event().wait()  # until the launcher stops it
        if __name__ == "__main__":
            if "RANK" in os.environ:
                train()
            config = elastic_run.LaunchConfig(1, 1, nproc_per_node=2, rdzv_backend="local", max_restarts=0)
            try:
                elastic_run.elastic_launch(config, train)()
            except elastic_run.ChildFailedError as error:
                sys.exit(f"RuntimeError: {error.get_first_failure()[1].message['message']}")
    """)
    flags, program = ((), PYTHON) if how == "function" else ((*WARM, "--nproc-per-node=2"), None)
    job = launch(*flags, path, env=QUIET, **({"program": program} if program else {}))
    assert job.wait_exit(deadline=100) == 1, job.stderr
    assert "RuntimeError: bad data" in job.stderr


@pytest.mark.long
def test_a_group_can_be_left_and_made_again(launch: Launch, script: Worker) -> None:
    """After destroy_process_group a second init_distributed meets the others anew, on the same store."""
    path = script("""
        import torch.distributed as dist
        for _ in range(3):
            context = worker.init_distributed()
            mean = worker.reduce_mean(context.rank)
            dist.destroy_process_group()
        say(mean=mean)
    """)
    job = launch(*WARM, "--nproc-per-node=2", path, env=QUIET)
    assert job.wait_exit() == 0, job.stderr
    assert told(job) == [{"mean": 0.5}] * 2


@pytest.mark.long
def test_who_does_not_come_again_is_named(launch: Launch, script: Worker) -> None:
    """A second meeting begins anew: that a rank came to the first one counts for nothing."""
    path = script("""
        import torch.distributed as dist
        worker.init_distributed()
        dist.destroy_process_group()
        if os.environ["RANK"] == "1":
            sys.stdin.buffer.read()  # until the launcher stops it
        worker.init_distributed(timeout=2)
    """)
    job = launch(*WARM, "--nproc-per-node=2", path, env=QUIET, stdin=-1)
    assert job.wait_exit() == 1
    assert re.search(r"JoinError: rank 0 on \S+: not all ranks have arrived .* 1 of 2 missing: rank 1", job.stderr)


@pytest.mark.long
def test_a_group_of_the_script_is_taken_as_it_is(launch: Launch, script: Worker) -> None:
    """Where the script has made the default group itself, it is described, and left to the script."""
    path = script("""
        import torch.distributed as dist
        atexit.register(lambda: say(is_left=not dist.is_initialized()))
        dist.init_process_group("gloo")
        context = worker.init_distributed()
        try:
            worker.init_distributed("nccl")
        except ValueError as error:
            say(rank=context.rank, backend=context.backend, error=str(error))
    """)
    job = launch(*WARM, "--nproc-per-node=2", path, env=QUIET)
    assert job.wait_exit() == 0, job.stderr
    error = "backend=nccl, but the process group is there already, with gloo"
    ranks = [{"rank": rank, "backend": "gloo", "error": error} for rank in range(2)]
    assert told(job) == [{"is_left": False}] * 2 + ranks


@pytest.mark.long
def test_a_rank_that_does_not_come_is_named(launch: Launch, script: Worker) -> None:
    """When a rank is missing at the timeout, the others say which, and of how many."""
    path = script(f"""
        {textwrap.indent(TOGETHER, " " * 8).strip()}
        if os.environ["RANK"] == "1":
            sys.stdin.buffer.read()  # until the launcher stops it
        worker.init_distributed(timeout=3)
    """)
    job = launch(*WARM, "--nproc-per-node=3", path, env=QUIET, stdin=-1)
    assert job.wait_exit() == 1
    assert re.search(
        r"JoinError: rank [02] on \S+: not all ranks have arrived \(timeout 3 s\): 1 of 3 missing: rank 1 \(did they",
        job.stderr,
    )


def test_a_rank_that_does_not_come_to_a_store_of_rank_0_is_named(torch_python: TorchPython, script: Worker) -> None:
    """Where rank 0 serves the store, as under srun, it names who is missing as well."""
    path = script("worker.init_distributed(timeout=1)")
    place = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = torch_python.run(path, env=place)
    assert done.returncode == 1  # at once: nobody came who might still ask its store
    assert re.search(
        r"JoinError: rank 0 on \S+: not all ranks have arrived \(timeout 1 s\): 2 of 3 missing: rank 1, 2 \(did they",
        done.stderr,
    )


@pytest.mark.long
def test_a_rank_that_fails_to_connect_is_named_with_its_host(launch: Launch, script: Worker) -> None:
    """A rank that arrived but can't make its group is named with its host by those that wait for it."""
    path = script(f"""
        {textwrap.indent(TOGETHER, " " * 8).strip()}
        if os.environ["RANK"] == "1":
            def hang(*arguments, **options): sys.stdin.buffer.read()
            dist.init_process_group = hang
        worker.init_distributed(timeout=3)
    """)
    job = launch(*WARM, "--nproc-per-node=2", path, env=QUIET, stdin=-1)
    assert job.wait_exit() == 1
    assert re.search(r"JoinError: rank 0 on (\S+): .*1 of 2 missing: rank 1 on \1 \(did they fail", job.stderr)


def test_a_store_that_is_not_there_is_named(torch_python: TorchPython, script: Worker) -> None:
    """A worker that can't reach rank 0's store says where it looked, and what to look at."""
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = torch_python.run(script("worker.init_distributed(timeout=1)"), env=place)
    assert done.returncode == 1
    assert re.search(
        r"JoinError: rank 1 on \S+ could not reach the workers' store at 127.0.0.1:1 \(MASTER_ADDR, MASTER_PORT\) "
        r"within 1 s \(does the worker run that serves it",
        done.stderr,
    )


def test_a_port_that_is_taken_is_named(torch_python: TorchPython, script: Worker) -> None:
    """Rank 0, where it serves the store itself, says that its port may be taken, and by what variable to change it."""
    path = script("""
        import socket
        with socket.socket() as taken:
            taken.bind(("0.0.0.0", 0))
            taken.listen()
            os.environ["MASTER_PORT"] = str(taken.getsockname()[1])
            worker.init_distributed(timeout=5)
    """)
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    done = torch_python.run(path, env=place)
    assert done.returncode == 1
    assert re.search(r"JoinError: rank 0 on \S+ could not serve .* \(is the port taken\? set MASTER_PORT", done.stderr)


@pytest.mark.long
def test_rank_0_takes_its_store_away_last(launch: Launch, script: Worker) -> None:
    """Where rank 0 serves the store, it waits at its end for the others, who may still use it."""
    path = script("""
        import subprocess, time
        if "RANK" not in os.environ:
            ranks = [
                subprocess.Popen([sys.executable, __file__], env={**os.environ, "RANK": str(rank)})
                for rank in range(2)
            ]
            sys.exit(max(rank.wait() for rank in ranks))
        import torch.distributed as dist
        context = worker.init_distributed()
        store = dist.distributed_c10d._get_default_store()
        if context.is_main:
            store.set("pid", str(os.getpid()))
            sys.exit()
        pid, deadline = store.get("pid").decode(), time.monotonic() + 1
        while time.monotonic() < deadline and os.path.exists(f"/proc/{pid}"):
            time.sleep(0.01)  # a second is enough for a process to end that doesn't wait
        store.add("last", 1)  # it has an answer; set() would not learn that nobody is there
        say(rank=context.rank)
    """)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job = launch(path, program=PYTHON, env={**QUIET, **place})
    assert job.wait_exit() == 0, job.stderr
    assert told(job) == [{"rank": 1}]
    assert job.stderr == ""


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"RANK": "3"}, "PlaceError: WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set, but RANK=3: set all of"),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1"},
            "PlaceError: SLURM_JOB_ID, SLURM_LOCALID, SLURM_STEP_NODELIST, SLURM_NODEID, SLURM_STEP_NUM_TASKS are",
        ),
    ],
)
def test_a_bad_environment_is_one_line(launch: Launch, script: Worker, place: dict[str, str], message: str) -> None:
    """Half an environment ends at once, before torch is imported, with what is set and what is missing."""
    path = script("sys.modules['torch'] = None; worker.init_distributed()")
    job = launch(path, program=PYTHON, env={**QUIET, **place})
    assert job.wait_exit() == 1
    assert message in job.stderr


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("timeout=0", "ValueError: timeout=0: it must be more than 0 s"),
        ("device='cuda'", "PlaceError: device=cuda: this process sees no CUDA device"),
        ("'nccl', device='cpu'", "ValueError: backend=nccl works on CUDA devices only, not on device=cpu"),
        ("'glue'", "glue"),
    ],
)
def test_bad_arguments_are_one_line(torch_python: TorchPython, script: Worker, call: str, message: str) -> None:
    """What can't be asked for is refused with what was given."""
    done = torch_python.run(script(f"worker.init_distributed({call})"))
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]


@pytest.mark.long
def test_a_task_of_srun_with_the_rank_of_another_shell_is_refused(launch: Launch, script: Worker) -> None:
    """Else each task would train a model of its own, and end with 0."""
    left_over = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    step = {"SLURM_JOB_ID": "4", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}
    task = ("sh", "-c", 'SLURM_TASK_PID=$$ exec "$@"', "sh", *PYTHON)
    job = launch(script("worker.init_distributed()"), program=task, env={**QUIET, **left_over, **step})
    assert job.wait_exit() == 1
    assert "PlaceError: RANK=0 and WORLD_SIZE=1 are set, but this process is task 1 of the 4 tasks" in job.stderr
