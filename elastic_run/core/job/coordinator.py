"""The elected node's side of the log: facts in, decisions out, one slot at a time. No I/O in here.

The driver's loop, on a thread and a connection of its own, from `member.Coordinate` to `member.StopCoordinating`:

1. `start_term` with the state document that the command names (None where it names none, b"" where it is gone). After
   `has_lost_state` read the facts that are there and where the log begins, and `skip` them. While it `wants` a copy of
   the state, which a node has put into this store, read that and feed `take_copy`. Then `read` the facts behind
   `coordinator.position`, again and again, waiting no longer than until `coordinator.wait_until`, and feed what came,
   also where that is nothing: `receive`. At each keep-alive interval read the beats of `coordinator.watched`, feed
   `observe`, and write `notes`. Could not read for a while: `interrupted`.
2. While `propose` gives a `Proposal`: write its `documents`, create its slot, and `settle` with the value that is there
   then, and with where the log begins, which is read with the slot or after it. Where the connection breaks, open
   another and do all of the same proposal again. What `settle` returns beside is a cleanup: raise its `log_start`,
   delete its keys, then say `garbage_deleted`. Where the connection breaks meanwhile, do the `unfinished_cleanup`
   before anything else but the next proposal. Before `notes` are written, `check` what lies there: another term may
   have begun.
3. `coordinator.is_over`: stop. The term or the job has ended. Where the coordinator `is_superseded`, tell the member
   (`TermEnded`).

The host of the store asks for a failover by a fact (`FailoverRequest`): a `Failover` follows, and the term is over.

In a log that tells of no round yet nothing is decided before it is known what the nodes know (`view_change`). Until
then the state document names the first fact, and whoever succeeds reads all of them again.

A decision and the state after it are one: the state document is written first, under a key that only this term uses,
and counts from the moment in which the slot is created. So a successor goes on from exactly what was decided, and folds
the facts behind the position that the state names once more.

The functions take what the coordinator knows, and return what it knows then. `now` is in monotonic seconds of this
node; `jitter` is a random number from 0 to 1, for the pause before a restart. The file is longer than others since it
is one record's life, from the beginning of a term to its end.
"""

from __future__ import annotations

from types import MappingProxyType

from elastic_run.core.job import machine as coordination
from elastic_run.core.job.apply_facts import apply_facts
from elastic_run.core.job.config import JobConfig
from elastic_run.core.job.formation import assign
from elastic_run.core.job.machine import Job, Silent
from elastic_run.core.job.majority import describe_majority
from elastic_run.core.job.reported_failure import verdict_exit_code
from elastic_run.core.job.snapshot import Formation, State, make_state, read_state, write_state
from elastic_run.core.job.state import GATHERING, HALTING, RUNNING, WARNED
from elastic_run.core.job.view_change import (
    find_view,
    is_behind,
    is_outdated,
    keep_deaths,
    leave_out_old,
    may_go_on,
    restate,
)
from elastic_run.core.protocol import liveness
from elastic_run.core.protocol.codec import MessageError
from elastic_run.core.protocol.job_keys import HEAD, STATUS, assignment_key, copy_key, decision_key, state_key
from elastic_run.core.protocol.liveness import Leases
from elastic_run.core.protocol.log_start import find_start
from elastic_run.core.protocol.messages import (
    LOSS,
    Claim,
    End,
    Failover,
    FailoverRequest,
    Form,
    Halt,
    Head,
    Join,
    LogStart,
    Prepare,
    Recovered,
    Refuse,
    Resign,
    Resync,
    read_decision,
    read_fact,
    read_head,
    to_json,
)
from elastic_run.records import dataclass, field, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TypeAlias

    from elastic_run.core.job.apply_facts import Event
    from elastic_run.core.job.view_change import View
    from elastic_run.core.protocol.liveness import Heartbeat
    from elastic_run.core.protocol.messages import Copy, Fact, SeatDead, Warn

    Pending: TypeAlias = Prepare | Form | Warn | Halt | Refuse | End | Resign | Failover | Resync | Recovered

#: Slots of the log that are kept for those who read slowly.
KEPT_SLOTS = 64
#: Rounds whose assignments are kept.
KEPT_ROUNDS = 2
#: Leases for which nodes that know of a round may come before a job is founded in a successor's store, or before the
#: nodes that wait for a majority are told to stop their workers: each may have noticed the loss a lease late.
_PATIENCE = 2
_OUTDATED = "no node that is here has the state of the round that may have been formed in another store"


