"""--hang-timeout on real jobs: each kind of hang names its rank, and normal pauses are none."""

from __future__ import annotations

import json
import re
import signal
from typing import TYPE_CHECKING

import pytest

from elastic_run import contract
from tests.support.sessions import free_port

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.support.launch import Launch, Launched, Worker


_BEGIN = """
import os, subprocess, sys, time
import torch, torch.distributed as dist
from elastic_run.worker import heartbeat

def load_batch():
    time.sleep(3600)

dist.init_process_group("gloo")
rank = dist.get_rank()
for _ in range(3):
    dist.all_reduce(torch.ones(4))
os.write(1, b"began\\n")
"""

_SLEEPS = "if rank == 1:\n    load_batch()\ndist.all_reduce(torch.ones(4))\n"
_COMPUTES = "while True:\n    dist.all_reduce(torch.ones(4))\n    time.sleep(0.01)\n"
#: A C function uses a processor without end, and no other thread of the rank runs.
_HOLDS_THE_LOCK = """
def count():
    sum(range(10**13))

model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
model(torch.ones(4, 4)).sum().backward()
if rank == 1:
    count()
model(torch.ones(4, 4)).sum().backward()
"""
_MISMATCH = """
first, second = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])
dist.all_reduce(torch.ones(4), group=second if rank == 2 else first)
"""
_LOADER = """
from torch.utils.data import DataLoader, Dataset

class Stuck(Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        while rank == 0 and index == 7 and loops:
            pass
        if rank == 0 and index == 7:
            load_batch()
        return torch.ones(2)

for batch in DataLoader(Stuck(), batch_size=2, num_workers=2):
    dist.all_reduce(batch)
"""
#: Each pause is longer than the timeout, but for the one in which nothing at all happens.
_PAUSES = """
def evaluate():
    end = time.monotonic() + 5
    while time.monotonic() < end:
        sum(range(10000))

def save():
    with open(sys.argv[1], "wb") as file:
        for _ in range(50):
            file.write(bytes(1 << 20))
            time.sleep(0.1)

def compile():
    code = "import time\\nend = time.monotonic() + 5\\nwhile time.monotonic() < end: pass"
    subprocess.run([sys.executable, "-c", code])

def heartbeats():
    for step in range(50):
        heartbeat(step)
        time.sleep(0.1)

for pause in (evaluate, save, compile, heartbeats, lambda: time.sleep(1.5)):
    if rank == 0:
        pause()
    dist.barrier()
os.write(1, b"done\\n")
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path) -> Worker:
    """Return a function that writes a program."""

    def write(text: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(_BEGIN + text, encoding="utf-8")
        return path

    return write


def run_until_reported(launch: Launch, logs: Path, *words: str | Path) -> str:
    """Run a job of three ranks until its hang is reported, then stop it; return what it said, once, with all stacks."""
    job = launch("--nproc-per-node=3", "--hang-timeout=4", f"--log-dir={logs}", *words)
    job.wait_line("the job goes on", deadline=120)
    job.send(signal.SIGTERM)
    assert job.wait_exit() == 143
    assert job.stderr.count("the job hangs: no progress of any rank for ") == 1
    (path,) = logs.glob("latest/stacks.txt")
    assert f"all stacks: {path.resolve()}" in job.stderr
    assert "=== rank 2" in path.read_text(encoding="utf-8")
    return job.stderr


#: A program, flags, and what the report has to say; the first two take long, and the others are one more of their kind.
_HANGS = {
    "mismatch": (_MISMATCH, ["--preload=torch"], "all_reduce (train.py:"),
    "looping loader": ("loops = True" + _LOADER, ["--preload=torch", "--hang-timeout=1"], "rank 0 is in "),
    "loader": ("loops = False" + _LOADER, [], "rank 0 is in "),
    "stopped": (_COMPUTES, ["--inject-fault=stop@8s:rank=2", "--shutdown-timeout=2"], "rank 2 is stopped (SIGSTOP, "),
    "holds": (_HOLDS_THE_LOCK, ["--hang-timeout=1"], "rank 1 is in count (train.py:"),
}


@pytest.mark.parametrize(
    ("program", "flags", "expected"),
    [
        pytest.param(*hang, id=name, marks=pytest.mark.long if number < 2 else pytest.mark.soak)
        for number, (name, hang) in enumerate(_HANGS.items())
    ],
)
def test_a_hang_names_the_rank_that_the_others_wait_for(
    program: str, flags: list[str], expected: str, script: Worker, launch: Launch, tmp_path: Path
) -> None:
    """Once, with all stacks in a file, and the job goes on until somebody stops it."""
    said = run_until_reported(launch, tmp_path / "logs", *flags, script(program))
    assert expected in said, said


def test_the_flight_recorder_names_the_collective(script: Worker, launch: Launch, tmp_path: Path) -> None:
    """It is on by itself, and its line stands below the places of the ranks."""
    said = run_until_reported(launch, tmp_path / "logs", "--preload=torch", script(_SLEEPS))
    assert "rank 1 is in load_batch (train.py:7), " in said
    assert "ranks 0, 2 wait in all_reduce (train.py:" in said
    assert (
        "flight recorder: rank 1 did not join all_reduce number 4 of group 'default', in which ranks 0, 2 wait" in said
    )


@pytest.mark.long
def test_the_report_begins_with_the_collective_if_all_ranks_wait(script: Worker, launch: Launch) -> None:
    """No place tells the cause then; the report names the rank in its first five lines."""
    program = "inner = dist.new_group([0, 1, 2])\ndist.all_reduce(torch.ones(4), group=None if rank == 1 else inner)\n"
    job = launch("--preload=torch", "--nproc-per-node=3", "--hang-timeout=3", "--hang-action=fail", script(program))
    assert job.wait_exit(deadline=180) == contract.EXIT_HUNG, job.stderr
    report = job.stderr[job.stderr.index("-- elastic-run: ") :]
    first = " ".join(" ".join(report.splitlines()[:5]).split())
    assert "rank 1 did not join all_reduce number 1 of group" in first, report
    assert report.count("did not join") == 1


@pytest.mark.long
def test_a_restart_takes_one_of_the_budget(script: Worker, launch: Launch) -> None:
    """The second attempt does not hang."""
    program = 'if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":\n    load_batch()\ndist.barrier()\n'
    program += "dist.destroy_process_group()\n"
    flags = ("--hang-timeout=3", "--hang-action=restart", "--max-restarts=1")
    job = launch("--preload=torch", "--nproc-per-node=2", *flags, script(program))
    assert job.wait_exit(deadline=180) == 0, job.stderr
    assert "rank 1 (local 1, pid " in job.stderr
    assert " made no progress" in job.stderr
    assert "restart 1 of 1" in job.stderr


@pytest.mark.long
def test_a_hang_that_ends_the_job_is_its_cause(script: Worker, launch: Launch, tmp_path: Path) -> None:
    """Exit code 212, and the rank and its place stand in failure.json."""
    path = script(_SLEEPS)
    jobs = {action: start_that_ends(launch, action, tmp_path / action, path) for action in ("restart", "fail")}
    for action, job in jobs.items():
        assert job.wait_exit(deadline=180) == contract.EXIT_HUNG, job.stderr
        check_cause(action, tmp_path / action)
    assert "the workers, which start again if a restart is left (--hang-action=restart)" in jobs["restart"].stderr


def start_that_ends(launch: Launch, action: str, logs: Path, path: Path) -> Launched:
    """Start a job of two ranks that its first hang ends."""
    flags = ("--hang-timeout=3", f"--hang-action={action}", "--max-restarts=0", f"--log-dir={logs}")
    return launch("--preload=torch", "--nproc-per-node=2", *flags, path)


#: Verdict and detail of a job that a hang ends, by the action.
_ENDS = {
    "restart": ("worker_failed", "no restart is left for --hang-action=restart (--max-restarts=0)"),
    "fail": ("hung", "--hang-action=fail ends the job"),
}


def check_cause(action: str, logs: Path) -> None:
    """Read the hang of rank 1 in a job's documents."""
    (path,) = logs.glob("latest/failure.json")
    document = json.loads(path.read_text(encoding="utf-8"))
    assert (document["verdict"], document["detail"]) == _ENDS[action]
    assert document["root_cause"]["rank"] == 1
    assert document["root_cause"]["exception"]["type"] == contract.HANG
    assert "rank 1 is in load_batch (train.py:7)" in document["root_cause"]["exception"]["message"]
    (path,) = logs.glob("latest/events.jsonl")
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    (found,) = [event for event in events if event["event"] == "hang_found"]
    assert (found["rank"], found["action"]) == (1, action)


