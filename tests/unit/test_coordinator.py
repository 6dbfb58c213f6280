"""The coordinator's bookkeeping: what it keeps, what it cleans up, and when its term is over."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from elastic_run.contract import EXIT_FAILURE
from elastic_run.core.job import coordinator as core
from elastic_run.core.job import coordinator_slots as slots
from elastic_run.core.job.coordinator_state import Cleanup
from elastic_run.core.job.reported_failure import read_report
from elastic_run.core.job.state import Gone, name_host
from elastic_run.core.protocol import messages
from elastic_run.core.protocol.job_keys import copy_key
from elastic_run.core.protocol.messages import Join, NodeInfo, Ready, StoreAddress
from tests.support.configs import plain_config

if TYPE_CHECKING:
    from elastic_run.core.job.coordinator_state import Coordinator

CONFIG = plain_config(1, 2, max_restarts=1000, last_call_timeout=0.0, max_backoff=0.0, scale_up_delay=1e6)


class Clerk:
    """Writes what a coordinator proposes into a store of its own."""

    def __init__(self, *nodes: str) -> None:
        self.values: dict[str, bytes] = {}
        self.position = 0
        self.known = core.start_term("a", term=1, slot=0, state=None, now=0.0)
        self.hear(*(Join(node, 1, NodeInfo(node, 1, 1), CONFIG, StoreAddress(node, 1)) for node in nodes))

    def hear(self, *facts: messages.Fact) -> None:
        """Take facts in, and write what follows."""
        self.position += len(facts)
        entries = [messages.to_json(fact) for fact in facts]
        self.known = core.receive(self.known, entries, self.position, now=0.0, jitter=0.0)
        self.write()

    def write(self) -> None:
        """Write all proposals."""
        while (proposal := slots.propose(self.known, 0.0)) is not None:
            self.values.update(proposal.documents)
            self.values[f"d/{proposal.slot}"] = proposal.entry
            self.known, cleanup = slots.settle(self.known, proposal.entry, now=0.0, jitter=0.0)
            self.values.update(cleanup.documents)
            for key in cleanup.deleted:
                self.values.pop(key, None)  # the claim's slot was another's to write
            self.known = slots.garbage_deleted(self.known)
            assert cleanup.trimmed == self.position


def _pending() -> Coordinator:
    known = core.start_term("a", term=1, slot=0, state=None, now=0.0)
    join = messages.to_json(Join("a", 1, NodeInfo("a", 1, 1), CONFIG, StoreAddress("a", 1)))
    return core.receive(known, [join], 1, now=0.0, jitter=0.0)


def test_a_job_of_many_rounds_takes_no_more_room_than_one_of_some() -> None:
    """Slots, states and assignments behind the newest are deleted: their number is bounded."""
    clerk = Clerk("a")
    for number in range(1, 151):
        report = {"exit_code": 1, "uptime": 60.0, "severity": 0, "text": "x" * 5000, "list": ["y"] * 20_000}
        clerk.hear(Ready("a", number + 1, number, f"{number}/1/a", "failed", StoreAddress("a", 1), report))
    kinds = [key.partition("/")[0] for key in clerk.values]
    assert (kinds.count("d"), kinds.count("s"), kinds.count("a"), kinds.count("head")) == (64, 1, 2, 1)
    (state,) = (value for key, value in clerk.values.items() if key.startswith("s/"))
    assert len(state) < 300_000
    job = clerk.known.job
    assert (job.round, job.restart_count, len(job.restart_times), len(job.attempts)) == (151, 150, 64, 64)
    assert job.attempts[0] == {"exit_code": 1, "uptime": 60.0, "severity": 0}


def test_attempts_are_bounded_by_what_they_weigh() -> None:
    """The oldest causes are forgotten when all together are too long."""
    clerk = Clerk("a")
    for number in range(1, 21):
        report = {"exit_code": 1, "uptime": 60.0, "severity": 0, "text": "x" * 60_000}
        clerk.hear(Ready("a", number + 1, number, f"{number}/1/a", "failed", StoreAddress("a", 1), report))
    assert len(clerk.known.job.attempts) == 4


def test_a_report_that_nothing_can_shorten_is_left_out() -> None:
    """Many short values that are too long together are not carried."""
    clerk = Clerk("a")
    report = {f"{index}": "x" * 500 for index in range(1000)}
    clerk.hear(Ready("a", 2, 1, "1/1/a", "failed", StoreAddress("a", 1), report))
    assert clerk.known.job.attempts == ({},)


@pytest.mark.parametrize("code", [0, True, "1", None])
def test_a_failure_whose_report_has_no_exit_code_of_a_failure_ends_with_one(code: object) -> None:
    """No job that failed ends with exit code 0, whatever another node says."""
    failed = Ready("a", 2, 1, "1/1/a", "failed", StoreAddress("a", 1), {"exit_code": code})
    assert read_report(failed, 0).failure.exit_code == EXIT_FAILURE


def test_strangers_that_are_gone_are_forgotten_the_oldest_first() -> None:
    """Of nodes that came and went a bounded number is remembered; members of the round always are."""
    clerk = Clerk("a", "b")
    clerk.hear(*(messages.Leave(f"x{index}", messages.LAST_SEQUENCE, "died") for index in range(300)))
    assert len(clerk.known.job.gone) == 256
    assert "x299" in clerk.known.job.gone


def test_a_node_that_never_joined_is_named_by_its_id() -> None:
    """It is the host's name, with a process id and a random part; a host's name may have an underscore."""
    assert name_host(Gone("gpu_1_4711_c0ffee", 1, "died", "its agent died")) == "gpu_1"


def test_nothing_is_taken_in_while_a_decision_is_pending() -> None:
    """Facts and heartbeats wait until the pending decision is written; none is lost."""
    known = _pending()
    assert known.wait_until is None
    assert core.receive(known, [b"{}"], 9, now=1.0, jitter=0.0) is known
    assert core.observe(known, {"a": None}, now=100.0, jitter=0.0) is known
    assert "head" not in core.make_documents(known, 1.0)
    assert "head" in core.make_documents(Clerk("a").known, 1.0)


def test_without_a_pending_decision_there_is_nothing_to_settle() -> None:
    """Settling twice changes nothing."""
    known = Clerk("a").known
    after, cleanup = slots.settle(known, b"whatever", now=0.0, jitter=0.0)
    assert after is known
    assert cleanup == Cleanup({}, (), {}, None)


@pytest.mark.parametrize(
    ("winner", "is_over"),
    [
        (messages.to_json(messages.Claim(2, "z")), True),
        (messages.to_json(messages.Claim(1, "z")), False),
        (messages.to_json(messages.Claim(3, "z")), True),
        (messages.to_json(messages.Warn(1, 1)), True),
        (messages.to_json(messages.Warn(0, 1)), False),
        (b"garbage", False),
        (None, True),
    ],
)
def test_a_slot_that_another_created_ends_the_term_or_is_skipped(winner: bytes | None, *, is_over: bool) -> None:
    """The next claim ends the term, and so do a decision of the same term and a trimmed slot; others are skipped."""
    known = _pending()
    after, cleanup = slots.settle(known, winner, now=0.0, jitter=0.0)
    assert after.is_over is is_over
    assert after.is_superseded is is_over
    assert cleanup.deleted == ("s/1.1", "a/1.1/a")
    assert (slots.propose(after, 0.0) is None) is is_over
    assert after.job.formed_slot == (1 if is_over else 2)


@pytest.mark.parametrize(("slot", "is_removed"), [(2, True), (1, False)])
def test_a_coordinator_whose_slot_was_trimmed_removes_what_it_has_written_beside_it(
    slot: int, *, is_removed: bool
) -> None:
    """Its newest entry is trimmed as well. In a store that was restored since then the documents may be another's."""
    start = messages.to_json(messages.LogStart(slot, 2))
    _, cleanup = slots.settle(_pending(), None, now=0.0, jitter=0.0, log_start=start)
    assert cleanup.deleted == ("s/1.1", "a/1.1/a")
    assert (cleanup.expected == {"d/start": start}) is is_removed


