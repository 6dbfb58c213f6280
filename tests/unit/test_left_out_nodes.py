"""The nodes that a job goes on without, as `elastic-run status` lists them."""

from __future__ import annotations

from elastic_run.core.job.config import Window
from elastic_run.core.job.coordination import list_left_out
from elastic_run.core.job.documents import Promise
from elastic_run.core.job.membership import Leaving
from elastic_run.core.job.restart_policy import UNHEALTHY
from elastic_run.core.job.state import Job
from elastic_run.core.job.succession import ONLY_ONE
from tests.unit.test_exclusion import Play


def play(period: Window | None = None) -> Play:
    """Let three nodes be a job of which one is excluded by an exit code."""
    job = Play(["a", "b", "c"], min_nodes=1, exclude_exit_codes=(77,), exclude_after=period)
    job.now = 40.0
    job.fail("b", code=77)
    return job


def test_an_excluded_machine_is_listed_until_it_may_join_again() -> None:
    """With its host, its reason, and the seconds that are left."""
    job = play(Window(2, 3600.0))
    (found,) = list_left_out(job.job, 700.0)
    assert found == {
        "host": "b",
        "kind": "excluded",
        "reason": "exit code 77 is listed in --exclude-exit-codes: b fails",
        "seconds": 600.0,
        "expires": 3000.0,
    }
    assert list_left_out(job.job, 3701.0) == []


def test_an_exclusion_without_a_period_lasts() -> None:
    """There is nothing to count down."""
    (found,) = list_left_out(play().job, 9e6)
    assert found["expires"] is None


def test_an_unhealthy_node_is_listed_until_its_host_is_back() -> None:
    """A node that has left for another reason is not in the list."""
    job = Play(["a", "b", "c"], min_nodes=1)
    job.small_job.feed("c", Leaving("signal"))
    job.small_job.feed("b", Leaving(UNHEALTHY, "check.sh ended with exit code 1"))
    (found,) = list_left_out(job.job, 5.0)
    assert (found["host"], found["kind"], found["seconds"], found["expires"]) == ("b", "unhealthy", None, None)
    assert found["reason"] == "check.sh ended with exit code 1"
    job.join("again", host="b")
    assert list_left_out(job.job, 5.0) == []


def test_a_job_that_has_not_begun_leaves_nobody_out() -> None:
    """Before the first node has joined there is no configuration."""
    assert list_left_out(Job(Promise(), ONLY_ONE, 0.0), 0.0) == []
