"""How many workers start, what each sees, that NCCL works in them as under torchrun, and warm workers on a GPU."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_run import contract
from tests.gpu.conftest import PROGRAMS
from tests.gpu.observation import list_gpu_processes, wait_free, workers_of
from tests.support.torchrun import TORCHRUN

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.gpu.conftest import Record
    from tests.support.launch import Launch

    Program = Callable[[str], Path]


@pytest.mark.parametrize("word", ["gpu", "auto"])
def test_one_worker_starts_for_one_gpu(word: str, launch: Launch, program: Program) -> None:
    """`gpu` and `auto` count the GPUs; the worker sees its GPU and all-reduces with NCCL."""
    job = launch(f"--nproc-per-node={word}", program("collective"))
    assert job.wait_exit() == 0
    assert "rank 0 has 1 devices" in job.stdout
    assert "rank 0 began: 1.0" in job.stdout
    assert "rank 1" not in job.stdout


def test_hidden_gpus_are_refused_in_a_line(launch: Launch, program: Program) -> None:
    """With CUDA_VISIBLE_DEVICES empty `gpu` is refused, and the line says why."""
    job = launch("--nproc-per-node=gpu", program("collective"), env={"CUDA_VISIBLE_DEVICES": ""})
    assert job.wait_exit() == contract.EXIT_USAGE
    assert job.stderr.count("\n") == 1
    assert "'gpu', but no gpu is visible here (CUDA_VISIBLE_DEVICES='')" in job.stderr


def test_more_workers_than_gpus_are_told(launch: Launch, program: Program) -> None:
    """Two workers on one GPU get a notice, and run."""
    job = launch("--nproc-per-node=2", program("collective"))
    assert job.wait_exit() == 0
    assert "--nproc-per-node: 2 workers see 1 GPU" in job.stderr
    assert job.stdout.count("began: 2.0") == 2


def test_the_launcher_has_no_cuda_context(launch: Launch, program: Program, record: Record) -> None:
    """Of the job's processes the worker alone has GPU memory, and the launcher has not loaded torch."""
    job = launch("--nproc-per-node=1", program("hang"), "quiet kernel")
    job.wait_line("case quiet kernel")
    held, workers = list_gpu_processes(), workers_of(job)
    record.add("GPU memory", f"launcher {job.pid}, workers {workers}: {held}")
    maps = Path(f"/proc/{job.pid}/maps").read_text(encoding="utf-8")
    assert "libtorch" not in maps
    assert "libcuda" not in maps
    assert job.pid not in held
    assert set(workers) <= set(held)
    assert job.wait_exit() == 0
    wait_free(workers)


def test_each_worker_sees_one_gpu(launch: Launch, program: Program) -> None:
    """With --virtual-local-rank the worker has LOCAL_RANK 0 and one visible GPU."""
    job = launch("--nproc-per-node=1", "--virtual-local-rank", program("collective"))
    assert job.wait_exit() == 0
    assert "rank 0 sees LOCAL_RANK=0 CUDA_VISIBLE_DEVICES=0\n" in job.stdout
    assert "rank 0 has 1 devices" in job.stdout


def test_nccl_works_as_under_torchrun(launch: Launch, program: Program, record: Record) -> None:
    """The same two workers all-reduce under both launchers."""
    for name, command in (("elastic-run", None), ("torchrun", TORCHRUN), ("elastic-run again", None)):
        options = {} if command is None else {"program": command}
        began_at = time.monotonic()
        job = launch("--nproc-per-node=2", program("collective"), **options)
        job.wait_lines(r"rank \d sees", count=2)
        first = time.monotonic() - began_at
        job.wait_lines(r"rank \d began: 2.0", count=2)
        reduced = time.monotonic() - began_at
        assert job.wait_exit() == 0
        end = time.monotonic() - began_at
        record.add(name, f"first lines {first:.3f} s, all-reduced {reduced:.2f} s, end {end:.2f} s")