def test_a_coordinator_that_sleeps_before_its_clean_up_leaves_no_state_behind() -> None:
    """The next one deletes what was to be deleted, before the sleeper's newest entry is trimmed."""
    clerk = Clerk("a")
    clerk.hear(Ready("a", 2, 1, "1/1/a", "failed", StoreAddress("a", 1), {"exit_code": 1}))
    state = clerk.values["s/2.1"]
    successor = core.resign(core.start_term("b", term=2, slot=3, state=state, now=0.0))
    assert slots.unfinished_cleanup(successor) is None  # a restored store may have an older log than this state
    proposal = slots.propose(successor, 0.0)
    assert proposal is not None
    _, cleanup = slots.settle(successor, proposal.entry, now=0.0, jitter=0.0)
    assert cleanup.deleted == ("s/1.1", "s/2.1")


@pytest.mark.parametrize("term", [1, 2])
def test_a_copy_that_a_node_brings_late_is_deleted_with_the_next_decision(term: int) -> None:
    """The log does not need it, unless the next decision asks all nodes where they stand."""
    clerk = Clerk("a")
    copy, newer = messages.Copy("a.1", 1, 1, 0, 1, "z"), messages.Copy("a.1", 1, term, 0, 1, "y")
    clerk.values[copy_key(copy)] = b"copy"
    join = Join("b", 1, NodeInfo("b", 1, 1), CONFIG, StoreAddress("b", 1), copy=copy)
    clerk.hear(join, replace(join, sequence=2))
    assert copy_key(copy) in clerk.values
    clerk.hear(Ready("a", 2, 1, "1/1/a", "failed", StoreAddress("a", 1), {"exit_code": 1}), replace(join, copy=newer))
    assert (copy_key(copy) in clerk.values) is (term == 2)


