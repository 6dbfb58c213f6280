"""Which nodes are there, for the lines of nodes that wait."""

from __future__ import annotations

from elastic_run.core.job.codec import from_document, to_message
from elastic_run.core.job.coordination import describe_wait
from elastic_run.core.job.documents import RoundEnd, WaitStatus
from elastic_run.core.job.state import BROKEN, GATHERING, RUNNING, MayFound
from elastic_run.core.job.succession import MAJORITY
from elastic_run.records import replace
from tests.support.small_job import SmallJob


def test_the_nodes_that_wait_know_who_is_there_and_for_how_long() -> None:
    """Below the minimum the job ends after `join_timeout`; with the minimum it starts after the last call."""
    job = SmallJob(min_nodes=2, max_nodes=3, last_call_timeout=5.0, join_timeout=60.0)
    assert describe_wait(job.state, job.now).present == 0
    job.add("a")
    status = describe_wait(job.state, job.now + 1.0)
    assert status == WaitStatus(GATHERING, 0, 2, 3, 1, ("a",), (), 59.0)
    job.add("b")
    status = describe_wait(job.state, job.now + 1.0)
    assert (status.seconds_left, status.starts, status.hosts) == (4.0, True, ("a", "b"))
    assert from_document(WaitStatus, to_message(status)) == status
    job.wait(5.0)
    status = describe_wait(job.state, job.now)
    assert (status.phase, status.seconds_left, status.hosts) == (RUNNING, None, ())


def test_a_refused_node_is_named_after_it_has_gone() -> None:
    """The node that waits for it reads why it is not in the job."""
    job = SmallJob()
    job.add("a")
    job.add("b", config=replace(job.config, max_restarts=5))
    job.close("b")
    assert describe_wait(job.state, job.now).lost == ("b (refused: --max-restarts is 5 there and 0 in the job)",)


def test_a_job_with_several_endpoints_says_how_many_seats_it_lacks() -> None:
    """One of three nodes waits for the others; with one possible coordinator nothing is missing."""
    first = SmallJob(MAJORITY, max_nodes=3, has_successors=True)
    first.decide(MayFound())
    first.add("a", "b", "c")
    second = SmallJob(MAJORITY, term=2, has_successors=True)
    second.move("c", replace(first.members["c"], phase="idle", ended=RoundEnd("stopped")))
    second.wait(12.1)
    assert describe_wait(second.state, second.now).missing == "1 of the last round's 3 nodes are here, 2 are needed"
    lone = SmallJob()
    lone.add("a", "b")
    lone.close("b")
    lone.end("a", "stopped")
    assert describe_wait(lone.state, lone.now).missing == ""


def test_fixed_ranks_that_have_not_come_are_named() -> None:
    """With --node-rank the user need not look for the node that is missing; a node that is away still counts."""
    job = SmallJob(min_nodes=3, max_nodes=3)
    job.add("a", preferred_rank=1, has_fixed_rank=True)
    job.close("a", BROKEN, returns=True)
    assert describe_wait(job.state, job.now).missing == "missing: node ranks 0, 2"
