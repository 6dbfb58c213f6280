"""When a waiting node is told which nodes are missing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.job.documents import WaitStatus
from elastic_run.records import replace
from elastic_run.rendezvous.events import Notice
from elastic_run.report.waiting import NEW, WaitNotices

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
