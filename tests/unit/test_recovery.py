"""How the log of a store that knows nothing of the job goes on from what the nodes know."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.job import coordinator as core
from elastic_run.core.job import coordinator_slots as slots
from elastic_run.core.job.apply_facts import apply_facts
from elastic_run.core.job.config import JobConfig
from elastic_run.core.job.job_document import job_to_document
from elastic_run.core.job.majority import describe_majority
from elastic_run.core.job.snapshot import find_newest_state, identify, make_state, write_state
from elastic_run.core.job.state import (
    AWAITED,
    ENDED,
    GATHERING,
    LIVE,
    MOVED,
    RUNNING,
    SILENT,
    VOID,
    Gone,
    Job,
    LeftLog,
    Node,
    Seat,
)
from elastic_run.core.job.store_change import give_up_awaited, move
from elastic_run.core.job.view_change import (
    View,
    find_ahead,
    find_view,
    is_outdated,
    keep_facts,
    leave_out_old,
    may_go_on,
    restate,
)
from elastic_run.core.protocol.job_keys import copy_key, state_key
from elastic_run.core.protocol.messages import (
    DIED,
    LAST_SEQUENCE,
    SEAT_RUNNING,
    Claim,
    Copy,
    End,
    Form,
    Halt,
    Join,
    Leave,
    MessageError,
    NodeInfo,
    PreviousRound,
    Ready,
    Recovered,
    SeatDead,
    StoreAddress,
    read_term,
    to_json,
)
from elastic_run.records import replace

if TYPE_CHECKING:
    from elastic_run.core.job.apply_facts import Event
    from elastic_run.core.job.coordinator_state import Coordinator

CONFIG = JobConfig(1, 3, has_successors=True)
STORE_ADDRESS = StoreAddress("n", 1)


def _join(
    node: str,
    *,
    last: PreviousRound | None = None,
    copy: Copy | None = None,
    config: JobConfig = CONFIG,
    script: str = "",
) -> Join:
    return Join(node, 1, NodeInfo(node, 1, 1, script=script), config, STORE_ADDRESS, last=last, copy=copy)


def _last(number: int, rank: int = 0, nodes: int = 2, incarnation: str = "a.1") -> PreviousRound:
    return PreviousRound(f"{number}/1/a", number, rank, nodes, 0, incarnation)


@pytest.mark.parametrize(
    ("copy", "last", "expected"),
    [
        (Copy("a.1", 2, 3, 1, 1), None, False),
        (Copy("a.1", 2, 4, 1, 1), None, True),
        (Copy("a.1", 3, 1, 1, 1), None, True),
        (Copy("b.1", 3, 9, 1, 1), None, False),
        (Copy("a.1", 2, 2, 1, 2), None, True),
        (None, _last(2), False),
        (None, replace(_last(2), round_id="2/2/b"), True),
        (None, _last(3), True),
        (None, _last(3, incarnation="b.1"), False),
    ],
)
def test_a_log_is_behind_where_a_node_knows_more_of_the_same_job(
    copy: Copy | None, last: PreviousRound | None, *, expected: bool
) -> None:
    """A newer round, one of a later term, or a newer term; what another job's nodes know counts for nothing."""
    job = Job(round=2, round_id="2/1/a", incarnation="a.1")
    ahead = find_ahead(job, 3, [Leave("c", 1, "died"), _join("b", copy=copy, last=last)])
    assert ahead == ({"b"} if expected else set())


def test_what_a_node_that_is_ahead_has_told_counts_after_the_question() -> None:
    """Not what it had told the log before: its first fact comes once more, and its workers' store is another by now."""
    known = Node("b", NodeInfo("b", 1, 1), STORE_ADDRESS, 1, 0, 0.0)
    job = Job(round=1, round_id="1/1/a", nodes=MappingProxyType({"b": known}))
    again, left = replace(_join("b"), sequence=2), Leave("c", 1, "died")
    assert keep_facts(job, [_join("b"), again, _join("a"), left, _join("b")], {"b"}) == (again, left)


