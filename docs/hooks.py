"""Fills the pages with facts of the code when the site is built: flags, exit codes, the state machine of an agent.

A page asks for them by a line of its own, ``<!-- made from: flags -->``. So the repository holds no generated text that
could be out of date. The drawing is plain SVG: no script, nothing from the network.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from elastic_run.cli.flags import FLAGS
from elastic_run.cli.help import describe_default
from elastic_run.contract import EXIT_CODES
from elastic_run.core.agent import machine as agent_machine
from elastic_run.report.event_log import ALWAYS, EVENTS, OF_WORKER

if TYPE_CHECKING:
    from elastic_run.cli.flags import Flag
    from elastic_run.report.event_log import Field

#: The states that may follow a state and the name of an event.
Steps: TypeAlias = Mapping[tuple[str, str], tuple[str, ...]]

#: A word of code: browsers would break it at each hyphen (`--log-dir`).
_WORD = re.compile(r"<code>([^<\s]{1,34})</code>")
#: Words that are code in the text of a flag: flags, and variables with an underscore.
_CODE = re.compile(r"(?<![\w/-])--?[a-z][\w-]*(?:=[\w:]+)?|\b[A-Z][A-Z\d]*_[A-Z\d_]+\b")
_MARK = re.compile(r"^<!-- made from: (\w+) -->$", re.MULTILINE)

# Sizes of the drawing, in its own units.
_BOX_WIDTH, _BOX_HEIGHT, _GAP, _LANE, _MIDDLE = 150, 36, 64, 110, 400
#: The height of a line of text.
_PITCH = 16


class Edge(NamedTuple):
    """An arrow: between which states, and for which events."""

    start: int
    end: int
    events: list[str]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace each mark by what it names; mkdocs calls this for every page.

    Args:
        markdown: The page as it is written.

    Raises:
        KeyError: A page asks for something that isn't made here.
    """
    makers: dict[str, Callable[[], str]] = {
        "flags": lambda: flags_sections(FLAGS),
        "exit_codes": exit_codes_table,
        "events": events_tables,
        "agent_states": lambda: state_drawing(_read_steps(), "states of an agent"),
        "agent_transitions": lambda: transitions_table(_read_steps()),
    }
    return _MARK.sub(lambda match: makers[match[1]](), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Keep flags, variables and file names in one line; mkdocs calls this for every page.

    Args:
        html: The page's content.
    """
    return _WORD.sub(r'<code class="word">\1</code>', html)


def flags_sections(flags: Sequence[Flag]) -> str:
    """Return the reference of the command line, a section for each flag: in a narrow table words break."""
    parts = ["<!-- Made from elastic_run/cli/flags.py; change it there. -->"]
    for group in dict.fromkeys(flag.group for flag in flags):
        parts += [f"## {group}", *(_flag_section(flag) for flag in flags if flag.group == group)]
    return "\n\n".join(parts) + "\n"


def _flag_section(flag: Flag) -> str:
    default = flag.default_text or f"`{describe_default(flag)}`"
    facts = [f"Default {default}"] if describe_default(flag) else []
    facts += [f"Variable `{flag.variable}`"] * bool(flag.variable)
    facts += ["*Not in torchrun*"] * flag.is_ours
    heading = f"### `{flag.heading}` {{ #{flag.name.strip('-')} }}"
    return "\n\n".join([heading, _CODE.sub(r"`\g<0>`", flag.text), *([" · ".join(facts)] if facts else [])])


def exit_codes_table() -> str:
    """Return the table of exit codes."""
    rows = [f"| {code} | `{name}` | {meaning} |" for code, name, meaning in EXIT_CODES]
    return "\n".join(["| code | verdict | meaning |", "|---|---|---|", *rows])


def events_tables() -> str:
    """Return the schema of the event log: the fields of all lines, then each event with its own."""
    parts = ["### In every line", _fields_table(ALWAYS), "### In every line about a worker", _fields_table(OF_WORKER)]
    for name, kind in EVENTS.items():
        about = " The line is about a worker." if kind.is_of_worker else ""
        parts += [f"### `{name}`", f"{kind.meaning}{about}"]
        parts += [_fields_table(kind.fields)] if kind.fields else []
    return "\n\n".join(parts)


def _fields_table(fields: tuple[Field, ...]) -> str:
    rows = [
        f"| `{field.name}` | {field.type}{' or null' if field.may_be_null else ''} | {field.meaning} |"
        for field in fields
    ]
    return "\n".join(["| field | type | meaning |", "|---|---|---|", *rows])


def _read_steps() -> Steps:
    """Return the states that may follow each state and event of an agent."""
    table = agent_machine.TRANSITIONS
    return {(state, event.__name__): transition.after for (state, event), transition in table.items()}


def transitions_table(steps: Steps) -> str:
    """Return legal steps of a state machine as a table."""
    rows = [f"| {state} | {event} | {' or '.join(after)} |" for (state, event), after in steps.items()]
    return "\n".join(["| in state | on event | goes to |", "|---|---|---|", *rows])


def state_drawing(steps: Steps, label: str) -> str:
    """Return a state machine as SVG: states in a column, arrows on, back on the left, far ahead on the right."""
    states = _states(steps)
    edges = _edges(steps, states)
    near = [edge for edge in edges if edge.end == edge.start + 1]
    ahead = sorted((edge for edge in edges if edge.end > edge.start + 1), key=lambda edge: edge.end - edge.start)
    back = sorted((edge for edge in edges if edge.end < edge.start), key=lambda edge: edge.start - edge.end)
    tops = _tops(len(states), near)
    parts = [_draw_near(edge, tops) for edge in near]
    parts += [_draw_arc(edge, lane, tops, side=1) for lane, edge in enumerate(ahead, 1)]
    parts += [_draw_arc(edge, lane, tops, side=-1) for lane, edge in enumerate(back, 1)]
    parts += [_draw_state(name, top) for name, top in zip(states, tops, strict=True)]
    height = tops[-1] + _BOX_HEIGHT + 10
    head = f'<div class="drawing"><svg viewBox="0 0 800 {height}" role="img" aria-label="{label}">'
    tip = '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    tip += '<path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>'
    style = 'fill="none" stroke="currentColor" font-size="13" font-family="sans-serif"'
    return "\n".join([head, tip, f"<g {style}>", *parts, "</g>", "</svg></div>"])


def _states(steps: Steps) -> list[str]:
    found = dict.fromkeys(state for state, _ in steps)
    found.update(dict.fromkeys(state for after in steps.values() for state in after))
    return list(found)


def _edges(steps: Steps, states: list[str]) -> list[Edge]:
    events: dict[tuple[str, str], list[str]] = {}
    for (state, event), following in steps.items():
        for after in following:
            if after != state:
                events.setdefault((state, after), []).append(event)
    return [Edge(states.index(start), states.index(end), names) for (start, end), names in events.items()]


def _tops(count: int, near: list[Edge]) -> list[int]:
    """Return where each state begins: an arrow to the next state is as long as its events need."""
    events = {edge.start: len(edge.events) for edge in near}
    tops = [10]
    for row in range(count - 1):
        tops.append(tops[-1] + _BOX_HEIGHT + max(_GAP, events.get(row, 0) * _PITCH + 2 * _PITCH))
    return tops


def _draw_state(name: str, top: int) -> str:
    left = _MIDDLE - _BOX_WIDTH // 2
    box = f'<rect x="{left}" y="{top}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="8"/>'
    return box + _text(_MIDDLE, top + _BOX_HEIGHT // 2 + 5, [name], "middle")


def _draw_near(edge: Edge, tops: list[int]) -> str:
    start, end = tops[edge.start] + _BOX_HEIGHT, tops[edge.end]
    line = f'<path d="M{_MIDDLE} {start}V{end}" marker-end="url(#tip)"/>'
    middle = (start + end + _PITCH) // 2 - _PITCH // 2 * (len(edge.events) - 1) - 4
    return line + _text(_MIDDLE + 8, middle, edge.events, "start")


def _draw_arc(edge: Edge, lane: int, tops: list[int], *, side: int) -> str:
    wall = _MIDDLE + side * _BOX_WIDTH // 2
    start, end = tops[edge.start] + _BOX_HEIGHT // 2 + 6, tops[edge.end] + _BOX_HEIGHT // 2 - 6
    far = wall + side * (40 + lane * _LANE)
    curve = f'<path d="M{wall} {start}C{far} {start} {far} {end} {wall} {end}" marker-end="url(#tip)"/>'
    middle = (start + end) // 2 + 4 - _PITCH // 2 * (len(edge.events) - 1)
    return curve + _text((wall + 3 * far) // 4 + side * -6, middle, edge.events, "end" if side > 0 else "start")


def _text(left: int, top: int, lines: list[str], anchor: str) -> str:
    spans = "".join(
        f'<tspan x="{left}" y="{top + _PITCH * row}">{escape(line)}</tspan>' for row, line in enumerate(lines)
    )
    return f'<text text-anchor="{anchor}" fill="currentColor" stroke="none">{spans}</text>'
