"""Scenario scripts of a whole job: what happens to its nodes in, the whole trace of its coordinator out.

A script in `coordination/` begins with the job's `config` and then has one event per `>` line; the lines below each
are the trace: the job's phase, what was decided, the places in a new round, and when time alone decides again. Events:
`join NODE`, `failing NODE [consequence]`, `ready NODE OUTCOME`, `leave NODE REASON` (`died`: its guardian has closed
the connection), `silent NODE SECONDS`, `back NODE` (a silent node is heard again), `tick`. `at=` sets the time. After a
deliberate change rewrite them all with `ELASTIC_RUN_REWRITE=1` and review the diff.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run.core.config import Window
from elastic_run.core.job.coordination import next_at
from elastic_run.core.job.documents import ErrorCount, NodeEnds, StuckRank
from elastic_run.core.job.membership import Leaving, WorkersFailing
from elastic_run.core.job.restart_policy import DIED
from elastic_run.core.job.state import ENDED, SILENT, WARNED
from elastic_run.records import replace
from tests.support.sessions import plain_config
from tests.support.small_job import SmallJob

if TYPE_CHECKING:
    from elastic_run.core.config import JobConfig
    from elastic_run.core.job.documents import Assignment
    from elastic_run.core.job.membership import Member
    from elastic_run.core.job.state import Job

SCRIPTS = sorted((Path(__file__).parent / "coordination").glob("*.txt"))
_REPORT = ("error", "exit_code", "severity", "signature", "is_deterministic", "uptime", "summary")
#: Words of `join` that say something of the node; the others are of its configuration.
_INFO = {"nproc": "local_world_size", "role": "role", "prefers": "preferred_rank", "serves": "serves_store"} | {
    "script": "script",
    "fixed": "has_fixed_rank",
}


def _value(text: str) -> Any:
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    if text[-1:] == "]":  # Window, as in [3/60.0] or [3]
        count, _, seconds = text.strip("[]").partition("/")
        return Window(int(count), float(seconds) if seconds else None)
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


def _split(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    named = dict(word.split("=", 1) for word in words if "=" in word)
    return [word for word in words if "=" not in word], {name: _value(text) for name, text in named.items()}


def _node_ends(values: dict[str, Any]) -> NodeEnds | None:
    """Read `lost=2 stuck=4+5 unmoved=1 had=7x2`.

    Two workers failed, ranks 4 and 5 did not stop, and rank 4 had not moved; two workers had error 7.
    """
    stuck = [StuckRank(int(rank), "load_batch", "t.py", 3) for rank in str(values.get("stuck", "")).split("+") if rank]
    failed, unmoved = values.get("lost", 0), values.get("unmoved", 0)
    pairs = [pair.split("x") for pair in str(values.get("had", "")).split("+") if pair]
    errors = tuple(ErrorCount(int(number), int(ranks)) for number, ranks in pairs)
    is_told = stuck or errors or "lost" in values
    return NodeEnds(failed, len(stuck), tuple(stuck), unmoved, errors) if is_told else None


class Player:
    """Plays one script."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._job = self._begin(plain_config())
        self._silent: dict[str, Member] = {}

    @staticmethod
    def _begin(config: JobConfig) -> SmallJob:
        job = SmallJob()
        job.config, job.now, job.jitter = config, 0.0, 0.5
        job.state = replace(job.state, since=0.0)
        return job

    def play(self, script: str) -> str:
        """Return the script with the trace of today."""
        for line in script.splitlines():
            if line.startswith("    "):
                continue
            self.lines.append(line)
            if line.startswith("config"):
                self._job = self._begin(plain_config(**_split(line.split()[1:])[1]))
            elif line.startswith("> "):
                self._step(*_split(line[2:].split()))
        return "\n".join(self.lines) + "\n"

    def _step(self, words: list[str], values: dict[str, Any]) -> None:
        job, before = self._job, self._job.state
        job.now = float(values.pop("at", job.now))
        self._perform(words, values)
        after = job.state
        for name in [name for name, member in job.members.items() if member.is_over and after.end is None]:
            job.close(name)  # it was refused, and goes
        self.lines.append("  ".join([f"    {after.phase}", *_list_decisions(before, after)]))
        if after.round is not before.round:
            places = [(name, one.place) for name, one in job.members.items() if one.started == after.round]
            self.lines += _describe_places(after, [(name, place) for name, place in places if place is not None])
        wake = next_at(job.state, job.now)
        if wake is not None:
            self.lines.append(f"      wakes at {wake:g}")

    def _perform(self, words: list[str], values: dict[str, Any]) -> None:
        job, kind, node = self._job, words[0], words[1] if len(words) > 1 else ""
        if kind == "tick":
            job.decide()
        elif kind == "join":
            info = {name: values.pop(word) for word, name in _INFO.items() if word in values}
            job.add(node, config=replace(job.config, **values), **info)
        elif kind == "failing":
            job.feed(node, WorkersFailing(job.state.number, "consequence" in words))
        elif kind == "ready":
            report = {name: values[name] for name in _REPORT if name in values}
            details = {"verdict": values.get("verdict", ""), "detail": values.get("detail", "")}
            job.end(node, words[2], **report, **details, ends=_node_ends(values))
        elif kind == "leave" and words[2] == DIED:
            job.close(node, ENDED, values.get("detail", ""))
        elif kind == "leave" and node not in job.members:
            member = job.make_member(node, job.config)
            job.move(node, replace(member, leaving=words[2], leaving_detail=values.get("detail", "")))
        elif kind == "leave":
            job.feed(node, Leaving(words[2], values.get("detail", "")))
        elif kind == "silent":
            self._silent[node] = job.members[node]
            job.close(node, SILENT, f"silent for {words[2]} s")
        else:
            assert kind == "back"
            job.move(node, self._silent.pop(node))


