"""The program that `elastic-run doctor` starts on each node, as the job's only worker there.

The launcher has brought the nodes together; they talk through the workers' store. Each node reads the reports of all
nodes and writes the same result. A node that is lost during the checks is a finding of the others.
Each node listens at one TCP port while the nodes examine each other.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from elastic_run.diagnosis.doctor_report import (
    PROBLEM,
    Finding,
    describe_findings,
    problem,
    read_findings,
    warning,
)
from elastic_run.records import dataclass, field
from elastic_run.rendezvous.addresses import find_local_address
from elastic_run.store.client import StoreClient
from elastic_run.store.connecting import connect_once
from elastic_run.store.errors import StoreConnectionError, StoreError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

#: Seconds: to meet in the store, for one connection, of sending, for the all-reduce.
_TO_MEET, _TO_CONNECT, _OF_SENDING, _TO_REDUCE = 60.0, 3.0, 0.5, 30.0
_CHUNK = bytes(1 << 20)


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The report of one node."""

    host: str  # The node's name
    facts: Mapping[str, str] = field(default_factory=dict)  # Versions, by name
    clock: float = 0.0  # The node's time of day, in seconds since 1970, when all nodes had met
    findings: Sequence[Finding] = ()  # The findings on this node alone
    #: Reasons why other nodes can't be reached by TCP, by rank
    failures: Mapping[int, str] = field(default_factory=dict)
    rate: float = 0.0  # Bytes per second to the next node; 0 if it was not measured
    reduction: float | str = 0.0  # Seconds of the all-reduce, or the reason why it failed


# --- the examination --------------------------------------------------------------------------------------------------
def examine(own: dict[str, Any], store: StoreClient, rank: int, size: int) -> list[NodeReport]:
    """Examine the network, and return the reports of all nodes; `own` has the findings on this node alone."""

    def share(name: str, value: object) -> list[Any]:
        """Share a value with the other nodes, and return the values of all nodes by rank."""
        store.set(f"doctor/{name}/{rank}", json.dumps(value))
        keys = [f"doctor/{name}/{each}" for each in range(size)]
        store.wait(keys, _TO_MEET)
        return [json.loads(text) for text in store.multi_get(keys)]

    address = find_local_address(store.host, store.port, _TO_CONNECT)
    has_torch = not own["facts"]["torch"].startswith("(")
    places = share("places", [address, serve(address, size), has_torch])
    clock = time.time()
    others = [each for each in range(size) if each != rank]
    with ThreadPoolExecutor(16) as threads:
        tries = threads.map(lambda each: _try_connection(*places[each][:2]), others)
        failures = {each: reason for each, reason in zip(others, tries, strict=True) if reason}
    rate = 0.0
    reduction: float | str = 0.0
    if not any(share("failures", len(failures))):
        host, port, *_ = places[(rank + 1) % size]
        rate = measure_rate(host, port, _OF_SENDING)
        share("measured", rank)
        if all(place[2] for place in places):
            reduction = _reduce_in_time(rank, size)
    found = {"clock": clock, "failures": list(failures.items()), "rate": rate, "reduction": reduction}
    reports = share("reports", {**found, "host": own["hosts"][0], "facts": own["facts"], "findings": own["findings"]})
    share("read", rank)  # the host of the store stays until then
    return [
        NodeReport(**{**each, "failures": dict(each["failures"]), "findings": read_findings(each)}) for each in reports
    ]


