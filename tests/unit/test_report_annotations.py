"""The line for GitHub Actions after a failed job."""

from __future__ import annotations

import pytest

from elastic_run.report.failure import find_annotation
from tests.support.job_results import captured, result, worker_end

ACTIONS = {"GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": "/home/runner/repo/"}
TRACE = (
    "Traceback (most recent call last):\n"
    '  File "/home/runner/repo/train.py", line 7, in <module>\n    step(1)\n'
    '  File "/venv/lib/python3.11/site-packages/torch/nn/module.py", line 99, in forward\n    fail()\n'
    "ValueError: 50%, of what: all\n"
)


def test_the_annotation_names_the_users_line() -> None:
    """The command has the file below the checked-out repository, the line, a title, and the cause, all escaped."""
    assert find_annotation(result(worker_end(1, 1, TRACE), worker_end(0, 0)), ACTIONS) == (
        "::error file=train.py,line=7,title=train.py failed::rank 1 on gpu07 (local 1, pid 4701) failed with exit "
        "code 1 after 12.3 s: ValueError: 50%25, of what: all"
    )


def test_a_failure_without_a_traceback_has_no_place() -> None:
    """A worker that was killed has a title and a message only; a comma and a colon in a title are escaped."""
    job = result(worker_end(0, -9), entrypoint="a,b:c.py")
    assert find_annotation(job, ACTIONS).startswith("::error title=a%2Cb%3Ac.py failed::rank 0 on gpu07")
    lost = result(verdict="store_lost", detail="gone\nfor good")
    assert find_annotation(lost, ACTIONS) == "::error title=train.py%3A the job's store can't be reached::gone for good"


@pytest.mark.parametrize("environ", [{}, {"GITHUB_ACTIONS": "false"}])
def test_there_is_none_elsewhere(environ: dict[str, str]) -> None:
    """Without GITHUB_ACTIONS=true there is no such line, nor after a success or a stop by signal."""
    assert not find_annotation(result(worker_end(0, 1, captured("value_error"))), environ)
    assert not find_annotation(result(verdict="success"), ACTIONS)
    assert not find_annotation(result(worker_end(0, 1), signal=15), ACTIONS)
