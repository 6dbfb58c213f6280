"""Workers of several nodes connect at MASTER_ADDR:MASTER_PORT, each of them late at random, round after round.

Three ways into a new round are taken a hundred times each: a worker's death, a node that comes and goes while rank 0
stays, and a new node in the place of rank 0. Every time all workers must connect, and no other process at that store.
"""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from benchmarks.figures import counted
from benchmarks.job import BenchmarkError
from benchmarks.nodes import NodeGroup, Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from benchmarks.figures import Figure
    from benchmarks.installation import Effort, Installation

    Connect: TypeAlias = Callable[[Installation, int], Iterator[None]]

_CONNECT = ("connect",)


def measure(installation: Installation, effort: Effort) -> list[Figure]:
    """Count what failed."""
    return [
        _figure(f"failures to connect after {effort.connections} {what}", connect, installation, effort)
        for what, connect in (
            ("restarts of 2 nodes", connect_after_failures),
            ("arrivals of a second node", connect_new_nodes),
            ("replacements of rank 0", connect_to_new_masters),
        )
    ]


def _figure(name: str, connect: Connect, installation: Installation, effort: Effort) -> Figure:
    begun = time.monotonic()
    count, why = count_connections(connect(installation, effort.connections))
    each = (time.monotonic() - begun) / max(count, 1)
    return counted(
        [number >= count for number in range(effort.connections)],
        benchmark="node_connections",
        name=name,
        note=f"{each:.2f} s each, with the random delays of the workers" + (f"; then {why}" if why else ""),
    )


def count_connections(rounds: Iterator[None]) -> tuple[int, str]:
    """Count the rounds in which all workers connect."""
    count = 0
    try:
        for _ in rounds:
            count += 1
    except BenchmarkError as error:
        return count, " ".join(str(error).split())
    return count, ""


def connect_after_failures(installation: Installation, times: int) -> Iterator[None]:
    """Let a worker of each node in turn die, and wait until all connect again; yields after each restart."""
    options = (f"--max-restarts={times}", "--max-backoff=0")
    with NodeGroup(installation, "2", *options, arguments=_CONNECT) as group:
        nodes = group.start_many(2)
        _wait_connected(Watch(nodes, "connected", group.nproc, from_start=True), 2 * group.nproc)
        for number in range(times):
            connected = Watch(nodes, "connected", group.nproc)
            nodes[number % 2].poke()
            _wait_connected(connected, 2 * group.nproc)
            yield


def connect_new_nodes(installation: Installation, times: int) -> Iterator[None]:
    """Let a second node join and leave again, and wait until all connect each time; yields after each arrival."""
    # By default 50 nodes in an hour may come and go.
    options = ("--rdzv-conf=last_call_timeout=0", "--scale-up-delay=0", f"--membership-window={3 * times}/1h")
    with NodeGroup(installation, "1:2", *options, arguments=_CONNECT) as group:
        stays = group.start()
        _wait_connected(Watch([stays], "connected", group.nproc, from_start=True), group.nproc)
        for _ in range(times):
            connected = Watch([stays], "connected", group.nproc)
            comes = group.start()
            _wait_connected(connected, 2 * group.nproc)
            _wait_connected(Watch([comes], "connected", group.nproc, from_start=True), 2 * group.nproc)
            yield
            connected = Watch([stays], "connected", group.nproc)
            comes.send(signal.SIGTERM)
            _wait_connected(connected, group.nproc)
            group.forget(comes)


def connect_to_new_masters(installation: Installation, times: int) -> Iterator[None]:
    """Kill the agent of rank 0, start another one, and wait until all connect there; yields after each replacement."""
    options = (f"--membership-window={3 * times}/1h",)
    with NodeGroup(installation, "2", *options, arguments=_CONNECT) as group:
        stays = group.start_host("--node-rank=1")
        master = group.start("--node-rank=0")
        _wait_connected(Watch([stays, master], "connected", group.nproc, from_start=True), 2 * group.nproc)
        for _ in range(times):
            connected = Watch([stays], "connected", group.nproc)
            master.send(signal.SIGKILL)
            group.forget(master)
            master = group.start("--node-rank=0")
            _wait_connected(connected, 2 * group.nproc)
            _wait_connected(Watch([master], "connected", group.nproc, from_start=True), 2 * group.nproc, group_rank=0)
            yield


def _wait_connected(connected: Watch, size: int, *, group_rank: int | None = None) -> None:
    for words in connected.wait():
        if int(words[3]) != size or group_rank not in (None, int(words[2])):
            message = f"not {size} workers that connect at rank 0 of the new node: {words}"
            raise BenchmarkError(message)
