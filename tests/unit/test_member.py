"""What a node makes of single events, where no scenario comes by."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elastic_run.core.job.config import JobConfig
from elastic_run.core.node import machine as membership
from elastic_run.core.node import messages as node_messages
from elastic_run.core.node.state import (
    BEGINNING,
    HALTING,
    LEAVING,
    OVER,
    READY,
    RUNNING,
    WAITING,
    KnownJob,
    LogPosition,
)
from elastic_run.core.protocol.log_start import find_restart
from elastic_run.core.protocol.messages import (
    DONE,
    Assignment,
    Claim,
    Copy,
    End,
    Form,
    Halt,
    Head,
    Join,
    LogStart,
    NodeInfo,
    Recovered,
    Refuse,
    StoreAddress,
    to_json,
)
from elastic_run.records import replace
from tests.scenarios.succession_script import Bed
from tests.scenarios.test_succession import SCRIPTS

if TYPE_CHECKING:
    from elastic_run.core.node.state import Member
    from elastic_run.core.protocol.messages import Decision


def test_a_preparation_that_a_round_has_followed_is_not_told() -> None:
    """The state was kept late: the round that it prepared, or another, is there already."""
    member, _ = membership.begin(
        "a", node_info=NodeInfo("a", 1, 1), config=JobConfig(1, 3), store_address=StoreAddress("a", 1), now=0.0
    )
    member = replace(
        member,
        state=READY,
        log=LogPosition(next_slot=5),
        job=replace(member.job, known_round=2, incarnation="a.1"),
        coordination=replace(member.coordination, is_vacant=False),
    )
    for prepared in (Copy("a.1", 1, 1, 5, 1), Copy("z.1", 2, 1, 5, 1)):
        assert membership.decide(member, node_messages.StateKept(prepared), 1.0) == (member, ())
    told, commands = membership.decide(member, node_messages.StateKept(Copy("a.1", 2, 1, 5, 1)), 1.0)
    assert told.job.prepared == Copy("a.1", 2, 1, 5, 1)
    assert [type(command) for command in commands] == [node_messages.Append]


def test_a_node_that_has_read_nothing_has_lost_nothing() -> None:
    """A store that is restored before a node has found the log changes nothing for the node."""
    member, commands = membership.begin(
        "a", node_info=NodeInfo("a", 1, 1), config=JobConfig(1, 3), store_address=StoreAddress("a", 1), now=0.0
    )
    assert find_restart(None, 0, (b"", b""), 0, there=(b"x", b"x"), raw=None) is None
    assert membership.decide(member, node_messages.StoreRestored(), 1.0)[1] == commands


def test_a_node_whose_store_lost_the_log_joins_after_it_has_read_a_claim() -> None:
    """Its new workers' store is open before it knows that the restored store has no log."""
    member = replace(_member(WAITING), log=LogPosition(next_slot=0), job=KnownJob())
    told: list[node_messages.Command] = []
    for event in (
        node_messages.StoreRestored(),
        node_messages.RejoinPrepared(None, StoreAddress("a", 2)),
        node_messages.HeadRead(None),
    ):
        member, commands = membership.decide(member, event, 1.0)
        told += commands
    assert [type(command) for command in told] == [node_messages.ReadHead, node_messages.PrepareRejoin]
    member, commands = membership.decide(member, node_messages.EntryRead(0, to_json(Claim(1, "b"))), 1.0)
    (said,) = commands
    assert isinstance(said, node_messages.Append)
    assert (said.fact.seen, said.fact.store_address.port) == (0, 2)  # type: ignore[union-attr]  # a Join


def test_a_node_that_has_read_beyond_the_new_start_of_a_restored_log_goes_back_to_it() -> None:
    """Another node let the log begin anew while this one was about to, at an earlier slot and in a later term."""
    member = _member(WAITING)
    member = replace(member, log=replace(member.log, last_entry=b"lost", former_entry=b"lost"))
    start = LogStart(3, 13, is_restart=True)
    member, _ = membership.decide(member, node_messages.StoreRestored(start), 1.0)
    assert (member.log.next_slot, member.log.term) == (3, 13)
    _, commands = membership.decide(member, node_messages.HeartbeatWritten(), 99.0)
    assert node_messages.CreateEntry(3, Claim(14, "a")) in commands


