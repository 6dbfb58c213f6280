"""The faults that are planted, in which ranks of which jobs, and whether the reports of a launcher name them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from statistics import mean, median
from typing import TYPE_CHECKING

from benchmarks.figures import Bar, Figure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


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
    Fault("import error", r"No module named 'colorsys_of_nobody'", LIGHT),
    Fault("port taken", r"Address already in use", LIGHT),
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
    Fault("import error on one node", r"No module named 'colorsys_of_nobody'", HOSTS),
    Fault("port taken on one node", r"Address already in use", HOSTS),
    Fault("wrong version on one node", r"torch 2\.4\.0", HOSTS),
    Fault("disk full on one node", r"No space left on device", HOSTS),
    Fault("host dark", r"silent for|lost|no answer|out of reach", HOSTS),
    Fault("agent killed", r"died|SIGKILL|launcher", HOSTS, injected="agent@2s"),
    Fault("host slow", r"slow", HOSTS, is_hang=True),
)
#: Hosts of a job of several, and ranks on each.
HOST_COUNT = 3
PER_HOST = 2
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
        return f"--inject-fault={self.fault.injected}:rank={self.rank}"

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


# --- what the closing lines of a launcher name, compared with the fault that was planted ------------------------------
#: Lines of a report within which the cause should stand, the title included.
FIRST_LINES = 5
_BENCHMARK = "diagnosis"
#: Percent that the faults given to both launchers have to reach.
_LEAST = 97.0
#: Seconds by which a hang's verdict may be later than its timeout.
_LATEST = 2.0
_US, _THEM = "elastic-run", "torchrun"
_TITLE = re.compile(r"^-- elastic-run: ")
#: torchrun lists the other failures before the one that it takes for the cause.
_TORCHRUN = re.compile(r"^Root Cause \(first observed failure\)")
_RANK = re.compile(r"\branks?\s*:?\s*(\d+)(?![\d-]|, \d)")
_RANKS = re.compile(r"\branks?\s*:?\s*\d")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


@dataclass(frozen=True)
class Verdict:
    """What a job's reports say.

    Args:
        case: What was planted.
        has_rank: Whether the first rank that each report names is the right one.
        has_cause: Whether each report names the cause.
        line: The line of the report, counted from its title, with which the cause is complete; of several nodes the
            last one's; 0 where a report does not name it.
        seconds: From the fault to the launcher's end, or None where the job had to be ended.
        text: All reports.
        late: Seconds from the fault to the line that the job hangs, without --hang-timeout; None where there is none.
    """

    case: Case
    has_rank: bool
    has_cause: bool
    line: int
    seconds: float | None
    text: str
    late: float | None = None

    @property
    def is_early(self) -> bool:
        """Whether the cause stands within the first lines, on every node."""
        return self.has_cause and 0 < self.line <= FIRST_LINES


def judge(case: Case, outputs: Sequence[str], seconds: float | None, *, host: str = "") -> Verdict:
    """Compare what the nodes wrote with what was planted."""
    reports = [closing_lines(output) for output in outputs]
    lines = [_line_of(case.fault.cause, report) for report in reports]
    return Verdict(
        case=case,
        has_rank=bool(reports) and all(_names_rank(report, case.rank, host) for report in reports),
        has_cause=bool(lines) and all(lines),
        line=max(lines, default=0) if all(lines) else 0,
        seconds=seconds,
        text="\n".join("\n".join(report) for report in reports),
    )


def closing_lines(output: str) -> list[str]:
    """Return the lines of a launcher's closing report, the title first; elastic-run's or torchrun's."""
    lines = _COLOUR.sub("", output).splitlines()
    starts = [index for index, line in enumerate(lines) if _TITLE.match(line)]
    if not starts:
        starts = [index for index, line in enumerate(lines) if _TORCHRUN.match(line.strip())]
    return lines[starts[-1] :] if starts else []


def _line_of(cause: str, report: Sequence[str]) -> int:
    """Return the number of lines that have to be read until the cause is complete; 0 where it isn't there."""
    wanted = re.compile(cause)
    for count in range(1, len(report) + 1):
        if wanted.search(" ".join(" ".join(report[:count]).split())):
            return count
    return 0


