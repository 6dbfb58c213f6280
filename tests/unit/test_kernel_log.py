"""The kernel's log as evidence: which of its lines is about a worker that failed, and what follows."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from elastic_run.cluster.limits import has_first_pids, read_kernel_log
from elastic_run.core.failure import diagnose as kinds
from elastic_run.core.failure.diagnose import diagnose, find_line, last_words, may_tell
from elastic_run.core.failure.job_result import JobResult, Rule
from elastic_run.core.failure.root_cause import find_root_cause, is_secondary
from elastic_run.report.closing_report import render
from elastic_run.report.failure_documents import failure_document
from elastic_run.report.failure_rules import built_in_rules
from tests.support.job_results import result, worker_end

if TYPE_CHECKING:
    from pathlib import Path

    from elastic_run.core.failure.root_cause import WorkerEnd

# Lines as kernels 5.4 to 6.12 write them, on x86 and arm64, and as NVIDIA's driver does.
GROUP_KILL = (
    "Memory cgroup out of memory: Killed process 4701 (python3) total-vm:9214780kB, anon-rss:8388224kB, "
    "file-rss:104kB, shmem-rss:0kB, UID:1000 pgtables:17260kB oom_score_adj:0"
)
KILL = "Out of memory: Killed process 4701 (pt_data_worker) total-vm:9214780kB, anon-rss:8388224kB, file-rss:104kB"
CRASH = "python3[4701]: segfault at 0 ip 00007fc02f385ad8 sp 00007fffee722ea8 error 4 in libtorch_cpu.so[167ad8+156000]"
TRAP = "traps: python3[4701] trap invalid opcode ip:7f1 sp:7ff error:0 in libfancy.so[1000+2000]"
ARM = (
    "python3[4701]: unhandled exception: DABT (lower EL), ESR 0x92000006, level 2 translation fault in libc.so.6[10000]"
)
FALLEN = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
# Driver 580 on an H100, after an illegal access and after an assertion of a kernel.
ILLEGAL = (
    "NVRM: Xid (PCI:0000:00:06): 31, pid=4701, name=python3 rank 1, channel 0x00000013, intr 00000000. MMU Fault: "
    "ENGINE GRAPHICS GPC1 GPCCLIENT_T1_8 faulted @ 0x0_e3e00000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_WRITE"
)
ASSERTION = "NVRM: Xid (PCI:0000:00:06): 43, pid=4701, name=python3 rank 1, channel 0x00000066"
FAULT = "NVRM: Xid (PCI:0000:3b:00): 31, pid=4701, name=python3, Ch 00000008, intr 00000000. MMU Fault"
OTHERS = (
    "eth0: link is up",
    "[   4701]  1000  4701  2303695  2097056 17674240        0             0 python3",
    "Out of memory: Killed process 470 (java)",
    "python3[47012]: segfault at 8 ip 0 sp 0 error 4",
)
ON_GPU = "Traceback (most recent call last):\nRuntimeError: CUDA error: unspecified launch failure\n"
LOST = "Traceback (most recent call last):\nRuntimeError: NCCL communicator was aborted on rank 1\n"
DATA = "Traceback (most recent call last):\nRuntimeError: DataLoader worker (pid 4701) is killed by signal: Killed. \n"


def line_of(end: WorkerEnd, *lines: str, has_own_pids: bool = True) -> str:
    """Return the line that is found, or "" where the log isn't even asked."""
    words = last_words(end)
    return find_line(end, words, (*OTHERS, *lines), has_own_pids=has_own_pids) if may_tell(end, words) else ""


@pytest.mark.parametrize(
    ("end", "line"),
    [
        (worker_end(1, -9), GROUP_KILL),
        (worker_end(1, 137), KILL),
        (worker_end(1, -11), CRASH),
        (worker_end(1, -4), TRAP),
        (worker_end(1, -11), ARM),
        (worker_end(0, 1, DATA), KILL),
        (worker_end(0, 1, ON_GPU), FALLEN),
        (worker_end(0, -6), FALLEN),
    ],
)
def test_the_line_about_a_worker_is_found(end: WorkerEnd, line: str) -> None:
    """It names the worker's process or a child that it speaks of, or a defect of a GPU where it used one."""
    assert line_of(end, line) == line
    assert line_of(end) == ""


@pytest.mark.parametrize(
    ("end", "line"),
    [
        (worker_end(1, 1, "Traceback (most recent call last):\nValueError: bad\n"), KILL),
        (worker_end(2, -9), KILL),
        (worker_end(0, 1, "Traceback (most recent call last):\nImportError: no\n"), FALLEN),
        (worker_end(1, 1, ON_GPU), FAULT),
        (worker_end(1, 1, ON_GPU), ILLEGAL),
        (worker_end(1, 1, ON_GPU), ASSERTION),
    ],
)
def test_a_line_about_something_else_is_no_evidence(end: WorkerEnd, line: str) -> None:
    """Another process, a failure that has nothing to do with a GPU, an Xid error that programs cause themselves."""
    assert line_of(end, line) == ""