def test_a_node_that_found_garbage_in_another_store_looks_for_the_log_at_each_heartbeat() -> None:
    """The start of the log is unreadable and the head is missing: the node waits until a coordinator writes one."""
    member, _ = membership.decide(_member(WAITING), node_messages.StoreChanged(), 1.0)
    member, _ = membership.decide(member, node_messages.HeadRead(None, b"garbage"), 1.0)
    _, commands = membership.decide(member, node_messages.HeartbeatWritten(), 2.0)
    assert commands == (node_messages.ReadHead(),)


_NODE_INFO, _STORE_ADDRESS = NodeInfo("a", 1, 1), StoreAddress("a", 1)
_PLACE = Assignment(3, 0, 1, 0, 1, 0, 1, _STORE_ADDRESS, 0, 1, incarnation="a.1", round_id="3/1/a")
_GONE = node_messages.WorkersGone(3, DONE, _STORE_ADDRESS)


def _member(state: str, **round_: object) -> Member:
    """Return a node that waits for slot 5 of a log in term 1, and has heard of round 3."""
    member, _ = membership.begin(
        "a", node_info=_NODE_INFO, config=JobConfig(1, 3), store_address=_STORE_ADDRESS, now=0.0
    )
    return replace(
        member,
        state=state,
        log=replace(member.log, next_slot=5, term=1),
        job=replace(member.job, known_round=3, incarnation="a.1"),
        round=replace(member.round, **round_),  # type: ignore[arg-type]  # fields of a round
    )


def _entry(decision: Decision) -> node_messages.EntryRead:
    return node_messages.EntryRead(5, to_json(decision))


#: Moves that no scenario makes: the state and event, and the state after.
_MOVES: dict[str, tuple[Member, node_messages.Event, str]] = {
    "told to go before the log was found": (
        _member(BEGINNING),
        node_messages.Leaving("signal"),
        LEAVING,
    ),
    **{
        f"excluded while it is {state}": (
            _member(state, place=place),
            _entry(Refuse(1, "a", "why", "excluded")),
            LEAVING,
        )
        for state, place in ((WAITING, None), (RUNNING, _PLACE), (HALTING, _PLACE), (READY, _PLACE), (LEAVING, _PLACE))
    },
    "the end while it leaves": (
        _member(LEAVING),
        _entry(End(1, "success", 0)),
        OVER,
    ),
    "the end while it runs": (
        _member(RUNNING, place=_PLACE),
        _entry(End(1, "unkillable_worker", 1)),
        OVER,
    ),
    "a round that was halted before it was told": (
        _member(READY, fetching=(4, 1), halt=Halt(1, 3, "loss")),
        node_messages.AssignmentRead(4, 1, to_json(_PLACE)),
        HALTING,
    ),
    "a round without it": (
        _member(READY, fetching=(4, 1)),
        node_messages.AssignmentRead(4, 1, None),
        WAITING,
    ),
    "a log that recovers another job": (
        _member(READY, place=_PLACE, gone=_GONE),
        _entry(Recovered(1, "z", 3, "3/1/z", 0, "z.1")),
        WAITING,
    ),
    "a log that recovers another first round of the job": (
        _member(RUNNING, place=replace(_PLACE, round=1, round_id="1/1/a")),
        _entry(Recovered(1, "z", 1, "1/1/z", 0, "a.1")),
        HALTING,
    ),
    "a node that is cut off": (
        _member(RUNNING, place=_PLACE),
        node_messages.CutOff(6.0),
        HALTING,
    ),
    "workers that end after the job went on": (
        _member(RUNNING, place=replace(_PLACE, round=2)),
        node_messages.WorkersGone(2, DONE, _STORE_ADDRESS),
        WAITING,
    ),
}


@pytest.mark.parametrize(("member", "event", "after"), _MOVES.values(), ids=_MOVES.keys())
def test_a_move_that_no_scenario_makes(member: Member, event: node_messages.Event, after: str) -> None:
    """Rare moves lead where the table says."""
    assert membership.decide(member, event, 1.0)[0].state == after