def _names_rank(report: Sequence[str], rank: int, host: str) -> bool:
    """Whether the first rank that a report names is the one, or the first host where a host is meant."""
    text = " ".join(" ".join(report).split())
    named = _RANKS.search(text)
    if host:
        first = re.search(r"\bh\d\b", text)
        return first is not None and first[0] == host
    found = None if named is None else _RANK.match(text, named.start())
    return found is not None and int(found[1]) == rank


# --- figures ----------------------------------------------------------------------------------------------------------
def make_figures(ours: Sequence[Verdict], theirs: Sequence[Verdict]) -> list[Figure]:
    """Return the rows of the table."""
    shares = [
        _share(ours, lambda verdict: verdict.has_rank, f"{len(ours)} planted faults: right rank or node named", 98),
        _share(ours, lambda verdict: verdict.has_cause, f"{len(ours)} planted faults: right cause named", 97),
        _share(
            ours,
            lambda verdict: verdict.is_early,
            f"{len(ours)} planted faults: cause within {FIRST_LINES} lines on every node",
            98,
        ),
    ]
    lines = [float(verdict.line) for verdict in ours if verdict.line]
    seconds = [verdict.seconds for verdict in ours if verdict.seconds is not None]
    late = [verdict.late for verdict in ours if verdict.late is not None]
    values = [
        _value(lines, "lines of the report until the cause", "lines"),
        _value(seconds, "fault to the launcher's end", "s"),
        _value(late, f"{len(late)} hangs: longest time from --hang-timeout to the verdict", "s", most=_LATEST),
    ]
    return [*shares, *[figure for figure in values if figure], *_beside(ours, theirs)]


def name_misses(missed: Sequence[Verdict]) -> str:
    """Return the faults that were missed, by name; the ranks and sizes of one kind in one clause."""
    kinds: dict[str, list[str]] = {}
    for verdict in missed:
        name, _, place = verdict.case.name.partition(" (")
        kinds.setdefault(name, []).append(place.rstrip(")"))
    return "missed: " + ", ".join(f"{name} ({'; '.join(places)})" for name, places in kinds.items()) if kinds else ""


def _share(verdicts: Sequence[Verdict], holds: Callable[[Verdict], bool], name: str, least: float) -> Figure:
    values = [100.0 * holds(verdict) for verdict in verdicts]
    return Figure(
        benchmark=_BENCHMARK,
        name=name,
        unit="%",
        bar=Bar(least, is_least=True),
        elastic_run=mean(values),
        values={_US: [values]},
        note=name_misses([verdict for verdict in verdicts if not holds(verdict)]),
    )


def _value(values: list[float], name: str, unit: str, *, most: float | None = None) -> Figure | None:
    """Return a figure of the median, or of the largest value, which has to hold a bar."""
    if not values:
        return None
    if most is not None:
        note = f"median {median(values):.3g} {unit}"
        return Figure(_BENCHMARK, name, unit, Bar(most), max(values), {_US: [values]}, note=note)
    note = f"largest {max(values):.3g} {unit}"
    return Figure(_BENCHMARK, name, unit, None, median(values), {_US: [values]}, note=note)


def _beside(ours: Sequence[Verdict], theirs: Sequence[Verdict]) -> list[Figure]:
    """Return what both launchers name of the faults that both were given."""
    if not theirs:
        return []
    given = {verdict.case for verdict in theirs}
    same = [verdict for verdict in ours if verdict.case in given]
    rows: dict[str, Callable[[Verdict], bool]] = {
        f"{len(theirs)} faults under both launchers: right rank": lambda verdict: verdict.has_rank,
        f"{len(theirs)} faults under both launchers: right cause": lambda verdict: verdict.has_cause,
    }
    figures = []
    for name, holds in rows.items():
        values = {_US: [[100.0 * holds(v) for v in same]], _THEM: [[100.0 * holds(v) for v in theirs]]}
        missed = name_misses([verdict for verdict in theirs if not holds(verdict)])
        figures.append(
            Figure(
                benchmark=_BENCHMARK,
                name=name,
                unit="%",
                bar=Bar(_LEAST, is_least=True),
                elastic_run=mean(values[_US][0]),
                torchrun=mean(values[_THEM][0]),
                values=values,
                note=f"torchrun's closing lines {missed}" if missed else "",
            )
        )
    return figures