def _list_decisions(before: Job, after: Job) -> list[str]:
    """Return what was decided between two states."""
    told = [_describe("Refuse", one) for one in after.refusals if one not in before.refusals]
    if after.halt is not None and after.halt is not before.halt:
        told.append(_describe("Halt", after.halt).replace("(", f"(round={after.number}, ", 1))
    if after.round is not None and after.round is not before.round:
        size = sum(member.node_info.local_world_size for member in after.members)
        started = after.round
        told.append(
            f"Form(round={started.number}, restart_count={started.restart_count}, nodes={started.size}, "
            f"world_size={size})"
        )
    if after.phase == WARNED != before.phase:
        told.append(f"Warn(round={after.number})")
    if after.end is not None and before.end is None:
        told.append(_describe("End", after.end))
    return told


def _describe(kind: str, decision: object) -> str:
    shown = []
    for name in type(decision).__slots__:  # type: ignore[attr-defined] # a record
        value = getattr(decision, name)
        if name == "attempts":
            value = [attempt.get("signature") for attempt in value]
        is_default = value in ("", (), [], None) or (name, value) == ("nodes", 0)
        if name != "term" and not is_default:
            shown.append(f"{name}={value!r}")
    return f"{kind}({', '.join(shown)})"


def _describe_places(job: Job, places: list[tuple[str, Assignment]]) -> list[str]:
    lines = []
    for node, place in sorted(places, key=lambda one: one[1].group_rank):
        size = job.nodes[node].node_info.local_world_size
        last = place.base_rank + size - 1
        role = (
            f", {job.nodes[node].node_info.role} {place.role_rank}/{place.role_world_size}" if _has_roles(job) else ""
        )
        lines.append(
            f"      {node}: rank {place.group_rank}/{place.group_world_size}, "
            f"workers {place.base_rank}-{last}/{place.world_size}{role}, store {place.master.host}:{place.master.port}"
            f"{f'; {place.news}' if place.news else ''}{'; learns the configuration' if place.config else ''}"
        )
    return lines


def _has_roles(job: Job) -> bool:
    return len({node.node_info.role for node in job.members}) > 1


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    """The trace of a scenario is the one that was reviewed."""
    script = path.read_text(encoding="utf-8")
    played = Player().play(script)
    if os.environ.get("ELASTIC_RUN_REWRITE"):
        path.write_text(played, encoding="utf-8")
        script = played
    assert played == script
