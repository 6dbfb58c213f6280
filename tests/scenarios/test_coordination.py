"""Scenario scripts of a whole job: facts in, the whole trace of phases and decisions out.

A script in `coordination/` begins with the job's `config` and then has one event per `>` line; the lines below each are
the trace that `decide` gives. Events: `join NODE`, `failing NODE [consequence]`, `ready NODE OUTCOME [id=]`,
`leave NODE REASON`, `confirm NODE…` (they have read the last `Prepare`), `seat_dead RANK STATUS [round=] [store=]`,
`silent NODE SECONDS`, `tick`, `succeed` (another coordinator goes on from the state document, on a clock of its own),
`move` (the same in another store). `at=` sets the time, `seq=` a fact's number. After a deliberate change rewrite them
all with `ELASTIC_RUN_REWRITE=1` and review the diff.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from elastic_run.core.job.machine import Job, Silent
from elastic_run.core.protocol.messages import (
    SEAT_UNTOLD,
    Failing,
    Foreign,
    Form,
    Join,
    Leave,
    PreviousRound,
    Ready,
    SeatDead,
)

from elastic_run.core.job import formation, job_document, store_change
from elastic_run.core.job import machine as coordination
from elastic_run.core.job.config import Window
from elastic_run.core.job.state import GATHERING
from elastic_run.core.protocol.facts import ErrorCount, NodeEnds, NodeInfo, StoreAddress, StuckRank
from tests.support.configs import plain_config

if TYPE_CHECKING:
    from elastic_run.core.job.apply_facts import Event

SCRIPTS = sorted((Path(__file__).parent / "coordination").glob("*.txt"))
#: What another node's clock shows more than the one before.
_OTHER_CLOCK = 1000.0
#: The job's incarnation.
_HERE = "here"
_REPORT = ("error", "exit_code", "severity", "signature", "is_deterministic", "uptime", "summary")


def _value(text: str) -> Any:  # noqa: ANN401 - whatever a script says
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
        self.job = replace(coordination.begin(), incarnation=_HERE)
        self.config = plain_config()
        self.now = 0.0
        self.offset = 0.0
        self.lines: list[str] = []
        self._sequences: dict[str, int] = {}
        self._ports: dict[str, int] = {}
        self._round_ids: dict[int, str] = {}

    def play(self, script: str) -> str:
        """Return the script with the trace of today."""
        for line in script.splitlines():
            if line.startswith("    "):
                continue
            self.lines.append(line)
            if line.startswith("config"):
                self.config = plain_config(**_split(line.split()[1:])[1])
            elif line.startswith("> "):
                self._step(*_split(line[2:].split()))
        return "\n".join(self.lines) + "\n"

    def _step(self, words: list[str], values: dict[str, Any]) -> None:
        self.now = float(values.pop("at", self.now))
        if words[0] in ("succeed", "failover"):
            self._succeed(is_moved=words[0] == "failover")
        events: list[Event] = []
        if words[0] == "confirm":
            events = [self._confirm(node) for node in words[1:]]
        elif words[0] not in ("succeed", "failover", "tick"):
            events = [self._event(words, values)]
        step = coordination.decide(self.job, events, now=self._clock, jitter=0.5)
        decisions = []
        while step.decision is not None:
            decisions.append(_describe(step))
            step = coordination.decide(replace(step.job, slot=step.job.slot + 1), (), now=self._clock, jitter=0.5)
        self.job = step.job
        self.lines.append("  ".join([f"    {self.job.phase}", *decisions]))
        self._round_ids[self.job.round] = self.job.round_id
        if any(decision.startswith("Form") for decision in decisions):
            self.lines += _describe_places(self.job)
        wake = coordination.next_at(self.job)
        if wake is not None:
            self.lines.append(f"      wakes at {wake - self.offset:g}")

    @property
    def _clock(self) -> float:
        return self.now + self.offset

    def _succeed(self, *, is_moved: bool) -> None:
        document = job_document.job_to_document(self.job, self._clock)
        self.offset += _OTHER_CLOCK
        self.job = job_document.job_from_document(document, self._clock)
        self.job = replace(self.job, term=self.job.term + 1, slot=self.job.slot + 1)
        if is_moved:
            self.job = store_change.move(self.job, self._clock)

    def _event(self, words: list[str], values: dict[str, Any]) -> Event:  # noqa: PLR0911 - one per kind
        kind, node = words[0], words[1]
        if kind == "seat_dead":
            return self._seat_dead(int(node), words[2], values)
        if kind == "silent":
            return Silent(node, float(words[2]))
        self._sequences[node] = sequence = values.pop("seq", self._sequences.get(node, 0) + 1)
        number = values.pop("round", self.job.round)
        round_id = values.pop("id", self._find_round_id(number))
        if kind == "join":
            return self._join(node, sequence, values)
        if kind == "failing":
            return Failing(node, sequence, number, round_id, "consequence" in words)
        if kind == "leave":
            return Leave(node, sequence, words[2], values.get("detail", ""))
        if kind == "foreign":
            return Foreign(node, sequence, values["protocol"])
        report = {name: values[name] for name in _REPORT if name in values} or None
        verdict, detail = values.get("verdict", ""), values.get("detail", "")
        ends = _node_ends(values)
        return Ready(
            node, sequence, number, round_id, words[2], self._store_address(node), report, verdict, detail, ends
        )

    def _confirm(self, node: str) -> Event:
        """Let a node that waits say that it has read the last `Prepare`."""
        join = self._event(["join", node], {})
        assert isinstance(join, Join)
        return replace(join, prepared=self.job.preparation)

    def _seat_dead(self, rank: int, status: str, values: dict[str, Any]) -> SeatDead:
        number = values.get("round", self.job.round)
        store_id = values.get("store", "")
        if status == SEAT_UNTOLD:
            return SeatDead(values["node"], "", "", 0, rank, status, store_id)
        return SeatDead(values.get("node", ""), self._find_round_id(number), _HERE, number, rank, status, store_id)

    def _find_round_id(self, number: int) -> str:
        """Return the id of a round, of this log's where it has formed one of that number."""
        return self._round_ids.get(number, f"{number}/elsewhere")

    def _store_address(self, node: str) -> StoreAddress:
        self._ports[node] = self._ports.get(node, 0) + 1
        return StoreAddress(node, self._ports[node])

    def _join(self, node: str, sequence: int, values: dict[str, Any]) -> Join:
        node_info = NodeInfo(
            node,
            1,
            values.pop("nproc", 1),
            values.pop("role", "default"),
            values.pop("prefers", None),
            serves_store=values.pop("serves", False),
            script=values.pop("script", ""),
            has_fixed_rank=values.pop("fixed", False),
        )
        last = None
        incarnation = values.pop("incarnation", _HERE)
        if "last" in values:
            number = values.pop("last")
            last = PreviousRound(
                self._find_round_id(number),
                number,
                values.pop("rank"),
                values.pop("nodes"),
                values.pop("restarts", 0),
                incarnation,
            )
        seen, heard = values.pop("seen", self.job.slot), values.pop("highest_round", 0)
        has_left = values.pop("left", False)
        config, address = replace(self.config, **values), self._store_address(node)
        return Join(node, sequence, node_info, config, address, seen, last, heard, has_left=has_left)


