"""The program that `elastic-run doctor` starts on each node, as the job's only worker there.

The launcher has brought the nodes together; they talk through the workers' store. Each node reads the reports of all
nodes and writes the same result. A node that is lost during the checks is a finding of the others.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from elastic_run.diagnosis.doctor.finding import Finding, problem
from elastic_run.diagnosis.doctor.network_probe import Listener, measure_rate, try_connection
from elastic_run.diagnosis.doctor.node_reports import NodeReport, describe_network, judge_node_reports
from elastic_run.diagnosis.doctor.report import describe_findings, read_findings
from elastic_run.rendezvous.addresses import find_local_address
from elastic_run.store.errors import StoreError
from elastic_run.store.tcpstore.client import StoreClient

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: Seconds: to meet in the store, for one connection, for a datagram, of sending, for the all-reduce.
_TO_MEET, _TO_CONNECT, _TO_HEAR, _OF_SENDING, _TO_REDUCE = 60.0, 3.0, 0.5, 0.5, 30.0
_THREADS = 16
_FLOATS = 1_000_000


class Probe:
    """One node among the others.

    Args:
        own: The findings on this node alone, as `describe_findings` writes them.
        store: The workers' store.
        rank: This node's rank.
        size: The number of nodes.
    """

    def __init__(self, own: dict[str, Any], store: StoreClient, rank: int, size: int) -> None:
        self._own = own
        self._store = store
        self._rank = rank
        self._size = size
        address = find_local_address(store.host, store.port, _TO_CONNECT)
        self._listener = Listener(address, size)
        self._address = address

    def run(self) -> list[NodeReport]:
        """Examine the network, and return the reports of all nodes."""
        has_torch = not self._own["facts"]["torch"].startswith("(")
        own_place = [self._address, self._listener.tcp_port, self._listener.udp_port, has_torch]
        places = self._share("places", own_place)
        clock = time.time()
        others = [rank for rank in range(self._size) if rank != self._rank]
        self._listener.send(self._rank, [(places[rank][0], places[rank][2]) for rank in others])
        with ThreadPoolExecutor(_THREADS) as threads:
            tries = threads.map(lambda rank: try_connection(places[rank][0], places[rank][1], _TO_CONNECT), others)
            failures = {rank: reason for rank, reason in zip(others, tries, strict=True) if reason}
        self._share("sent", self._rank)
        heard = self._listener.wait_heard(set(others), _TO_HEAR)
        is_whole = not any(self._share("failures", len(failures)))
        rate = 0.0
        reduction: float | str = 0.0
        if is_whole:
            host, port, *_ = places[(self._rank + 1) % self._size]
            rate = measure_rate(host, port, _OF_SENDING)
            self._share("measured", self._rank)
            if all(place[3] for place in places):
                reduction = reduce_all(self._rank, self._size)
        own = {**self._own, "clock": clock, "failures": failures, "heard": sorted(heard), "rate": rate}
        reports = [read_report(text) for text in self._share("reports", {**own, "reduction": reduction})]
        self._share("read", self._rank)  # the host of the store stays until then
        return reports

    def _share(self, name: str, value: object) -> list[Any]:
        """Share a value with the other nodes, and return the values of all nodes by rank."""
        self._store.set(f"doctor/{name}/{self._rank}", json.dumps(value))
        keys = [f"doctor/{name}/{rank}" for rank in range(self._size)]
        self._store.wait(keys, _TO_MEET)
        return [json.loads(text) for text in self._store.multi_get(keys)]


def read_report(text: dict[str, Any]) -> NodeReport:
    """Read the report of a node."""
    return NodeReport(
        host=text["hosts"][0],
        facts=text["facts"],
        clock=text["clock"],
        findings=read_findings(text),
        failures={int(rank): reason for rank, reason in text["failures"].items()},
        heard=frozenset(text["heard"]),
        rate=text["rate"],
        reduction=text["reduction"],
    )


def reduce_all(rank: int, size: int) -> float | str:
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
        tensor = torch.ones(_FLOATS, device="cuda:0" if has_gpus else "cpu")
        dist.all_reduce(tensor)
        start = time.monotonic()
        dist.all_reduce(tensor)
        total = float(tensor[-1].item())
        seconds = time.monotonic() - start
        dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001 - whatever torch raises is the finding
        return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    return seconds if total == float(size * size) else f"rank {rank} got a wrong sum, {total}"


def main() -> None:
    """Run this node's part, and write the result beside the file of its own findings."""
    path = sys.argv[1]
    with open(path, encoding="utf-8") as file:
        own = json.load(file)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        with StoreClient(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), _TO_MEET) as store:
            reports = Probe(own, store, rank, size).run()
        facts = {**own["facts"], **describe_network(reports)}
        result = describe_findings([report.host for report in reports], judge_node_reports(reports), facts)
    except (StoreError, OSError) as error:
        what = f"{own['hosts'][0]} has met the other nodes, but lost them or reaches no worker's port"
        remedy = "look at the doctor's report on the other nodes; open all TCP ports between the nodes"
        lost: list[Finding] = [problem(what, str(error), remedy), *read_findings(own)]
        result = describe_findings(own["hosts"], lost, own["facts"])
    with open(f"{path}.result", "w", encoding="utf-8") as file:
        json.dump({**result, "rank": rank}, file)


if __name__ == "__main__":
    main()