#: A thread of each rank wakes up 100 times a second, as those of gloo do, and needs little processor time.
_POLLS = """
import os, threading, time

def poll():
    while True:
        end = time.thread_time() + 0.0003
        while time.thread_time() < end:
            pass
        time.sleep(0.01)

threading.Thread(target=poll, daemon=True).start()
os.write(1, b"began\\n")
time.sleep(600)
"""


def test_a_thread_that_polls_does_not_delay_the_verdict(launch: Launch, tmp_path: Path) -> None:
    """No look takes it for progress: the verdict comes when the ranks have been at their places for the timeout."""
    program = tmp_path / "program.py"
    program.write_text(_POLLS)
    delays: list[float] = []
    # On a busy machine a polling thread may wait for a processor as long as one that computes: then a look delays it.
    while not delays or (min(delays) >= 0.1 and len(delays) < 5):
        logs = tmp_path / f"logs{len(delays)}"
        flags = ("--nproc-per-node=12", "--hang-timeout=2", "--hang-action=fail", f"--log-dir={logs}")
        job = launch(*flags, program)
        assert job.wait_exit() == contract.EXIT_HUNG, job.stderr
        (path,) = logs.glob("latest/events.jsonl")
        events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        (found,) = [event for event in events if event["event"] == "hang_found"]
        (same,) = re.findall(r"no progress of any rank for ([\d.]+) s", found["detail"])
        delays.append(float(same) - found["still_s"])
    assert min(delays) < 0.1, delays


