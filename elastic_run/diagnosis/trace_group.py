"""The first finding in one process group: a rank that did not join a collective, ranks that differ, a lone send.

Pure. All ranks of a group number its collectives alike, so a rank with a lower last number than its peers has not
joined the next collective. A rank is unknown if it has no dump, or if its ring has overwritten all its collectives of
the group. A rank without a dump is named only if every known rank has joined.

Ranks of a group have to call the same operation with the same sizes and types. In some operations sizes may differ, so
they are not compared: `all_to_all`, the tensors of the root in `gather` and `scatter`, coalesced operations of several
tensors.
"""

from __future__ import annotations

from elastic_run.diagnosis.dumps import COMPLETED, STARTED
from elastic_run.diagnosis.trace_findings import (
    ALONE,
    BEHIND,
    DIFFERENT_CALLS,
    NO_DUMP,
    NO_PARTNER,
    NO_SENDER,
    NOT_JOINED,
    NOT_STARTED,
    UNFINISHED,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from elastic_run.diagnosis.dumps import Calls, Collective, Dump
    from elastic_run.diagnosis.trace_findings import Finding, Group

#: Operations whose inputs have the same shape on all ranks.
_SAME_INPUTS = frozenset(
    (
        *("all_reduce", "allreduce_coalesced", "reduce", "_reduce_oop", "broadcast", "_broadcast_oop"),
        *("all_gather", "_all_gather_base", "_allgather_base", "all_gather_into_tensor_coalesced"),
        *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    )
)
#: Operations that fail or hang where element types differ.
_SAME_TYPES = _SAME_INPUTS

#: Kinds of differences.
OPERATION = "operation"
SIZES = "sizes"
TYPES = "types"


def check_group(group: Group, dumps: Mapping[int, Dump]) -> list[Finding]:
    """Return the first finding in the collectives of a group, as later ones follow from it; and those in its sends."""
    return [*_check_collectives(group, dumps), *_check_p2p(group, dumps)]


def _check_collectives(group: Group, dumps: Mapping[int, Dump]) -> list[Finding]:
    if not any(group.calls.values()):
        return []
    if len(group.members) == 1:
        return _alone(group)
    finding = _different_calls(group, dumps) or _not_joined(group, dumps) or _unfinished(group)
    return [] if finding is None else [finding]


def _alone(group: Group) -> list[Finding]:
    """Find a rank that waits in a group whose other members are unknown: gloo's own dumps don't list them."""
    ((rank, by_number),) = group.calls.items()
    number, calls = max(by_number.items())
    if group.is_listed or not _is_open(calls):
        return []
    return [
        group.make_finding(
            ALONE,
            calls[-1].operation,
            number,
            ranks=(),
            waiting=(rank,),
            where=calls[-1].where,
        )
    ]


def _different_calls(group: Group, dumps: Mapping[int, Dump]) -> Finding | None:
    numbers = sorted({number for calls in group.calls.values() for number in calls})
    for number in numbers:
        calls = {rank: each[number] for rank, each in group.calls.items() if number in each}
        sets = _group_equal(calls)
        if len(sets) < 2:  # noqa: PLR2004 - all are equal
            continue
        most, second = sets[0], sets[1]
        is_tie = len(most) == len(second)
        first = calls[most[0]]
        return group.make_finding(
            DIFFERENT_CALLS,
            first[-1].operation,
            number,
            ranks=tuple(sorted(calls)) if is_tie else tuple(sorted(rank for other in sets[1:] for rank in other)),
            waiting=() if is_tie else tuple(rank for rank in most if _waits(dumps[rank], calls[rank])),
            where=_common_place(calls[rank] for rank in most),
            difference=_difference(first, calls[second[0]]),
            calls=tuple((ranks, _differing(calls[ranks[0]], first)) for ranks in sets),
        )
    return None


def _differing(calls: Calls, other: Calls) -> Collective:
    """Return the first of several calls that differs from another rank's, or the last."""
    pairs = zip(calls, other, strict=False)
    return next((mine for mine, theirs in pairs if _difference((mine,), (theirs,))), calls[-1])


def _not_joined(group: Group, dumps: Mapping[int, Dump]) -> Finding | None:
    first = min(number for calls in group.calls.values() for number in calls)
    last = {rank: _last_number(group, dumps, rank, first) for rank in group.members}
    known = {rank: number for rank, number in last.items() if number is not None}
    low, high = min(known.values()), max(known.values())
    number = min((each for calls in group.calls.values() for each in calls if each > low), default=low)
    late = tuple(rank for rank, each in sorted(known.items()) if each < number)
    joined = {rank: group.calls[rank].get(number, ()) for rank in known if rank not in late}
    waiting = tuple(rank for rank, calls in sorted(joined.items()) if calls and _waits(dumps[rank], calls))
    missing = late or tuple(rank for rank in group.members if rank not in dumps)
    if not missing or (not late and not any(_is_open(calls) for calls in joined.values())):
        return None
    kind = NO_DUMP if not late else NOT_JOINED if waiting else BEHIND
    example = next((calls for calls in joined.values() if calls), ())
    ends = [(rank, dumps[rank].collectives[-1]) for rank in late if dumps[rank].collectives]
    return group.make_finding(
        kind,
        example[-1].operation if example else "",
        number,
        ranks=missing,
        waiting=waiting,
        where=_common_place(calls for rank, calls in joined.items() if rank in waiting),
        last=tuple(ends),
        behind=tuple((rank, high - known[rank]) for rank in late),
    )


def _last_number(group: Group, dumps: Mapping[int, Dump], rank: int, first: int) -> int | None:
    """Return the number of a rank's last collective in a group, or None where it is unknown."""
    if group.calls.get(rank):
        return max(group.calls[rank])
    return first - 1 if rank in dumps and dumps[rank].is_whole else None


def _unfinished(group: Group) -> Finding | None:
    """Return a collective that all ranks have joined and that some have not ended."""
    number = max(number for calls in group.calls.values() for number in calls)
    calls = {rank: each[number] for rank, each in group.calls.items() if number in each}
    waiting = tuple(rank for rank, each in calls.items() if _is_open(each))
    if not waiting or len(calls) < len(group.members):
        return None
    started = {rank for rank, each in calls.items() if any(call.state == STARTED for call in each)}
    not_started = tuple(rank for rank in waiting if rank not in started) if started else ()
    return group.make_finding(
        NOT_STARTED if not_started else UNFINISHED,
        calls[waiting[0]][-1].operation,
        number,
        ranks=not_started,
        waiting=tuple(rank for rank in waiting if rank not in not_started),
        where=_common_place(calls[rank] for rank in waiting),
    )


def _is_open(calls: Calls) -> bool:
    return any(call.is_open for call in calls)


def _waits(dump: Dump, calls: Calls) -> bool:
    """Whether a rank waits in calls, or waited until they failed: its last record, not known as a success."""
    is_last = bool(calls) and calls[-1] is dump.collectives[-1]
    return _is_open(calls) or (is_last and calls[-1].state != COMPLETED)


def _common_place(calls: Iterable[Calls]) -> str:
    """Return the place in the code that most of these calls have, or ""."""
    places = [call[-1].where for call in calls if call[-1].where]
    return max(places, key=places.count, default="")


def _difference(one: Calls, other: Calls) -> str:
    """Return how two ranks' calls under one number differ: `OPERATION`, `SIZES` or `TYPES`; "" for not at all."""
    if [call.operation for call in one] != [call.operation for call in other]:
        return OPERATION
    for mine, theirs in zip(one, other, strict=True):
        if mine.operation in _SAME_INPUTS and mine.input_sizes != theirs.input_sizes:
            return SIZES
    for mine, theirs in zip(one, other, strict=True):
        if mine.operation in _SAME_TYPES and set(mine.input_types) != set(theirs.input_types):
            return TYPES
    return ""


def _group_equal(calls: dict[int, Calls]) -> list[tuple[int, ...]]:
    """Return the ranks with equal calls under one number, the largest group first."""
    groups: list[list[int]] = []
    for rank in sorted(calls):
        equal = next((group for group in groups if not _difference(calls[group[0]], calls[rank])), None)
        if equal is None:
            groups.append([rank])
        else:
            equal.append(rank)
    return [tuple(group) for group in sorted(groups, key=lambda group: (-len(group), group))]


def _check_p2p(group: Group, dumps: Mapping[int, Dump]) -> list[Finding]:
    """Find the sends and recvs of a group whose partner has no open call that matches.

    Only open calls are compared: the number of ended calls that a ring still holds differs from rank to rank.
    """
    pending: dict[tuple[int, int, str], list[tuple[int, Collective]]] = {}
    for rank in group.calls:
        for call in dumps[rank].collectives:
            if group.has(call) and call.is_p2p and call.is_open:
                pending.setdefault((call.source, call.target, call.operation), []).append((rank, call))
    from_any = {target: pending.pop((-1, target, "recv"), []) for target in {key[1] for key in pending}}
    findings = []
    for (source, target, operation), calls in sorted(pending.items()):
        opposite = list(pending.get((source, target, "recv" if operation == "send" else "send"), ()))
        while operation == "send" and len(opposite) < len(calls) and from_any[target]:
            opposite.append(from_any[target].pop(0))
        partner = target if operation == "send" else source
        if len(calls) > len(opposite):
            findings.append(_without_partner(group, calls[len(opposite)], partner, dumps))
        elif operation == "send":
            findings += _different_p2p(group, calls, opposite)
    return findings + [_without_sender(group, *calls[0]) for calls in from_any.values() if calls]


def _without_partner(group: Group, waiting: tuple[int, Collective], partner: int, dumps: Mapping[int, Dump]) -> Finding:
    rank, call = waiting
    # The partner's number counts within the group.
    other = group.members[partner] if partner < len(group.members) else partner
    last = dumps[other].collectives[-1:] if other in dumps else ()
    return group.make_finding(
        NO_PARTNER if other in dumps else NO_DUMP,
        call.operation,
        call.sequence,
        ranks=(other,),
        waiting=(rank,),
        where=call.where,
        last=tuple((other, each) for each in last),
    )


def _without_sender(group: Group, rank: int, call: Collective) -> Finding:
    return group.make_finding(
        NO_SENDER,
        call.operation,
        call.sequence,
        ranks=(),
        waiting=(rank,),
        where=call.where,
    )


def _different_p2p(
    group: Group, sends: list[tuple[int, Collective]], receives: list[tuple[int, Collective]]
) -> list[Finding]:
    for (sender, send), (receiver, receive) in zip(sends, receives, strict=False):
        sizes = send.input_sizes != receive.output_sizes
        sent, received = send.input_types or send.output_types, receive.output_types or receive.input_types
        if sizes or set(sent) != set(received):
            return [
                group.make_finding(
                    DIFFERENT_CALLS,
                    send.operation,
                    send.sequence,
                    ranks=(sender, receiver),
                    waiting=(),
                    where=send.where,
                    difference="sizes" if sizes else "types",
                    calls=(((sender,), send), ((receiver,), receive)),
                )
            ]
    return []
