"""A root cause on its way to the other nodes of the job."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.failure.root_cause import OomKills
from elastic_run.core.job.restart_policy import Failure
from elastic_run.report import render
from elastic_run.report.failure_documents import decode_root_cause, encode_root_cause
from tests.support.job_results import captured, result, worker_end

if TYPE_CHECKING:
    from elastic_run.core.failure.root_cause import WorkerEnd


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


@pytest.mark.parametrize("kills", [None, 7, {}, {"group": "many"}, {"machine": []}])
def test_garbage_about_the_oom_killer_is_nothing(kills: object) -> None:
    """Another agent wrote it, perhaps of another release."""
    document = encode_root_cause(worker_end(0, -9), Failure(137))
    document["end"]["oom_kills"] = kills
    read = decode_root_cause(document)
    assert read is not None
    assert read.oom_kills is None or (read.oom_kills.group, read.oom_kills.machine) == (None, None)