def test_the_death_of_a_node_without_a_seat_counts_after_the_question() -> None:
    """Its guardian does not tell it again, and a round that was prepared in another store may have the node."""
    gone = {name: Gone(name, LAST_SEQUENCE, reason, "") for name, reason in (("c", DIED), ("d", "signal"))}
    assert keep_facts(Job(gone=MappingProxyType(gone)), [], set()) == (Leave("c", LAST_SEQUENCE, DIED),)


def test_nobody_knows_of_a_round() -> None:
    """Newcomers alone have no view: the job is founded."""
    assert find_view([_join("a"), Leave("b", 1, "died")], {}) is None


def test_a_fact_that_comes_once_more_hides_no_newer_one() -> None:
    """A connection broke, the fact was said again, and the first copy arrives after newer facts of its node."""
    death = SeatDead("a", "1/1/a", "a.1", 1, 0, "running")
    events: list[Event] = [_join("a"), _join("b"), death, _join("b")]
    assert leave_out_old(events, {"a": 3}) == [_join("b"), death]


def test_the_newest_copy_is_of_the_highest_round_then_term_then_slot() -> None:
    """A minority that went on deciding in a later term has no newer round."""
    old, newer, newest = Copy("a.1", 1, 9, 99, 1), Copy("a.1", 2, 3, 4, 1), Copy("a.1", 2, 3, 5, 1)
    view = find_view([_join("a", copy=newest), _join("b", copy=old), _join("c", copy=newer)], {})
    assert view == View(newest, None, (newest,))
    assert find_view([_join("a", copy=newest), _join("c", copy=newer)], {newest: None}) == View(newer, None, (newer,))


def test_a_log_does_not_go_on_from_an_older_round_than_its_own() -> None:
    """Nodes that have read nothing of its last round may answer first (seed 12493)."""
    old, own = Copy("a.1", 1, 9, 99, 1, "other"), Copy("a.1", 2, 3, 4, 2, "here")
    assert find_view([_join("b", copy=old)], {own: Job()}) == View(own, None, (old, own))
    assert find_view([_join("b")], {own: Job()}) == View(own, None, (own,))


def test_a_round_that_no_copy_knows_counts() -> None:
    """A node that runs a newer round than all copies tell of names its size."""
    copy = Copy("a.1", 1, 1, 1, 1)
    assert find_view([_join("a", copy=copy), _join("b", last=_last(2))], {}) == View(copy, _last(2), (copy,))
    assert find_view([_join("a", copy=copy), _join("b", last=_last(1))], {}) == View(copy, None, (copy,))


def test_of_two_rounds_of_one_number_the_later_terms_is_the_newer() -> None:
    """The log that formed it went on from what the other log knew; a node that has no copy names it by its id."""
    older, newer = Copy("a.1", 2, 9, 9, 1), Copy("a.1", 2, 3, 4, 3)
    assert find_view([_join("a", copy=older), _join("b", copy=newer)], {}) == View(newer, None, (newer,))
    last = replace(_last(2), round_id="2/4/c")
    assert find_view([_join("a", copy=newer), _join("b", last=last)], {}) == View(newer, last, (newer,))


def test_the_newest_copy_of_each_store_counts() -> None:
    """The log of each store may have formed the next round; a copy of two rounds before tells of none."""
    newest, older = Copy("a.1", 2, 3, 5, 3, "s"), Copy("a.1", 2, 3, 4, 3, "s")
    other, former, old = Copy("a.1", 2, 1, 1, 1, "t"), Copy("a.1", 1, 9, 1, 1, "u"), Copy("a.1", 1, 3, 1, 1, "v")
    told = [_join(str(index), copy=copy) for index, copy in enumerate([newest, older, other, former, old])]
    view = find_view(told, {})
    assert view is not None
    assert (view.copy, set(view.copies), view.highest_term) == (newest, {newest, other, former}, 9)