def serve(address: str, backlog: int) -> int:
    """Take connections from now on, and throw their bytes away; return the port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.create_server((address, 0), family=family, backlog=max(backlog, 1))

    def accept() -> None:
        while True:
            with suppress(OSError):
                threading.Thread(target=_drain, args=server.accept()[:1], daemon=True).start()

    threading.Thread(target=accept, name="doctor's port", daemon=True).start()
    return int(server.getsockname()[1])


def _drain(connection: socket.socket) -> None:
    with connection, suppress(OSError):
        while connection.recv(len(_CHUNK)):
            pass
        connection.send(b"\0")  # all of it has come


def _try_connection(host: str, port: int) -> str:
    """Connect once; returns "" or why that is not possible, one of the words of `store.errors`."""
    try:
        connect_once(host, port, _TO_CONNECT, dark_after=_TO_CONNECT).close()
    except StoreConnectionError as error:
        return error.reason
    return ""


def measure_rate(host: str, port: int, seconds: float) -> float:
    """Send for some time, and return the bytes per second that have arrived; 0 where the connection broke."""
    try:
        with connect_once(host, port, seconds * 5, dark_after=seconds * 5) as connection:
            connection.settimeout(seconds * 5)
            sent, start = 0, time.monotonic()
            while time.monotonic() < start + seconds:
                connection.sendall(_CHUNK)
                sent += len(_CHUNK)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)
            return sent / (time.monotonic() - start)
    except (OSError, StoreConnectionError):
        return 0.0


def _reduce_in_time(rank: int, size: int) -> float | str:
    """Sum up a tensor of all nodes; returns the seconds, or why that failed. A hang is a failure."""
    done: list[float | str] = []
    thread = threading.Thread(target=lambda: done.append(_reduce(rank, size)), name="all-reduce", daemon=True)
    thread.start()
    thread.join(_TO_REDUCE * 2)
    return done[0] if done else f"no end within {_TO_REDUCE * 2:.0f} s"


def _reduce(rank: int, size: int) -> float | str:
    try:
        import gc
        from datetime import timedelta

        gc.disable()  # its looks at all of torch, during the import and at the end, take a third of this process's time
        import torch
        import torch.distributed as dist

        gc.freeze()
        has_gpus = torch.cuda.is_available()
        dist.init_process_group("nccl" if has_gpus else "gloo", timeout=timedelta(seconds=_TO_REDUCE))
        tensor = torch.ones(1_000_000, device="cuda:0" if has_gpus else "cpu")
        dist.all_reduce(tensor)
        start = time.monotonic()
        dist.all_reduce(tensor)
        total = float(tensor[-1].item())
        seconds = time.monotonic() - start
        dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001 - whatever torch raises is the finding
        return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    return seconds if total == float(size * size) else f"rank {rank} got a wrong sum, {total}"


# --- the findings from all reports ------------------------------------------------------------------------------------
#: Seconds between clocks, and the share of the median rate, from which on a node is named.
_CLOCKS = 10.0
_SLOW = 0.5
_MEGABYTE = 1e6
#: Pairs that are named one by one.
_PAIRS = 4


def check_node_reports(nodes: Sequence[NodeReport]) -> list[Finding]:
    """Return the findings on the nodes and between them, problems first."""
    found = [*_check_pairs(nodes), *_check_versions(nodes), *_check_clocks(nodes)]
    found += [*_check_rates(nodes), *_check_reduction(nodes), *_merge_own(nodes)]
    return sorted(found, key=lambda finding: finding.severity != PROBLEM)


def describe_network(nodes: Sequence[NodeReport]) -> dict[str, str]:
    """Return the measurements between the nodes, by name."""
    facts = {"pairs": str(len(nodes) * (len(nodes) - 1) // 2)}
    if rates := [node.rate for node in nodes if node.rate]:
        facts["MB/s"] = f"{min(rates) / _MEGABYTE:.0f} to {max(rates) / _MEGABYTE:.0f}"
    if seconds := [node.reduction for node in nodes if isinstance(node.reduction, float) and node.reduction]:
        facts["all-reduce of 4 MB"] = f"{max(seconds) * 1000:.0f} ms"
    return facts


def _check_pairs(nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    """Name the nodes that reach no other, then each pair that is left."""
    ranks = range(len(nodes))
    broken = [
        (one, other)
        for one in ranks
        for other in ranks[one + 1 :]
        if other in nodes[one].failures or one in nodes[other].failures
    ]
    remedy = "open all TCP ports between the nodes: workers connect to each other at random ports"
    lonely = {rank for rank in ranks if 1 < sum(rank in pair for pair in broken) == len(nodes) - 1}
    for rank in sorted(lonely):
        what = f"{nodes[rank].host} and the other nodes can't reach each other, though all of them have met"
        yield problem(what, ", ".join(sorted(set(nodes[rank].failures.values()))), remedy)
    broken = [pair for pair in broken if not lonely.intersection(pair)]
    for one, other in broken[:_PAIRS]:
        yield problem(*_describe_pair(nodes, one, other), remedy)
    if len(broken) > _PAIRS:
        yield problem(f"{len(broken) - _PAIRS} more pairs can't reach each other", "", remedy)


def _describe_pair(nodes: Sequence[NodeReport], one: int, other: int) -> tuple[str, str]:
    first, second = nodes[one].host, nodes[other].host
    tries = ((first, second, nodes[one].failures.get(other)), (second, first, nodes[other].failures.get(one)))
    evidence = "; ".join(f"{source} to {target}: {reason or 'connects'}" for source, target, reason in tries)
    failed = [(source, target) for source, target, reason in tries if reason]
    if len(failed) == 1:
        return f"{failed[0][0]} can't connect to {failed[0][1]}", evidence
    return f"{first} and {second} can't reach each other", evidence


def _check_versions(nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    """Name the nodes that have another version of something than most nodes."""
    for name in nodes[0].facts:
        versions = [node.facts.get(name, "?") for node in nodes]
        usual, count = Counter(versions).most_common(1)[0]
        strays = [f"{node.host} {version}" for node, version in zip(nodes, versions, strict=True) if version != usual]
        if strays:
            what = f"{name} is not the same on all nodes: {', '.join(strays[:_PAIRS])}, but {usual} on {count}"
            remedy = f"install the same version everywhere: pip install {name.lower()}=={usual}"
            if name == "Python":
                remedy = f"use Python {usual} on all nodes, best from one shared environment or one image"
            yield problem(what, "", remedy)


def _check_clocks(nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    clocks = sorted((node.clock, node.host) for node in nodes)
    (early, slow), (late, fast) = clocks[0], clocks[-1]
    if late - early > _CLOCKS:
        what = f"the clocks of {slow} and {fast} are {late - early:.0f} s apart: logs can't be compared"
        remedy = "timedatectl set-ntp true, or chronyc makestep"
        yield warning(what, "elastic-run itself does not compare clocks", remedy)


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
        names = "GLOO_SOCKET_IFNAME=eth0 and NCCL_SOCKET_IFNAME=eth0"
        remedy = f"export {names} on all nodes, with the interface of the network"
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


def main() -> None:
    """Run this node's part, and write the result beside the file of its own findings."""
    path = sys.argv[1]
    with open(path, encoding="utf-8") as file:
        own = json.load(file)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        with StoreClient(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), _TO_MEET) as store:
            reports = examine(own, store, rank, size)
        facts = {**own["facts"], **describe_network(reports)}
        result = describe_findings([report.host for report in reports], check_node_reports(reports), facts)
    except (StoreError, OSError) as error:
        what = f"{own['hosts'][0]} has met the other nodes, but lost them or reaches no worker's port"
        remedy = "look at the doctor's report on the other nodes; open all TCP ports between the nodes"
        result = describe_findings(own["hosts"], [problem(what, str(error), remedy), *read_findings(own)], own["facts"])
    with open(f"{path}.result", "w", encoding="utf-8") as file:
        json.dump({**result, "rank": rank}, file)


if __name__ == "__main__":
    main()