@dataclass(frozen=True, slots=True)
class Proposal:
    """A decision to write.

    Args:
        slot: The slot to create.
        documents: Key to value: to be written before the slot is created.
        entry: What to create.
    """

    slot: int
    documents: Mapping[str, bytes]
    entry: bytes


@dataclass(frozen=True, slots=True)
class Cleanup:
    """What follows a slot that was created; none of it is needed for the job to go on at once.

    Args:
        documents: Key to value: to be written.
        log_start: Where the log begins from now on, or None for where it does already: to be raised before `deleted`.
        deleted: Keys that nobody needs any more.
        trimmed: Facts up to this position of the stream are no longer needed, or None.
    """

    documents: Mapping[str, bytes]
    deleted: tuple[str, ...]
    trimmed: int | None
    log_start: LogStart | None = None


@dataclass(frozen=True, slots=True)
class Coordinator:
    """What the coordinator knows.

    Attributes:
        node: This node.
        term: Its term.
        slot: The next free slot, as far as it knows.
        job: The state as of the facts that were read and the decision that is pending.
        leases: When it last heard of each node.
        kept_slots: Slots of the log that it keeps.
        began: Monotonic seconds of the beginning.
        patience: Leases for which nodes that know of a round may come before a job is founded.
        first: Position in the stream of facts from which a successor reads as long as the log has no round.
        events: What was heard since then, as long as the log tells of no round.
        copies: The copies of the state that were read, None for garbage.
        wants: The copy to read, or None.
        view: The state that it would go on from, while the majority is missing, or None.
        due: Monotonic seconds at which it looks again while the log tells of no round, or None.
        has_halted: Whether those who wait for a majority were told to stop their workers.
        position: Of the stream of facts: all up to here was folded.
        oldest: The oldest slot that may still be there.
        raised: The start of the log, as far as this term has raised it.
        formations: Rounds whose assignments are kept, the latest last.
        state_slot: Whose state document is the newest, -1 for none.
        state_term: Its term.
        garbage_keys: Keys to delete, as far as it knows: nobody needs them any more.
        known_restarts: The restarts that its node had heard of when its term began.
        pending: The decision that is being written, or None.
        last: The last decision, to be written after the pending one, or None.
        complaint: What was wrong with the last garbage among the facts, "" for none; for one line of the log.
        is_over: Whether its term is over.
        is_superseded: Whether it is over because another term decides, which this node's member may not know yet.
    """

    node: str
    term: int
    slot: int
    job: Job
    leases: Leases
    kept_slots: int = KEPT_SLOTS
    began: float = 0.0
    patience: int = 0
    first: int = 0
    events: tuple[Event, ...] = ()
    copies: Mapping[Copy, Job | None] = field(default_factory=lambda: MappingProxyType({}))
    wants: Copy | None = None
    view: Job | None = None
    due: float | None = None
    has_halted: bool = False
    position: int = 0
    oldest: int = 0
    raised: int = 0
    formations: tuple[Formation, ...] = ()
    state_slot: int = -1
    state_term: int = 0
    garbage_keys: tuple[str, ...] = ()
    known_restarts: int = 0
    pending: Pending | None = None
    last: Resign | Failover | None = None
    complaint: str = ""
    is_over: bool = False
    is_superseded: bool = False

    @property
    def watched(self) -> tuple[str, ...]:
        """The nodes whose beats are to be read."""
        return tuple(self.job.nodes)

    @property
    def wait_until(self) -> float | None:
        """Monotonic seconds until which to wait for facts at most, None for any time."""
        return coordination.next_at(self.job) if self.due is None else self.due

    @property
    def settled_position(self) -> int:
        """Of the stream of facts: nobody reads those before it again."""
        return self.position if self.job.round else self.first


