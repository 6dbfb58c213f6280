"""How the log of a store that knows nothing of the job goes on from what the nodes know."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.job import coordinator as office
from elastic_run.core.job.snapshot import identify
from elastic_run.core.job.state import AWAITED, LIVE, Job, Seat
from elastic_run.core.job.view_change import View, find_view, is_behind, leave_out_old, may_go_on, restate
from elastic_run.core.protocol.job_keys import copy_key
from elastic_run.core.protocol.messages import (
    Copy,
    End,
    Halt,
    Join,
    Last,
    Leave,
    MessageError,
    NodeInfo,
    Offer,
    Rules,
    SeatDead,
    to_json,
)
from elastic_run.records import replace

if TYPE_CHECKING:
    from elastic_run.core.job.apply_facts import Event

RULES = Rules(1, 3, has_successors=True)
OFFER = Offer("n", 1)


def _join(
    node: str, *, last: Last | None = None, copy: Copy | None = None, rules: Rules = RULES, script: str = ""
) -> Join:
    return Join(node, 1, NodeInfo(node, 1, 1, script=script), rules, OFFER, last=last, copy=copy)


def _last(number: int, rank: int = 0, nodes: int = 2, incarnation: str = "a.1") -> Last:
    return Last(f"{number}/1/a", number, rank, nodes, 0, incarnation)


@pytest.mark.parametrize(
    ("copy", "last", "expected"),
    [
        (Copy("a.1", 2, 3, 1), None, False),
        (Copy("a.1", 2, 4, 1), None, True),
        (Copy("a.1", 3, 1, 1), None, True),
        (Copy("b.1", 3, 9, 1), None, False),
        (None, _last(2), False),
        (None, _last(3), True),
        (None, _last(3, incarnation="b.1"), False),
    ],
)
def test_a_log_is_behind_where_a_node_knows_more_of_the_same_job(
    copy: Copy | None, last: Last | None, *, expected: bool
) -> None:
    """A newer round, or a newer term of the same round; what another job's nodes know counts for nothing."""
    job = Job(round=2, incarnation="a.1")
    assert is_behind(job, 3, [Leave("c", 1, "died"), _join("b", copy=copy, last=last)]) is expected


def test_nobody_knows_of_a_round() -> None:
    """Newcomers alone have no view: the job is founded."""
    assert find_view([_join("a"), Leave("b", 1, "died")]) is None


def test_a_fact_that_comes_once_more_hides_no_newer_one() -> None:
    """A connection broke, the fact was said again, and the first copy arrives after newer facts of its node."""
    former: list[Event] = [_join("a"), Leave("a", 3, "died")]
    death = SeatDead("a", "1/1/a", "a.1", 1, 0, "running")
    events: list[Event] = [_join("a"), _join("b"), death, _join("b")]
    assert leave_out_old(events, former) == [_join("b"), death]


def test_the_newest_copy_is_of_the_highest_round_then_term_then_slot() -> None:
    """A minority that went on deciding in a later term has no newer round."""
    old, newer, newest = Copy("a.1", 1, 9, 99), Copy("a.1", 2, 3, 4), Copy("a.1", 2, 3, 5)
    view = find_view([_join("a", copy=newest), _join("b", copy=old), _join("c", copy=newer)])
    assert view == View(newest, None)
    assert find_view([_join("a", copy=newest), _join("c", copy=newer)], [newest]) == View(newer, None)


def test_a_round_that_no_copy_knows_counts() -> None:
    """A node that runs a newer round than all copies tell of names its size."""
    copy = Copy("a.1", 1, 1, 1)
    assert find_view([_join("a", copy=copy), _join("b", last=_last(2))]) == View(copy, _last(2))
    assert find_view([_join("a", copy=copy), _join("b", last=_last(1))]) == View(copy, None)


def test_the_job_that_most_nodes_know_goes_on() -> None:
    """A node of another job is a newcomer to it, whatever its round."""
    other = _join("c", last=_last(9, incarnation="z.1"))
    assert find_view([_join("a", last=_last(1)), _join("b", last=_last(1, 1)), other]) == View(None, _last(1))


