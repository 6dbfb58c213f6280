"""How much is measured: what `make bench` records, and what a quicker run may take back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """How often things are done.

    Args:
        pairs: Turns that elastic-run and torchrun, or the floor, take.
        starts: Starts in a row of a job whose workers connect.
        restarts: Restarts of a job one of whose workers is late.
        kills: Launchers that are killed.
        megabytes: Size of the output that has to arrive whole.
        rounds: Rounds of each number of nodes.
        nodes: The largest number of nodes.
        connections: Rounds of each kind in which the workers of several nodes connect.
        faults: Planted faults, at most.
    """

    pairs: int = 5
    starts: int = 1000
    restarts: int = 100
    kills: int = 50
    megabytes: int = 200
    rounds: int = 3
    nodes: int = 4000
    connections: int = 100
    faults: int = 1000
