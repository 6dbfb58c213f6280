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
    add_phases,
    draw_resources,
    draw_rows,
    draw_silences,
    find_span,
    phases_of,
)
from elastic_run.report.text import count, span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elastic_run.report.job_history import Agent, Event, Job, Logs, Member, Round, Worker

#: Numbers that the page shows at most: cards, first and last rounds, names.
_CARDS = 20
_FIRST_ROUNDS = 20
_LAST_ROUNDS = 80
_NAMED = 10
#: Seconds of a job, all nodes together, from which on its goodput says something.
_SHORTEST = 1.0

_WORDS = {"running": "workers run", "starting": "start", "waiting": "rendezvous and pauses", "stopping": "stop"}
_REASONS = {"failure": "a worker failed", "halt": "stopped by the job", "signal": "a signal", "success": "success"}


_COLUMNS = ("round", "restart", "nodes", "workers", "formed (UTC)", "waited", "ran", "recovered in", "ended by")


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
    environment.filters.update(span=span, clock=_clock, moment=_moment)
    return environment.get_template("history_page.html").render(_describe(job, logs, others))


def _describe(job: Job, logs: Logs, others: list[str]) -> dict[str, Any]:
    """Return all that the template fills in."""
    shown = find_span(job)
    rows, cards = draw_rows(job, shown), find_failures(job)
    silences, is_output_seen = draw_silences(job, shown)
    ended = _find_ending(job)
    started = next((agent.started for agent in job.agents if agent.started is not None), None)
    wall = sum(agent.last_at - agent.first_at for agent in job.agents)
    more_rounds = len(job.rounds) - _FIRST_ROUNDS - _LAST_ROUNDS
    shown_rounds = job.rounds if more_rounds <= 0 else [*job.rounds[:_FIRST_ROUNDS], *job.rounds[-_LAST_ROUNDS:]]
    return {
        "job": job,
        "release": __version__,
        "program": started["program"] if started else "",
        "name": os.path.basename(started["program"]) if started else "",
        "ended": ended,
        "verdict": job.verdict,
        "tone": "good" if job.verdict == "success" else "bad" if job.verdict else "open",
        "span": shown,
        "scale": SCALE,
        "rows": rows[:ROWS],
        "more_rows": len(rows) - ROWS,
        "cards": cards[:_CARDS],
        "more_cards": len(cards) - _CARDS,
        "hosts": len({agent.node for agent in job.agents}),
        "columns": _COLUMNS,
        "rounds": [_describe_round(each) for each in shown_rounds],
        "more_rounds": max(0, more_rounds),
        "shares": _share_out(job, wall),
        "has_goodput": wall >= _SHORTEST,
        "silences": silences,
        "is_output_seen": is_output_seen,
        "height": HEIGHT,
        "resources": draw_resources(job, shown),
        "stacks": [(os.path.basename(os.path.dirname(path)) or path, path, text) for path, text in logs.stacks],
        "remarks": _find_remarks(job, logs, others),
        "files": logs.files,
    }


def _find_ending(job: Job) -> dict[str, Any] | None:
    """Return the last event of the launcher that tells most about the end of the job, or None."""
    told = [agent.ended for agent in job.agents if agent.ended is not None and agent.ended["verdict"] == job.verdict]
    return max(told, key=lambda ended: (bool(ended["cause"] or ended["detail"]), ended["time"]), default=None)


def _share_out(job: Job, wall: float) -> list[tuple[str, str, float, float]]:
    """Return kind, words, seconds and share of each phase; time without any phase counts as waiting."""
    sums = add_phases(job)
    sums["waiting"] += max(0.0, wall - sum(sums.values()))
    whole = max(sum(sums.values()), 1e-6)
    return [(kind, _WORDS[kind], sums[kind], 100 * sums[kind] / whole) for kind in PHASES]


def _describe_round(each: Round) -> tuple[str, ...]:
    """Return the cells of a round in the table, in the order of `_COLUMNS`."""
    members = list(each.members.values())
    ran = [end - begin for member in members for kind, begin, end in phases_of(member) if kind == RUNNING]
    recovery = max((member.recovery_s for member in members if member.recovery_s is not None), default=None)
    return (
        str(each.number),
        str(each.restart),
        str(each.nodes) if len(members) >= each.nodes else f"{each.nodes} ({len(members)} here)",
        str(each.workers),
        _clock(min(member.formed_at for member in members)),
        span(max(member.rendezvous_s for member in members)),
        span(max(ran, default=0)),
        "" if recovery is None else span(recovery),
        _describe_end(each),
    )


def _describe_end(each: Round) -> str:
    members = list(each.members.values())
    reasons = [member.stop_reason for member in members if member.stop_reason]
    if not reasons:
        return "not in the logs"
    # A node halts where another one has failed: the failure is the reason.
    reason = next((word for word in ("failure", "signal", "halt", "success") if word in reasons), reasons[0])
    if reason == "failure" and (hang := find_hang(each)) is not None and hang["action"] != "report":
        return "a hang"
    detail = next((member.detail for member in members if member.detail), "") if reason == "halt" else ""
    return detail or _REASONS.get(reason, reason)


def _find_remarks(job: Job, logs: Logs, others: list[str]) -> list[str]:
    """Return remarks on the logs themselves, such as missing ones."""
    remarks = [_describe_silent_end(agent) for agent in job.agents if agent.ended is None]
    remarks += [
        f"{agent.node}: {count(agent.lost_lines, 'line')} could not be written"
        for agent in job.agents
        if agent.lost_lines
    ]
    missing = max((each.nodes - len(each.members) for each in job.rounds), default=0)
    if missing > 0:
        remarks.append(f"the event logs of up to {count(missing, 'node')} are not here")
    for mistake in logs.mistakes:
        what = "is not an event" if mistake.count == 1 else "are not events"
        first = f"line {mistake.first_line} {mistake.reason}"
        remarks.append(f"{mistake.file}: {count(mistake.count, 'line')} {what}, and left out ({first})")
    remarks += logs.problems
    if others:
        named = ", ".join(others[-_NAMED:])
        remarks.append(f"{count(len(others), 'other job')} in these logs (--run shows another one): {named}")
    return remarks


def _describe_silent_end(agent: Agent) -> str:
    what = "the log does not say how its launcher ended: it was killed, or still runs"
    return f"{agent.node}: {what} (last line {_clock(agent.last_at)} UTC)"


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
    where: str  # The exception's file and line, or ""
    remark: str  # A remark on the failure, or ""
    log_file: str  # Path of the worker's stderr, or ""
    at: float | None  # Wall clock, or None
    uptime: float | None  # Seconds that the worker lived, or None
    rounds: list[int] = field(default_factory=list)  # Numbers of the rounds that failed in this way
    nodes: dict[str, int] = field(default_factory=dict)  # Number of these rounds in which each node failed first
    others: list[int] = field(default_factory=list)  # Other ranks that failed in the last of these rounds


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