def test_the_machine_passes_the_doctor(launch: Launch) -> None:
    """`elastic-run doctor` finds no problem of the GPU on a healthy machine, and all-reduces with NCCL."""
    job = launch("doctor")
    job.wait_exit()
    told = job.stdout
    assert "the memory of 1 GPU is in use" not in told or "by process" in told
    assert "built without CUDA" not in told
    nodes = [launch("doctor", "--nnodes=2", "--rdzv-endpoint=127.0.0.1:29411", env=host(n)) for n in range(2)]
    for node in nodes:
        node.wait_exit()
    assert "all-reduce of 4 MB" in nodes[0].stdout + nodes[1].stdout


@pytest.mark.parametrize("name", ["nvml_recovery", "xid"])
def test_a_healthy_gpu_passes_the_health_checks(name: str, launch: Launch, program: Program) -> None:
    """The checks of examples/health let the round begin."""
    check = Path(__file__).parents[2] / "examples/health" / f"{name}.py"
    job = launch("--nproc-per-node=1", f"--health-check={sys.executable} {check}", program("collective"))
    assert job.wait_exit() == 0
    assert "rank 0 began: 1.0" in job.stdout


def host(number: int) -> dict[str, str | None]:
    """Return the environment of a node that NCCL takes for a host of its own."""
    return {"NCCL_HOSTID": f"host-{number}"}


def test_explain_names_the_gpus(launch: Launch, program: Program) -> None:
    """`--explain` tells how many workers start and why."""
    job = launch("--explain", "--nproc-per-node=gpu", program("collective"))
    assert job.wait_exit() == 0
    assert "gpu" in job.stdout.lower()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("minimal_ddp", ()),
        ("elastic_training", ("--checkpoint={}/model.pt", "--epochs=1", "--pace=0")),
        ("resume/train", ()),
        ("restart", ("{}/progress",)),
    ],
)
def test_examples_run_on_a_gpu(name: str, arguments: tuple[str, ...], launch: Launch, tmp_path: Path) -> None:
    """The examples use a GPU where there is one."""
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    words = [argument.format(tmp_path) for argument in arguments]
    job = launch("--nproc-per-node=1", "--max-restarts=3", "--min-uptime=0", path, *words, cwd=tmp_path)
    assert job.wait_exit() == 0


# --- warm workers: torch is preloaded without CUDA, and CUDA works in the forks ---------------------------------------
@pytest.mark.parametrize("flag", ["--preload=torch", ""])
def test_workers_restart_on_the_gpu(flag: str, launch: Launch, program: Program, record: Record) -> None:
    """A rank is killed while its peer holds GPU memory; both start again, from the template where there is one."""
    flags = [flag] if flag else []
    job = launch("--nproc-per-node=2", "--max-restarts=1", "--max-backoff=0", *flags, program("warm"))
    assert job.wait_exit() == 0
    killed = float(job.wait_line(r"killed at ([\d.]+)")[1])
    restarted = max(float(found[1]) for found in job.wait_lines(r"restarted at ([\d.]+)", count=2))
    record.add("restart", f"{flag or 'cold'}: {restarted - killed:.2f} s from the death to the last all-reduce")
    how = "warm" if flag == "--preload=torch" else "cold"
    assert job.stdout.count(f"attempt 1 is {how}") == 2, job.stderr
    assert job.stdout.count("began: 2.0") == 4


def test_a_module_that_initialises_cuda_is_not_preloaded(launch: Launch, program: Program) -> None:
    """The line names the module and CUDA, and the workers start cold."""
    env: dict[str, str | None] = {"PYTHONPATH": str(PROGRAMS)}
    job = launch("--nproc-per-node=1", "--preload=torch,initialises_cuda", program("collective"), env=env)
    assert job.wait_exit() == 0
    assert "initialises_cuda can't be preloaded: it initialises CUDA" in job.stderr


def test_a_module_that_asks_for_gpus_is_not_preloaded(launch: Launch, program: Program) -> None:
    """The driver's library opens devices and starts a thread for the question alone; the line names the module."""
    env: dict[str, str | None] = {"PYTHONPATH": str(PROGRAMS)}
    job = launch("--nproc-per-node=1", "--preload=torch,asks_for_cuda", program("collective"), env=env)
    assert job.wait_exit() == 0
    assert "asks_for_cuda can't be preloaded: it opens a device (/dev/nvidia" in job.stderr
    assert "rank 0 began: 1.0" in job.stdout
