"""failure.json, and a root cause on its way to the other nodes of the job."""

from __future__ import annotations

import json
import resource
import signal
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run.core.failure.job_result import Attempt
from elastic_run.core.failure.root_cause import BARE_END, OomKills
from elastic_run.core.job.codec import encode
from elastic_run.core.job.documents import RoundEnd
from elastic_run.core.job.restart_policy import Failure
from elastic_run.core.job.round_ending import REMEMBERED_BYTES, read_report, remember
from elastic_run.core.job.state import REMEMBERED
from elastic_run.report.closing_report import render
from elastic_run.report.failure_documents import (
    decode_root_cause,
    encode_root_cause,
    failure_document,
    write_failure_file,
)
from tests.support.job_results import NOON, captured, result, stopped, worker_end

if TYPE_CHECKING:
    from pathlib import Path

    from elastic_run.core.failure.root_cause import WorkerEnd


def test_the_document_has_exactly_the_keys_of_version_1() -> None:
    """A key that goes or changes its name breaks schedulers; a new one is added here."""
    root = worker_end(1, -9, oom_kills=OomKills(1, 2))
    job = result(
        root,
        *stopped(0),
        attempts=(Attempt(restart_count=0, root=worker_end(0, 1, captured("chained")), started_at=NOON, uptime=3.0),),
        survivors=((4711, "nfs_wait"),),
        log_dir="/logs",
    )
    document = failure_document(job)
    assert json.loads(json.dumps(document)) == document
    assert {key: value for key, value in document.items() if key not in {"workers", "root_cause", "attempts"}} == {
        "version": 1,
        "verdict": "worker_failed",
        "exit_code": 137,
        "detail": "",
        "equal_errors": None,
        "advice": "Use a smaller batch or fewer DataLoader workers, or ask for more memory.",
        "causes": [
            {
                "kind": "oom_kill",
                "ranks": [1],
                "confidence": "certain",
                "why": ["SIGKILL", "the kernel's OOM killer ended it: the job's memory limit is reached"],
                "help": "Use a smaller batch or fewer DataLoader workers, or ask for more memory.",
            }
        ],
        "signal": None,
        "ended_at": NOON + 0.1,
        "ended_at_utc": "2026-11-20T10:11:12.147Z",
        "entrypoint": "train.py",
        "role": "default",
        "run_id": "job7",
        "world_size": 2,
        "nnodes": 1,
        "restarts_used": 0,
        "max_restarts": 0,
        "log_dir": "/logs",
        "unkillable": [{"pid": 4711, "wait_channel": "nfs_wait"}],
        "oom_kills": {"group": 1, "machine": 2},
    }
    assert document["root_cause"] == {
        "rank": 1,
        "local_rank": 1,
        "role": "default",
        "host": "gpu07",
        "pid": 4701,
        "exit_code": None,
        "signal": {"number": 9, "name": "SIGKILL"},
        "ended_at": NOON,
        "ended_at_utc": "2026-11-20T10:11:12.047Z",
        "uptime": 12.3,
        "restart_count": 0,
        "was_stopped": False,
        "stuck_at": None,
        "is_consequence": False,
        "exception": None,
        "remark": "",
        "last_words": "",
        "kernel_line": "",
        "error_file": "",
        "log_file": "",
        "stderr_tail": [],
        "stderr_target": "",
    }
    attempt = document["attempts"][0]
    assert set(attempt) == {"restart_count", "started_at", "started_at_utc", "uptime", "kept_state", "root_cause"}
    assert set(attempt["root_cause"]["exception"]) == {"type", "message", "where", "cause", "lines", "is_certain"}
    assert [worker["rank"] for worker in document["workers"]] == [1, 0]


def test_megabytes_of_a_worker_s_words_are_cut() -> None:
    """The file stays small, whatever the exception holds."""
    text = 'Traceback (most recent call last):\n  File "t.py", line 1, in f\nValueError: ' + "x\udcff" * 200_000
    assert len(json.dumps(failure_document(result(worker_end(0, 1, text))))) < 500_000
    long = failure_document(result(worker_end(0, 1, text[:10_000])))
    assert len(long["root_cause"]["exception"]["message"]) > 9000


