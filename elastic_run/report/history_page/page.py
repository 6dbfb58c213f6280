"""The page: its data, filled into `page.html` by jinja2, which escapes every text.

The page shows a limited number of rows, cards and rounds, and says how many it leaves out.
"""

from __future__ import annotations

import os
import time

from elastic_run import __version__
from elastic_run.records import dataclass
from elastic_run.report.history_page.failures import find_failures, find_hang
from elastic_run.report.history_page.resources import draw_resources
from elastic_run.report.history_page.silences import HEIGHT, draw_silences
from elastic_run.report.history_page.timeline import (
    PHASES,
    ROWS,
    RUNNING,
    SCALE,
    add_phases,
    draw_rows,
    find_span,
    phases_of,
)
from elastic_run.report.wording import count, span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elastic_run.report.history_page.files import Logs
    from elastic_run.report.job_history import Agent, Job, Round

#: Numbers that the page shows at most: cards, first and last rounds, names.
_CARDS = 20
_FIRST_ROUNDS = 20
_LAST_ROUNDS = 80
_NAMED = 10
#: Seconds of a job, all nodes together, from which on its goodput says something.
_SHORTEST = 1.0

_WORDS = {"running": "workers run", "starting": "start", "waiting": "rendezvous and pauses", "stopping": "stop"}
_REASONS = {"failure": "a worker failed", "halt": "stopped by the job", "signal": "a signal", "success": "success"}


@dataclass(frozen=True, slots=True)
class RoundRow:
    """One line of the table of rounds."""

    number: int
    restart: int
    nodes: str
    workers: int
    formed: str
    waited: str
    ran: str
    end: str
    recovery: str


def render_page(job: Job, logs: Logs, others: list[str]) -> str:
    """Return the page of a job as HTML.

    Args:
        job: The job.
        logs: The event logs and stacks.
        others: Ids of further jobs in the logs.

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
    return environment.get_template("page.html").render(_describe(job, logs, others))


def _describe(job: Job, logs: Logs, others: list[str]) -> dict[str, Any]:
    """Return all that the template fills in."""
    shown = find_span(job)
    rows, cards = draw_rows(job, shown), find_failures(job)
    ended = _find_ending(job)
    started = next((agent.started for agent in job.agents if agent.started is not None), None)
    wall = sum(agent.last_at - agent.first_at for agent in job.agents)
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
        "rounds": _describe_rounds(job),
        "more_rounds": max(0, len(job.rounds) - _FIRST_ROUNDS - _LAST_ROUNDS),
        "shares": _share_out(job, wall),
        "has_goodput": wall >= _SHORTEST,
        "silences": draw_silences(job, shown),
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


def _describe_rounds(job: Job) -> list[RoundRow]:
    rounds = job.rounds
    if len(rounds) > _FIRST_ROUNDS + _LAST_ROUNDS:
        rounds = [*rounds[:_FIRST_ROUNDS], *rounds[-_LAST_ROUNDS:]]
    return [_describe_round(each) for each in rounds]


def _describe_round(each: Round) -> RoundRow:
    members = list(each.members.values())
    ran = max(
        (end - begin for member in members for kind, begin, end in phases_of(member) if kind == RUNNING), default=0
    )
    recovery = max((member.recovery_s for member in members if member.recovery_s is not None), default=None)
    known = len(members)
    return RoundRow(
        number=each.number,
        restart=each.restart,
        nodes=str(each.nodes) if known >= each.nodes else f"{each.nodes} ({known} here)",
        workers=each.workers,
        formed=_clock(min(member.formed_at for member in members)),
        waited=span(max(member.rendezvous_s for member in members)),
        ran=span(ran),
        end=_describe_end(each),
        recovery="" if recovery is None else span(recovery),
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
    remarks += [_describe_clock(agent) for agent in job.agents if agent.clock_offset]
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


def _describe_clock(agent: Agent) -> str:
    difference = f"{span(abs(agent.clock_offset))} {'ahead of' if agent.clock_offset > 0 else 'behind'}"
    return f"{agent.node}: its clock was about {difference} the others'; times here are corrected"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(seconds))


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
