"""Facts into the job's state: which nodes are there, and what became of the round on each. It decides nothing.

- A fact counts once: its number must be above the last that its node said.
- A node that went silent keeps its place in `gone`: when it is heard again it comes back, with its rank if no round was
  formed meanwhile. A node that said `Leave` never comes back.
- A node that joins again tells which round it runs or has run last. If that is the present one, nothing has changed; if
  it had followed the log beyond that round's slot, or has heard of that round or a newer one, and doesn't run it, the
  round has lost it; if it tells of an older one that it has not left, it is busy until its `Ready` says that its
  workers are gone.
- A proof of death (`SeatDead`) makes the seat void, unless the log of another store may have counted it for a newer
  round; then the seat is dead elsewhere (see `majority.has_majority`). The dead don't come back.
- A node that runs any other round (of another job, or of a log that lost the majority) comes as a newcomer, busy until
  its workers are gone, and keeps nothing of it.
"""

from __future__ import annotations

from types import MappingProxyType

from elastic_run.core.failure.root_cause import LOST_RANK
from elastic_run.core.job.config import JobConfig, describe_difference
from elastic_run.core.job.exclusion import find_exclusion
from elastic_run.core.job.rank_claims import has_rival
from elastic_run.core.job.refusals import forget_refused, forget_replaced, has_missed_refusal, note_refused
from elastic_run.core.job.reported_failure import read_report
from elastic_run.core.job.role_scripts import describe_other_script, settle_script
from elastic_run.core.job.state import (
    DEAD_ELSEWHERE,
    HALTING,
    LIVE,
    MOVED,
    REFUSED,
    REMEMBERED_GONE,
    RUNNING,
    SILENT,
    UNKNOWN,
    VOID,
    WARNED,
    Gone,
    Job,
    Node,
    Refusal,
    Seat,
)
from elastic_run.core.protocol.facts import MOST_ERRORS, MOST_STUCK
from elastic_run.core.protocol.messages import (
    BY_SIGNAL,
    CANNOT_START,
    DIED,
    DONE,
    EXCLUDED,
    FAILED,
    LAST_SEQUENCE,
    PROTOCOL,
    SEAT_CONFIRMED,
    SEAT_UNTOLD,
    STOPPED,
    UNHEALTHY,
    UNKILLABLE,
    UNREACHABLE,
    Failing,
    Foreign,
    Join,
    Leave,
    PreviousRound,
    Ready,
    SeatDead,
)
from elastic_run.records import dataclass, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import TypeAlias

    from elastic_run.core.protocol.messages import NodeEnds, NodeInfo

_ACTIVE = frozenset((RUNNING, WARNED, HALTING))
_CLAUSES = {
    BY_SIGNAL: "was told to stop",
    DIED: "its agent died",
    UNKILLABLE: "has a process that can't be killed",
    UNHEALTHY: "unhealthy",
}


@dataclass(frozen=True, slots=True)
class Silent:
    """A node's lease ran out; it was not heard for so many seconds."""

    node: str
    seconds: float


Event: TypeAlias = Join | Failing | Ready | Leave | Foreign | SeatDead | Silent


def apply_facts(job: Job, events: Iterable[Event], now: float) -> Job:
    """Return the state after facts, in their order; the phase stays the same."""
    book = None
    for event in events:
        book = book or _JobUpdate(job, now)
        book.enter(event)
    return job if book is None else book.close()


def drop_refused(job: Job, name: str, detail: str) -> Job:
    """Return the state without a node that is refused in this slot."""
    book = _JobUpdate(job, 0.0)
    book.drop_refused(name, detail)
    return note_refused(book.close(), name)