def test_the_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """It replaces an older one at once, and no draft is left."""
    (tmp_path / "failure.json").write_text("old", encoding="utf-8")
    path = write_failure_file(result(worker_end(0, 1, captured("value_error"))), str(tmp_path))
    assert path == str(tmp_path / "failure.json")
    assert json.loads((tmp_path / "failure.json").read_text(encoding="utf-8"))["version"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["failure.json"]


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """A missing directory doesn't raise; the launcher says so and ends as it would."""
    said: list[str] = []
    job = result(worker_end(0, 1))
    assert write_failure_file(job, str(tmp_path / "gone"), said.append) == ""
    assert said == [f"failure.json could not be written to {tmp_path / 'gone'}: No such file or directory"]
    assert write_failure_file(job, str(tmp_path / "gone")) == ""


def test_a_full_disk_leaves_the_old_file_and_no_draft(tmp_path: Path) -> None:
    """A write that fails half-way (here: of the limit of file sizes) takes its draft away."""
    (tmp_path / "failure.json").write_text("old", encoding="utf-8")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    said: list[str] = []
    try:
        assert (
            write_failure_file(result(worker_end(0, 1, captured("clients_missing"))), str(tmp_path), said.append) == ""
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["failure.json"]
    assert (tmp_path / "failure.json").read_text(encoding="utf-8") == "old"
    assert "File too large" in said[0]


def carried(end: WorkerEnd) -> WorkerEnd:
    """Return what another node reads of a worker's end."""
    read = decode_root_cause(json.loads(json.dumps(encode_root_cause(end, Failure(1)))))
    assert read is not None
    return read


@pytest.mark.parametrize(
    "end",
    [
        worker_end(3, -9, oom_kills=OomKills(1, 2), kernel_line="Memory cgroup out of memory: Killed process 4703"),
        worker_end(3, -9, oom_kills=OomKills(0, None)),
        worker_end(0, 1, captured("chained")),
    ],
    ids=["log", "counters", "exception"],
)
def test_every_node_reports_the_same_cause(end: WorkerEnd) -> None:
    """What the kernel of the failed worker's node knows travels with the failure: other nodes have other counters."""
    assert render(result(carried(end))) == render(result(end))


@pytest.mark.parametrize("garbage", [{"oom_kills": 7}, {"exception": {"type": []}}, {"uptime": "long"}, {"pid": None}])
def test_an_end_that_is_garbage_is_none(garbage: dict[str, Any]) -> None:
    """Another agent wrote it; a field that a newer release has added is ignored."""
    document = encode_root_cause(worker_end(0, -9), Failure(137))
    document["end"] |= {"stuck_at": 7, "of_a_newer_release": 7}
    assert decode_root_cause(document) is not None
    document["end"] |= garbage
    assert decode_root_cause(document) is None


# --- the failure in a node's report, which may be incomplete, garbage or too long -------------------------------------
def _read(**report: Any) -> Any:
    return read_report("n", RoundEnd("failed", report), 3)


def test_values_that_are_garbage_have_their_defaults() -> None:
    """Another node's report can't break the coordinator."""
    root = _read(exit_code="x", severity=True, signature=None, uptime="long", decision=7, rule=8, is_deterministic=1)
    assert (root.failure.exit_code, root.severity, root.order) == (1, BARE_END, 3)
    assert (root.failure.uptime, root.failure.signature, root.failure.is_deterministic) == (0.0, None, False)
    assert (root.failure.decision, root.failure.rule) == ("", "")


def test_a_report_that_is_too_long_goes_without_its_long_values() -> None:
    """Each node gets it; a report of very many values goes altogether."""
    assert _read(summary="short", stack="x" * 70_000).report == {"summary": "short"}
    assert _read(**{f"value {number}": "x" * 900 for number in range(100)}).report == {}


def test_the_causes_of_attempts_are_bounded() -> None:
    """The newest are kept, by number and by size."""
    kept: tuple[dict[str, Any], ...] = ()
    for number in range(2 * REMEMBERED):
        kept = remember(kept, {"number": number})
    assert [one["number"] for one in kept] == [*range(REMEMBERED, 2 * REMEMBERED)]
    kept = remember(kept, {"summary": "x" * (REMEMBERED_BYTES - 100)})
    assert sum(len(encode(one)) for one in kept) <= REMEMBERED_BYTES
    assert "summary" in kept[-1]
    assert remember(kept, None) == kept
