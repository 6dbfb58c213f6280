"""The elected node's side of the log: facts in, decisions out, one slot at a time. No I/O in here.

The driver's loop, on a thread and a connection of its own, from `Coordinate` to `member.StopCoordinating`:

1. `start_term` with the state document that the command names (None where it names none, b"" where it is gone). After
   `has_lost_state` read the newest state that the store has all the same, and feed `take_backup`; read the facts that
   are there and where the log begins, and `skip` them. While it `wants` a copy of the state, which a node has put into
   this store, read that and feed `take_copy`. Then `read` the facts behind
   `coordinator.position`, again and again, waiting no longer than until `coordinator.wait_until`, and feed what came,
   also where that is nothing: `receive`. At each keep-alive interval read the heartbeats of `coordinator.watched`, feed
   `observe`, and write what `make_documents` returns. Could not read for a while: `interrupted`.
2. While `propose` gives a `Proposal`: write its `documents`, create its slot, and `settle` with the value that is there
   then, and with where the log begins, which is read with the slot or after it. Where the connection breaks, open
   another and do all of the same proposal again. What `settle` returns beside is a cleanup: raise its `log_start`,
   delete its keys where the store has what is `expected`, then say `garbage_deleted`. Where the connection breaks
   meanwhile, do the `unfinished_cleanup` before anything else but the next proposal. Before these documents are
   written, `check` what lies there: another term may have begun.
3. `coordinator.is_over`: stop. The term or the job has ended. Where the coordinator `is_superseded`, tell the member
   (`TermEnded`).

The host of the store asks for a failover by a fact (`FailoverRequest`): a `Failover` follows, and the term is over.

In a log that tells of no round yet nothing is decided before it is known what the nodes know (`view_change`). Until
then the state document names the first fact, and whoever succeeds reads all of them again.

The functions take what the coordinator knows, and return what it knows then. `now` is in monotonic seconds of this
node; `jitter` is a random number from 0 to 1, for the pause before a restart.
"""

from __future__ import annotations

from types import MappingProxyType

