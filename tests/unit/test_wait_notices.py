"""Lines about nodes that are awaited: who is told what, when, and which nodes are there."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.job.codec import from_document, to_message
from elastic_run.core.job.coordination import describe_wait
from elastic_run.core.job.documents import RoundEnd
from elastic_run.core.job.founding import MAJORITY
from elastic_run.core.job.node_status import WaitStatus
from elastic_run.core.job.state import BROKEN, GATHERING, RUNNING, MayFound
from elastic_run.records import replace
from elastic_run.rendezvous.events import Notice
from elastic_run.report.waiting import NEW, WaitNotices
from tests.support.small_job import SmallJob

if TYPE_CHECKING:
    from elastic_run.rendezvous.events import Waiting


_INTERVAL = 1.0
_GATHERING = WaitStatus("gathering", 0, 2, 4, 1, ("a",), (), 30.0)


class Node:
    """A node that waits from second 0 on; `told` has the seconds at which it was told something."""

    def __init__(self, *, shows_waiting: bool = False) -> None:
        self.state: str | None = NEW
        self.told: list[float] = []
        self.doubt = ""
        self.events: list[Notice | Waiting] = []
        self.status: WaitStatus | None = None
        self._now = 0.0
        self.notices = WaitNotices(
            state=lambda: self.state,
            doubt=lambda is_alone: "" if is_alone else self.doubt,
            shows_waiting=shows_waiting,
            deliver=self._deliver,
        )

    def _deliver(self, event: Notice | Waiting) -> None:
        self.told.append(self._now)
        self.events.append(event)

    def write(self, status: WaitStatus) -> None:
        """Let the coordinator have this status for each question from now on."""
        self.status = status

    def look(self, *seconds: float) -> None:
        """Let the node look at these seconds."""
        for self._now in seconds:
            if self._now >= self.notices.next_look(self._now, _INTERVAL):
                self.notices.note_look(self._now)
                if self.status is not None:
                    self.notices.take(self.status, self._now)


def test_a_line_that_says_the_same_comes_more_and_more_rarely() -> None:
    """Where the agent prints lines, the first comes after 2 s; the pauses grow from 10 s to a minute."""
    node = Node()
    for seconds in range(260):
        node.write(replace(_GATHERING, seconds_left=300.0 - seconds))
        node.look(float(seconds))
    assert node.told == [2.0, 12.0, 32.0, 72.0, 132.0, 192.0, 252.0]


@pytest.mark.parametrize(("most", "known"), [(256, 3), (257, 1)])
def test_in_a_large_job_a_node_looks_every_ten_seconds(most: int, known: int) -> None:
    """In other jobs `status` knows all nodes that were there at the last heartbeat."""
    node = Node()
    for seconds in range(5):
        present = max(1, seconds - 1)
        node.write(replace(_GATHERING, max_nodes=most, present=present, hosts=("a", "b", "c")[:present]))
        node.look(float(seconds))
    assert node.notices.described.startswith(f"waiting: {known}/")
    assert node.told == [2.0]


def test_a_change_is_told_soon() -> None:
    """A node that comes, or is refused, is told at the next look, and the pauses begin to grow anew."""
    node = Node()
    node.write(_GATHERING)
    node.look(*map(float, range(80)))
    node.write(replace(_GATHERING, present=2, hosts=("a", "b")))
    node.look(*map(float, range(80, 120)))
    assert node.told == [2.0, 12.0, 32.0, 72.0, 82.0, 92.0, 112.0]


def test_a_line_names_the_node_ranks_that_are_missing() -> None:
    """Where the nodes have fixed ranks, the user need not look for the node that did not come."""
    node = Node()
    node.write(replace(_GATHERING, missing="missing: node ranks 1, 3"))
    node.look(0.0, 2.0)
    (notice,) = node.events
    assert isinstance(notice, Notice)
    assert notice.text == "waiting: 1/4 nodes (a), gives up in 0:30; missing: node ranks 1, 3"
    assert node.notices.described == "waiting: 1/4 nodes (a); missing: node ranks 1, 3"
    node.state = None
    node.look(3.0)
    assert node.notices.described == ""


def test_a_line_that_is_rewritten_follows_each_look() -> None:
    """Where the agent rewrites one line, each look after the first 2 s updates it, until the wait is over."""
    node = Node(shows_waiting=True)
    node.write(_GATHERING)
    node.look(0.0, 1.0, 2.0, 3.0, 4.0)
    assert node.told == [2.0, 3.0, 4.0]
    node.state = None
    node.look(5.0, 6.0)
    assert node.told[3:] == []
    assert node.notices.first_due(7.0) == math.inf


def test_a_coordinator_that_began_just_now_knows_nothing() -> None:
    """Until the coordinator knows of a node, the node asks again a quarter of a second later, and says nothing."""
    node = Node()
    node.write(replace(_GATHERING, present=0))
    node.look(0.0, 2.0)
    assert node.told == []
    assert node.notices.first_due(2.1) == 2.25


def test_each_node_that_is_missing_is_told_once_beside_the_line_that_is_rewritten() -> None:
    """The line may have no room for the reason."""
    node = Node(shows_waiting=True)
    node.write(replace(_GATHERING, lost=("b (refused: too old)",)))
    node.look(0.0, 2.0, 3.0)
    node.write(replace(_GATHERING, lost=("c (unhealthy)", "b (refused: too old)")))
    node.look(4.0, 5.0)
    told = [
        (seconds, event.text) for seconds, event in zip(node.told, node.events, strict=True) if type(event) is Notice
    ]
    assert told == [(2.0, "not in the job: b (refused: too old)"), (4.0, "not in the job: c (unhealthy)")]


# --- which nodes are there --------------------------------------------------------------------------------------------
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