def start_term(  # noqa: PLR0913 - what a node knows of the job
    node: str,
    *,
    term: int,
    slot: int,
    state: bytes | None,
    now: float,
    jitter: float = 0.0,
    is_successor: bool = False,
    known_round: int = 0,
    newest_round: int = 0,
    known_restarts: int = 0,
    silent: str = "",
    last_heartbeat: Heartbeat | None = None,
    store_id: str = "",
    kept_slots: int = KEPT_SLOTS,
) -> Coordinator:
    """Begin a term.

    Args:
        node: This node.
        term: The term.
        slot: The slot of the claim.
        state: The state document to go on from; b"" where there should be one, None where there can't be.
        now: Monotonic seconds.
        jitter: A random number in [0, 1).
        is_successor: Whether the job may have been in another store before this one.
        known_round: The newest round that this node has heard of; no other gets its number again.
        newest_round: The newest of this log's job that it knows: the state is old where it doesn't know that round.
        known_restarts: The restarts that it has heard of: they count where the state is lost, or is an older copy.
        silent: The coordinator before, where this node has missed its beats for a lease, else "".
        last_heartbeat: The last of them: it gets no other lease, unless it has beaten since.
        store_id: The birth mark of the store.
        kept_slots: Slots of the log that are kept for those who read slowly.

    Returns:
        The coordinator; where the state is garbage, with a `complaint`, and it asks all nodes where they stand.
    """
    leases = Leases(0.0) if last_heartbeat is None else Leases(0.0, MappingProxyType({silent: last_heartbeat}))
    # A node claims a term but once, in whatever store: nobody founds another job under this name.
    begun = replace(coordination.begin(), highest_round=known_round, incarnation=f"{node}.{term}")
    patience = _PATIENCE if is_successor else 0
    fresh = Coordinator(node, term, slot + 1, begun, leases, kept_slots, began=now, patience=patience)
    if state is not None:
        try:
            found, job = read_state(state, now)
        except MessageError as error:
            fresh = replace(
                fresh,
                patience=1,
                pending=Resync(term, str(error)),
                complaint=f"the state of the job is lost: {error}",
            )
        else:
            fresh = _go_on(fresh, found, job)
            if newest_round > job.round > 0:
                fresh = _ask_anew(fresh, (), now)
    restarts = max(fresh.job.restart_count, known_restarts)
    job = replace(fresh.job, term=term, slot=slot + 1, coordinator=node, store_id=store_id, restart_count=restarts)
    coordinator = replace(fresh, job=job, known_restarts=known_restarts)
    return coordinator if coordinator.pending is not None else _decide(coordinator, (), now, jitter)


def has_lost_state(coordinator: Coordinator) -> bool:
    """Whether the state was garbage and nobody was asked yet: facts up to now are then to be passed over (`skip`)."""
    return isinstance(coordinator.pending, Resync)


def skip(coordinator: Coordinator, position: int, log_start: bytes | None) -> Coordinator:
    """Pass over the facts up to a position: they tell a part only, and every node is about to say all again.

    `log_start` is what lies at `LOG_START`: the slots below are trimmed, as the state that is lost had said. In a store
    that was restored they may be there again.
    """
    start = find_start(log_start)
    oldest = 0 if start is None or start.is_restart else start.slot
    return replace(coordinator, position=position, first=position, oldest=oldest, raised=oldest)


def take_copy(coordinator: Coordinator, data: bytes | None, *, now: float, jitter: float) -> Coordinator:
    """Take in what lies at the `copy_key` of `wants`: the copy, garbage, which leaves a `complaint`, or None."""
    copy, job, complaint = coordinator.wants, None, coordinator.complaint
    if copy is None:
        return coordinator
    try:
        _, job = read_state(data or b"", now)
    except MessageError as error:
        complaint = f"{copy_key(copy)}: {error}"
    copies = MappingProxyType({**coordinator.copies, copy: job})
    coordinator = replace(coordinator, copies=copies, wants=None, complaint=complaint)
    return coordinator if coordinator.pending is not None else _decide(coordinator, (), now, jitter)


def receive(
    coordinator: Coordinator, entries: Sequence[bytes], position: int, *, now: float, jitter: float
) -> Coordinator:
    """Apply facts, or the time that has passed. While a decision is pending nothing is taken in, nor is it lost.

    `entries` may have garbage among them, which is left out; `position` is the one behind the last of them.
    """
    if coordinator.pending is not None or coordinator.is_over:
        return coordinator
    facts: list[Fact | SeatDead] = []
    moving = None
    complaint = coordinator.complaint
    for entry in entries:
        try:
            fact = read_fact(entry)
        except MessageError as error:
            complaint = str(error)
        else:
            if isinstance(fact, FailoverRequest):
                moving = fact
            else:
                facts.append(fact)
    coordinator = replace(coordinator, position=position, complaint=complaint)
    coordinator = _decide(coordinator, facts, now, jitter)
    return (
        coordinator
        if moving is None
        else _end_term(coordinator, Failover(coordinator.term, moving.endpoint, moving.detail))
    )


