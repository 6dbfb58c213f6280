"""The program that `elastic-run doctor` starts on each node, as the job's only worker there.

The launcher has brought the nodes together; they talk through the workers' store. Each node reads the reports of all
nodes and writes the same result. A node that is lost during the checks is a finding of the others.

Each node listens at one TCP and one UDP port while the nodes examine each other. A TCP connection needs both
directions, so it does not show which of them is broken; a datagram that arrives shows that its direction works.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from elastic_run.diagnosis.doctor.findings import Finding, describe_findings, problem, read_findings
from elastic_run.diagnosis.doctor.node_reports import NodeReport, check_node_reports, describe_network
from elastic_run.rendezvous.addresses import find_local_address
from elastic_run.store.connecting import connect_once
from elastic_run.store.errors import StoreConnectionError, StoreError
from elastic_run.store.tcpstore.client import StoreClient

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

_DATAGRAMS = 3
_CHUNK = bytes(1 << 20)
_RANK = 4


class Listener:
    """This node's ports, which answer other nodes until they are closed.

    Args:
        address: The address of this node by which others reach it.
        backlog: Number of other nodes.

    Attributes:
        tcp_port: The port that accepts connections; their bytes are read and thrown away.
        udp_port: The port at which datagrams are counted.
    """

    def __init__(self, address: str, backlog: int) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family, backlog=max(backlog, 1))
        self._datagrams = socket.socket(family, socket.SOCK_DGRAM)
        self._datagrams.bind((address, 0))
        self._server.settimeout(0)
        self._datagrams.settimeout(0)
        self.tcp_port: int = self._server.getsockname()[1]
        self.udp_port: int = self._datagrams.getsockname()[1]
        self._heard: set[int] = set()
        self._has_heard = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, self._accept)
        self._selector.register(self._datagrams, selectors.EVENT_READ, self._hear)
        self._thread = threading.Thread(target=self._serve, name="doctor's ports", daemon=True)
        self._thread.start()

    def send(self, rank: int, addresses: Iterable[tuple[str, int]]) -> None:
        """Send each other node some datagrams with this node's rank."""
        for _ in range(_DATAGRAMS):
            for address in addresses:
                try:
                    self._datagrams.sendto(rank.to_bytes(_RANK, "big"), address)
                except OSError:
                    continue  # the connection will say why

    def wait_heard(self, ranks: set[int], timeout: float) -> set[int]:
        """Wait until datagrams of these nodes have come, and return the nodes whose datagrams have come."""
        with self._has_heard:
            self._has_heard.wait_for(lambda: ranks <= self._heard, timeout)
            return set(self._heard)

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                key.data(key.fileobj)

    def _accept(self, server: socket.socket) -> None:
        try:
            taken, _ = server.accept()
        except OSError:
            return
        taken.settimeout(0)
        self._selector.register(taken, selectors.EVENT_READ, self._read)

    def _read(self, taken: socket.socket) -> None:
        try:
            if taken.recv(len(_CHUNK)):
                return
            taken.send(b"\0")  # all of it has come
        except OSError:
            pass
        self._selector.unregister(taken)
        taken.close()

    def _hear(self, datagrams: socket.socket) -> None:
        try:
            text = datagrams.recv(64)
        except OSError:
            return
        with self._has_heard:
            self._heard.add(int.from_bytes(text[:_RANK], "big"))
            self._has_heard.notify_all()


def try_connection(host: str, port: int, timeout: float) -> str:
    """Connect once; returns "" or why that is not possible, one of the words of `store.errors`."""
    try:
        connect_once(host, port, timeout, dark_after=timeout).close()
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
        result = describe_findings([report.host for report in reports], check_node_reports(reports), facts)
    except (StoreError, OSError) as error:
        what = f"{own['hosts'][0]} has met the other nodes, but lost them or reaches no worker's port"
        remedy = "look at the doctor's report on the other nodes; open all TCP ports between the nodes"
        lost: list[Finding] = [problem(what, str(error), remedy), *read_findings(own)]
        result = describe_findings(own["hosts"], lost, own["facts"])
    with open(f"{path}.result", "w", encoding="utf-8") as file:
        json.dump({**result, "rank": rank}, file)


if __name__ == "__main__":
    main()
