"""Workers connect at MASTER_ADDR:MASTER_PORT, on one node and on several. No start may fail.

On one node a process keeps taking and releasing ports beside it, as other programs on a machine do. On several nodes
three ways into a new round are taken a hundred times each: a worker's death, a node that comes and goes while rank 0
stays, and a new node in the place of rank 0. Every time all workers must connect, and no other process at that store.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from benchmarks.figures import counted
from benchmarks.job import BenchmarkError, Job
from benchmarks.nodes import NodeGroup, Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from benchmarks.figures import Figure
    from benchmarks.installation import Effort, Installation

    Connect: TypeAlias = Callable[[Installation, int], Iterator[None]]


# --- one node: a thousand starts in a row, and restarts with one rank late --------------------------------------------
_WORKERS = 4
#: Seconds for one restart, the late rank's included.
_RESTART_DEADLINE = 5.0


def measure_workers(installation: Installation, effort: Effort) -> list[Figure]:
    """Count what failed."""
    with busy_ports(installation):
        begun = time.monotonic()
        failures = [failure_of_start(installation) for _ in range(effort.starts)]
        each = (time.monotonic() - begun) / effort.starts
        are_connected, why_not = _try_restarts(installation, effort.restarts)
    return [
        counted(
            [why != "" for why in failures],
            benchmark="worker_connections",
            name=f"failures in {effort.starts} starts of {_WORKERS} workers that connect, "
            "while another program takes ports",
            note=f"{1000 * each:.0f} ms each, from exec to exit"
            + "".join(f"; {why}" for why in [*filter(None, failures)][:1]),
        ),
        counted(
            [not is_connected for is_connected in are_connected],
            benchmark="worker_connections",
            name=f"failures in {effort.restarts} restarts with one of {_WORKERS} ranks late",
            note=why_not,
        ),
    ]


def _try_restarts(installation: Installation, restarts: int) -> tuple[list[bool], str]:
    """Return in which rounds all workers connected, and the reason if the job failed."""
    try:
        return connected_rounds(installation, restarts), ""
    except BenchmarkError as error:
        return [False] * (restarts + 1), " ".join(str(error).split())


def failure_of_start(installation: Installation) -> str:
    """Run a job whose workers connect and end; return what went wrong, or nothing."""
    command = installation.launcher("elastic-run", _WORKERS, installation.worker("connect"))
    try:
        with Job(command, directory=installation.directory) as job:
            job.wait_end()
            job.wait_lines(_WORKERS, starting="connected 0")
    except BenchmarkError as error:
        return " ".join(str(error).split())
    return ""


def connected_rounds(installation: Installation, restarts: int) -> list[bool]:
    """Run one job that restarts so often, and return for each of its rounds whether all workers connected."""
    options = (f"--max-restarts={restarts}", "--max-backoff=0")
    command = installation.launcher("elastic-run", _WORKERS, *options, installation.worker("connect"), str(restarts))
    with Job(command, directory=installation.directory) as job:
        job.wait_end(deadline=_RESTART_DEADLINE * (restarts + 1))
        # In all rounds but the last, rank 0 fails once all ranks have connected, and the others may be stopped before
        # they write their line.
        expected = [1] * restarts + [_WORKERS]
        return [job.lines.count(f"connected {attempt}") >= least for attempt, least in enumerate(expected)]


@contextlib.contextmanager
def busy_ports(installation: Installation) -> Iterator[None]:
    """Have another program take and release ports meanwhile."""
    command = [installation.python, "-u", installation.worker("port_taker")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as taker:
        if taker.stdin is None or taker.stdout is None:
            message = "the port taker has no pipes"
            raise BenchmarkError(message)
        taker.stdout.readline()
        try:
            yield
        finally:
            taker.stdin.close()


# --- several nodes, each worker late at random, round after round -----------------------------------------------------
_CONNECT = ("connect",)


def measure_nodes(installation: Installation, effort: Effort) -> list[Figure]:
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
