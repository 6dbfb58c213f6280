"""Sends and recvs without a partner, in one process group. Pure."""

from __future__ import annotations

from elastic_run.diagnosis.trace_findings import DIFFERENT_CALLS, NO_DUMP, NO_PARTNER, NO_SENDER, Finding

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.diagnosis.collectives import Collective, Dump
    from elastic_run.diagnosis.trace_findings import Group

__all__ = ["unmatched_p2p"]


def unmatched_p2p(group: Group, dumps: dict[int, Dump]) -> list[Finding]:
    """Find the sends and recvs of a group whose partner has no open call that matches.

    Only open calls are compared: the number of ended calls that a ring still holds differs from rank to rank.

    Args:
        group: The group.
        dumps: The dumps by rank.

    Returns:
        The findings.
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


def _without_partner(group: Group, waiting: tuple[int, Collective], partner: int, dumps: dict[int, Dump]) -> Finding:
    rank, call = waiting
    # The partner's number counts within the group.
    other = group.members[partner] if partner < len(group.members) else partner
    last = dumps[other].collectives[-1:] if other in dumps else ()
    return Finding(
        kind=NO_PARTNER if other in dumps else NO_DUMP,
        group=group.name,
        description=group.description,
        members=group.members,
        operation=call.operation,
        sequence=call.sequence,
        ranks=(other,),
        waiting=(rank,),
        where=call.where,
        last=tuple((other, each) for each in last),
    )


def _without_sender(group: Group, rank: int, call: Collective) -> Finding:
    return Finding(
        kind=NO_SENDER,
        group=group.name,
        description=group.description,
        members=group.members,
        operation=call.operation,
        sequence=call.sequence,
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
                Finding(
                    kind=DIFFERENT_CALLS,
                    group=group.name,
                    description=group.description,
                    members=group.members,
                    operation=send.operation,
                    sequence=send.sequence,
                    ranks=(sender, receiver),
                    waiting=(),
                    where=send.where,
                    difference="sizes" if sizes else "types",
                    calls=(((sender,), send), ((receiver,), receive)),
                )
            ]
    return []
