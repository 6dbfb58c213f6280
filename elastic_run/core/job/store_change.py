"""The job's state after the job has moved to another store, to which each node has yet to come."""

from __future__ import annotations

from types import MappingProxyType

from elastic_run.core.job.state import AWAITED, MOVED, SILENT, UNKNOWN, Gone, Job, Node, Seat
from elastic_run.core.protocol.messages import DONE
from elastic_run.records import replace


def move(job: Job, now: float) -> Job:
    """Return the state as it goes on in another store, to which every node has yet to come.

    But the one in whose agent the old store lived: it went silent with it, and its lease is over. If it is there
    all the same, it comes back like any other silent node. A job with one store has no such node: its log began anew.

    Args:
        job: A copy of the state that was left in the old store.
        now: Monotonic seconds.

    Returns:
        The state there.
    """
    return replace(
        job,
        nodes=MappingProxyType({}),
        gone=MappingProxyType({**job.gone, **{name: _leave_behind(node, job) for name, node in job.nodes.items()}}),
        seats=tuple(_await_holder(seat, job) for seat in job.seats),
        formed_slot=-1,
        prepared=(),
        preparation=None,
        since=now,
    )


def _await_holder(seat: Seat, job: Job) -> Seat:
    node = job.nodes.get(seat.node)
    if node is None:
        return seat
    if not _is_out_of_reach(node, job):
        return replace(seat, status=AWAITED)
    is_lost = seat.is_lost or (node.is_member and node.outcome != DONE)
    return replace(seat, status=UNKNOWN, is_lost=is_lost)


def _leave_behind(node: Node, job: Job) -> Gone:
    if _is_out_of_reach(node, job):
        return Gone(node.node, node.sequence, SILENT, "silent, and its store is out of reach", node)
    clause = "did not change to the next endpoint" if _can_move(job) else "has not reported again"
    return Gone(node.node, node.sequence, MOVED, clause, node)


def _is_out_of_reach(node: Node, job: Job) -> bool:
    return node.node_info.serves_store and _can_move(job)


def _can_move(job: Job) -> bool:
    """Whether the job has several stores, and has left one; otherwise its log began anew in the only store."""
    return job.config is not None and job.config.has_successors


def give_up_awaited(job: Job) -> Job:
    """Return the state in which no node is awaited any more: nodes that have not come may run elsewhere."""

    def give_up(seat: Seat) -> Seat:
        gone = job.gone.get(seat.node)
        is_done = gone is not None and gone.was is not None and gone.was.outcome == DONE
        return replace(seat, status=UNKNOWN, is_lost=seat.is_lost or not is_done)

    return replace(job, seats=tuple(give_up(seat) if seat.status == AWAITED else seat for seat in job.seats))