@pytest.mark.parametrize("number", [48, 63, 64, 74, 79, 94, 95, 110, 119, 120, 140])
def test_every_error_of_a_gpu_its_memory_or_its_link_is_a_defect(number: int) -> None:
    """Those of NVIDIA's list that a program does not cause, for each signal that native code dies of."""
    line = FALLEN.replace("79", str(number))
    for signal in (4, 5, 6, 7, 8, 9, 11):
        assert line_of(worker_end(0, -signal), line) == line


def test_pids_of_another_namespace_are_not_compared() -> None:
    """In a container the kernel's pids are not the worker's; a defect of a GPU is told without one."""
    assert line_of(worker_end(1, -9), GROUP_KILL, has_own_pids=False) == ""
    assert line_of(worker_end(1, -9), FALLEN, has_own_pids=False) == FALLEN


@pytest.mark.parametrize(
    ("end", "line", "kind", "confidence", "helps"),
    [
        (worker_end(1, -9), GROUP_KILL, kinds.OOM_KILL, kinds.CERTAIN, "smaller batch"),
        (worker_end(0, 1, DATA), KILL, kinds.OOM_KILL, kinds.CERTAIN, "fewer DataLoader"),
        (worker_end(1, 1, ON_GPU), FALLEN, kinds.GPU_DEFECT, kinds.LIKELY, "Take the node out of use"),
        (worker_end(1, -11), CRASH, kinds.END, kinds.CERTAIN, "Native code crashed"),
    ],
)
def test_the_line_is_evidence_for_the_cause(end: WorkerEnd, line: str, kind: str, confidence: str, helps: str) -> None:
    """It decides kind and confidence, stands in the reasons, and rules see it."""
    end = worker_end(end.rank, end.exitcode, exception=end.exception, kernel_line=line)
    (cause,) = diagnose(JobResult("worker_failed", 1, root=end, ends=(end,)), built_in_rules())
    assert (cause.kind, cause.confidence) == (kind, confidence)
    assert cause.why[-1] == f"the kernel's log: {line}"
    assert helps in cause.help


def test_a_rule_of_the_user_sees_the_line() -> None:
    """So a rule can take a node out of the job for one kind of Xid error."""
    end = worker_end(1, 1, ON_GPU, kernel_line=FALLEN)
    rules = (Rule(r"Xid .*: 79,", "call Anna"), *built_in_rules())
    assert diagnose(JobResult("worker_failed", 1, root=end), rules)[0].help == "call Anna"


def test_the_rank_whose_gpu_failed_is_the_cause_among_lost_peers() -> None:
    """All ranks say that they lost a peer; the kernel of one of them says why."""
    ends = [worker_end(0, 1, LOST), worker_end(1, 1, LOST, after=1.0, kernel_line=FALLEN), worker_end(2, -6, LOST)]
    assert [is_secondary(end) for end in ends] == [True, False, True]
    assert find_root_cause(ends) is ends[1]


def test_the_report_shows_the_line() -> None:
    """Below the worker's end, in the place of a guess; failure.json has it, too."""
    job = result(worker_end(1, -9, kernel_line=GROUP_KILL))
    text = " ".join(line[9:] for line in render(job))
    assert f"the kernel's log: {GROUP_KILL} (nothing was written)" in text
    assert text.endswith("Use a smaller batch or fewer DataLoader workers, or ask for more memory.")
    assert failure_document(job)["root_cause"]["kernel_line"] == GROUP_KILL


def test_the_log_is_read_from_the_workers_start_on(tmp_path: Path) -> None:
    """Older records, lines of dictionaries and garbage are left out; a log that can't be read has no lines."""
    now = int(time.monotonic() * 1e6)
    log = tmp_path / "kmsg"
    log.write_bytes(
        b"6,1,1000,-;an old one\n"
        + f"4,2,{now},-,caller=T1;eth0: link; up\n SUBSYSTEM=net\n3,3,{now},-;".encode()
        + b"caf\\xc3\n\xff\n"
    )
    assert read_kernel_log(10.0, str(log)) == ("eth0: link; up", "caf\\xc3")
    assert read_kernel_log(10.0, str(tmp_path / "none")) == ()
    assert read_kernel_log(10.0, str(tmp_path)) == ()


def test_records_that_were_overwritten_meanwhile_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says so once, and goes on with the oldest record that is left."""
    answers: list[bytes | OSError] = [b"6,1,0,-;a\n", BrokenPipeError(), b"6,9,0,-;b\n", BlockingIOError()]

    def read(_descriptor: int, _size: int) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(os, "read", read)
        found = read_kernel_log(1e9, os.devnull)
    assert (found, answers) == (("a", "b"), [])


@pytest.mark.parametrize(
    ("namespace", "expected"), [("pid:[4026531836]", True), ("pid:[4026532621]", False), (None, False)]
)
def test_pids_count_where_they_are_those_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch, namespace: str | None, *, expected: bool
) -> None:
    """Not in a container, nor where /proc does not say."""

    def read_link(_: str) -> str:
        if namespace is None:
            raise FileNotFoundError
        return namespace

    monkeypatch.setattr(os, "readlink", read_link)
    assert has_first_pids() is expected