class _JobUpdate:
    """A job's state while a batch of facts is entered; a thousand joins don't copy it a thousand times."""

    def __init__(self, job: Job, now: float) -> None:
        self._job = job
        self._now = now
        self._nodes = dict(job.nodes)
        self._gone = dict(job.gone)
        self._seats: list[Seat] | None = None  # a copy, made for the first change

    def enter(self, event: Event) -> None:
        if isinstance(event, Silent):
            self._enter_silence(event)
            return
        if isinstance(event, SeatDead):
            self._enter_seat_dead(event)
            return
        known = self._nodes.get(event.node) or self._gone.get(event.node)
        if known is not None and event.sequence <= known.sequence and not has_missed_refusal(known, event):
            return
        if isinstance(event, Foreign):
            mend = "install the same release of elastic-run on all nodes"
            told = f"uses protocol {event.protocol}, the job {PROTOCOL}: {mend}"
            self._refuse(event.node, f"this node {told}", f"it {told}")
        elif isinstance(event, Join):
            self._enter_join(event)
        elif isinstance(event, Failing):
            self._enter_failing(event)
        elif isinstance(event, Ready):
            self._enter_ready(event)
        else:
            self._enter_leave(event)

    def close(self) -> Job:
        strangers = [name for name, gone in self._gone.items() if gone.was is None or not gone.was.is_member]
        for name in strangers[: max(0, len(strangers) - REMEMBERED_GONE)]:
            del self._gone[name]
        if self._seats is not None:
            self._set(seats=tuple(self._seats))
        if not self._nodes and self._job.round == 0:
            # Whoever comes next begins anew, with a configuration that may be better.
            self._set(config=None, scripts=())
            forget_refused(self._gone)
        return replace(self._job, nodes=MappingProxyType(self._nodes), gone=MappingProxyType(self._gone))

    def _set(self, **changes: object) -> None:
        self._job = replace(self._job, **changes)  # type: ignore[arg-type]  # names are checked by tests

    # --- seats -------------------------------------------------------------------------------------------------------
    def _set_seat(self, rank: int | None, status: str, *, is_lost: bool = False) -> None:
        if rank is not None:
            self._seats = seats = self._seats if self._seats is not None else list(self._job.seats)
            seat = seats[rank]
            is_kept = seat.status == VOID or (seat.status == DEAD_ELSEWHERE and status != VOID)
            seats[rank] = replace(seat, status=seat.status if is_kept else status, is_lost=seat.is_lost or is_lost)

    def _take_seat(self, node: Node, rank: int | None) -> Node:
        """Return a node in its seat of the last round, if it has one: a seat has one holder for ever."""
        self._seats = seats = self._seats if self._seats is not None else list(self._job.seats)
        if rank is None or not 0 <= rank < len(seats) or seats[rank].node not in ("", node.node):
            return replace(node, rank=None)
        seats[rank] = replace(seats[rank], node=node.node)
        self._set_seat(rank, LIVE)
        return replace(node, rank=rank)

    def _enter_seat_dead(self, fact: SeatDead) -> None:
        rank, status = self._judge_death(fact)
        if rank is None:
            return
        holder = (self._seats or self._job.seats)[rank].node
        before = self._gone.get(holder)
        # A node that went by itself has given its reason. The proof adds only that its agent has ended since.
        has_said_why = before is not None and before.reason not in (SILENT, MOVED, DIED)
        if not has_said_why and (holder in self._nodes or before is not None):
            clause = _CLAUSES[DIED]
            self._drop(holder, DIED, f"{clause}: {fact.detail}" if fact.detail else clause, sequence=LAST_SEQUENCE)
        self._set_seat(rank, status, is_lost=holder not in self._gone)

    def _judge_death(self, fact: SeatDead) -> tuple[int | None, str]:
        """Return the seat in the last round of which a proof tells, or None, and what the seat is from now on."""
        job = self._job
        seats = self._seats or job.seats
        # Without its word no log can have formed a round with other nodes after the one that it was told of.
        has_confirmed = fact.status == SEAT_CONFIRMED or bool(fact.store_id)
        is_counted_here = not has_confirmed or fact.store_id == job.store_id
        status = VOID if is_counted_here else DEAD_ELSEWHERE
        if fact.round_id == job.round_id:
            return fact.rank if 0 <= fact.rank < len(seats) else None, status
        if fact.status != SEAT_UNTOLD and fact.incarnation != job.incarnation:
            return None, ""
        rank = next((rank for rank, seat in enumerate(seats) if seat.node == fact.node), None)
        # It died before it was told of its seat in the last round. Or it was told of a round that another log formed,
        # and this log doesn't know.
        return rank, status if fact.round_index < job.round else DEAD_ELSEWHERE

    def _next_order(self) -> int:
        self._set(order=self._job.order + 1)
        return self._job.order

    # --- joining -----------------------------------------------------------------------------------------------------
    def _enter_join(self, fact: Join) -> None:
        if self._job.config is None:
            self._set(config=fact.config, since=self._now)
        config, script = self._job.config or fact.config, fact.node_info.role_script
        difference = self._describe_difference(fact, config, "here")
        if difference:
            self._refuse(fact.node, difference, self._describe_difference(fact, config, "there"))
            return
        self._set(scripts=settle_script(self._job.scripts, script))
        if fact.highest_round > self._job.highest_round:
            # No round gets a number again that a node knows, be it of another incarnation.
            self._set(highest_round=fact.highest_round)
        self._count_restarts(fact)
        node = self._nodes.get(fact.node) or self._welcome(fact)
        node = self._place(node, fact)
        node = replace(
            node,
            node_info=_kept(fact.node_info),
            store_address=fact.store_address,
            sequence=fact.sequence,
            has_other_config=fact.config != config,
            prepared=fact.prepared,
        )
        exclusion = find_exclusion(self._job, config, node, self._now)
        if exclusion is not None:
            # Another agent of the machine, or the same one, which has not read yet that it is excluded.
            node = replace(node, is_excluded=True)
            self._set(refusals=(*self._job.refusals, Refusal(fact.node, exclusion.reason, EXCLUDED)))
        self._nodes[fact.node] = node
        self._note_rank(node)

    def _count_restarts(self, fact: Join) -> None:
        """Count what a node has heard of: the log of another store may have restarted the job beside this one."""
        is_other_job = any(told and told.incarnation != self._job.incarnation for told in (fact.last, fact.copy))
        if fact.known_restarts > self._job.restart_count and not is_other_job:
            self._set(restart_count=fact.known_restarts)

    def _describe_difference(self, fact: Join, config: JobConfig, here: str) -> str:
        script = fact.node_info.role_script
        return describe_difference(config, fact.config, here=here) or describe_other_script(
            self._job.scripts, script, here=here
        )

    def _place(self, node: Node, fact: Join) -> Node:
        """Return a node where it stands in the round that runs."""
        if fact.last is not None and self._is_last(fact.last):
            # After the state was lost, the seat's node is unknown.
            node = self._take_seat(node, fact.last.rank)
            if self._job.phase in _ACTIVE and node.rank is not None:
                return replace(node, is_member=True, is_busy=False, is_to_read=False)
        # A restored store may have lost a round of which the node has heard: it passes over the `Form` of an older one.
        is_to_read = fact.seen < self._job.formed_slot and fact.highest_round < self._job.round
        if node.is_member:
            # Where it has read that the round was formed and doesn't run it, the round can't work.
            return node if is_to_read else replace(node, outcome=node.outcome or STOPPED)
        if self._job.phase in _ACTIVE:
            self._set_seat(node.rank, LIVE, is_lost=True)  # it has a seat in the round that runs, and doesn't run it
        # It is about to read that the last round was formed with it. Until it has left that round, others may still use
        # the workers' store that it offered for it.
        is_busy = fact.last is not None and not fact.has_left
        return replace(node, is_busy=is_busy, is_to_read=node.rank is not None and is_to_read)

    def _note_rank(self, node: Node) -> None:
        """Note that a node came with a fixed rank which another node has."""
        if node.node not in self._job.rank_claims and has_rival(self._nodes.values(), node):
            self._set(rank_claims=(*self._job.rank_claims, node.node))

    def _is_last(self, last: PreviousRound) -> bool:
        """Whether a round is the last that was formed, and not another log's of the same number."""
        return last.round_id == self._job.round_id

    def _is_present(self, last: PreviousRound) -> bool:
        """Whether a round is the one that runs or is being stopped."""
        return self._is_last(last) and self._job.phase in _ACTIVE

    def _welcome(self, fact: Join) -> Node:
        """Return a new node, or one that was silent for a while, as it was but for its membership."""
        gone = self._gone.pop(fact.node, None)
        if gone is None or gone.was is None:
            forget_replaced(self._gone, fact.node_info.host)
            order = self._next_order()
            return Node(
                fact.node, _kept(fact.node_info), fact.store_address, fact.sequence, arrived=order, arrived_at=self._now
            )
        self._set_seat(gone.was.rank, LIVE)
        is_same_round = gone.was.is_member and fact.last is not None and self._is_present(fact.last)
        outcome = gone.was.outcome if is_same_round else ""
        return replace(gone.was, is_member=False, arrived_at=self._now, failing=None, outcome=outcome)

    def drop_refused(self, name: str, detail: str) -> None:
        self._drop(name, REFUSED, detail, sequence=LAST_SEQUENCE)

    def _refuse(self, name: str, detail: str, noted: str) -> None:
        """Refuse a node: its user reads `detail`, those of the nodes that wait read what is noted."""
        self.drop_refused(name, noted)
        self._set(refusals=(*self._job.refusals, Refusal(name, detail)))

    # --- the round ---------------------------------------------------------------------------------------------------
    def _enter_failing(self, fact: Failing) -> None:
        node = self._nodes.get(fact.node)
        if node is None:
            return
        node = replace(node, sequence=fact.sequence)
        if node.is_member and fact.round_id == self._job.round_id and not node.outcome:
            if node.failing is None:
                node = replace(node, failing=self._next_order(), is_suspecting=fact.is_secondary)
            else:
                node = replace(node, is_suspecting=node.is_suspecting and fact.is_secondary)
        self._nodes[fact.node] = node

    def _enter_ready(self, fact: Ready) -> None:
        known = self._nodes.get(fact.node)
        node = known or self._return(fact.node)
        if node is None:
            return
        is_last = fact.round_id == self._job.round_id
        # Where it speaks of an older round, it may be about to read that the last one was formed with it.
        was_to_read = known is None or node.is_to_read
        is_to_read = was_to_read and node.rank is not None and not is_last and self._job.formed_slot >= 0
        node = replace(
            node, sequence=fact.sequence, store_address=fact.store_address, is_busy=False, is_to_read=is_to_read
        )
        if node.is_member and is_last:
            is_suspecting = _is_suspecting(node, fact)
            ends = _cut(fact.ends)
            node = replace(node, outcome=fact.outcome, is_suspecting=is_suspecting, ends=ends)
            self._weigh(node, fact)
        self._nodes[fact.node] = node

    def _return(self, name: str) -> Node | None:
        """Take back a node that was silent for a while; one that has yet to come to this log says `Join` first.

        Its `Ready` may arrive before that in a store that was restored. Only the `Join` tells which rank it had.
        """
        gone = self._gone.get(name)
        if gone is None or gone.reason != SILENT or gone.was is None:
            return None
        del self._gone[name]
        self._set_seat(gone.was.rank, LIVE)
        return gone.was

    def _weigh(self, node: Node, fact: Ready) -> None:
        """Note what a node reports of a failure, if it is a likelier cause than what is known."""
        is_hidden = fact.outcome == STOPPED and fact.report is not None
        if fact.outcome not in (FAILED, UNREACHABLE, CANNOT_START) and not is_hidden:
            return
        root = read_report(fact, node.failing if node.failing is not None else self._next_order())
        if is_hidden:
            self._set(hidden=self._job.hidden or root)
        elif fact.outcome == CANNOT_START and self._job.ending is None:
            self._set(ending=root)
        elif self._job.root is None or (root.severity, root.order) < (self._job.root.severity, self._job.root.order):
            self._set(root=root)

    # --- going -------------------------------------------------------------------------------------------------------
    def _enter_leave(self, fact: Leave) -> None:
        clause = _CLAUSES.get(fact.reason, fact.reason)
        detail = f"{clause}: {fact.detail}" if fact.detail else clause
        job, prepared = self._job, fact.prepared
        is_counted_here = prepared is None or job.copy.knows(prepared, job.known_states)
        self._drop(
            fact.node, fact.reason, detail, sequence=LAST_SEQUENCE, gone=VOID if is_counted_here else DEAD_ELSEWHERE
        )

    def _enter_silence(self, event: Silent) -> None:
        node = self._nodes.get(event.node)
        if node is not None:
            self._drop(event.node, SILENT, f"silent for {event.seconds:.1f} s", sequence=node.sequence)

    def _drop(self, name: str, reason: str, detail: str, *, sequence: int, gone: str = VOID) -> None:
        node = self._nodes.pop(name, None)
        before = self._gone.pop(name, None)
        was = node if node is not None or before is None else before.was
        self._gone[name] = Gone(name, sequence, reason, detail, was)
        if was is not None:
            # One that says itself that it goes runs nowhere else. Of one that is silent, or whose agent died, only the
            # proof with its seat's record says so: the last round that it was in may be another log's.
            is_lost = was.is_member and was.outcome != DONE
            self._set_seat(was.rank, UNKNOWN if reason in (SILENT, DIED) else gone, is_lost=is_lost)


def _is_suspecting(node: Node, fact: Ready) -> bool:
    """Whether a node that failed knows of consequences only; one that had said otherwise may not know better now."""
    report = fact.report or {}
    is_certain = node.failing is not None and not node.is_suspecting
    return fact.outcome == FAILED and not is_certain and report.get("severity") == LOST_RANK


def _cut(ends: NodeEnds | None) -> NodeEnds | None:
    return None if ends is None else replace(ends, stuck=ends.stuck[:MOST_STUCK], errors=ends.errors[:MOST_ERRORS])


def _kept(node_info: NodeInfo) -> NodeInfo:
    """Return what the state keeps of a node_info: the script's file is kept once for its role."""
    return node_info if node_info.script_file is None else replace(node_info, script_file=None)
