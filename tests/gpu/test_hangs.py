"""--hang-timeout with NCCL: a rank that waits spins on its processor and its GPU, and yet the verdict comes in time."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import TYPE_CHECKING

import pytest

from elastic_run import contract
from tests.gpu.observation import describe_gpus, describe_threads, list_gpu_processes, wait_free, workers_of
from tests.support.launch import launch as run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.gpu.conftest import Record
    from tests.support.launch import Launch, Launched

    Program = Callable[[str], Path]


TIMEOUT = 10
#: Hangs of which NCCL's watchdog writes lines while they last, also after the time was taken.
NOISY = ("shape", "operation")
#: How late a verdict may be, in seconds.
LATE = 2.0
#: What the verdict says of each hang; all of it has to be there.
HANGS = {
    "item": ("look at rank 1: other ranks wait for it", "rank 1 is in load_batch", "rank 1 did not join all_reduce"),
    "synchronize": (
        "look at rank 1: other ranks wait for it",
        "rank 1 is in take_lock",
        "rank 1 did not join all_reduce",
    ),
    "barrier": ("look at rank 1: other ranks wait for it", "rank 1 is in load_batch", "rank 1 did not join"),
    "backward": ("look at rank 1: other ranks wait for it", "rank 1 is in load_batch", "rank 1 did not join"),
    "shape": ("rank 0", "rank 1", "all_reduce"),
    "operation": ("rank 1 calls broadcast",),
    "kernel": ("ranks 0-1 wait in reduce",),
}


@pytest.mark.parametrize("case", HANGS)
def test_a_hang_is_found(case: str, launch: Launch, program: Program, record: Record, tmp_path: Path) -> None:
    """The verdict comes in time and names the rank; both workers end, and no GPU memory is left."""
    flags = (
        f"--hang-timeout={TIMEOUT}",
        "--hang-action=fail",
        f"--log-dir={tmp_path / 'logs'}",
        "--shutdown-timeout=5",
    )
    job = launch("--nproc-per-node=2", *flags, program("hang"), case)
    job.wait_lines("case", count=2)
    time.sleep(TIMEOUT / 2)
    silence = observe(job, record)
    began_at = time.monotonic() - silence
    job.wait_line("the job hangs", deadline=75)
    late = time.monotonic() - began_at - TIMEOUT
    pids = workers_of(job)
    record.add("late", f"{late:.2f} s")
    code = job.wait_exit()
    record.add("left", f"{list_gpu_processes()}; {pids} free after {wait_free(pids):.2f} s")
    for path in (tmp_path / "logs").rglob("stacks*.txt"):
        record.add(path.name, path.read_text(encoding="utf-8"))
    assert [text for text in HANGS[case] if text not in job.stderr] == []
    assert late < LATE or case in NOISY
    assert code == contract.EXIT_HUNG


def test_a_hang_is_restarted(launch: Launch, program: Program) -> None:
    """The workers of a hang are stopped in NCCL, their GPU memory is free, and the job goes on from the template."""
    flags = ("--hang-timeout=4", "--hang-action=restart", "--max-restarts=1", "--shutdown-timeout=5", "--preload=torch")
    job = launch("--nproc-per-node=2", *flags, program("hang"), "once")
    assert job.wait_exit() == 0
    assert "look at rank 1: other ranks wait for it" in job.stderr
    assert job.stdout.count("done") == 2


def test_a_hang_of_two_nodes_is_found(launch: Launch, program: Program) -> None:
    """Two launchers with a rank each judge all ranks together."""
    flags = (
        "--nnodes=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:29433",
        "--rdzv-id=gpu",
        "--hang-timeout=5",
        "--hang-action=fail",
    )
    nodes = [launch(*flags, "--nproc-per-node=1", program("hang"), "item") for _ in range(2)]
    assert [node.wait_exit() for node in nodes] == [contract.EXIT_HUNG] * 2
    assert all("rank 1 is in load_batch" in node.stderr for node in nodes)


@pytest.mark.parametrize("case", ["long kernel", "quiet kernel", "matrices"])
def test_work_is_no_hang(case: str, launch: Launch, program: Program, record: Record) -> None:
    """A GPU that computes for more than three timeouts without a line of output is no hang."""
    job = launch("--nproc-per-node=2", "--hang-timeout=4", program("hang"), case)
    job.wait_lines("case", count=2)
    time.sleep(5)
    observe(job, record)
    assert job.wait_exit() == 0
    assert job.stdout.count("done") == 2
    assert "hangs" not in job.stderr


def test_a_rank_that_has_ended_is_named(launch: Launch, program: Program, record: Record) -> None:
    """A rank that ends with 0 while its peer waits: NCCL ends the peer, or the verdict names the ended rank."""
    job = launch("--nproc-per-node=2", "--hang-timeout=10", "--hang-action=fail", program("hang"), "ends")
    job.wait_lines("case", count=2)
    began_at = time.monotonic()
    code = job.wait_exit(deadline=75)
    record.add("end", f"{code} after {time.monotonic() - began_at:.2f} s")
    assert "look at rank 1: it has ended, and other ranks wait for it" in job.stderr
    assert code == contract.EXIT_HUNG


def test_a_kernel_that_has_not_begun_is_named(launch: Launch, program: Program, tmp_path: Path) -> None:
    """With TORCH_NCCL_ENABLE_TIMING=1 the recorder knows which GPU has begun a collective."""
    flags = ("--hang-timeout=5", "--hang-action=fail", f"--log-dir={tmp_path / 'logs'}")
    env: dict[str, str | None] = {"TORCH_NCCL_ENABLE_TIMING": "1"}
    job = launch("--nproc-per-node=2", *flags, program("hang"), "kernel", env=env)
    assert job.wait_exit(deadline=75) == contract.EXIT_HUNG
    assert "rank 1" in job.stderr


def observe(job: Launched, record: Record) -> float:
    """Record what can be seen of a job's workers, and what our own commands say of them; return their silence."""
    pids = workers_of(job)
    record.add(f"threads of {pids}", describe_threads(pids))
    record.add("GPU", describe_gpus())
    said = {}
    for words in (("status",), ("stacks",), ("status", "--json")):
        asked = run(words[0], str(job.pid), *words[1:])
        asked.wait_exit()
        said[words] = asked.stdout
        record.add(" ".join(words), asked.stdout + asked.stderr)
    workers = json.loads(said["status", "--json"])["nodes"][0]["workers"]
    return min(float(worker["silence"]) for worker in workers)


