"""Which faults are planted where: each kind in several ranks, groups and sizes of the job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.benchmarks.diagnosis.faults import (
    COLLECTIVE_FAULTS,
    HANG_FAULTS,
    HOST_FAULTS,
    LIGHT_FAULTS,
    PEER_FAULTS,
    TORCH,
    Fault,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Hosts of a job of several, and ranks on each.
HOSTS = 3
PER_HOST = 2
#: Below the ports that the kernel chooses.
_FIRST_PORT = 21100
#: Faults that torchrun gets as well, in rank 1 of four.
_FOR_TORCHRUN = frozenset(
    (
        *("exception", "segfault", "SIGKILL", "exit code", "early exit 0", "data loader child killed"),
        *(fault.name for fault in COLLECTIVE_FAULTS),
    )
)


@dataclass(frozen=True)
class Case:
    """A fault in a job.

    Args:
        fault: Its kind.
        rank: The rank that has it; of a job of several hosts the first rank of the host that has it.
        size: Ranks of the job.
        groups: Process groups in which they train; one is the default group.
    """

    fault: Fault
    rank: int
    size: int
    groups: int = 1

    @property
    def name(self) -> str:
        """What the tables and the list of misses call it."""
        groups = f", {self.groups} x {self.size // self.groups}" if self.groups > 1 else ""
        return f"{self.fault.name} ({self.fault.place}, rank {self.rank} of {self.size}{groups})"

    @property
    def injected(self) -> str:
        """The flag of elastic-run that injects the fault, or ""."""
        if not self.fault.injected:
            return ""
        injected = f"port={self.port}" if self.fault.injected == "port" else self.fault.injected
        return f"--inject-fault={injected}:rank={self.rank}"

    @property
    def port(self) -> int:
        """A port for the program; another one for each case of a kind, as two of them run at a time."""
        return _FIRST_PORT + self.size + self.rank

    @property
    def is_for_torchrun(self) -> bool:
        """Whether torchrun gets the same fault."""
        return (
            self.fault.place == TORCH
            and self.fault.name in _FOR_TORCHRUN
            and (self.rank, self.size, self.groups) == (1, 4, 1)
        )


def all_cases() -> tuple[Case, ...]:
    """Return all cases, in a fixed order."""
    return (*_light_cases(), *_torch_cases(), *_host_cases())


def choose(most: int) -> tuple[Case, ...]:
    """Return so many cases at most, from all kinds alike.

    Args:
        most: How many.
    """
    cases = all_cases()
    step = -(-len(cases) // max(1, most))
    return cases[::step]


def _light_cases() -> Iterator[Case]:
    for fault in LIGHT_FAULTS:
        yield from (Case(fault, rank, 8) for rank in (0, 1, 4, 7))
        yield Case(fault, 1, 2)
        yield from (Case(fault, rank, 32) for rank in (16, 31) if not fault.memory)


def _torch_cases() -> Iterator[Case]:
    for fault in (*PEER_FAULTS, *COLLECTIVE_FAULTS, *HANG_FAULTS):
        yield from (Case(fault, rank, 4) for rank in range(4))
        # What lasts until a collective times out is planted in fewer ranks of the larger job.
        ranks = (0, 1, 4, 7) if fault in PEER_FAULTS else (1, 4)
        yield from (Case(fault, rank, 8, groups=2) for rank in ranks)


def _host_cases() -> Iterator[Case]:
    for fault in HOST_FAULTS:
        yield from (Case(fault, host * PER_HOST, HOSTS * PER_HOST) for host in range(HOSTS))