@pytest.mark.parametrize(
    ("prepared", "expected"),
    [
        (None, False),
        (Copy("a.1", 2, 1, 5, 1, "s"), False),
        (Copy("a.1", 2, 1, 6, 1, "s"), True),
        (Copy("a.1", 2, 1, 1, 1, "u"), True),
        (Copy("a.1", 2, 9, 9, 1, "t"), False),
        (Copy("a.1", 1, 9, 9, 1, "s"), False),
        (Copy("a.1", 1, 9, 9, 1, "u"), True),
        (Copy("a.1", 1, 1, 9, 1, "s"), False),
        (Copy("z.1", 3, 9, 9, 1, "s"), False),
    ],
)
def test_a_node_that_has_read_a_newer_prepare_than_all_copies_tell_of_holds_the_log_up(
    prepared: Copy | None, *, expected: bool
) -> None:
    """The round may have been formed without those who are here, and its nodes are not known."""
    copy = Copy("a.1", 2, 1, 5, 1, "s")
    view = find_view([_join("a", copy=copy), replace(_join("b"), prepared=prepared)], {})
    assert view is not None
    seats = (Seat("a", AWAITED),)
    copied = Job(round=2, round_id="2/1/a", incarnation="a.1", config=CONFIG, seats=seats, prepared=("a", "b"))
    job = restate(view, {copy: copied}, [_join("a", copy=copy)], begun=Job(store_id="t"), now=5.0)
    assert job.left_logs == (LeftLog(copy, ("a", "b")),)
    job = replace(job, left_logs=(LeftLog(copy),), seats=(Seat("a", LIVE),))
    assert is_outdated(view, job) is expected
    assert may_go_on(view, job, CONFIG, 99.0) is not expected


def test_a_round_that_no_copy_knows_is_newer_than_a_prepare_before_it() -> None:
    """Its members go on from it, whatever was prepared before."""
    prepared = Copy("a.1", 1, 1, 5, 1)
    view = find_view([_join("a", last=_last(2)), replace(_join("b"), prepared=prepared)], {})
    assert view == View(None, _last(2), (), (prepared,))
    assert not is_outdated(view, Job(round=2, round_id="2/1/a", incarnation="a.1", store_id="s"))


@pytest.mark.parametrize(("round_id", "term"), [("3/7/a/b", 7), ("", 0), ("3", 0), ("3/x/a", 0)])
def test_a_rounds_id_tells_its_term(round_id: str, term: int) -> None:
    """Garbage tells none."""
    assert read_term(round_id) == term


@pytest.mark.parametrize(("reason", "is_back"), [(SILENT, True), (MOVED, False)])
def test_a_node_that_has_not_come_to_this_log_comes_with_its_join(reason: str, *, is_back: bool) -> None:
    """Without the rank that only a `Join` tells it would be taken for a newcomer."""
    known = Node("b", NodeInfo("b", 1, 1), STORE_ADDRESS, 1, 0, 0.0)
    job = Job(round=2, round_id="2/1/a", config=CONFIG, gone=MappingProxyType({"b": Gone("b", 1, reason, "", known)}))
    job = apply_facts(job, [Ready("b", 2, 2, "2/1/a", "stopped", STORE_ADDRESS)], 0.0)
    assert ("b" in job.nodes) == is_back


@pytest.mark.parametrize(
    ("restarts", "last", "expected"),
    [(2, None, 3), (4, None, 4), (4, _last(4), 4), (4, _last(4, incarnation="z.1"), 3)],
)
def test_restarts_that_another_log_has_counted_count(restarts: int, last: PreviousRound | None, expected: int) -> None:
    """Other nodes restarted the job apart, after a failure of which this log knows nothing."""
    job = Job(round=4, round_id="4/3/b", incarnation="a.1", config=CONFIG, restart_count=3)
    job = apply_facts(job, [replace(_join("c", last=last), known_restarts=restarts)], 0.0)
    assert job.restart_count == expected


def test_the_job_that_most_nodes_know_goes_on() -> None:
    """A node of another job is a newcomer to it, whatever its round."""
    other = _join("c", last=_last(9, incarnation="z.1"))
    assert find_view([_join("a", last=_last(1)), _join("b", last=_last(1, 1)), other], {}) == View(None, _last(1))


def test_without_a_copy_rules_and_scripts_are_those_of_the_nodes_that_run() -> None:
    """A stranger who spoke first settles nothing, and the proof of a death counts."""
    events: list[Event] = [
        _join("x", config=JobConfig(1, 3, max_restarts=7), script="other.py"),
        _join("a", last=_last(4), script="train.py"),
        SeatDead("b", "4/1/a", "a.1", 4, 1, "running"),
    ]
    job = restate(View(None, _last(4)), {}, events, begun=Job(highest_round=6, restart_count=2), now=5.0)
    assert (job.config, job.round, job.highest_round, job.restart_count, job.incarnation) == (CONFIG, 4, 6, 2, "a.1")
    assert [script.script for script in job.scripts] == ["train.py"]
    assert [refusal.node for refusal in job.refusals] == ["x"]
    assert [seat.status for seat in job.seats] == [LIVE, "void"]