def test_what_could_not_be_deleted_is_deleted_with_the_next_decision() -> None:
    """Where the connection broke before its keys were deleted, a decision's garbage isn't left for ever."""
    known = _pending()
    known, cleanup = slots.settle(known, b"garbage", now=0.0, jitter=0.0)
    assert cleanup.deleted == ("s/1.1", "a/1.1/a")
    proposal = slots.propose(known, 0.0)
    assert proposal is not None
    known, cleanup = slots.settle(known, proposal.entry, now=0.0, jitter=0.0)
    assert {"s/1.1", "a/1.1/a"} <= set(cleanup.deleted)
    assert slots.garbage_deleted(known).garbage_keys == ()


def test_a_cleanup_expects_the_newest_entry_of_its_coordinator() -> None:
    """Where that is gone, the store was restored from a backup, and may need what is to be deleted."""
    known = _pending()
    claim = messages.to_json(messages.Claim(1, "a"))
    for winner in (messages.to_json(messages.Claim(2, "z")), None):
        _, cleanup = slots.settle(known, winner, now=0.0, jitter=0.0)
        assert cleanup.expected == {"d/0": claim}
    proposal = slots.propose(known, 0.0)
    assert proposal is not None
    known, cleanup = slots.settle(known, proposal.entry, now=0.0, jitter=0.0)
    assert cleanup.expected == {"d/1": proposal.entry}
    known = replace(known, garbage_keys=("s/0.1",))
    assert slots.unfinished_cleanup(known) == Cleanup({}, ("s/0.1",), {"d/1": proposal.entry}, 1)


def test_a_cleanup_that_broke_off_is_done_again_without_another_decision() -> None:
    """The job may decide nothing more for hours. When the term is over, another coordinator cleans up."""
    known = _pending()
    assert slots.unfinished_cleanup(known) is None
    known, _ = slots.settle(known, b"garbage", now=0.0, jitter=0.0)
    proposal = slots.propose(known, 0.0)
    assert proposal is not None
    known, cleanup = slots.settle(known, proposal.entry, now=0.0, jitter=0.0)
    assert slots.unfinished_cleanup(known) == replace(cleanup, documents={})
    assert slots.unfinished_cleanup(slots.garbage_deleted(known)) is None
    assert slots.unfinished_cleanup(replace(known, is_over=True)) is None


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        (b"", "nothing is there"),
        (b"\xff", "not JSON"),
        (b'{"protocol":3}', "the state of the job is in protocol 3"),
        (b'{"protocol":1}', "is missing"),
    ],
)
def test_a_state_that_is_garbage_is_said_and_asked_for(state: bytes, complaint: str) -> None:
    """The term begins all the same: its first decision asks every node where it stands."""
    known = core.start_term("a", term=2, slot=1, state=state, now=0.0, known_round=4)
    assert complaint in known.complaint
    assert known.pending == messages.Resync(2, "a", known.complaint.partition(": ")[2])
    assert known.job.highest_round == 4