_LEFT = _member(HALTING, place=_PLACE, told=_PLACE)
_OF_NO_USE = {
    "a round of another job": replace(_LEFT, job=replace(_LEFT.job, incarnation="z.1")),
    "a round in whose place the log has another": replace(_LEFT, round=replace(_LEFT.round, is_replaced=True)),
    "an older round of a job whose store can move": replace(
        _LEFT, job=replace(_LEFT.job, known_round=4), config=replace(_LEFT.config, has_successors=True)
    ),
}


@pytest.mark.parametrize("member", _OF_NO_USE.values(), ids=_OF_NO_USE.keys())
def test_a_node_tells_no_log_of_a_round_from_which_it_must_not_go_on(member: Member) -> None:
    """The node comes back as one without a round, and says nothing of the end of its last round."""
    _, commands = membership.decide(member, _GONE, 1.0)
    (fact,) = [command.fact for command in commands if isinstance(command, node_messages.Append)]
    assert isinstance(fact, Join)
    assert fact.last is None


def test_every_move_of_the_table_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change of state that the table allows is made in a scenario, or in the test above."""
    made = {(member.state, type(event), after) for member, event, after in _MOVES.values()}
    decide = membership.decide

    def record(member: Member, event: node_messages.Event, now: float) -> membership.Decision:
        after = decide(member, event, now)
        made.add((member.state, type(event), after[0].state))
        return after

    monkeypatch.setattr(membership, "decide", record)
    for path in SCRIPTS:
        Bed().play(path.read_text(encoding="utf-8"))
    allowed = {
        (state, event, after)
        for (state, event), transition in membership.TRANSITIONS.items()
        for after in transition.after
        if after != state
    }
    assert allowed <= made


def test_a_step_that_is_not_in_the_table_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reaction that leads to a state which the table does not name is refused."""
    step = (RUNNING, node_messages.CutOff)
    monkeypatch.setitem(membership.TRANSITIONS, step, replace(membership.TRANSITIONS[step], after=()))
    with pytest.raises(membership.IllegalTransitionError, match="from running to halting"):
        membership.decide(_member(RUNNING, place=_PLACE), node_messages.CutOff(6.0), 1.0)


@pytest.mark.parametrize(
    ("member", "event"),
    [
        (_member(READY, fetching=(4, 1)), node_messages.AssignmentRead(3, 1, to_json(_PLACE))),
        (_member(RUNNING, place=_PLACE), node_messages.WorkersFailing(2)),
        (_member(RUNNING, place=_PLACE), node_messages.WorkersGone(2, DONE, _STORE_ADDRESS)),
        (_member(RUNNING, place=_PLACE), node_messages.AssignmentRead(4, 1, None)),
    ],
)
def test_a_word_about_another_round_changes_nothing(member: Member, event: node_messages.Event) -> None:
    """What was said of a round before, or asked for before, comes too late to matter."""
    after, _ = membership.decide(
        replace(member, coordination=replace(member.coordination, claims_from=9.0)), event, 1.0
    )
    assert (after.state, after.round, after.facts) == (member.state, member.round, member.facts)


def test_an_excluded_node_says_that_it_goes_and_tells_its_agent() -> None:
    """The fact lets the others count its seat as free, in whatever store; the agent is told why."""
    member = _member(READY, place=_PLACE)
    _, commands = membership.decide(member, _entry(Refuse(1, "a", "why", "excluded")), 1.0)
    assert [type(command) for command in commands] == [node_messages.Append, node_messages.Refused]
    assert commands[1] == node_messages.Refused("why", "excluded")
    left = replace(member, state=LEAVING)
    assert membership.decide(left, _entry(Refuse(1, "a", "why", "excluded")), 1.0)[1] == ()


@pytest.mark.parametrize("coordinates", [False, True])
def test_a_refused_coordinator_ends_its_term(*, coordinates: bool) -> None:
    """Another node coordinates at once, without waiting for a lease: the refused one may serve the store."""
    member = _member(WAITING)
    member = replace(member, coordination=replace(member.coordination, coordinator="a", is_coordinator=coordinates))
    after, commands = membership.decide(member, _entry(Refuse(1, "a", "why")), 1.0)
    expected = [node_messages.EndTerm()] * coordinates + [node_messages.Refused("why")]
    assert ([*commands], after.state, after.coordination.is_coordinator) == (expected, OVER, False)