def test_what_a_node_said_before_it_said_where_it_stands_does_not_count() -> None:
    """A node that joined as a newcomer, and then says that it runs the round, is its member."""
    seats = (Seat("a", LIVE), Seat("b", LIVE))
    copied = Job(round=1, round_id="1/1/a", phase="running", seats=seats, config=CONFIG, incarnation="a.1")
    again = Join("a", 2, NodeInfo("a", 1, 1), CONFIG, STORE_ADDRESS, last=_last(1))
    copy = Copy("a.1", 1, 1, 1, 1)
    job = restate(View(copy, None, (copy,)), {copy: copied}, [_join("a"), again], begun=Job(), now=5.0)
    assert [node.node for node in job.members] == ["a"]
    assert not job.has_lost


def test_a_seat_that_was_lost_stays_lost_in_another_store() -> None:
    """Its holder never ran the round, and served the store that was left: the round can't succeed without it."""
    holder = Node("b", NodeInfo("b", 1, 1, serves_store=True), STORE_ADDRESS, 1, arrived=1, arrived_at=0.0, rank=1)
    seats = (Seat("a", LIVE), Seat("b", LIVE, is_lost=True))
    job = Job(round=1, phase="running", seats=seats, nodes=MappingProxyType({"b": holder}))
    assert move(job, 5.0).has_lost
    done = Gone("b", 1, "moved", "", replace(holder, outcome="done"))
    seats = (Seat("a", LIVE), Seat("b", AWAITED, is_lost=True))
    assert give_up_awaited(Job(round=1, seats=seats, gone=MappingProxyType({"b": done}))).has_lost


@pytest.mark.parametrize(
    ("has_successors", "waited", "expected"), [(True, 99.0, False), (False, 5.0, False), (False, 6.0, True)]
)
def test_a_lease_is_enough_where_the_store_can_not_move(*, has_successors: bool, waited: float, expected: bool) -> None:
    """A majority is asked for only where another log of the job may exist."""
    config = JobConfig(1, 3, has_successors=has_successors)
    job = Job(
        round=1,
        config=config,
        seats=(Seat("a", LIVE), Seat("b", AWAITED), Seat("c", AWAITED)),
        nodes=MappingProxyType({}),
    )
    assert may_go_on(View(None, None), job, config, waited) is expected


def test_a_copy_is_identified_without_reading_all_of_it() -> None:
    """What isn't a state document is no copy."""
    with pytest.raises(MessageError):
        identify(b'{"job":7}')


def _waiting() -> Coordinator:
    known = core.start_term("b", term=2, slot=0, state=None, now=0.0, is_successor=True)
    facts = [to_json(_join("b", last=_last(1, 1), copy=Copy("a.1", 1, 1, 1, 1)))]
    return core.receive(known, facts, 1, now=0.0, jitter=0.0)


def test_a_copy_that_is_wanted_is_read_once() -> None:
    """Garbage in place of the copy is named with its key, and never asked for again."""
    known = _waiting()
    copy = Copy("a.1", 1, 1, 1, 1)
    assert (known.wants, known.pending) == (copy, None)
    known = core.take_copy(known, b"garbage", now=0.0, jitter=0.0)
    assert copy_key(copy) in known.complaint
    assert (known.wants, known.view is not None) == (None, True)
    assert core.take_copy(known, b"", now=0.0, jitter=0.0) is known


