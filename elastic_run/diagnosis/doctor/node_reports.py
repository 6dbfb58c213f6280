"""Findings from the reports of all nodes of a job. Pure."""

from __future__ import annotations

from collections import Counter

from elastic_run.diagnosis.doctor.findings import PROBLEM, Finding, problem, warning
from elastic_run.records import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

#: Seconds between clocks, and the share of the median rate, from which on a node is named.
_CLOCKS = 10.0
_SLOW = 0.5
_MEGABYTE = 1e6
#: Pairs that are named one by one.
_PAIRS = 4


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The report of one node."""

    host: str  # The node's name
    facts: Mapping[str, str] = field(default_factory=dict)  # Versions, by name
    clock: float = 0.0  # The node's time of day, in seconds since 1970, when all nodes had met
    findings: Sequence[Finding] = ()  # The findings on this node alone
    #: Reasons why other nodes can't be reached by TCP, by rank
    failures: Mapping[int, str] = field(default_factory=dict)
    heard: frozenset[int] = frozenset()  # Ranks whose datagrams have come
    rate: float = 0.0  # Bytes per second to the next node; 0 if it was not measured
    reduction: float | str = 0.0  # Seconds of the all-reduce, or the reason why it failed


def check_node_reports(nodes: Sequence[NodeReport]) -> list[Finding]:
    """Return the findings on the nodes and between them, problems first."""
    found = [*_check_pairs(nodes), *_check_versions(nodes), *_check_clocks(nodes)]
    found += [*_check_rates(nodes), *_check_reduction(nodes), *_merge_own(nodes)]
    return sorted(found, key=lambda finding: finding.severity != PROBLEM)


def describe_network(nodes: Sequence[NodeReport]) -> dict[str, str]:
    """Return the measurements between the nodes, by name."""
    count = len(nodes) * (len(nodes) - 1) // 2
    facts = {"pairs": str(count)}
    rates = [node.rate for node in nodes if node.rate]
    if rates:
        facts["MB/s"] = f"{min(rates) / _MEGABYTE:.0f} to {max(rates) / _MEGABYTE:.0f}"
    seconds = [node.reduction for node in nodes if isinstance(node.reduction, float) and node.reduction]
    if seconds:
        facts["all-reduce of 4 MB"] = f"{max(seconds) * 1000:.0f} ms"
    return facts


def _check_pairs(nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    """Name the nodes that reach no other, then each pair that is left, with its direction."""
    others = len(nodes) - 1
    remedy = "open all TCP ports between the nodes: workers connect to each other at random ports"
    lonely = {
        rank
        for rank, node in enumerate(nodes)
        if others > 1
        and sum(rank in other.failures or one in node.failures for one, other in enumerate(nodes)) == others
    }
    for rank in sorted(lonely):
        what = f"{nodes[rank].host} and the other nodes can't reach each other, though all of them have met"
        yield problem(what, _describe_reasons(nodes[rank].failures.values()), remedy)
    broken = [
        (one, other)
        for one in range(len(nodes))
        for other in range(one + 1, len(nodes))
        if not lonely & {one, other} and (other in nodes[one].failures or one in nodes[other].failures)
    ]
    for one, other in broken[:_PAIRS]:
        yield problem(*_describe_pair(nodes, one, other), remedy)
    if len(broken) > _PAIRS:
        yield problem(f"{len(broken) - _PAIRS} more pairs can't reach each other", "", remedy)


def _describe_pair(nodes: Sequence[NodeReport], one: int, other: int) -> tuple[str, str]:
    first, second = nodes[one].host, nodes[other].host
    there, back = one in nodes[other].heard, other in nodes[one].heard
    if there != back:
        source, target = (second, first) if there else (first, second)
        return f"packets from {source} to {target} get lost", f"those from {target} to {source} arrive"
    tries = ((first, second, nodes[one].failures.get(other)), (second, first, nodes[other].failures.get(one)))
    evidence = "; ".join(f"{source} to {target}: {reason or 'connects'}" for source, target, reason in tries)
    failed = [(source, target) for source, target, reason in tries if reason]
    if len(failed) == 1:
        return f"{failed[0][0]} can't connect to {failed[0][1]}", evidence
    return f"{first} and {second} can't reach each other", evidence


def _describe_reasons(reasons: object) -> str:
    return ", ".join(sorted(set(reasons))) if isinstance(reasons, type({}.values())) else ""


def _check_versions(nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    """Name the nodes that have another version of something than most nodes."""
    for name in nodes[0].facts:
        versions = [node.facts.get(name, "?") for node in nodes]
        usual, count = Counter(versions).most_common(1)[0]
        strays = [f"{node.host} {version}" for node, version in zip(nodes, versions, strict=True) if version != usual]
        if strays:
            what = f"{name} is not the same on all nodes: {', '.join(strays[:_PAIRS])}, but {usual} on {count}"
            package = "elastic-run" if name == "elastic-run" else name.lower()
            remedy = f"install the same version everywhere: pip install {package}=={usual}"
            if name == "Python":
                remedy = f"use Python {usual} on all nodes, best from one shared environment or one image"
            yield problem(what, "", remedy)


def _check_clocks(nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    clocks = sorted((node.clock, node.host) for node in nodes)
    (early, slow), (late, fast) = clocks[0], clocks[-1]
    if late - early > _CLOCKS:
        what = f"the clocks of {slow} and {fast} are {late - early:.0f} s apart: logs can't be compared"
        yield warning(
            what, "elastic-run itself does not compare clocks", "timedatectl set-ntp true, or chronyc makestep"
        )


def _check_rates(nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    rates = sorted(node.rate for node in nodes)
    median = rates[len(rates) // 2]
    for rank, node in enumerate(nodes):
        if median and node.rate < _SLOW * median:
            target = nodes[(rank + 1) % len(nodes)].host
            what = f"{node.host} sends {node.rate / _MEGABYTE:.0f} MB/s to {target}, less than half of the others"
            evidence = f"the median is {median / _MEGABYTE:.0f} MB/s"
            yield warning(what, evidence, "compare speed and errors of the links: ethtool eth0; ip -s link")


def _check_reduction(nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    failed = [(node.host, node.reduction) for node in nodes if isinstance(node.reduction, str)]
    if failed:
        hosts = ", ".join(host for host, _ in failed[:_PAIRS])
        remedy = (
            "export GLOO_SOCKET_IFNAME=eth0 and NCCL_SOCKET_IFNAME=eth0 on all nodes, with the interface of the network"
        )
        yield problem(f"an all-reduce of all nodes fails on {hosts}", failed[0][1], remedy)


def _merge_own(nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    """Put the hosts' names in front of their own findings; a finding of several hosts is shown once."""
    hosts: dict[Finding, list[str]] = {}
    for node in nodes:
        for finding in node.findings:
            hosts.setdefault(finding, []).append(node.host)
    for finding, names in hosts.items():
        where = ", ".join(names[:_PAIRS]) + (f" and {len(names) - _PAIRS} more" if len(names) > _PAIRS else "")
        yield Finding(finding.severity, f"{where}: {finding.what}", finding.evidence, finding.remedy)
