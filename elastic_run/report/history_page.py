"""The page of a job's history: its data, filled into `history_page.html` by jinja2, which escapes every text.

One HTML file without anything from the network. The page shows a limited number of rows, cards and rounds, and says how
many it leaves out. Each kind of first failure of a round has a card, and so has each rank that a hang waited for: a
hang that ended its round is that round's failure, and hangs of a rank are one kind, however long each was.
"""

from __future__ import annotations

import os
import time

from elastic_run import __version__
from elastic_run.contract import EXIT_HUNG, HANG
from elastic_run.records import dataclass, field
from elastic_run.report.history_charts import (
    HEIGHT,
    PHASES,
    ROWS,
    RUNNING,
    SCALE,
    draw_resources,
    draw_rows,
    draw_silences,
    find_span,
    phases_of,
)
from elastic_run.report.job_history import moment
from elastic_run.report.text import count, span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elastic_run.report.job_history import Event, Job, Logs, Member, Round, Worker

#: Numbers that the page shows at most: cards, first and last rounds.
_CARDS = 20
_FIRST_ROUNDS = 20
_LAST_ROUNDS = 80
#: Seconds of a job, all nodes together, from which on its goodput says something.
_SHORTEST = 1.0

_WORDS = {"running": "workers run", "starting": "start", "waiting": "rendezvous and pauses", "stopping": "stop"}
_REASONS = {"failure": "a worker failed", "halt": "stopped by the job", "signal": "a signal", "success": "success"}


_COLUMNS = (
    "round",
    "restart",
    "nodes",
    "workers",
    "formed (UTC)",
    "waited",
    "ran",
    "recovered in",
    "behind",
    "ended by",
)


