"""View change: how the log of a store in which nothing was decided yet goes on from what the nodes know.

The store that had the log is lost, or the job's state in it. Every node says where it stands (`Join`): the round that
it runs or has run last, and which copy of the state it keeps.

Rules
- The newest copy counts: of the highest round, then term, then slot. A round that a node has run and no copy knows has
  as many seats as that node says, whose holders are not known by name until they come.
- Of each log of another store the newest copy tells which round may have been formed there (`state.LeftLog`). While a
  node has confirmed a `Prepare` that none of the copies knows, nothing is decided.
- The log goes on (`Recovered`) when the holders of more than half of the round's seats that are not void are here: no
  other log can then go on from this round as well. Where the store can't move no other log exists, and a lease is
  enough to wait for them, and for those of a newer round of which a node has heard.
- In a store that was restored, its newest state counts as a copy, though the log begins anew behind that state.
- Nobody knows of a round: the job is founded. In a successor's store, and after the state was lost, nodes that know of
  a round have some leases of time to come first.
- A log that tells of a round, but is older than what a node knows, goes on in the same way: the nodes left its store,
  the job went on in another one, and they are back. What this node has told counts at once: others may answer the
  `Resync` before it, and without its knowledge the log would be too old again.
- Rounds go on with the next number, and the term is above every one of which a node tells: what a node confirms here is
  newer than what it has confirmed elsewhere.
"""

from __future__ import annotations

from collections import Counter
from types import MappingProxyType

from elastic_run.core.job.apply_facts import Silent, apply_facts
from elastic_run.core.job.majority import has_majority
from elastic_run.core.job.role_scripts import settle_script
from elastic_run.core.job.state import DEAD_ELSEWHERE, RUNNING, VOID, Job, LeftLog, Seat, forget_place
from elastic_run.core.job.store_change import move
from elastic_run.core.protocol.messages import DIED, SEAT_CONFIRMED, SEAT_RUNNING, Join, Leave, SeatDead, read_term
from elastic_run.records import dataclass, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from elastic_run.core.job.apply_facts import Event
    from elastic_run.core.job.config import JobConfig
    from elastic_run.core.job.state import Gone, Node
    from elastic_run.core.protocol.messages import Copy, PreviousRound

__all__ = ["View", "find_ahead", "find_view", "is_outdated", "keep_facts", "leave_out_old", "may_go_on", "restate"]


@dataclass(frozen=True, slots=True)
class View:
    """The newest that the nodes here know of their job.

    Args:
        copy: The newest copy of its state, or None.
        last: The newest round that a node has run, where no copy knows of it, else None.
        copies: The newest copy of the state in each store's log, as far as it may tell of a newer round than `copy`.
        prepared: The states beside all `Prepare`s that nodes here have confirmed.
    """

    copy: Copy | None
    last: PreviousRound | None
    copies: tuple[Copy, ...] = ()
    prepared: tuple[Copy, ...] = ()

    @property
    def highest_term(self) -> int:
        """The highest term of which a node tells."""
        formed_term = 0 if self.last is None else read_term(self.last.round_id)
        return max(formed_term, *(copy.term for copy in (*self.copies, *self.prepared)), 0)


def leave_out_old(events: Iterable[Event], heard: Mapping[str, int]) -> list[Event]:
    """Leave out facts that came once more, after newer ones of their nodes.

    Args:
        events: What was heard.
        heard: Per node the number of the last fact that was heard before.
    """
    latest = {**heard}
    kept = []
    for event in events:
        if not isinstance(event, SeatDead | Silent):
            if event.sequence <= latest.get(event.node, 0):
                continue
            latest[event.node] = event.sequence
        kept.append(event)
    return kept


def find_ahead(job: Job, term: int, events: Iterable[Event]) -> set[str]:
    """Return the nodes whose state of the job is newer than the log's, since the job went on in another store."""
    return {event.node for event in events if isinstance(event, Join) and _is_ahead(event, job, term)}


def _is_ahead(join: Join, job: Job, term: int) -> bool:
    last, here = join.last, (job.round, read_term(job.round_id))
    told = [copy for copy in (join.copy, join.prepared) if copy is not None and copy.incarnation == job.incarnation]
    is_copied = any(copy.order[:3] > (*here, term) for copy in told)
    is_prepared = join.prepared is not None and not job.copy.knows(join.prepared, job.known_states)
    is_run = last is not None and last.incarnation == job.incarnation and _order_last(last) > here
    return is_copied or is_prepared or is_run


def keep_facts(job: Job, events: Iterable[Event], ahead: Collection[str]) -> tuple[Event, ...]:
    """Return what counts after a `Resync` too: what nobody tells again, and what nodes that are ahead have told.

    Others may answer before those have read the `Resync`. If the log went on without what those know, they would make
    the coordinator ask again, and again.

    Args:
        job: The state before the `Resync`.
        events: What was heard since.
        ahead: The nodes that know more than the log.
    """
    statuses = {VOID: SEAT_RUNNING, DEAD_ELSEWHERE: SEAT_CONFIRMED}
    died = [Leave(gone.node, gone.sequence, DIED) for gone in job.gone.values() if gone.reason == DIED]
    deaths = [
        SeatDead(seat.node, job.round_id, job.incarnation, job.round, rank, statuses[seat.status])
        for rank, seat in enumerate(job.seats)
        if seat.status in statuses
    ]
    known: dict[str, Node | Gone] = {**job.gone, **job.nodes}
    heard = {name: node.sequence for name, node in known.items()}
    told = leave_out_old([event for event in events if event.node in ahead], heard)
    gone = [event for event in events if event.node not in ahead and isinstance(event, SeatDead | Leave)]
    return (*died, *deaths, *told, *gone)


