"""Findings of the analysis of dumps, and the words for them: the cause in the first line.

The words are for users who have never seen a flight recorder.
"""

from __future__ import annotations

from elastic_run.records import dataclass
from elastic_run.report.text import count, ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.diagnosis.dumps import Collective

#: Kinds of findings, the likelier cause first.
DIFFERENT_CALLS = "different_calls"
NOT_JOINED = "not_joined"
NO_PARTNER = "no_partner"
DIFFERENT_ORDER = "different_order"
NOT_STARTED = "not_started"
NO_DUMP = "no_dump"
ALONE = "alone"
UNFINISHED = "unfinished"
BEHIND = "behind"
KINDS = (DIFFERENT_CALLS, DIFFERENT_ORDER, NOT_JOINED, NO_PARTNER, NOT_STARTED, NO_DUMP, ALONE, BEHIND, UNFINISHED)
#: Kinds without ranks at which the cause lies.
WITHOUT_RANKS = (ALONE, UNFINISHED)


@dataclass(frozen=True, slots=True)
class Finding:
    """A reason why the ranks of a group do not go on."""

    kind: str  # One of the kinds above
    group: str  # Name of the process group
    description: str  # Description of the process group, or ""
    members: tuple[int, ...]  # Ranks of the group that are known
    operation: str  # The operation, or "" where it is unknown
    sequence: int  # Its number in the group
    ranks: tuple[int, ...]  # The ranks at which the cause lies
    waiting: tuple[int, ...]  # The ranks that wait for them
    where: str = ""  # Where the waiting ranks are in the user's code, or ""
    difference: str = ""  # For different calls: the operation, the sizes or the types
    #: For different calls, and for a different order: ranks, and the collective that these ranks call
    calls: tuple[tuple[tuple[int, ...], Collective], ...] = ()
    last: tuple[tuple[int, Collective], ...] = ()  # The last collective of each of `ranks`, if it has one
    behind: tuple[tuple[int, int], ...] = ()  # For each of `ranks`, how many collectives its peers are ahead


@dataclass(frozen=True, slots=True)
class Analysis:
    """The findings from the dumps of a job."""

    findings: tuple[Finding, ...]  # The cause first, then the findings that do not follow from it
    consequences: tuple[Finding, ...]  # Findings that follow from those
    ranks: tuple[int, ...]  # Ranks that have a dump
    absent: tuple[int, ...]  # Ranks of a group that have none


#: Lines on the last collectives of ranks, and shapes of a call, that are shown.
_MOST_LAST = 3
_MOST_SHAPES = 2
_RULES = {
    DIFFERENT_CALLS: "all ranks of a group have to call the same operations in the same order",
    DIFFERENT_ORDER: "call the collectives of different groups in the same order on all ranks",
}


# --- words ------------------------------------------------------------------------------------------------------------
def first_line(found: Analysis) -> str:
    """Return the cause in one sentence, or "" if there is none."""
    return cause_line(found.findings[0]) if found.findings and found.findings[0].kind != UNFINISHED else ""


def cause_line(finding: Finding) -> str:
    """Return one finding in one sentence."""
    return _SENTENCES[finding.kind](finding)


def detail_lines(finding: Finding) -> list[str]:
    """Return the details of a finding, a sentence in each line."""
    lines = []
    behind = dict(finding.behind)
    for rank, call in finding.last[:_MOST_LAST]:
        missing = f", {count(behind[rank], 'collective')} behind" if behind.get(rank, 0) > 1 else ""
        lines.append(f"rank {rank}'s last: {_call(call)}{_place(call.where)}{missing}")
    without = [rank for rank in finding.ranks if rank not in dict(finding.last)]
    if finding.kind == NOT_JOINED and without:
        lines.append(f"{ranks(without)} called no collective at all")
    if len(finding.last) > _MOST_LAST:
        lines.append(f"... ({len(finding.last)} ranks in all)")
    if finding.kind in (DIFFERENT_CALLS, DIFFERENT_ORDER):
        lines += [f"{ranks(who)}: {_difference(finding, call)}{_place(call.where)}" for who, call in finding.calls]
    if finding.kind in _RULES:
        lines.append(_RULES[finding.kind])
    return lines


def _not_joined(finding: Finding) -> str:
    wait = f", in which {ranks(finding.waiting)} {_verb(finding.waiting, 'wait')}" if finding.waiting else ""
    return f"{ranks(finding.ranks)} did not join {_operation(finding)}{wait}{_brackets(finding.where)}"


def _behind(finding: Finding) -> str:
    return f"{ranks(finding.ranks)} had not yet joined {_operation(finding)}; no rank waited in it"