def observe(coordinator: Coordinator, beats: Mapping[str, int | None], *, now: float, jitter: float) -> Coordinator:
    """Take in the beats of the nodes that are `watched`; see `liveness.observe`."""
    if coordinator.pending is not None or coordinator.is_over:
        return coordinator
    leases, silent = liveness.observe(coordinator.leases, beats, now)
    events: list[Event] = [Silent(node, leases.age(node, now)) for node in silent]
    return _decide(replace(coordinator, leases=leases), events, now, jitter)


def interrupted(coordinator: Coordinator, now: float) -> Coordinator:
    """Start all leases anew: the store could not be read for a while."""
    return replace(coordinator, leases=liveness.interrupted(coordinator.leases, now))


def propose(coordinator: Coordinator, now: float) -> Proposal | None:
    """Return the decision that is to be written next, the same one until it is settled, or None."""
    pending = coordinator.pending
    if pending is None or coordinator.is_over:
        return None
    slot, term = coordinator.slot, pending.term
    documents = {state_key(slot, term): _write_state(coordinator, now)}
    if isinstance(pending, Form):
        assignments = assign(coordinator.job)
        documents.update({assignment_key(slot, term, node): to_json(place) for node, place in assignments.items()})
    return Proposal(slot, documents, to_json(pending))


def settle(coordinator: Coordinator, winner: bytes | None, *, now: float, jitter: float) -> tuple[Coordinator, Cleanup]:
    """Go on after the slot of the proposal was created, by this node or another.

    `winner` is the value that is in the slot; None where the slot was trimmed: this node was stopped for so long.
    """
    pending = coordinator.pending
    if pending is None or coordinator.is_over:
        return coordinator, Cleanup({}, (), None)
    if winner == to_json(pending):
        return _take_own_entry(coordinator, pending, now, jitter)
    proposal = propose(coordinator, now)
    useless = tuple(proposal.documents) if proposal is not None else ()
    after = replace(coordinator, garbage_keys=(*coordinator.garbage_keys, *useless))
    # Otherwise a void entry: garbage, or the last breath of a term that is over. The decision goes into the next slot.
    is_superseded = winner is None or _ends_term(winner, coordinator.term)
    after = _supersede(after) if is_superseded else _try_next_slot(after)
    return after, _clean_up(after, {}, None)


def unfinished_cleanup(coordinator: Coordinator) -> Cleanup | None:
    """Return what is left of the last `Cleanup` where the connection broke meanwhile; None in a term that is over."""
    if not coordinator.garbage_keys or coordinator.is_over:
        return None
    return _clean_up(coordinator, {}, coordinator.settled_position)


def garbage_deleted(coordinator: Coordinator) -> Coordinator:
    """Take in that the keys of the last `Cleanup` were deleted."""
    return replace(coordinator, garbage_keys=(), raised=coordinator.oldest)


def check(coordinator: Coordinator, head: bytes | None, log_start: bytes | None) -> Coordinator:
    """Look whether another term decides: this node may have been stopped, and its slots may be trimmed.

    `head` and `log_start` are what lies at `HEAD` and `LOG_START`. The term is over if a later one has written either.
    """
    start = find_start(log_start)
    terms = [_read_term(head), 0 if start is None else start.term]
    is_behind = start is not None and start.slot > coordinator.slot
    return _supersede(coordinator) if is_behind or max(terms) > coordinator.term else coordinator


def resign(coordinator: Coordinator) -> Coordinator:
    """End the term in order: a `Resign` follows the pending decision, then the term is over."""
    return _end_term(coordinator, Resign(coordinator.term, coordinator.node))


def notes(coordinator: Coordinator, now: float) -> dict[str, bytes]:
    """Return the documents beside the log, by key: `head` for who comes late, `status` for who waits.

    `head` is to be written at every keep-alive interval, since a coordinator that was stopped may have overwritten it
    with an older one.
    """
    documents = {STATUS: to_json(coordination.describe(coordinator.view or coordinator.job, now))}
    if coordinator.pending is None:
        documents[HEAD] = _write_head(coordinator)
    return documents


def _decide(coordinator: Coordinator, events: Sequence[Event], now: float, jitter: float) -> Coordinator:
    if coordinator.job.round == 0:
        folded = _watch(coordinator, apply_facts(coordinator.job, events, now), now)
        events = leave_out_old(events, folded.events)
        coordinator = replace(folded, events=(*folded.events, *events), due=None, view=None)
        view = find_view(coordinator.events, [copy for copy, job in coordinator.copies.items() if job is None])
        if view is not None:
            return _recover(coordinator, view, now)
        founds_at = _after_leases(coordinator, coordinator.patience)
        if now < founds_at:
            return replace(coordinator, due=founds_at, pending=coordinator.last)
        events = ()
    elif is_behind(coordinator.job, coordinator.term, events):
        return _ask_anew(replace(coordinator, leases=liveness.watch(coordinator.leases, {}, now)), events, now)
    step = coordination.decide(coordinator.job, events, now=now, jitter=jitter)
    return replace(_watch(coordinator, step.job, now), pending=step.decision or coordinator.last)