def find_view(events: Iterable[Event], read: Mapping[Copy, Job | None]) -> View | None:
    """Return the view of the job that most nodes know; None if no node knows of a round.

    Args:
        events: What was heard.
        read: The state in each copy that was read, or None for an unreadable copy. If the log was begun anew, its own
            former state is one of them, or the one in a restored store.
    """
    joins = {event.node: event for event in events if isinstance(event, Join)}.values()
    copies = [join.copy for join in joins if join.copy is not None and read.get(join.copy, join) is not None]
    lasts = [join.last for join in joins if join.last is not None]
    known = [copy for copy, job in read.items() if job is not None and copy not in copies]
    told = [*(copy.incarnation for copy in copies), *(last.incarnation for last in lasts)]
    counts = Counter(told or [copy.incarnation for copy in known])
    if not counts:
        return None
    incarnation = max(counts, key=lambda name: (counts[name], name))
    copies = [copy for copy in (*copies, *known) if copy.incarnation == incarnation]
    copy = max(copies, key=lambda copy: copy.order, default=None)
    last = max((last for last in lasts if last.incarnation == incarnation), key=_order_last, default=None)
    is_known = last is None or (copy is not None and copy.order[:2] >= _order_last(last))
    prepared = {join.prepared for join in joins if join.prepared is not None}
    newest = {one.store_id: one for one in sorted(copies, key=lambda one: one.order)}.values()
    return View(
        copy,
        None if is_known else last,
        tuple(one for one in newest if copy is not None and one.is_prepared_after(copy.round, copy.formed_term)),
        tuple(one for one in prepared if one.incarnation == incarnation),
    )


def _order_last(last: PreviousRound) -> tuple[int, int]:
    """Return what tells the newer of two rounds of one job."""
    return last.round, read_term(last.round_id)


def restate(view: View, copies: Mapping[Copy, Job | None], events: Sequence[Event], *, begun: Job, now: float) -> Job:
    """Return the state of the job as the nodes know it, with all that was heard of them in this store.

    Args:
        view: What to go on from.
        copies: The states in the view's copies.
        events: All that was heard in this store.
        begun: The state of a job that is founded here: coordinator and store are taken from it.
        now: Monotonic seconds.

    Returns:
        The state.
    """
    copied = None if view.copy is None else copies[view.copy]
    job = Job(incarnation=begun.incarnation) if copied is None else move(copied, now)
    if view.last is not None:
        job = _adopt(job, view.last, now)
    for event in events:
        if job.config is None and isinstance(event, Join) and event.last == view.last:
            job = replace(job, config=event.config)
        if copied is None and isinstance(event, Join) and event.last is not None:
            job = replace(job, scripts=settle_script(job.scripts, event.node_info.role_script))
    job = replace(
        job,
        term=begun.term,
        coordinator=begun.coordinator,
        store_id=begun.store_id,
        left_logs=_find_left_logs({copy: copies[copy] for copy in view.copies}, job, begun.store_id),
        slot=begun.slot,
        highest_round=max(job.highest_round, begun.highest_round),
        restart_count=max(job.restart_count, begun.restart_count),
    )
    return apply_facts(job, _keep_latest(events), now)


def may_go_on(view: View, job: Job, config: JobConfig, waited: float) -> bool:
    """Tell whether the log may go on from a state.

    Args:
        view: What the nodes know.
        job: The state, of `restate`.
        config: Its configuration.
        waited: Seconds since the first coordinator here began to wait for the nodes.
    """
    if config.has_successors:
        return has_majority(job, config) and not is_outdated(view, job)
    # A node here has heard of a newer round, whose members may have yet to answer.
    is_complete = not job.is_awaiting and job.highest_round <= job.round
    return waited >= config.lease or is_complete


def is_outdated(view: View, job: Job) -> bool:
    """Tell whether a round may have been formed in a store that was left, whose nodes are not known here."""
    return not all(job.copy.knows(prepared, job.known_states) for prepared in view.prepared)


def _find_left_logs(copies: Mapping[Copy, Job | None], job: Job, store_id: str) -> tuple[LeftLog, ...]:
    """Return what the copies tell of the logs of other stores, which rounds may have been formed there among it."""
    logs = [LeftLog(copy, copied.prepared) for copy, copied in copies.items() if copied is not None]
    logs += [log for copied in copies.values() if copied is not None for log in copied.left_logs]
    newest: dict[str, LeftLog] = {}
    for log in sorted(logs, key=lambda log: log.state.order):
        newest[log.state.store_id] = log
    formed_term = read_term(job.round_id)
    return tuple(
        log if log.state.is_prepared_after(job.round, formed_term) else replace(log, prepared=())
        for log in newest.values()
        if log.state.store_id != store_id
    )


def _adopt(job: Job, last: PreviousRound, now: float) -> Job:
    """Take over a round that was formed after the copy of the state was made."""
    return replace(
        job,
        phase=RUNNING,
        since=now,
        gone=MappingProxyType({name: forget_place(gone) for name, gone in job.gone.items()}),
        round=last.round,
        round_id=last.round_id,
        incarnation=last.incarnation,
        formed_slot=-1,
        seats=(Seat(),) * last.nodes,
        until=None,
        restart_count=max(job.restart_count, last.restart_count),
        round_restarts=last.restart_count,
        news="",
        root=None,
        hidden=None,
    )


def _keep_latest(events: Sequence[Event]) -> list[Event]:
    """Leave out what a node said before it last said where it stands."""
    latest = {event.node: index for index, event in enumerate(events) if isinstance(event, Join)}
    return [
        event for index, event in enumerate(events) if isinstance(event, SeatDead) or index >= latest.get(event.node, 0)
    ]