def _describe(step: coordination.Step) -> str:
    decision = step.decision
    assert decision is not None
    shown = []
    for name in type(decision).__slots__:
        value = getattr(decision, name)
        if name == "attempts":
            value = [attempt.get("signature") for attempt in value]
        is_default = value in ("", (), [], None) or (name, value) == ("nodes", 0)
        if name not in ("term", "incarnation") and not is_default:
            shown.append(f"{name}={value!r}")
    return f"{type(decision).__name__}({', '.join(shown)})"


def _describe_places(job: Job) -> list[str]:
    places = formation.assign(job)
    lines = []
    for node, place in places.items():
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


def test_every_transition_is_told() -> None:
    """Every move between phases that the table allows is seen in some scenario, at the end of a step."""
    seen = set()
    for path in SCRIPTS:
        phase = GATHERING
        for line in path.read_text(encoding="utf-8").splitlines():
            words = line.split()
            if line.startswith("    ") and not line.startswith("      "):
                kind = words[1].partition("(")[0] if len(words) > 1 else None
                seen.add((phase, kind))
                phase = words[0]
            elif line.startswith("config"):
                phase = GATHERING
    allowed = {(phase, None if kind is None else kind.__name__) for phase, kind in coordination.TRANSITIONS}
    assert allowed <= seen


def test_a_step_that_is_not_in_the_table_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision that leads to a phase which the table does not name is refused."""
    monkeypatch.setattr(coordination, "TRANSITIONS", {**coordination.TRANSITIONS, ("gathering", Form): ()})
    player = Player()
    with pytest.raises(coordination.IllegalTransitionError, match="Form led from gathering to running"):
        player.play("config min_nodes=1 max_nodes=1\n> join a\n")
