"""The failures of a job: one card for each kind of first failure of a round, and for each rank that a hang waited for.

Pure. A hang that ended its round is that round's failure. Hangs of one rank are one kind, however long each was.
"""

from __future__ import annotations

from elastic_run.contract import EXIT_HUNG, HANG
from elastic_run.records import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.report.job_history import Event, Job, Member, Round, Worker

_STILL = "made no progress"


@dataclass(slots=True)
class Card:
    """A kind of failure; all fields above `rounds` describe its last occurrence.

    Args:
        title: The worker, and how it ended.
        cause: The exception in one line, or "".
        where: The exception's file and line, or "".
        remark: A remark on the failure, or "".
        log_file: Path of the worker's stderr, or "".
        at: Wall clock, or None.
        uptime: Seconds that the worker lived, or None.
        rounds: Numbers of the rounds that failed in this way.
        nodes: Number of these rounds in which each node failed first.
        others: Other ranks that failed in the last of these rounds.
    """

    title: str
    cause: str
    where: str
    remark: str
    log_file: str
    at: float | None
    uptime: float | None
    rounds: list[int] = field(default_factory=list)
    nodes: dict[str, int] = field(default_factory=dict)
    others: list[int] = field(default_factory=list)


def find_failures(job: Job) -> list[Card]:
    """Return the failures of a job, the latest kind first: the failure that ended the job is on top."""
    cards: dict[tuple[str, ...], Card] = {}
    for each in job.rounds:
        if (hang := find_hang(each)) is not None and hang["action"] == "report":
            card, node = _make_hang_card(each, hang)
            _add(cards, ("", card.title), card, each.number, node)
        found = _find_first(each)
        if found is None:
            continue
        member, worker = found
        card = _make_card(member, worker)
        failed = (other.rank for other in _workers(each) if other.failure is not None)
        card.others = sorted(rank for rank in failed if rank != worker.rank)
        is_hang = end_text(worker) == _STILL
        key = ("", card.title) if is_hang else (card.cause, card.where, end_text(worker))
        _add(cards, key, card, each.number, member.node)
    return list(reversed(cards.values()))


def _add(cards: dict[tuple[str, ...], Card], key: tuple[str, ...], card: Card, number: int, node: str) -> None:
    """Put the card of a round in the place of the one of the same kind, as the latest."""
    before = cards.pop(key, None)
    if before is not None:
        card.rounds, card.nodes = before.rounds, before.nodes
    card.rounds.append(number)
    card.nodes[node] = card.nodes.get(node, 0) + 1
    cards[key] = card


def find_hang(each: Round) -> Event | None:
    """Return the event `hang_found` of a round, or None."""
    return next((member.hang for member in each.members.values() if member.hang is not None), None)


def end_text(worker: Worker) -> str:
    """Return how a worker ended."""
    failure = worker.failure or {}
    if failure.get("exit_code") == EXIT_HUNG and failure["cause"].startswith(HANG):
        return _STILL
    if worker.signal is not None:
        return f"was killed by {worker.signal}"
    return "has no end in the logs" if worker.exit_code is None else f"ended with exit code {worker.exit_code}"


def _workers(each: Round) -> list[Worker]:
    return [worker for member in each.members.values() for worker in member.workers.values()]


def _find_first(each: Round) -> tuple[Member, Worker] | None:
    """Return the worker that failed first: a worker with a cause of its own comes before workers that lost a peer.

    Each node names its own first failure. Between nodes the wall clocks decide, which is good enough for display.
    """
    failed = [
        (
            worker.failure["is_consequence"],
            not worker.failure["is_root"],
            worker.ended_at or member.last_at,
            worker.rank,
        )
        for member in each.members.values()
        for worker in member.workers.values()
        if worker.failure is not None
    ]
    if not failed:
        return _find_unexplained(each)
    rank = min(failed)[3]
    return next((member, member.workers[rank]) for member in each.members.values() if rank in member.workers)


def _find_unexplained(each: Round) -> tuple[Member, Worker] | None:
    """Return a worker that ended badly, if the launcher was killed before it could write the reason."""
    for member in each.members.values():
        for worker in member.workers.values():
            has_failed = worker.signal is not None or bool(worker.exit_code)
            if has_failed and not worker.was_stopped and worker.ended_at is not None:
                return member, worker
    return None


def _make_hang_card(each: Round, hang: Event) -> tuple[Card, str]:
    """Return the card of a hang that was only reported, and the node."""
    rank = hang["rank"]
    node = next((member.node for member in each.members.values() if rank in member.workers), hang["node"])
    title = "no rank made progress" if rank is None else f"rank {rank} on {node} {_STILL}"
    return Card(title, f"{HANG}: {hang['detail']}", "", "The job went on.", "", hang["time"], None), node


def _make_card(member: Member, worker: Worker) -> Card:
    failure = worker.failure or {}
    begun, ended = worker.started_at, worker.ended_at
    return Card(
        title=f"rank {worker.rank} on {member.node} {end_text(worker)}",
        cause=failure.get("cause", ""),
        where=failure.get("where", ""),
        remark=failure.get("remark", ""),
        log_file=failure.get("log_file", ""),
        at=ended,
        uptime=None if begun is None or ended is None else ended - begun,
    )