def _no_partner(finding: Finding) -> str:
    (rank,), (other,) = finding.waiting, finding.ranks
    opposite = "recv from" if finding.operation == "send" else "send to"
    way = "to" if finding.operation == "send" else "from"
    waits = f"rank {rank} waits in {finding.operation} {way} rank {other}{_brackets(finding.where)}"
    return f"rank {other} did not call {opposite} rank {rank} in {_group(finding)}: {waits}"


def _different_calls(finding: Finding) -> str:
    (most, expected), (who, found) = finding.calls[:2]
    called = _difference(finding, found), _difference(finding, expected)
    return (
        f"{ranks(who)} {_verb(who, 'call')} {called[0]} as collective number {finding.sequence} of {_group(finding)}, "
        f"{ranks(most)} {_verb(most, 'call')} {called[1]}"
    )


def _different_order(finding: Finding) -> str:
    if finding.waiting:
        elsewhere = [call for who, call in finding.calls if set(finding.ranks) <= set(who)]
        where = f": {ranks(finding.ranks)} {_verb(finding.ranks, 'wait')} in {_call(elsewhere[0])}" if elsewhere else ""
        return f"{_not_joined(finding)}{where}"
    waits = [f"{ranks(who)} {_verb(who, 'wait')} in {_call(call)}" for who, call in finding.calls[:2]]
    return f"{ranks(finding.ranks)} wait for each other in different groups: {', '.join(waits)}"


def _not_started(finding: Finding) -> str:
    who = ranks(finding.ranks)
    return (
        f"{who} called {_operation(finding)}, but the GPU of {who} has not begun it: "
        f"an earlier kernel hangs there; {ranks(finding.waiting)} {_verb(finding.waiting, 'wait')}"
    )


def _no_dump(finding: Finding) -> str:
    wait = f"{ranks(finding.waiting)} {_verb(finding.waiting, 'wait')} in {_operation(finding)}"
    return f"{wait}{_brackets(finding.where)}; there is no dump of {ranks(finding.ranks)}"


def _alone(finding: Finding) -> str:
    place = _brackets(finding.where)
    return f"{ranks(finding.waiting)} waits in {_operation(finding)}{place}; the dumps do not list that group's ranks"


def _unfinished(finding: Finding) -> str:
    return f"all ranks of {_group(finding)} are in {_operation(finding)}{_brackets(finding.where)}: no rank is missing"


_SENTENCES = {
    ALONE: _alone,
    BEHIND: _behind,
    DIFFERENT_CALLS: _different_calls,
    DIFFERENT_ORDER: _different_order,
    NOT_JOINED: _not_joined,
    NOT_STARTED: _not_started,
    NO_DUMP: _no_dump,
    NO_PARTNER: _no_partner,
    UNFINISHED: _unfinished,
}


def _verb(numbers: tuple[int, ...], verb: str) -> str:
    return verb if len(numbers) > 1 else f"{verb}s"


def _operation(finding: Finding) -> str:
    return f"{finding.operation or 'collective'} number {finding.sequence} of {_group(finding)}"


def _group(finding: Finding) -> str:
    return _group_name(finding.group, finding.description)


def _group_name(name: str, description: str) -> str:
    shown = "default" if description == "default_pg" else description or name
    return f"group '{shown}'"


def _call(call: Collective) -> str:
    if call.is_p2p:
        source = "any rank" if call.source < 0 else call.source
        return f"{call.operation} {source} to {call.target} of {_group_name(call.group, call.description)}"
    return f"{call.operation} number {call.sequence} of {_group_name(call.group, call.description)}"


def _difference(finding: Finding, call: Collective) -> str:
    """Return a call: its operation, with sizes and types only if these differ."""
    if finding.difference == "sizes":
        return f"{call.operation} of {_shapes(call)}"
    if finding.difference == "types":
        return f"{call.operation} of {', '.join(call.input_types or call.output_types)}"
    return call.operation if finding.kind == DIFFERENT_CALLS else _call(call)


def _shapes(call: Collective) -> str:
    shapes = call.input_sizes or call.output_sizes
    shown = [f"[{', '.join(map(str, shape))}]" for shape in shapes[:_MOST_SHAPES]]
    if len(shapes) > _MOST_SHAPES:
        shown.append(f"... ({len(shapes)} tensors)")
    return " ".join(shown) or "no tensor"


def _place(where: str) -> str:
    return f", at {where}" if where else ""


def _brackets(where: str) -> str:
    return f" ({where.partition(' in ')[0]})" if where else ""
