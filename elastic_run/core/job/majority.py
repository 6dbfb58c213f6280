"""Whether nodes that are cut off from here could form a round of their own: which nodes of the last round are needed.

Rules
- Where the store can move, a round forms only with more than half of the last round's seats that are not void. So at
  most one of several stores can form the next one.
- The seats of a new round count for the round after it. A node that was cut off before it read the `Form` still goes by
  the seats before. So a round with other nodes is prepared first: it forms when more than half of the last round's
  nodes have read the `Prepare` (raft's joint consensus; Ongaro, "Consensus: Bridging Theory and Practice", 4.3).
- A log that goes on from a state with such a `Prepare` can't know whether the round was formed where it was left: it
  also needs more than half of that round's nodes. Half of them are enough if the others are proved to be dead.
- A node confirms a `Prepare` only if that log has taken in the last one that the node confirmed in another store. So of
  two logs that have confirmations of more than half of the last round, one has taken in the other's `Prepare`.
"""

from __future__ import annotations

from elastic_run.core.job.state import AWAITED, DEAD_ELSEWHERE, LIVE, MOVED, SILENT, UNKNOWN, VOID, Job, Seat
from elastic_run.core.protocol.messages import DIED, read_term
from elastic_run.records import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterator, Sequence

    from elastic_run.core.job.config import JobConfig

_PAIR = 2
#: Names that a line for the user holds.
_SHOWN = 8
_AWAY = frozenset((AWAITED, UNKNOWN, DEAD_ELSEWHERE))


def needs_preparation(job: Job, config: JobConfig, chosen: Collection[str]) -> bool:
    """Whether a majority of the last round must know of the next one before it forms.

    Holders of seats that were cut off before they read the `Form` go by the last round's seats, and the others by the
    new round's: where these are other nodes, both could have a majority.
    """
    if not config.has_successors or job.round == 0:
        return False
    holders = [seat.node for seat in job.seats if seat.status != VOID]
    # In a later term other logs may go on from this round, whose terms need not be above this one.
    is_same = job.term == read_term(job.round_id) and len(holders) == len(chosen) and set(holders) == set(chosen)
    return any(log.prepared for log in job.left_logs) or not (is_same or not holders)


def is_prepared(job: Job, config: JobConfig) -> bool:
    """Whether the round that was prepared may form: its nodes wait, and a majority of the last one knows of it."""
    waiting = {node.node: node for node in job.waiting}
    informed = {name for name, node in waiting.items() if node.prepared == job.preparation}
    return all(name in waiting for name in job.prepared) and has_majority(job, config, informed)


def has_majority(job: Job, config: JobConfig, counted: Container[str] | None = None) -> bool:
    """Whether the nodes that are cut off from here, if any, can't form a round of their own.

    Args:
        job: The state, gathering.
        config: Its configuration.
        counted: The nodes that count of those that are here; None for all.

    Returns:
        Whether more than half of the last round's seats that are not void have their holders here, or all but the dead;
        always, where the store can't move, or where all seats are void. The same must hold of each round that may have
        been formed in a store that was left.
    """
    if not config.has_successors or job.round == 0:
        return True
    return all(_is_majority(_count_only(seats, counted), config) for seats in _find_rounds(job))


def _find_rounds(job: Job) -> Iterator[tuple[Seat, ...]]:
    """Return the seats of the last round, and of those that may have followed it in a store that was left."""
    yield job.seats
    known = {seat.node: seat for seat in job.seats}
    for log in job.left_logs:
        yield tuple(known.get(name) or Seat(name, _find_status(job, name)) for name in log.prepared)


def _find_status(job: Job, name: str) -> str:
    """Return what is known of a node that had no seat in the last round."""
    gone = job.gone.get(name)
    if name in job.nodes:
        return LIVE
    if gone is not None and gone.reason == DIED:
        return DEAD_ELSEWHERE
    return UNKNOWN if gone is None or gone.reason in (SILENT, MOVED) else VOID


def _count_only(seats: tuple[Seat, ...], counted: Container[str] | None) -> Sequence[Seat]:
    if counted is None:
        return seats
    return [
        replace(seat, status=AWAITED) if seat.status == LIVE and seat.node not in counted else seat for seat in seats
    ]


def _is_majority(seats: Sequence[Seat], config: JobConfig) -> bool:
    quorum = sum(seat.status != VOID for seat in seats)
    if quorum == 0:
        return True
    survivors, dead = _count(seats, LIVE), _count(seats, DEAD_ELSEWHERE)
    if survivors + dead == quorum and dead <= survivors:
        # Dead nodes that another log may have counted are no majority there without one of those that are all here.
        return True
    if quorum == _PAIR and survivors == 1:
        return config.on_split == "continue"
    return 2 * survivors > quorum


def describe_majority(job: Job, config: JobConfig) -> str:
    """Say which nodes of the last round are needed before another may form; "" where none are."""
    if has_majority(job, config):
        return _describe_uninformed(job) if job.prepared and not is_prepared(job, config) else ""
    if _is_majority(job.seats, config):
        return _describe_prepared_elsewhere(job, config)
    here = _count(job.seats, LIVE)
    away = [f"rank {rank}{_describe_holder(job, seat)}" for rank, seat in enumerate(job.seats) if seat.status in _AWAY]
    told = ", ".join([*away[:_SHOWN], *(["…"] if len(away) > _SHOWN else [])])
    dead = _count(job.seats, DEAD_ELSEWHERE)
    quorum = sum(seat.status != VOID for seat in job.seats)
    alive = quorum - dead
    needed = min(quorum // 2 + 1, alive) if dead <= alive else quorum // 2 + 1
    return f"{here} of the last round's {len(job.seats)} nodes are here, {needed} are needed; not here: {told}"


def _describe_uninformed(job: Job) -> str:
    live = [job.nodes[seat.node] for seat in job.seats if seat.status == LIVE]
    informed = sum(node.prepared == job.preparation for node in live)
    return f"{informed} of the last round's {len(job.seats)} nodes have confirmed the next round, more are needed"


def _describe_prepared_elsewhere(job: Job, config: JobConfig) -> str:
    seats = next(seats for seats in _find_rounds(job) if not _is_majority(seats, config))
    return (
        f"a round may have been formed in another store: {_count(seats, LIVE)} of its {len(seats)} nodes are here, "
        "more than half are needed"
    )


def _count(seats: Sequence[Seat], status: str) -> int:
    return sum(seat.status == status for seat in seats)


def _describe_holder(job: Job, seat: Seat) -> str:
    gone = job.gone.get(seat.node)
    return "" if gone is None or gone.was is None else f" ({gone.was.node_info.host})"