def test_status_shows_the_gpu(launch: Launch, program: Program, record: Record) -> None:
    """`elastic-run status --json` has the use of the GPU and its memory, and the port has the job's metrics."""
    job = launch("--nproc-per-node=1", "--metrics-port=29477", program("hang"), "quiet kernel")
    job.wait_line("case")
    time.sleep(2)
    asked = run("status", str(job.pid), "--json")
    asked.wait_exit()
    with urllib.request.urlopen("http://127.0.0.1:29477/metrics", timeout=10) as answer:
        metrics = answer.read().decode()
    record.add("status and metrics", asked.stdout + metrics)
    worker = json.loads(asked.stdout)["nodes"][0]["workers"][0]
    assert worker["gpu"] > 50
    assert worker["gpu_memory"] > 100 << 20
    assert job.wait_exit() == 0


# --- the report of a job whose rank fails on the GPU while its peer waits in NCCL -------------------------------------
#: The exit codes of each failure, and what the report says. After an assertion on the GPU NCCL's watchdog may end the
#: process by SIGABRT before Python does.
FAILURES: dict[str, tuple[set[int], list[str]]] = {
    "memory": ({1}, ["OutOfMemoryError: CUDA out of memory", "hint The GPU's memory is full"]),
    "assert": ({1, 134}, ["cause rank 1 ", "failure.py:32 in <module>", "hint A CUDA kernel failed earlier"]),
    "illegal": ({1}, ["an illegal memory access was encountered", "hint A CUDA kernel failed earlier than this line"]),
    "ordinal": ({1}, ["invalid device ordinal", "hint There are more workers than visible GPUs"]),
    "cpu tensor": ({1}, ["No backend type associated with device type cpu", "rank 1"]),
    "exception": ({1}, ["ValueError: shard 17 is corrupt", "rank 1"]),
    "fork": ({1}, ["Cannot re-initialize CUDA in forked subprocess", "hint CUDA was used before a fork"]),
    "killed": ({137}, ["cause rank 1", "SIGKILL"]),
    "gone": ({134}, ["cause rank 1 ended with code 0", "ncclRemoteError"]),
    "duplicate": ({1}, ["Duplicate GPU detected", "hint Two ranks use one GPU"]),
    "timeout": ({134}, ["cause rank 1 did not join all_reduce number 2", "group watchdog thread terminated"]),
}


@pytest.mark.parametrize("case", FAILURES)
def test_the_report_names_the_cause(
    case: str, launch: Launch, program: Program, record: Record, tmp_path: Path
) -> None:
    """The cause is the rank that failed, its text has a hint, and no GPU memory is left."""
    recorder = ["--flight-recorder", f"--log-dir={tmp_path / 'logs'}"] if case in ("timeout", "gone") else []
    job = launch("--nproc-per-node=2", *recorder, program("failure"), case)
    pids: list[int] = []
    if case != "duplicate":
        job.wait_lines("began", count=1)
        pids = workers_of(job)
    began_at = time.monotonic()
    code = job.wait_exit(deadline=75)
    record.add("end", f"{code} after {time.monotonic() - began_at:.2f} s, memory free {wait_free(pids):.2f} s later")
    codes, texts = FAILURES[case]
    report = " ".join(job.stderr[job.stderr.rfind("-- elastic-run: ") :].split())
    assert [text for text in texts if text not in report] == []
    assert code in codes