def render_page(job: Job, logs: Logs, others: list[str]) -> str:
    """Return the page of a job as HTML.

    Raises:
        ModuleNotFoundError: jinja2 is not installed.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(os.path.dirname(__file__)),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(span=span, count=count, clock=_clock, moment=_moment)
    return environment.get_template("history_page.html").render(_describe(job, logs, others))


def _describe(job: Job, logs: Logs, others: list[str]) -> dict[str, Any]:
    """Return all that the template fills in."""
    shown = find_span(job)
    rows, cards = draw_rows(job, shown), find_failures(job)
    started = next((agent.started for agent in job.agents if agent.started is not None), None)
    wall = sum(agent.last_at - agent.first_at for agent in job.agents)
    more_rounds = len(job.rounds) - _FIRST_ROUNDS - _LAST_ROUNDS
    shown_rounds = job.rounds if more_rounds <= 0 else [*job.rounds[:_FIRST_ROUNDS], *job.rounds[-_LAST_ROUNDS:]]
    return {
        "job": job,
        "logs": logs,
        "others": others,
        "release": __version__,
        "program": started["program"] if started else "",
        "name": os.path.basename(started["program"]) if started else "",
        "ended": _find_ending(job),
        "span": shown,
        "scale": SCALE,
        "rows": rows[:ROWS],
        "more_rows": len(rows) - ROWS,
        "cards": cards[:_CARDS],
        "more_cards": len(cards) - _CARDS,
        "columns": _COLUMNS,
        "rounds": [_describe_round(each) for each in shown_rounds],
        "more_rounds": max(0, more_rounds),
        "missing": max((each.formed["nodes"] - len(each.members) for each in job.rounds), default=0),
        "shares": _share_out(job, wall),
        "has_goodput": wall >= _SHORTEST,
        "silences": draw_silences(job, shown),
        "slow": [line for each in job.rounds for member in each.members.values() for line in member.slow][:_CARDS],
        "height": HEIGHT,
        "resources": draw_resources(job, shown),
    }


def _find_ending(job: Job) -> dict[str, Any] | None:
    """Return the last event of the launcher that tells most about the end of the job, or None."""
    told = [agent.ended for agent in job.agents if agent.ended is not None and agent.ended["verdict"] == job.verdict]
    return max(told, key=lambda ended: (bool(ended["cause"] or ended["detail"]), ended["time"]), default=None)


def _share_out(job: Job, wall: float) -> list[tuple[str, str, float, float]]:
    """Return kind, words, seconds and share of each phase, all nodes together; time without any phase is waiting."""
    sums = dict.fromkeys(PHASES, 0.0)
    for member in (member for each in job.rounds for member in each.members.values()):
        for kind, begin, end in phases_of(member):
            sums[kind] += max(0.0, end - begin)
    sums["waiting"] += max(0.0, wall - sum(sums.values()))
    whole = max(sum(sums.values()), 1e-6)
    return [(kind, _WORDS[kind], sums[kind], 100 * sums[kind] / whole) for kind in PHASES]


def _describe_round(each: Round) -> tuple[str, ...]:
    """Return the cells of a round in the table, in the order of `_COLUMNS`."""
    members, formed = list(each.members.values()), each.formed
    ran = [end - begin for member in members for kind, begin, end in phases_of(member) if kind == RUNNING]
    started = (member.events.get("workers_started", {}).get("recovery_s") for member in members)
    recovery = max((seconds for seconds in started if seconds is not None), default=None)
    return (
        str(each.number),
        str(formed["restart"]),
        str(formed["nodes"]) if len(members) >= formed["nodes"] else f"{formed['nodes']} ({len(members)} here)",
        str(formed["workers"]),
        _clock(min(member.formed["time"] for member in members)),
        span(max(member.formed["rendezvous_s"] for member in members)),
        span(max(ran, default=0)),
        "" if recovery is None else span(recovery),
        _describe_behind(members),
        _describe_end(each),
    )


def _describe_behind(members: list[Member]) -> str:
    """Return the rank for which the others waited longest, and its highest percentage of a minute; "" if unknown."""
    told = [(share, rank) for member in members for _, shares in member.waits for rank, share in shares.items()]
    share, rank = max(told, default=(0.0, 0))
    return f"rank {rank}: {share:.0f} %" if told else ""


def _describe_end(each: Round) -> str:
    stops = [stop for member in each.members.values() if (stop := member.events.get("workers_stopping"))]
    reasons = [stop["reason"] for stop in stops]
    if not reasons:
        return "not in the logs"
    # A node halts where another one has failed: the failure is the reason.
    reason = next((word for word in ("failure", "signal", "halt", "success") if word in reasons), reasons[0])
    if reason == "failure" and (hang := find_hang(each)) is not None and hang["action"] != "report":
        return "a hang"
    detail = next((stop["detail"] for stop in stops if stop["detail"]), "") if reason == "halt" else ""
    return detail or _REASONS.get(reason, reason)


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(seconds))


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))


# --- failures ---------------------------------------------------------------------------------------------------------
_STILL = "made no progress"


@dataclass(slots=True)
class Card:
    """A kind of failure; all fields above `rounds` describe its last occurrence."""

    title: str  # The worker, and how it ended
    cause: str  # The exception in one line, or ""
    at: float | None  # Wall clock, or None
    where: str = ""  # The exception's file and line, or ""
    remark: str = ""  # A remark on the failure, or ""
    log_file: str = ""  # Path of the worker's stderr, or ""
    uptime: float | None = None  # Seconds that the worker lived, or None
    others: list[int] = field(default_factory=list)  # Other ranks that failed
    rounds: list[int] = field(default_factory=list)  # Numbers of the rounds that failed in this way
    nodes: dict[str, int] = field(default_factory=dict)  # Number of these rounds in which each node failed first


def find_failures(job: Job) -> list[Card]:
    """Return the failures of a job, the latest kind first: the failure that ended the job is on top."""
    cards: dict[tuple[str, ...], Card] = {}
    for each in job.rounds:
        if (hang := find_hang(each)) is not None and hang["action"] == "report":
            card, node = _make_hang_card(each, hang)
            _add(cards, ("", card.title), card, each.number, node)
        if (found := _find_first(each)) is not None:
            member, worker = found
            card = _make_card(member, worker)
            card.others = sorted(
                other.rank for _, other in each.workers if other is not worker and "worker_failed" in other.events
            )
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
    return next((hang for member in each.members.values() if (hang := member.events.get("hang_found"))), None)


def end_text(worker: Worker) -> str:
    """Return how a worker ended."""
    failure, exited = worker.events.get("worker_failed", {}), worker.events.get("worker_exited", {})
    if failure.get("exit_code") == EXIT_HUNG and failure["cause"].startswith(HANG):
        return _STILL
    if exited.get("signal") is not None:
        return f"was killed by {exited['signal']}"
    return f"ended with exit code {exited['exit_code']}" if exited else "has no end in the logs"


def _find_first(each: Round) -> tuple[Member, Worker] | None:
    """Return the worker that failed first: a worker with a cause of its own comes before workers that lost a peer.

    Each node names its own first failure. Between nodes the wall clocks decide, which is good enough for display. If
    the launcher was killed before it could write a reason, it is a worker that ended badly.
    """
    failed = [
        (
            failure["is_consequence"],
            not failure["is_root"],
            moment(worker, "worker_exited", member.last_at),
            worker.rank,
        )
        for member, worker in each.workers
        if (failure := worker.events.get("worker_failed"))
    ]
    if failed:
        rank = min(failed)[3]
        return next(pair for pair in each.workers if pair[1].rank == rank)
    return next((pair for pair in each.workers if _ended_badly(pair[1].events.get("worker_exited"))), None)


def _ended_badly(exited: Event | None) -> bool:
    return exited is not None and not exited["was_stopped"] and bool(exited["signal"] or exited["exit_code"])


def _make_hang_card(each: Round, hang: Event) -> tuple[Card, str]:
    """Return the card of a hang that was only reported, and the node."""
    rank = hang["rank"]
    node = next((member.node for member in each.members.values() if rank in member.workers), hang["node"])
    title = f"rank {rank} on {node} {_STILL}"
    return Card(title, f"{HANG}: {hang['detail']}", hang["time"], remark="The job went on."), node


def _make_card(member: Member, worker: Worker) -> Card:
    failure = worker.events.get("worker_failed", {})
    begun, ended = (worker.events.get(name, {}).get("time") for name in ("worker_started", "worker_exited"))
    return Card(
        title=f"rank {worker.rank} on {member.node} {end_text(worker)}",
        cause=failure.get("cause", ""),
        at=ended,
        where=failure.get("where", ""),
        remark=failure.get("remark", ""),
        log_file=failure.get("log_file", ""),
        uptime=None if begun is None or ended is None else ended - begun,
    )