def test_who_coordinates_after_a_question_to_all_nodes_knows_the_round_before_it() -> None:
    """Nodes that have read nothing of that round may answer first."""
    job = Job(
        1, 4, round=2, round_id="2/1/a", incarnation="a.1", seats=(Seat("a", LIVE), Seat("d", VOID)), config=CONFIG
    )
    state = write_state(make_state(job, 0.0, position=0, oldest=0, formations=()))
    asking = core.start_term("b", term=2, slot=4, state=state, now=0.0, newest_round=3)
    assert core.has_lost_state(asking)
    proposal = slots.propose(core.skip(asking, [], 0, None), 1.0)
    assert proposal is not None
    (document,) = proposal.documents.values()
    known = core.start_term("c", term=3, slot=6, state=document, now=9.0)
    assert known.events == (SeatDead("d", "2/1/a", "a.1", 2, 1, SEAT_RUNNING),)
    known = core.receive(known, [to_json(_join("b", last=_last(1)))], 1, now=9.0, jitter=0.0)
    assert isinstance(known.pending, Recovered)
    assert known.pending.round_id == "2/1/a"
    lost = core.start_term("c", term=3, slot=6, state=document.replace(b'"former":{', b'"former":{},"":{'), now=9.0)
    assert core.has_lost_state(lost)


def _write(job: Job, former: Job | None = None) -> bytes:
    state = make_state(job, 0.0, position=0, oldest=0, formations=())
    return write_state(replace(state, former=None if former is None else job_to_document(former, 0.0)))


_ONE_STORE = JobConfig(1, 3, last_call_timeout=0.0)
_RUNNING = Job(1, 4, round=2, round_id="2/1/a", incarnation="a.1", config=_ONE_STORE, phase=RUNNING)


@pytest.mark.parametrize(
    ("state", "number"),
    [
        (None, 0),
        (b"garbage", 0),
        (_write(_RUNNING), 2),
        (_write(Job(1, 4)), 0),
        (_write(Job(1, 4), former=_RUNNING), 2),
        (_write(replace(_RUNNING, phase=ENDED)), 2),  # nodes have gone on from before this end
    ],
)
def test_a_log_that_was_begun_anew_goes_on_from_what_the_store_knows(state: bytes | None, number: int) -> None:
    """Where no node knows of a round, that of the backup is the newest."""
    known = core.take_backup(core.start_term("b", term=9, slot=7, state=b"", now=0.0), state, 0.0)
    assert (0 if known.former is None else known.former.round) == number
    facts = [to_json(_join("c", config=_ONE_STORE))]
    known = core.receive(replace(known, pending=None), facts, 1, now=0.0, jitter=0.0)
    known = core.receive(known, [], 1, now=99.0, jitter=0.0)
    assert isinstance(known.pending, Recovered if number else Form)
    assert known.job.phase == RUNNING


def test_the_newest_state_is_that_of_the_last_entry_that_counts() -> None:
    """Not of a claim, of garbage, or of an entry that a coordinator wrote after a later term had begun."""
    entries = [None, to_json(Halt(2, 1, "loss")), b"garbage", to_json(Claim(3, "b")), to_json(Halt(2, 1, "late"))]
    assert find_newest_state(enumerate(entries)) == state_key(1, 2)
    assert find_newest_state(enumerate(entries[2:])) == state_key(-1, 0)


def test_a_coordinator_that_has_the_state_of_before_needs_no_backup() -> None:
    """It asks all nodes since its node knows of a newer round than the state."""
    known = core.start_term("b", term=9, slot=7, state=_write(_RUNNING), now=0.0, newest_round=3)
    assert core.has_lost_state(known)
    assert core.take_backup(known, _write(replace(_RUNNING, round=1)), 0.0) is known


def test_who_coordinates_next_reads_what_a_node_told_before_it_left() -> None:
    """Its successor reads the facts once more; the state has only the farewells that came before those facts."""
    known = core.start_term("q", term=1, slot=0, state=None, now=0.0, is_successor=True)
    newest = replace(_join("x", last=_last(2), copy=Copy("a.1", 2, 1, 1, 2, "A")), sequence=2)
    facts = [to_json(newest), to_json(Leave("x", 3, "signal"))]
    known = core.receive(known, facts, 2, now=0.0, jitter=0.0)
    proposal = slots.propose(core.resign(known), 0.0)
    assert proposal is not None
    (document,) = proposal.documents.values()
    following = core.start_term("y", term=2, slot=2, state=document, now=1.0, is_successor=True)
    older = [to_json(_join(node, last=_last(1, rank), copy=Copy("a.1", 1, 1, 1, 1))) for rank, node in enumerate("yz")]
    following = core.receive(following, [*facts, *older], 4, now=1.0, jitter=0.0)
    assert following.pending is None
    assert following.wants == Copy("a.1", 2, 1, 1, 2, "A")