def test_the_question_of_another_coordinator_of_one_term_is_no_own_one() -> None:
    """In a restored store two nodes may have claimed one term: the nodes may have answered the other one by now."""
    known, other = (core.start_term(node, term=2, slot=1, state=b"", now=0.0) for node in "ab")
    assert other.pending is not None
    known, _ = slots.settle(known, messages.to_json(other.pending), now=0.0, jitter=0.0)
    assert known.is_superseded


@pytest.mark.parametrize(
    ("start", "first"),
    [
        (messages.LogStart(900, 2), 900),
        (messages.LogStart(900, 2, is_restart=True), 0),  # slots of the backup may be there again
        (None, 0),
    ],
)
def test_slots_that_were_trimmed_are_not_deleted_again_where_the_state_is_lost(
    start: messages.LogStart | None, first: int
) -> None:
    """The start of the log says which slots are gone, so that a long job does not delete thousands of keys."""
    known = core.start_term("a", term=3, slot=1000, state=b"", now=0.0, kept_slots=8)
    known = core.skip(known, [], 7, None if start is None else messages.to_json(start))
    proposal = slots.propose(known, 0.0)
    assert proposal is not None
    known, cleanup = slots.settle(known, proposal.entry, now=0.0, jitter=0.0)
    deleted = [int(key[2:]) for key in cleanup.deleted if key.startswith("d/")]
    assert deleted == list(range(first, 1001 - 8 + 1))
    assert cleanup.log_start == messages.LogStart(1001 - 8 + 1, 3)


def test_a_node_that_has_missed_its_refusal_is_refused_again() -> None:
    """A reader that is far behind passes over slots, its own `Refuse` among them; its next `Join` tells that."""
    clerk = Clerk("a")
    other = replace(CONFIG, max_restarts=7)
    join = Join("b", 1, NodeInfo("b", 1, 1), other, StoreAddress("b", 1))

    def find_refusals() -> list[int]:
        decisions = {key: messages.read_decision(value) for key, value in clerk.values.items() if key.startswith("d/")}
        return [int(key[2:]) for key, one in decisions.items() if isinstance(one, messages.Refuse)]

    clerk.hear(join)
    (slot,) = find_refusals()
    clerk.hear(replace(join, sequence=2, seen=slot - 1))
    assert find_refusals() == [slot]  # it is about to read that
    clerk.hear(replace(join, sequence=3, seen=slot))
    first, second = find_refusals()
    assert first == slot < second
    clerk.hear(replace(join, sequence=4, seen=slot))
    assert find_refusals() == [first, second]
    for fact in (Ready("b", 5, 1, "", "done", StoreAddress("b", 1)), messages.Leave("b", 6, "signal")):
        clerk.hear(fact)
    assert find_refusals() == [first, second]


def test_a_state_that_is_older_than_what_its_node_knows_is_not_gone_on_from() -> None:
    """The job went on in another store, and its nodes are back: the first decision asks every node where it stands."""
    (old,) = (value for key, value in Clerk("a", "b").values.items() if key.startswith("s/"))
    known = core.start_term("b", term=3, slot=4, state=old, now=0.0, known_round=2, newest_round=2)
    assert known.pending == messages.Resync(3, "b", "the job went on in another store")
    assert known.job.round == 0
    assert not known.complaint
    assert core.start_term("b", term=3, slot=4, state=old, now=0.0, newest_round=1).job.round == 1