from elastic_run.core.job import machine as coordination
from elastic_run.core.job.coordinator_decision import WAIT_LIMIT, ask_anew, decide_next
from elastic_run.core.job.coordinator_slots import supersede, write_head
from elastic_run.core.job.coordinator_state import KEPT_SLOTS, Coordinator
from elastic_run.core.job.job_document import job_from_document
from elastic_run.core.job.machine import Silent
from elastic_run.core.job.snapshot import read_state
from elastic_run.core.job.state import ENDED
from elastic_run.core.protocol import liveness
from elastic_run.core.protocol.codec import MessageError, encode
from elastic_run.core.protocol.job_keys import HEAD, STATUS, copy_key, decision_key
from elastic_run.core.protocol.liveness import Leases
from elastic_run.core.protocol.log_start import find_start
from elastic_run.core.protocol.messages import (
    Claim,
    Failover,
    FailoverRequest,
    Leave,
    Resign,
    Resync,
    SeatDead,
    read_fact,
    read_head,
    to_json,
)
from elastic_run.records import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elastic_run.core.job.apply_facts import Event
    from elastic_run.core.job.machine import Job
    from elastic_run.core.job.snapshot import State
    from elastic_run.core.protocol.liveness import Heartbeat
    from elastic_run.core.protocol.messages import Fact


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
        silent: The coordinator before, where this node has missed its heartbeats for a lease, else "".
        last_heartbeat: The last of them: it gets no other lease, unless it has beaten since.
        store_id: The id of the store.
        kept_slots: Slots of the log that are kept for those who read slowly.

    Returns:
        The coordinator; where the state is garbage, with a `complaint`, and it asks all nodes where they stand.
    """
    leases = Leases(0.0) if last_heartbeat is None else Leases(0.0, MappingProxyType({silent: last_heartbeat}))
    # A node claims a term but once, in whatever store: nobody founds another job under this name.
    begun = replace(coordination.begin(), highest_round=known_round, incarnation=f"{node}.{term}")
    wait_limit = WAIT_LIMIT if is_successor else 0
    fresh = Coordinator(node, term, slot + 1, begun, leases, kept_slots, began=now, wait_limit=wait_limit)
    if state is not None:
        try:
            going_on = _go_on(fresh, *read_state(state, now), now)
        except MessageError as error:
            complaint = f"the state of the job is lost: {error}"
            fresh = replace(fresh, wait_limit=1, pending=Resync(term, node, str(error)), complaint=complaint)
        else:
            fresh = going_on
            if newest_round > fresh.job.round > 0:
                fresh = ask_anew(fresh, (), (), now)
    restarts = max(fresh.job.restart_count, known_restarts)
    job = replace(fresh.job, term=term, slot=slot + 1, coordinator=node, store_id=store_id, restart_count=restarts)
    written = MappingProxyType({decision_key(slot): to_json(Claim(term, node))})
    coordinator = replace(fresh, job=job, known_restarts=known_restarts, written=written)
    return coordinator if coordinator.pending is not None else decide_next(coordinator, (), now, jitter)


def has_lost_state(coordinator: Coordinator) -> bool:
    """Whether the state was garbage or too old, and nobody was asked yet: the facts up to now are then to `skip`."""
    return isinstance(coordinator.pending, Resync)


def skip(coordinator: Coordinator, entries: Sequence[bytes], position: int, log_start: bytes | None) -> Coordinator:
    """Pass over the facts up to a position: they tell a part only, and every node is about to say all again.

    Only deaths and departures of nodes are kept, since no node says them again. `log_start` is the value of the key
    `LOG_START`. It tells which slots are trimmed, as the lost state did. A restored store may have these slots again.
    """
    start = find_start(log_start)
    oldest = 0 if start is None or start.is_restart else start.slot
    facts, _ = _read_facts(entries)
    events = (*coordinator.events, *(fact for fact in facts if isinstance(fact, SeatDead | Leave)))
    return replace(
        coordinator, position=position, first=position, events=events, kept=events, oldest=oldest, raised=oldest
    )


def take_backup(coordinator: Coordinator, data: bytes | None, now: float) -> Coordinator:
    """Take in the newest state in the store, as `find_newest_state` finds it: None or garbage tells nothing.

    The backup of a restored store may know a newer round than the nodes that are here.
    """
    try:
        found, job = read_state(data or b"", now)
        former = job if found.former is None else job_from_document(found.former, now)
    except MessageError:
        return coordinator
    if coordinator.former is not None or not former.round:
        return coordinator
    return replace(coordinator, former=former, copies=MappingProxyType({former.copy: former}))


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
    return coordinator if coordinator.pending is not None else decide_next(coordinator, (), now, jitter)


def receive(
    coordinator: Coordinator, entries: Sequence[bytes], position: int, *, now: float, jitter: float
) -> Coordinator:
    """Apply facts, or the time that has passed. While a decision is pending nothing is taken in, nor is it lost.

    `entries` may have garbage among them, which is left out; `position` is the one behind the last of them.
    """
    if coordinator.pending is not None or coordinator.is_over:
        return coordinator
    told, complaint = _read_facts(entries)
    facts: list[Fact | SeatDead] = []
    moving = None
    for fact in told:
        if isinstance(fact, FailoverRequest):
            moving = fact
        else:
            facts.append(fact)
    coordinator = replace(coordinator, position=position, complaint=complaint or coordinator.complaint)
    coordinator = decide_next(coordinator, facts, now, jitter)
    return (
        coordinator
        if moving is None
        else _end_term(coordinator, Failover(coordinator.term, moving.endpoint, moving.detail))
    )


def observe(
    coordinator: Coordinator, heartbeats: Mapping[str, int | None], *, now: float, jitter: float
) -> Coordinator:
    """Take in the heartbeats of the nodes that are `watched`; see `liveness.observe`."""
    if coordinator.pending is not None or coordinator.is_over:
        return coordinator
    leases, silent = liveness.observe(coordinator.leases, heartbeats, now)
    # A node whose heartbeat has expired in the store was silent for at least a lease, also if this term is younger.
    events: list[Event] = [Silent(node, max(leases.lease, leases.age(node, now))) for node in silent]
    return decide_next(replace(coordinator, leases=leases), events, now, jitter)


def interrupted(coordinator: Coordinator, now: float) -> Coordinator:
    """Start all leases anew: the store could not be read for a while."""
    return replace(coordinator, leases=liveness.interrupted(coordinator.leases, now))


def check(coordinator: Coordinator, head: bytes | None, log_start: bytes | None) -> Coordinator:
    """Look whether another term decides: this node may have been stopped, and its slots may be trimmed.

    `head` and `log_start` are what lies at `HEAD` and `LOG_START`. The term is over if a later one has written either.
    """
    start = find_start(log_start)
    terms = [_read_term(head), 0 if start is None else start.term]
    is_behind = start is not None and start.slot > coordinator.slot
    return supersede(coordinator) if is_behind or max(terms) > coordinator.term else coordinator


def resign(coordinator: Coordinator) -> Coordinator:
    """End the term in order: a `Resign` follows the pending decision, then the term is over."""
    return _end_term(coordinator, Resign(coordinator.term, coordinator.node))


def make_documents(coordinator: Coordinator, now: float) -> dict[str, bytes]:
    """Return the documents beside the log, by key: `head` for who comes late, `status` for who waits.

    `head` is to be written at every keep-alive interval, since a coordinator that was stopped may have overwritten it
    with an older one.
    """
    documents = {STATUS: to_json(coordination.describe(coordinator.view or coordinator.job, now))}
    if coordinator.pending is None:
        documents[HEAD] = write_head(coordinator)
    return documents


def _read_facts(entries: Sequence[bytes]) -> tuple[list[Fact | SeatDead | FailoverRequest], str]:
    """Return the facts among entries, and why the last unreadable one was refused, "" for none."""
    facts, complaint = [], ""
    for entry in entries:
        try:
            facts.append(read_fact(entry))
        except MessageError as error:
            complaint = str(error)
    return facts, complaint


def _read_term(head: bytes | None) -> int:
    try:
        return 0 if head is None else read_head(head).term
    except MessageError:
        return 0


def _end_term(coordinator: Coordinator, last: Resign | Failover) -> Coordinator:
    return replace(coordinator, last=last, pending=coordinator.pending or last)


def _go_on(fresh: Coordinator, found: State, job: Job, now: float) -> Coordinator:
    if job.phase == ENDED:
        message = "it is that of an ended job, and a restored store has lost the end"
        raise MessageError(message)
    facts, _ = _read_facts([encode(fact) for fact in found.gone])
    gone = tuple(fact for fact in facts if isinstance(fact, SeatDead | Leave))
    former = None if found.former is None else job_from_document(found.former, now)
    return replace(
        fresh,
        job=job,
        wait_limit=found.wait_limit,
        first=found.position,
        events=gone,
        kept=gone,
        former=former,
        copies=MappingProxyType({} if former is None else {former.copy: former}),
        position=found.position,
        oldest=found.oldest,
        formations=found.formations,
        state_slot=found.slot,
        state_term=found.term,
        former_garbage_keys=found.garbage_keys,
    )