def test_the_cause_of_a_failure_is_awaited_anew() -> None:
    """The wait of the log that was left is over: a coordinator that went by it would never wait for facts."""
    seats = (Seat("a", LIVE), Seat("b", LIVE))
    job = Job(1, round=1, round_id="1/1/a", incarnation="a.1", phase="running", seats=seats, config=CONFIG, until=-1.0)
    state = write_state(make_state(replace(job, slot=1), 0.0, position=0, oldest=0, formations=()))
    facts = [to_json(_join(node, last=_last(1, rank), copy=identify(state))) for rank, node in enumerate("ab")]
    known = core.start_term("b", term=2, slot=0, state=None, now=0.0, is_successor=True)
    known = core.take_copy(core.receive(known, facts, 2, now=0.0, jitter=0.0), state, now=0.0, jitter=0.0)
    assert isinstance(known.pending, Recovered)
    assert known.job.until is None


def test_a_copy_goes_when_the_log_goes_on() -> None:
    """Each copy of which a node has told is deleted once."""
    copy = Copy("a.1", 1, 1, 1, 1)
    events = [_join("b", last=_last(1), copy=copy)] * 2
    known = core.start_term("b", term=2, slot=0, state=None, now=0.0, is_successor=True)
    recovered = Recovered(2, "b", 1, "1/1/a", 0, "a.1")
    known = replace(known, job=replace(known.job, round=1), events=tuple(events), pending=recovered)
    _, cleanup = slots.settle(known, to_json(recovered), now=0.0, jitter=0.0)
    assert cleanup.deleted == (copy_key(copy),)


def test_without_a_majority_the_job_ends_after_the_join_timeout() -> None:
    """Workers run on for two leases; then they are stopped, and the nodes wait for the others."""
    known = core.take_copy(_waiting(), None, now=0.0, jitter=0.0)
    assert known.wait_until == 12.0
    known = core.receive(known, [], 1, now=12.0, jitter=0.0)
    assert isinstance(known.pending, Halt)
    assert core.take_copy(_wanting(known), None, now=12.0, jitter=0.0).pending is known.pending
    known, cleanup = slots.settle(known, to_json(known.pending), now=12.0, jitter=0.0)
    assert (known.wait_until, cleanup.trimmed) == (600.0, 0)
    known = core.receive(known, [], 1, now=600.0, jitter=0.0)
    assert isinstance(known.pending, End)
    assert known.pending.detail == (
        "1 of the last round's 2 nodes are here, 2 are needed; not here: rank 0 within 600 s"
    )


@pytest.mark.parametrize(("away", "end"), [(8, "rank 7, rank 8"), (9, "rank 7, rank 8, …")])
def test_eight_ranks_that_are_awaited_are_named(away: int, end: str) -> None:
    """A line that leaves others out says so."""
    job = Job(round=1, config=CONFIG, seats=(Seat("a", LIVE), *(Seat(str(rank), AWAITED) for rank in range(away))))
    assert describe_majority(job, CONFIG).endswith(end)


def _wanting(known: Coordinator) -> Coordinator:
    """Return a coordinator that wants a copy while a decision is pending."""
    return replace(known, wants=Copy("a.1", 1, 1, 1, 1))


@pytest.mark.parametrize(("phase", "is_lost"), [(RUNNING, True), (GATHERING, False)])
def test_a_seat_is_lost_only_while_its_round_runs(phase: str, *, is_lost: bool) -> None:
    """A node that joins anew and runs none of its round loses the seat; between two rounds there is nothing to lose."""
    node = Node("a", NodeInfo("a", 1, 1), STORE_ADDRESS, 0, 0, 0.0, rank=0)
    job = Job(
        phase=phase,
        round=1,
        round_id="1/1/a",
        incarnation="a.1",
        config=CONFIG,
        seats=(Seat("a", LIVE),),
        nodes=MappingProxyType({"a": node}),
    )
    assert apply_facts(job, [_join("a")], 1.0).seats == (Seat("a", LIVE, is_lost=is_lost),)