def start_nodes(
    launch: Launch, *words: str | Path, timeouts: Sequence[str] = ("--hang-timeout=4",) * 2
) -> list[Launched]:
    """Start a job of two nodes with one worker each."""
    place = (f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-backend=c10d", "--rdzv-id=hang", "--nnodes=2")
    return [launch(*place, timeout, *words) for timeout in timeouts]


@pytest.mark.parametrize(
    "action",
    [
        pytest.param("report", marks=pytest.mark.long),
        *(pytest.param(action, marks=pytest.mark.soak) for action in ("restart", "fail")),
    ],
)
def test_the_ranks_of_all_nodes_are_judged_together(
    action: str, script: Worker, launch: Launch, tmp_path: Path
) -> None:
    """The rank that the other node waits for is named, there as well; the job has one cause."""
    logs = tmp_path / "logs"
    flags = (f"--hang-action={action}", "--max-restarts=0", f"--log-dir={logs}")
    nodes = start_nodes(launch, *flags, script(_SLEEPS))
    if action == "report":
        for node in nodes:
            node.wait_line("the job goes on", deadline=120)
            assert "rank 0 waits in all_reduce (train.py:" in node.stderr
            assert "rank 1 is in load_batch (train.py:7), " in node.stderr
            assert node.stderr.count("the job hangs") == 1
        nodes[0].send(signal.SIGTERM)
        nodes[1].send(signal.SIGTERM)
    codes = [node.wait_exit(deadline=180) for node in nodes]
    if action != "report":
        assert codes == [contract.EXIT_HUNG] * 2, nodes[0].stderr + nodes[1].stderr
        documents = [json.loads(path.read_text(encoding="utf-8")) for path in logs.rglob("failure.json")]
        assert [document["root_cause"]["rank"] for document in documents] == [1, 1]
        assert {document["root_cause"]["exception"]["type"] for document in documents} == {contract.HANG}


def test_a_rank_that_has_ended_at_once_is_waited_for_in_vain(launch: Launch, tmp_path: Path) -> None:
    """Rank 0 has ended before its node has looked for a hang; the other node decides."""
    program = tmp_path / "train.py"
    program.write_text('import os, time\nif os.environ["RANK"] != "0":\n    time.sleep(3600)\n')
    nodes = start_nodes(launch, "--hang-action=fail", program)
    assert [node.wait_exit(deadline=60) for node in nodes] == [contract.EXIT_HUNG] * 2
    assert "  rank 0 has ended with exit code 0" in "".join(node.stderr for node in nodes)


def test_a_node_that_does_not_look_for_hangs_is_named(launch: Launch, tmp_path: Path) -> None:
    """Its ranks may make progress, so the other node can't tell."""
    program = tmp_path / "train.py"
    program.write_text("import time\ntime.sleep(3600)\n")
    asking, _ = start_nodes(launch, program, timeouts=("--hang-timeout=1", "--max-restarts=0"))
    asking.wait_line("hangs are not detected: ", deadline=60)
    assert asking.stderr.rstrip().endswith(" has no --hang-timeout")


@pytest.mark.long
def test_a_node_whose_ranks_make_progress_is_no_hang(script: Worker, launch: Launch) -> None:
    """The ranks of the other node wait for it for much longer than the timeout."""
    program = "if rank == 0:\n    for _ in range(100):\n        heartbeat()\n        time.sleep(0.15)\ndist.barrier()\n"
    nodes = start_nodes(launch, script(program + "dist.destroy_process_group()\n"))
    assert [node.wait_exit(deadline=180) for node in nodes] == [0, 0]
    assert "the job hangs" not in nodes[0].stderr + nodes[1].stderr


@pytest.mark.long
def test_normal_pauses_are_no_hang(script: Worker, launch: Launch, tmp_path: Path) -> None:
    """Evaluation, a checkpoint, compilation and heartbeats of one rank, for which the others wait."""
    job = launch("--preload=torch", "--nproc-per-node=2", "--hang-timeout=4", script(_PAUSES), tmp_path / "checkpoint")
    assert job.wait_exit(deadline=180) == 0, job.stderr
    assert job.stdout.count("done") == 2
    assert "the job hangs" not in job.stderr


#: A management library of one GPU, which computes for the worker that has written its pid.
_LIBRARY = """
import os
from types import SimpleNamespace

class NVMLError(Exception):
    pass

class NVMLError_NotFound(NVMLError):
    pass

def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUtilizationRates(device): return SimpleNamespace(gpu=80)
def nvmlDeviceGetComputeRunningProcesses(device):
    with open(os.path.join(os.path.dirname(__file__), "pid")) as file:
        return [SimpleNamespace(pid=int(file.read()), usedGpuMemory=1)]
def nvmlDeviceGetProcessUtilization(device, since):
    used = nvmlDeviceGetComputeRunningProcesses(device)[0].pid
    return [SimpleNamespace(pid=used, smUtil=80, memUtil=0, encUtil=0, decUtil=0)]
"""
_ON_GPU = """
import os, sys, time
with open(os.path.join(os.path.dirname(__file__), "pid"), "w") as file:
    file.write(str(os.getpid() if sys.argv[1] == "busy" else 1))
os.write(1, b"began\\n")
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize(("use", "code"), [("busy", 0), ("idle", contract.EXIT_HUNG)])
def test_a_gpu_that_computes_is_progress(use: str, code: int, launch: Launch, tmp_path: Path) -> None:
    """The worker's processes sleep until its GPU is done, for longer than the timeout; an idle GPU is a hang."""
    (tmp_path / "pynvml.py").write_text(_LIBRARY)
    program = tmp_path / "program.py"
    program.write_text(_ON_GPU)
    options = ("--standalone", "--hang-timeout=1", "--hang-action=fail", program)
    job = launch(*options, use, "4" if use == "busy" else "600", env={"PYTHONPATH": str(tmp_path)})
    assert job.wait_exit() == code, job.stderr