def _ask_anew(coordinator: Coordinator, events: Sequence[Event], now: float) -> Coordinator:
    """Ask all nodes where they stand: the job went on in another store, and this log is older than what they know."""
    former = coordinator.job
    begun = replace(
        coordination.begin(),
        term=former.term,
        slot=former.slot,
        coordinator=former.coordinator,
        store_id=former.store_id,
        highest_round=former.highest_round,
        restart_count=former.restart_count,
        incarnation=f"{coordinator.node}.{coordinator.term}",
    )
    return replace(
        coordinator,
        job=begun,
        began=now,
        patience=1,
        first=coordinator.position,
        events=keep_deaths(former, events),
        has_halted=False,
        pending=Resync(coordinator.term, "the job went on in another store"),
    )


def _watch(coordinator: Coordinator, job: Job, now: float) -> Coordinator:
    leases, config = coordinator.leases, job.config
    if config is not None:
        is_founding = job.round == 0 and coordinator.view is None
        leases = replace(leases, lease=config.lease)
        leases = liveness.expect_first(leases, config.first_leases if is_founding else 1, now)
    return replace(coordinator, job=job, leases=liveness.watch(leases, job.nodes, now))


def _after_leases(coordinator: Coordinator, count: int) -> float:
    config = coordinator.job.config
    return coordinator.began + (0.0 if config is None else count * config.lease)


def _recover(coordinator: Coordinator, view: View, now: float) -> Coordinator:
    """Go on from what the nodes know of their job, as soon as a majority of its last round is here."""
    wanted = next((copy for copy in view.copies if copy not in coordinator.copies), None)
    if wanted is not None:
        return replace(coordinator, wants=wanted)
    job = restate(view, coordinator.copies, coordinator.events, begun=coordinator.job, now=now)
    config, waited = job.config or JobConfig(1, 1), now - coordinator.began
    if may_go_on(view, job, config, waited):
        term = max(coordinator.term, view.highest_term + 1)
        # Not all members may have read that the round was warned or halted: it is said again in this log.
        # The cause of a failure is awaited anew, once the node that failed is here.
        if job.phase in (RUNNING, WARNED, HALTING):
            job = replace(job, phase=RUNNING, until=None)
        job = replace(job, term=term, since=coordinator.began)
        recovered = Recovered(term, coordinator.node, job.round, job.round_id, job.restart_count, job.incarnation)
        return replace(_watch(coordinator, job, now), pending=recovered)
    missing = _OUTDATED if is_outdated(view, job) else describe_majority(job, config)
    gathering = replace(job, phase=GATHERING, since=coordinator.began)
    return _await_majority(coordinator, gathering, config, waited, missing)


def _await_majority(coordinator: Coordinator, view: Job, config: JobConfig, waited: float, missing: str) -> Coordinator:
    """Wait for a majority: its workers run on for two leases, then those here are told to stop theirs."""
    coordinator = replace(coordinator, view=view, pending=coordinator.last)
    halts_after = _PATIENCE * config.lease
    if not config.has_successors:
        return replace(coordinator, due=coordinator.began + config.lease)
    if waited >= config.join_timeout:
        detail = f"{missing} within {config.join_timeout:g} s"
        verdict = "nodes_lost"
        return replace(coordinator, pending=End(coordinator.term, verdict, verdict_exit_code(verdict), detail))
    if waited >= halts_after and not coordinator.has_halted:
        halt = Halt(coordinator.term, view.round, LOSS, missing)
        return replace(coordinator, pending=halt, has_halted=True)
    due = config.join_timeout if coordinator.has_halted else min(halts_after, config.join_timeout)
    return replace(coordinator, due=coordinator.began + due)


