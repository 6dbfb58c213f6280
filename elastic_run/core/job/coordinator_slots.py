"""How the coordinator writes a decision into the next slot of the log, with the state after it, and what goes then.

A decision and the state after it are one: the state document is written first, under a key that only this term uses,
and counts from the moment in which the slot is created. So a successor goes on from exactly what was decided, and folds
the facts behind the position that the state names once more.

A coordinator may be stopped before it deletes keys. In a store that was restored from a backup meanwhile, others may
need these keys. So they are deleted only where the coordinator's newest entry is still there, and the log begins where
it did after the start was raised. Where that entry is trimmed by now, the next coordinator has deleted them: the state
names them. And the coordinator itself removes what it has written beside a slot that it finds trimmed.
"""

from __future__ import annotations

from types import MappingProxyType

from elastic_run.core.job.coordinator_decision import decide_next
from elastic_run.core.job.coordinator_state import Cleanup, Proposal
from elastic_run.core.job.formation import assign
from elastic_run.core.job.job_document import job_to_document
from elastic_run.core.job.snapshot import Formation, make_state, write_state
from elastic_run.core.job.state import RUNNING, WARNED
from elastic_run.core.protocol.codec import MessageError, decode
from elastic_run.core.protocol.job_keys import HEAD, LOG_START, assignment_key, copy_key, decision_key, state_key
from elastic_run.core.protocol.log_start import is_trimmed
from elastic_run.core.protocol.messages import (
    Claim,
    End,
    Failover,
    Form,
    Head,
    Join,
    Leave,
    LogStart,
    Prepare,
    Resign,
    Resync,
    SeatDead,
    read_decision,
    to_json,
)
from elastic_run.records import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic_run.core.job.coordinator_state import Coordinator, Pending

#: Rounds whose assignments are kept.
KEPT_ROUNDS = 2


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


def settle(
    coordinator: Coordinator, winner: bytes | None, *, now: float, jitter: float, log_start: bytes | None = None
) -> tuple[Coordinator, Cleanup]:
    """Go on after the slot of the proposal was created, by this node or another.

    `winner` is the value in the slot. It is None if the slot was trimmed because this node was stopped for a long time;
    then `log_start` is the present value of the key `LOG_START`.
    """
    pending = coordinator.pending
    if pending is None or coordinator.is_over:
        return coordinator, Cleanup({}, (), {}, None)
    if winner == to_json(pending):
        return _take_own_entry(coordinator, pending, now, jitter)
    proposal = propose(coordinator, now)
    useless = tuple(proposal.documents) if proposal is not None else ()
    if winner is None and log_start is not None and is_trimmed(coordinator.slot, log_start):
        # Its newest entry is trimmed as well. No node reads the documents of a slot below the start.
        return supersede(coordinator), Cleanup({}, useless, {LOG_START: log_start}, None)
    after = replace(coordinator, garbage_keys=(*coordinator.garbage_keys, *useless))
    # Otherwise a void entry: garbage, or the last breath of a term that is over. The decision goes into the next slot.
    is_superseded = winner is None or _ends_term(winner, coordinator.term)
    after = supersede(after) if is_superseded else _try_next_slot(after)
    return after, _clean_up(after, {}, None)


def unfinished_cleanup(coordinator: Coordinator) -> Cleanup | None:
    """Return what is left of the last `Cleanup` where the connection broke meanwhile; None in a term that is over."""
    if not coordinator.garbage_keys or coordinator.is_over:
        return None
    return _clean_up(coordinator, {}, coordinator.settled_position)


def garbage_deleted(coordinator: Coordinator) -> Coordinator:
    """Take in that the keys of the last `Cleanup` were deleted."""
    return replace(coordinator, garbage_keys=(), raised=coordinator.oldest)


def _take_own_entry(
    coordinator: Coordinator, pending: Pending, now: float, jitter: float
) -> tuple[Coordinator, Cleanup]:
    slot, term = coordinator.slot, pending.term
    garbage_keys = [*_list_garbage(coordinator)]
    if coordinator.events and coordinator.job.round:
        copies = [event.copy for event in coordinator.events if isinstance(event, Join) and event.copy]
        garbage_keys += dict.fromkeys(map(copy_key, copies))
        coordinator = replace(coordinator, events=(), kept=(), former=None, copies=MappingProxyType({}), due=None)
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
        # No node can answer a `Resync` before it is written, and that may take a lease.
        began=now if isinstance(pending, Resync) else coordinator.began,
        oldest=oldest,
        formations=formations,
        state_slot=slot,
        state_term=term,
        garbage_keys=tuple(garbage_keys),
        former_garbage_keys=(),
        written=MappingProxyType({decision_key(slot): to_json(pending)}),
        pending=None,
        last=coordinator.last and replace(coordinator.last, term=term),
        is_over=is_over,
    )
    cleanup = _clean_up(after, {HEAD: write_head(after)}, coordinator.settled_position)
    return (after if is_over else decide_next(after, (), now, jitter)), cleanup


def _clean_up(coordinator: Coordinator, documents: Mapping[str, bytes], trimmed: int | None) -> Cleanup:
    is_raised = coordinator.raised >= coordinator.oldest
    start = None if is_raised else LogStart(coordinator.oldest, coordinator.term)
    return Cleanup(documents, coordinator.garbage_keys, coordinator.written, trimmed, start)


def supersede(coordinator: Coordinator) -> Coordinator:
    """End the term since another one decides."""
    return replace(coordinator, is_over=True, is_superseded=True)


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


def _ends_term(winner: bytes, term: int) -> bool:
    try:
        decision = read_decision(winner)
    except MessageError:
        return False
    # Any other decision of this very term is another coordinator's, which has claimed the term in a store that was
    # restored from a backup. This one is the wrong one. The documents of its proposal have taken the place of the other
    # one's, so they go all the same: without a state or an assignment the nodes say again where they stand.
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
        wait_limit=coordinator.wait_limit,
        garbage_keys=_list_garbage(coordinator),
    )
    if not coordinator.job.round:
        gone = [decode(to_json(event)) for event in coordinator.kept if isinstance(event, SeatDead | Leave)]
        former = None if coordinator.former is None else job_to_document(coordinator.former, now)
        state = replace(state, gone=tuple(gone), former=former)
    return write_state(state)


def _list_garbage(coordinator: Coordinator) -> tuple[str, ...]:
    """Return the keys that nobody needs once the pending decision is in the log."""
    keys = (*coordinator.garbage_keys, *coordinator.former_garbage_keys)
    return keys if coordinator.state_slot < 0 else (*keys, state_key(coordinator.state_slot, coordinator.state_term))


def write_head(coordinator: Coordinator) -> bytes:
    """Return the document `head`, for nodes that come late."""
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
