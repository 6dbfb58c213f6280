"""The words for findings: the cause in the first line, for users who have never seen a flight recorder."""

from __future__ import annotations

from elastic_run.diagnosis import trace_findings
from elastic_run.report.text import count, ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.diagnosis.collectives import Collective
    from elastic_run.diagnosis.trace_findings import Analysis, Finding

#: Lines on the last collectives of ranks, and shapes of a call, that are shown.
_MOST_LAST = 3
_MOST_SHAPES = 2
_RULES = {
    trace_findings.DIFFERENT_CALLS: "all ranks of a group have to call the same operations in the same order",
    trace_findings.OTHER_SIZE: "all ranks of a group have to call the same operations with the same sizes",
    trace_findings.DIFFERENT_ORDER: "call the collectives of different groups in the same order on all ranks",
}


def first_line(found: Analysis) -> str:
    """Return the cause in one sentence, or "" if there is none.

    Args:
        found: The analysis.
    """
    return (
        cause_line(found.findings[0]) if found.findings and found.findings[0].kind != trace_findings.UNFINISHED else ""
    )


def cause_line(finding: Finding) -> str:
    """Return one finding in one sentence.

    Args:
        finding: The finding.
    """
    return _SENTENCES[finding.kind](finding)


def detail_lines(finding: Finding) -> list[str]:
    """Return the details of a finding, a sentence in each line.

    Args:
        finding: The finding.
    """
    lines = []
    behind = dict(finding.behind)
    for rank, call in finding.last[:_MOST_LAST]:
        missing = f", {count(behind[rank], 'collective')} behind" if behind.get(rank, 0) > 1 else ""
        lines.append(f"rank {rank}'s last: {_call(call)}{_place(call.where)}{missing}")
    without = [rank for rank in finding.ranks if rank not in dict(finding.last)]
    if finding.kind == trace_findings.NOT_JOINED and without:
        lines.append(f"{_ranks(without)} called no collective at all")
    if len(finding.last) > _MOST_LAST:
        lines.append(f"... ({len(finding.last)} ranks in all)")
    if finding.kind in (trace_findings.DIFFERENT_CALLS, trace_findings.OTHER_SIZE, trace_findings.DIFFERENT_ORDER):
        lines += [f"{_ranks(who)}: {_difference(finding, call)}{_place(call.where)}" for who, call in finding.calls]
    if finding.kind in _RULES:
        lines.append(_RULES[finding.kind])
    return lines


def _not_joined(finding: Finding) -> str:
    wait = f", in which {_ranks(finding.waiting)} {_verb(finding.waiting, 'wait')}" if finding.waiting else ""
    return f"{_ranks(finding.ranks)} did not join {_operation(finding)}{wait}{_brackets(finding.where)}"


def _behind(finding: Finding) -> str:
    return f"{_ranks(finding.ranks)} had not yet joined {_operation(finding)}; no rank waited in it"


def _no_partner(finding: Finding) -> str:
    (rank,), (other,) = finding.waiting, finding.ranks
    opposite = "recv from" if finding.operation == "send" else "send to"
    way = "to" if finding.operation == "send" else "from"
    waits = f"rank {rank} waits in {finding.operation} {way} rank {other}{_brackets(finding.where)}"
    return f"rank {other} did not call {opposite} rank {rank} in {_group(finding)}: {waits}"


def _no_sender(finding: Finding) -> str:
    waits = f"{_ranks(finding.waiting)} waits in recv from any rank of {_group(finding)}{_brackets(finding.where)}"
    return f"{waits}, and no rank waits in a send to it"


def _different_calls(finding: Finding) -> str:
    (most, expected), (who, found) = finding.calls[:2]
    if expected.is_p2p:
        what = f"{_shapes(found)}, but rank {most[0]} sends {_shapes(expected)}"
        return f"rank {who[0]} expects {what} ({finding.difference} differ in {_group(finding)})"
    called = _difference(finding, found), _difference(finding, expected)
    return (
        f"{_ranks(who)} {_verb(who, 'call')} {called[0]} as collective number {finding.sequence} of {_group(finding)}, "
        f"{_ranks(most)} {_verb(most, 'call')} {called[1]}"
    )


def _other_size(finding: Finding) -> str:
    ((peers, call),) = finding.calls
    others = tuple(rank for rank in finding.ranks if rank not in peers)
    called = f"{_ranks(peers)} {_verb(peers, 'call')} {_difference(finding, call)}"
    return (
        f"{called} as collective number {finding.sequence} of {_group(finding)}, {_ranks(others)} expects another size"
    )


def _different_order(finding: Finding) -> str:
    if finding.waiting:
        elsewhere = [call for who, call in finding.calls if set(finding.ranks) <= set(who)]
        where = (
            f": {_ranks(finding.ranks)} {_verb(finding.ranks, 'wait')} in {_call(elsewhere[0])}" if elsewhere else ""
        )
        return f"{_not_joined(finding)}{where}"
    waits = [f"{_ranks(who)} {_verb(who, 'wait')} in {_call(call)}" for who, call in finding.calls[:2]]
    return f"{_ranks(finding.ranks)} wait for each other in different groups: {', '.join(waits)}"


def _not_started(finding: Finding) -> str:
    who = _ranks(finding.ranks)
    return (
        f"{who} called {_operation(finding)}, but the GPU of {who} has not begun it: "
        f"an earlier kernel hangs there; {_ranks(finding.waiting)} {_verb(finding.waiting, 'wait')}"
    )


def _no_dump(finding: Finding) -> str:
    wait = f"{_ranks(finding.waiting)} {_verb(finding.waiting, 'wait')} in {_operation(finding)}"
    return f"{wait}{_brackets(finding.where)}; there is no dump of {_ranks(finding.ranks)}"


def _alone(finding: Finding) -> str:
    place = _brackets(finding.where)
    return f"{_ranks(finding.waiting)} waits in {_operation(finding)}{place}; the dumps do not list that group's ranks"


def _unfinished(finding: Finding) -> str:
    return f"all ranks of {_group(finding)} are in {_operation(finding)}{_brackets(finding.where)}: no rank is missing"


_SENTENCES = {
    trace_findings.ALONE: _alone,
    trace_findings.BEHIND: _behind,
    trace_findings.DIFFERENT_CALLS: _different_calls,
    trace_findings.DIFFERENT_ORDER: _different_order,
    trace_findings.NOT_JOINED: _not_joined,
    trace_findings.NOT_STARTED: _not_started,
    trace_findings.NO_DUMP: _no_dump,
    trace_findings.NO_PARTNER: _no_partner,
    trace_findings.NO_SENDER: _no_sender,
    trace_findings.OTHER_SIZE: _other_size,
    trace_findings.UNFINISHED: _unfinished,
}


def _ranks(numbers: tuple[int, ...] | list[int]) -> str:
    return ranks(numbers)


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
    return call.operation if finding.kind == trace_findings.DIFFERENT_CALLS else _call(call)


def _shapes(call: Collective) -> str:
    shapes = (call.input_sizes if call.operation != "recv" else call.output_sizes) or call.output_sizes
    shown = [f"[{', '.join(map(str, shape))}]" for shape in shapes[:_MOST_SHAPES]]
    if len(shapes) > _MOST_SHAPES:
        shown.append(f"... ({len(shapes)} tensors)")
    return " ".join(shown) or "no tensor"


def _place(where: str) -> str:
    return f", at {where}" if where else ""


def _brackets(where: str) -> str:
    return f" ({where.partition(' in ')[0]})" if where else ""