def _take_own_entry(
    coordinator: Coordinator, pending: Pending, now: float, jitter: float
) -> tuple[Coordinator, Cleanup]:
    slot, term = coordinator.slot, pending.term
    garbage_keys = [*coordinator.garbage_keys]
    if coordinator.events and coordinator.job.round:
        garbage_keys += {copy_key(event.copy) for event in coordinator.events if isinstance(event, Join) and event.copy}
        coordinator = replace(coordinator, events=(), copies=MappingProxyType({}), due=None)
    if coordinator.state_slot >= 0:
        garbage_keys.append(state_key(coordinator.state_slot, coordinator.state_term))
    formations = coordinator.formations
    if isinstance(pending, Form):
        formations = (*formations, _make_formation(coordinator))
        for old in formations[:-KEPT_ROUNDS]:
            garbage_keys += [assignment_key(old.slot, old.term, node) for node in old.nodes]
        formations = formations[-KEPT_ROUNDS:]
    oldest = max(coordinator.oldest, slot - coordinator.kept_slots + 1)
    garbage_keys += [decision_key(old) for old in range(coordinator.oldest, oldest)]
    is_over = isinstance(pending, End | Resign | Failover)
    after = replace(
        coordinator,
        term=term,
        slot=slot + 1,
        job=replace(coordinator.job, slot=slot + 1),
        oldest=oldest,
        formations=formations,
        state_slot=slot,
        state_term=term,
        garbage_keys=tuple(garbage_keys),
        pending=None,
        is_over=is_over,
    )
    cleanup = _clean_up(after, {HEAD: _write_head(after)}, coordinator.settled_position)
    return (after if is_over else _decide(after, (), now, jitter)), cleanup


def _clean_up(coordinator: Coordinator, documents: Mapping[str, bytes], trimmed: int | None) -> Cleanup:
    is_raised = coordinator.raised >= coordinator.oldest
    start = None if is_raised else LogStart(coordinator.oldest, coordinator.term)
    return Cleanup(documents, coordinator.garbage_keys, trimmed, start)


def _supersede(coordinator: Coordinator) -> Coordinator:
    return replace(coordinator, is_over=True, is_superseded=True)


def _read_term(head: bytes | None) -> int:
    try:
        return 0 if head is None else read_head(head).term
    except MessageError:
        return 0


def _make_formation(coordinator: Coordinator) -> Formation:
    job = coordinator.job
    nodes = tuple(node.node for node in job.members)
    return Formation(coordinator.slot, coordinator.term, nodes, job.restart_count)


def _try_next_slot(coordinator: Coordinator) -> Coordinator:
    slot = coordinator.slot + 1
    job = replace(coordinator.job, slot=slot)
    if isinstance(coordinator.pending, Form):
        job = replace(job, formed_slot=slot)
    elif isinstance(coordinator.pending, Prepare) and job.preparation is not None:
        job = replace(job, preparation=replace(job.preparation, slot=slot))
    return replace(coordinator, slot=slot, job=job)


def _end_term(coordinator: Coordinator, last: Resign | Failover) -> Coordinator:
    return replace(coordinator, last=last, pending=coordinator.pending or last)


def _ends_term(winner: bytes, term: int) -> bool:
    try:
        decision = read_decision(winner)
    except MessageError:
        return False
    # Any other decision of this very term would be another coordinator of it: that can't be, and we'd be the wrong one.
    return decision.term > term if isinstance(decision, Claim) else decision.term == term


def _write_state(coordinator: Coordinator, now: float) -> bytes:
    formations = coordinator.formations
    if isinstance(coordinator.pending, Form):
        formations = (*formations, _make_formation(coordinator))
    state = make_state(
        coordinator.job,
        now,
        position=coordinator.settled_position,
        oldest=coordinator.oldest,
        formations=formations,
        patience=coordinator.patience,
    )
    return write_state(state)


def _go_on(fresh: Coordinator, found: State, job: Job) -> Coordinator:
    return replace(
        fresh,
        job=job,
        patience=found.patience,
        first=found.position,
        position=found.position,
        oldest=found.oldest,
        formations=found.formations,
        state_slot=found.slot,
        state_term=found.term,
    )


def _write_head(coordinator: Coordinator) -> bytes:
    job = coordinator.job
    formation = coordinator.formations[-1] if coordinator.formations else Formation(-1, 0, ())
    return to_json(
        Head(
            slot=coordinator.slot - 1,
            term=coordinator.term,
            coordinator=coordinator.node,
            round=job.round,
            form_slot=formation.slot,
            form_term=formation.term,
            is_running=job.phase in (RUNNING, WARNED),
            state_slot=coordinator.state_slot,
            state_term=coordinator.state_term,
            restart_count=max(formation.restart_count, coordinator.known_restarts),
            incarnation=job.incarnation if job.round else "",  # until then it may be another's that goes on here
            round_id=job.round_id,
            prepared=job.preparation,
            known=job.known_states,
        )
    )
