"""The faults that are planted, the words by which a report names each, and in which ranks of which jobs they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Workers that import nothing, workers of gloo, and workers on several virtual hosts.
LIGHT, TORCH, HOSTS = "light", "torch", "hosts"
_RECORDER = ("--flight-recorder",)
#: Seconds without progress that are a hang.
HANG_TIMEOUT = 3
_HANG = (f"--hang-timeout={HANG_TIMEOUT}", "--hang-action=fail")


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Args:
        name: As the worker's script and the tables have it.
        cause: A regular expression that the report has to match, its lines joined by spaces.
        place: LIGHT, TORCH or HOSTS.
        flags: What the launcher is given beside the script.
        is_hang: Whether the job goes on for ever, so that only a hang verdict or a user ends it.
        memory: Megabytes of the job's memory limit, or 0.
        injected: The fault as `--inject-fault` takes it, without the rank; "" where the worker's script has it itself:
            the script under torchrun, and what is no fault of the flag or needs a place in the program.
    """

    name: str
    cause: str
    place: str
    flags: tuple[str, ...] = ()
    is_hang: bool = False
    memory: int = 0
    injected: str = ""


LIGHT_FAULTS = (
    Fault("exception", r"ValueError: bad batch", LIGHT),
    Fault("async exception", r"InjectedFaultError", LIGHT, injected="raise@3s"),
    Fault("segfault", r"SIGSEGV", LIGHT, injected="signal=SIGSEGV"),
    Fault("abort", r"SIGABRT", LIGHT, injected="signal=SIGABRT"),
    Fault("SIGKILL", r"killed by SIGKILL|Signal 9 \(SIGKILL\)", LIGHT, injected="kill"),
    Fault("SIGTERM", r"killed by SIGTERM|Signal 15 \(SIGTERM\)", LIGHT, injected="signal=SIGTERM"),
    Fault("exit code", r"exit ?code\s*:?\s*7\b", LIGHT, injected="exit=7"),
    Fault(
        "OOM kill",
        r"OOM killer (ended it|was at work)|out of memory: Killed process",
        LIGHT,
        memory=150,
        injected="oom@2s",
    ),
    Fault("disk full", r"No space left on device", LIGHT),
    Fault("import error", r"No module named 'colorsys'", LIGHT, injected="import=colorsys"),
    Fault("port taken", r"Address already in use", LIGHT, injected="port"),
    Fault("wrong version", r"cannot import name 'scaled_mm'", LIGHT),
)
#: The others of these notice at once that a rank has gone.
PEER_FAULTS = (
    Fault("exception", r"ValueError: bad batch", TORCH),
    Fault("segfault", r"SIGSEGV", TORCH),
    Fault("abort", r"SIGABRT", TORCH),
    Fault("SIGKILL", r"killed by SIGKILL|Signal 9 \(SIGKILL\)", TORCH),
    Fault("SIGTERM", r"killed by SIGTERM|Signal 15 \(SIGTERM\)", TORCH),
    Fault("exit code", r"exit ?code\s*:?\s*7\b", TORCH),
    Fault("early exit 0", r"ended with (exit )?(code )?0\b", TORCH),
    Fault("data loader child killed", r"DataLoader worker .{,200}killed by", TORCH),
)
COLLECTIVE_FAULTS = (
    Fault("mismatched collective", r"calls broadcast", TORCH, _RECORDER),
    Fault("mismatched shape", r"calls all_reduce of \[8\]", TORCH, _RECORDER),
    Fault("missing rank in a group", r"did not join all_reduce", TORCH, _RECORDER),
)
HANG_FAULTS = (
    Fault("SIGSTOP", r"is stopped \(SIGSTOP", TORCH, _HANG, is_hang=True),
    Fault("held GIL", r"in hold_gil", TORCH, _HANG, is_hang=True),
    Fault("sleep", r"in sleep_long", TORCH, _HANG, is_hang=True),
    Fault("data loader stuck", r"in DataLoader \(faulty_gloo\.py", TORCH, _HANG, is_hang=True),
    Fault("thread died", r"in get \(faulty_gloo\.py", TORCH, _HANG, is_hang=True),
    Fault("missing rank in a collective", r"did not join all_reduce", TORCH, _HANG, is_hang=True),
)
#: Of several hosts; the rank counts the hosts.
HOST_FAULTS = (
    Fault("import error on one node", r"No module named 'colorsys'", HOSTS, injected="import=colorsys"),
    Fault("port taken on one node", r"Address already in use", HOSTS, injected="port"),
    Fault("wrong version on one node", r"torch 2\.4\.0", HOSTS),
    Fault("disk full on one node", r"No space left on device", HOSTS),
    Fault("host dark", r"silent for|lost|no answer|out of reach", HOSTS),
    Fault("agent killed", r"died|SIGKILL|launcher", HOSTS, injected="agent@2s"),
    Fault("host slow", r"slow", HOSTS, is_hang=True),
)
#: Hosts of a job of several, and ranks on each.
HOST_COUNT = 3
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
    """Return each kind of fault in several ranks, groups and sizes of the job, in a fixed order."""
    return (*_light_cases(), *_torch_cases(), *_host_cases())


def choose(most: int) -> tuple[Case, ...]:
    """Return so many cases at most, from all kinds alike."""
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
        yield from (Case(fault, host * PER_HOST, HOST_COUNT * PER_HOST) for host in range(HOST_COUNT))