@pytest.mark.parametrize(("slot", "term"), [(4, 1), (5, 3), (6, 3)])
def test_a_node_without_a_head_takes_the_first_one_at_its_own_slot(slot: int, term: int) -> None:
    """A head of the very slot that the node waits for tells the term as well as a later one; an older head does not."""
    member = _member(WAITING)
    member = replace(member, log=replace(member.log, needs_head=True))
    head = Head(
        slot, 3, "b", 3, 2, 1, is_running=True, state_slot=-1, state_term=0, incarnation="a.1", round_id="3/1/a"
    )
    after, _ = membership.decide(member, node_messages.HeadRead(to_json(head)), 1.0)
    assert (after.log.term, after.log.needs_head) == (term, False)


def test_a_round_of_another_job_may_be_this_node_s() -> None:
    """It has offered its workers' store there; to join as a newcomer now would offer the same one a second time."""
    member = _member(READY, place=_PLACE, gone=node_messages.WorkersGone(3, DONE, _STORE_ADDRESS))
    waiting, commands = membership.decide(member, _entry(Form(1, 4, 0, 1, 1, incarnation="b.1")), 1.0)
    assert waiting.state == WAITING
    assert node_messages.FetchAssignment(5, 1) in commands
    assert not any(isinstance(command, node_messages.Append) for command in commands)
    place = replace(_PLACE, round=4, incarnation="b.1", round_id="4/1/b")
    running, commands = membership.decide(waiting, node_messages.AssignmentRead(5, 1, to_json(place)), 2.0)
    assert running.state == RUNNING
    formed, told = commands
    assert formed == node_messages.Formed(place)
    assert isinstance(told, node_messages.Append)
    assert isinstance(told.fact, Join)
    assert told.fact.last is not None
    assert told.fact.last.round_id == "4/1/b"


@pytest.mark.parametrize(("number", "state"), [(3, WAITING), (4, WAITING), (5, RUNNING)])
def test_a_round_that_is_not_above_the_last_one_is_not_run(number: int, state: str) -> None:
    """The last one may be of another job, which was begun in another store: this log has stopped before that."""
    member = _member(WAITING)
    told = replace(_PLACE, round=4, incarnation="b.1", round_id="4/1/b")
    member = replace(
        member,
        round=replace(member.round, told=told, fetching=(5, 1)),
        job=replace(member.job, known_round=number, incarnation="a.1"),
    )
    place = replace(_PLACE, round=number, incarnation="a.1", round_id=f"{number}/1/a")
    after, commands = membership.decide(member, node_messages.AssignmentRead(5, 1, to_json(place)), 2.0)
    assert after.state == state
    assert (node_messages.Formed(place) in commands) is (state == RUNNING)


def test_a_head_of_another_release_is_no_garbage() -> None:
    """The user hears of the other release once, from the decision by which this node is refused."""
    member = _member(WAITING)
    member = replace(member, log=replace(member.log, needs_head=True))
    told = [
        node_messages.Unreadable in map(type, membership.decide(member, node_messages.HeadRead(head), 1.0)[1])
        for head in (b'{"protocol":99,"term":1}', b"garbage")
    ]
    assert told == [False, True]


def test_a_node_that_finds_no_log_joins_after_the_first_claim() -> None:
    """A backup of the store that has its `Join` has a claim, too. A log of another release hears of it at once."""
    beginning, _ = membership.begin(
        "a", node_info=_NODE_INFO, config=JobConfig(1, 3), store_address=_STORE_ADDRESS, now=0.0
    )
    _, (told, *_) = membership.decide(beginning, node_messages.HeadRead(b'{"protocol":99,"term":1}'), 1.0)
    assert isinstance(told, node_messages.Append)
    member, commands = membership.decide(beginning, node_messages.HeadRead(None), 1.0)
    assert commands == (node_messages.CreateEntry(0, Claim(1, "a")),)
    member, commands = membership.decide(member, node_messages.HeartbeatWritten(is_unknown=True), 1.0)
    assert commands == (node_messages.ReadHead(),)
    member, commands = membership.decide(member, node_messages.EntryRead(0, to_json(Claim(1, "b"))), 1.0)
    assert [type(command) for command in commands] == [node_messages.Append]
    assert isinstance(member.facts.outstanding[0], Join)
