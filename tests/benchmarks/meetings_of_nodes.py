"""Workers of several nodes meet at MASTER_ADDR:MASTER_PORT, each of them late at random, round after round.

Three ways into a new round are taken a hundred times each: a worker's death, a node that comes and goes while rank 0
stays, and a new node in the place of rank 0. Every time all workers must meet, and nobody else at that store.
"""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from tests.benchmarks.figures import counted
from tests.benchmarks.job import BenchmarkError
from tests.benchmarks.node_group import NodeGroup, Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from tests.benchmarks.effort import Effort
    from tests.benchmarks.figures import Figure
    from tests.benchmarks.installation import Installation

    Meet: TypeAlias = Callable[[Installation, int], Iterator[None]]

_MEET = ("meet",)


def measure(installation: Installation, effort: Effort) -> list[Figure]:
    """Count what failed."""
    return [
        _figure(
            f"failures to connect after {effort.meetings} restarts of 2 nodes",
            meet_after_failures,
            installation,
            effort,
        ),
        _figure(
            f"failures to connect after {effort.meetings} arrivals of a second node",
            meet_newcomers,
            installation,
            effort,
        ),
        _figure(
            f"failures to connect after {effort.meetings} replacements of rank 0",
            meet_at_new_masters,
            installation,
            effort,
        ),
    ]


def _figure(name: str, meet: Meet, installation: Installation, effort: Effort) -> Figure:
    begun = time.monotonic()
    met, why = count_met(meet(installation, effort.meetings))
    each = (time.monotonic() - begun) / max(met, 1)
    return counted(
        [number >= met for number in range(effort.meetings)],
        benchmark="meetings_of_nodes",
        name=name,
        note=f"{each:.2f} s each, with the random delays of the workers" + (f"; then {why}" if why else ""),
    )


def count_met(meetings: Iterator[None]) -> tuple[int, str]:
    """Go from meeting to meeting.

    Args:
        meetings: One of those below.

    Returns:
        How many took place, and why the next one did not, if so.
    """
    met = 0
    try:
        for _ in meetings:
            met += 1
    except BenchmarkError as error:
        return met, " ".join(str(error).split())
    return met, ""


def meet_after_failures(installation: Installation, times: int) -> Iterator[None]:
    """Let a worker die, now on this node and now on that, and all meet again; yields after each meeting."""
    options = (f"--max-restarts={times}", "--max-backoff=0")
    with NodeGroup(installation, "2", *options, arguments=_MEET) as group:
        nodes = group.start_many(2)
        _wait_met(Watch(nodes, "met", group.nproc, from_start=True), 2 * group.nproc)
        for number in range(times):
            met = Watch(nodes, "met", group.nproc)
            nodes[number % 2].poke()
            _wait_met(met, 2 * group.nproc)
            yield


def meet_newcomers(installation: Installation, times: int) -> Iterator[None]:
    """Let a second node come, and all meet; it goes, and those that are left meet; yields after each arrival."""
    # By default 50 nodes in an hour may come and go.
    options = ("--rdzv-conf=last_call_timeout=0", "--scale-up-delay=0", f"--membership-window={3 * times}/1h")
    with NodeGroup(installation, "1:2", *options, arguments=_MEET) as group:
        stays = group.start()
        _wait_met(Watch([stays], "met", group.nproc, from_start=True), group.nproc)
        for _ in range(times):
            met = Watch([stays], "met", group.nproc)
            comes = group.start()
            _wait_met(met, 2 * group.nproc)
            _wait_met(Watch([comes], "met", group.nproc, from_start=True), 2 * group.nproc)
            yield
            met = Watch([stays], "met", group.nproc)
            comes.send(signal.SIGTERM)
            _wait_met(met, group.nproc)
            group.forget(comes)


def meet_at_new_masters(installation: Installation, times: int) -> Iterator[None]:
    """Kill the agent of rank 0 and start another, and all meet at its address; yields after each meeting."""
    options = (f"--membership-window={3 * times}/1h",)
    with NodeGroup(installation, "2", *options, arguments=_MEET) as group:
        stays = group.start_host("--node-rank=1")
        master = group.start("--node-rank=0")
        _wait_met(Watch([stays, master], "met", group.nproc, from_start=True), 2 * group.nproc)
        for _ in range(times):
            met = Watch([stays], "met", group.nproc)
            master.send(signal.SIGKILL)
            group.forget(master)
            master = group.start("--node-rank=0")
            _wait_met(met, 2 * group.nproc)
            _wait_met(Watch([master], "met", group.nproc, from_start=True), 2 * group.nproc, group_rank=0)
            yield


def _wait_met(met: Watch, size: int, *, group_rank: int | None = None) -> None:
    for words in met.wait():
        if int(words[3]) != size or group_rank not in (None, int(words[2])):
            message = f"not a meeting of {size} at rank 0 of the new node: {words}"
            raise BenchmarkError(message)