def test_without_a_copy_rules_and_scripts_are_those_of_the_nodes_that_run() -> None:
    """A stranger who spoke first settles nothing, and the proof of a death counts."""
    events: list[Event] = [
        _join("x", rules=Rules(1, 3, max_restarts=7), script="other.py"),
        _join("a", last=_last(4), script="train.py"),
        SeatDead("b", "4/1/a", "a.1", 4, 1, "running"),
    ]
    job = restate(View(None, _last(4)), None, events, begun=Job(highest_round=6, restart_count=2), now=5.0)
    assert (job.rules, job.round, job.highest_round, job.restart_count, job.incarnation) == (RULES, 4, 6, 2, "a.1")
    assert [script.script for script in job.scripts] == ["train.py"]
    assert [refusal.node for refusal in job.refusals] == ["x"]
    assert [seat.status for seat in job.seats] == [LIVE, "void"]


def test_what_a_node_said_before_it_said_where_it_stands_does_not_count() -> None:
    """A node that joined as a newcomer, and then says that it runs the round, is its member."""
    seats = (Seat("a", LIVE), Seat("b", LIVE))
    copied = Job(round=1, round_id="1/1/a", phase="running", seats=seats, rules=RULES, incarnation="a.1")
    again = Join("a", 2, NodeInfo("a", 1, 1), RULES, OFFER, last=_last(1))
    view = View(Copy("a.1", 1, 1, 1), None)
    job = restate(view, copied, [_join("a"), again], begun=Job(), now=5.0)
    assert [node.node for node in job.members] == ["a"]
    assert not job.has_lost


@pytest.mark.parametrize(
    ("has_successors", "waited", "expected"), [(True, 99.0, False), (False, 5.0, False), (False, 6.0, True)]
)
def test_a_lease_is_enough_where_the_store_can_not_move(*, has_successors: bool, waited: float, expected: bool) -> None:
    """A majority is asked for only where another log of the job may exist."""
    rules = Rules(1, 3, has_successors=has_successors)
    job = Job(
        round=1,
        rules=rules,
        seats=(Seat("a", LIVE), Seat("b", AWAITED), Seat("c", AWAITED)),
        nodes=MappingProxyType({}),
    )
    assert may_go_on(job, rules, waited) is expected


def test_a_copy_is_identified_without_reading_all_of_it() -> None:
    """What isn't a state document is no copy."""
    with pytest.raises(MessageError):
        identify(b'{"job":7}')


def _waiting() -> office.Coordinator:
    known = office.start_term("b", term=2, slot=0, state=None, now=0.0, is_successor=True)
    facts = [to_json(_join("b", last=_last(1, 1), copy=Copy("a.1", 1, 1, 1)))]
    return office.receive(known, facts, 1, now=0.0, jitter=0.0)


def test_a_copy_that_is_wanted_is_read_once() -> None:
    """Garbage in place of the copy is named with its key, and never asked for again."""
    known = _waiting()
    copy = Copy("a.1", 1, 1, 1)
    assert (known.wants, known.pending) == (copy, None)
    known = office.take_copy(known, b"garbage", now=0.0, jitter=0.0)
    assert copy_key(copy) in known.complaint
    assert (known.wants, known.view is not None) == (None, True)
    assert office.take_copy(known, b"", now=0.0, jitter=0.0) is known


def test_without_a_majority_the_job_ends_after_the_join_timeout() -> None:
    """Workers run on for two leases; then they are stopped, and the nodes wait for the others."""
    known = office.take_copy(_waiting(), None, now=0.0, jitter=0.0)
    assert known.wait_until == 12.0
    known = office.receive(known, [], 1, now=12.0, jitter=0.0)
    assert isinstance(known.pending, Halt)
    assert office.take_copy(_wanting(known), None, now=12.0, jitter=0.0).pending is known.pending
    known, cleanup = office.settle(known, to_json(known.pending), now=12.0, jitter=0.0)
    assert (known.wait_until, cleanup.trimmed) == (600.0, 0)
    known = office.receive(known, [], 1, now=600.0, jitter=0.0)
    assert isinstance(known.pending, End)
    assert known.pending.detail == (
        "1 of the last round's 2 nodes are here, 2 are needed; not here: rank 0 within 600 s"
    )


def _wanting(known: office.Coordinator) -> office.Coordinator:
    """Return a coordinator that wants a copy while a decision is pending."""
    return replace(known, wants=Copy("a.1", 1, 1, 1))
