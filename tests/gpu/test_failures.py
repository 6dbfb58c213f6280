"""The report of a job whose rank fails on the GPU while its peer waits in NCCL names the cause, and memory is freed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.gpu.observation import wait_free, workers_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.gpu.conftest import Record
    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Program = Callable[[str], Path]

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