@pytest.mark.parametrize("is_garbage", [False, True])
def test_of_the_facts_before_all_are_asked_those_count_which_nobody_says_again(*, is_garbage: bool) -> None:
    """A proof of death is told once, and a node that has left answers no question."""
    (old,) = (value for key, value in Clerk("a", "b").values.items() if key.startswith("s/"))
    known = core.start_term("b", term=3, slot=4, state=b"" if is_garbage else old, now=0.0, newest_round=2)
    dead = messages.SeatDead("a", "2/2/a", "a.1", 2, 0, "running")
    left = messages.Leave("c", 6, "signal")
    join = Join("c", 5, NodeInfo("c", 1, 1), CONFIG, StoreAddress("c", 1))
    facts = [messages.to_json(fact) for fact in (join, dead, left)]
    for position, entries in ((4, [*facts[:2], b"garbage"]), (5, facts[2:])):
        known = core.skip(known, entries, position, None)
    assert (known.events, known.position, known.first) == ((dead, left), 5, 5)


@pytest.mark.parametrize("is_garbage", [False, True])
def test_restarts_that_a_node_has_heard_of_count_where_the_state_does_not_know_them(*, is_garbage: bool) -> None:
    """Neither garbage nor an older state gives a job its restart budget back."""
    (old,) = (value for key, value in Clerk("a", "b").values.items() if key.startswith("s/"))
    state = b"garbage" if is_garbage else old
    known = core.start_term("b", term=2, slot=0, state=state, now=0.0, known_restarts=3)
    assert known.job.restart_count == 3


def test_a_state_in_no_known_phase_is_garbage() -> None:
    """A well-formed document whose phase is none would be a defect at the next decision."""
    proposal = slots.propose(_pending(), 0.0)
    assert proposal is not None
    state = proposal.documents["s/1.1"].replace(b'"phase":"running"', b'"phase":"x"')
    known = core.start_term("a", term=2, slot=1, state=state, now=0.0)
    assert "'x' is none of gathering, running" in known.complaint


def test_a_coordinator_whose_term_is_over_does_nothing() -> None:
    """After the end nothing is folded or proposed."""
    known = replace(_pending(), is_over=True)
    assert slots.propose(known, 0.0) is None
    assert core.receive(known, [], 0, now=0.0, jitter=0.0) is known


@pytest.mark.parametrize(("nodes", "leases"), [(255, 1), (256, 2)])
def test_hundreds_of_nodes_have_more_time_for_their_first_heartbeats(nodes: int, leases: int) -> None:
    """While they gather for the first round a node that was never seen is lost later; in a round it is not."""
    config = plain_config(nodes, nodes)
    known = core.start_term("n0", term=1, slot=0, state=None, now=0.0)
    joins = [
        messages.to_json(Join(f"n{n}", 1, NodeInfo(f"n{n}", 1, 1), config, StoreAddress("n", 1))) for n in range(nodes)
    ]
    waiting = core.receive(known, joins[:-1], nodes - 1, now=0.0, jitter=0.0)
    before = core.observe(waiting, {}, now=leases * config.lease - 0.1, jitter=0.0)
    assert len(before.job.nodes) == nodes - 1
    assert not core.observe(waiting, {}, now=leases * config.lease, jitter=0.0).job.nodes
    formed_at = leases * config.lease - 0.1
    formed = core.receive(waiting, joins[-1:], nodes, now=formed_at, jitter=0.0)
    assert formed.job.round == 1
    assert formed.leases.first == 1
    assert {heartbeat.since for heartbeat in formed.leases.heartbeats.values()} == (
        {0.0, formed_at} if leases == 1 else {formed_at}
    )


def test_a_node_whose_heartbeat_has_expired_was_silent_for_a_lease() -> None:
    """A new coordinator may see its last heartbeat just before the store removes it."""
    clerk = Clerk("a", "b")
    for now, value in ((0.1, 5), (0.2, None)):
        clerk.known = core.observe(clerk.known, {"a": 1, "b": value}, now=now, jitter=0.0)
    assert clerk.known.job.gone["b"].detail == f"silent for {CONFIG.lease:.1f} s"
