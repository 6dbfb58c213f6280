"""Scenario scripts of one agent: events in, the whole trace of states and commands out.

A script in `supervision/` begins with what the agent is and then has one event per `>` line; the lines below each are
the trace that `decide` gives. After a deliberate change rewrite them all with `ELASTIC_RUN_REWRITE=1` and review the
diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_run.core.agent import machine, messages
from elastic_run.core.config import JobConfig
from elastic_run.core.job.restart_policy import CAUSE_WAIT, Failure
from elastic_run.records import replace

SCRIPTS = sorted((Path(__file__).parent / "supervision").glob("*.txt"))
_FAILURE_FIELDS = ("exit_code", "signature", "uptime", "is_deterministic")


def _values(words: list[str]) -> dict[str, object]:
    pairs = (word.split("=", 1) for word in words)
    return {name: _value(text) for name, text in pairs}


def _value(text: str) -> object:
    if text in ("True", "False"):
        return text == "True"
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


def _make_agent(words: list[str]) -> machine.Agent:
    values = _values(words)
    size = values.pop("workers", 2)
    wait_limit = values.pop("wait_limit", CAUSE_WAIT)
    follows_job = values.pop("follows_job", False) is True
    forwarded = values.pop("forward", None)
    assert isinstance(size, int)
    return machine.Agent(
        config=JobConfig(**values),  # type: ignore[arg-type]
        local_world_size=size,
        follows_job=follows_job,
        wait_limit=wait_limit,  # type: ignore[arg-type]
        forwarded=frozenset() if forwarded is None else frozenset({forwarded}),  # type: ignore[arg-type]
    )


def _make_event(name: str, values: dict[str, object]) -> messages.Event:
    kind = getattr(messages, name)
    if name == "GroupGone":
        fields = {field: values.pop(field) for field in _FAILURE_FIELDS if field in values}
        values["failure"] = Failure(**fields) if fields else None  # type: ignore[arg-type]
    if name == "JobOver":
        values = {"finish": messages.Finish(**values)}  # type: ignore[arg-type]
    event = kind(**values)
    assert isinstance(event, messages.Event)
    return event


def _describe(command: messages.Command) -> str:
    names: list[str] = sorted(type(command).__slots__)
    slots = [name for name in names if getattr(command, name) not in ("", None)]
    return f"{type(command).__name__}({', '.join(f'{slot}={getattr(command, slot)!r}' for slot in slots)})"


def _trace(agent: machine.Agent, commands: tuple[messages.Command, ...]) -> str:
    return "  ".join([f"    {agent.state}", *map(_describe, commands)])


def play(script: str) -> str:
    """Return the script with the trace that `decide` gives today."""
    lines: list[str] = []
    agent = None
    now = 0.0
    for line in script.splitlines():
        if line.startswith("    "):
            continue
        lines.append(line)
        if line.startswith("agent"):
            agent, commands = machine.begin(_make_agent(line.split()[1:]))
            lines.append(_trace(agent, commands))
        elif line.startswith("> "):
            assert agent is not None
            name, *words = line[2:].split()
            values = _values(words)
            now = float(values.pop("at", now))  # type: ignore[arg-type]
            try:
                agent, commands = machine.decide(agent, _make_event(name, values), now, 0.5)
                lines.append(_trace(agent, commands))
            except machine.IllegalTransitionError as error:
                lines.append(f"    illegal: {error}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    """The trace of a scenario is the one that was reviewed."""
    script = path.read_text()
    played = play(script)
    if os.environ.get("ELASTIC_RUN_REWRITE"):
        path.write_text(played)
        script = played
    assert played == script


def test_every_transition_is_told() -> None:
    """Every move that the table allows is seen in some scenario."""
    seen = set()
    for path in SCRIPTS:
        state = ""
        event = ""
        for line in path.read_text().splitlines():
            if line.startswith("> "):
                event = line[2:].split()[0]
            elif line.startswith("    ") and not line.startswith("    illegal"):
                after = line.split()[0]
                if event:
                    seen.add((state, event, after))
                state = after
            elif line.startswith("agent"):
                event = ""
    allowed = {
        (state, event.__name__, after)
        for (state, event), transition in machine.TRANSITIONS.items()
        for after in transition.after
    }
    assert allowed <= seen


def test_a_step_that_is_not_in_the_table_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reaction that leads to a state which the table does not name is refused."""
    step = (machine.JOINING, messages.RoundFormed)
    table = machine.TRANSITIONS.copy()
    table[step] = replace(table[step], after=())
    monkeypatch.setattr(machine, "TRANSITIONS", table)
    agent = machine.Agent(config=JobConfig(), local_world_size=1)
    with pytest.raises(machine.IllegalTransitionError, match="from joining to running"):
        machine.decide(agent, messages.RoundFormed(0), 0.0)


def test_news_are_restarts_stops_and_hurry() -> None:
    """Only what the user wants to know while the job goes on is news."""
    agent = machine.Agent(config=JobConfig(), local_world_size=1)
    assert not machine.has_news(agent, agent.replace(state=machine.RUNNING))
    for change in ({"restart_count": 1}, {"signal": 15}, {"is_hurried": True}):
        assert machine.has_news(agent, agent.replace(**change))
