"""Memory and idleness of the launcher while its workers sleep, and what it must never import.

Memory is the proportional set size: shared pages count by share. The launcher's processes are itself and all below it
that are not workers: the guardian, or whatever else a launcher needs.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.figures import Bar, alone, compare, compared, take_turns
from benchmarks.job import BenchmarkError, Job
from elastic_run.contract import RECORDER_THREAD
from tests.support.processes import descendants_of

if TYPE_CHECKING:
    from benchmarks.figures import Figure
    from benchmarks.installation import Effort, Installation

#: Seconds over which wake-ups are counted in each turn.
_IDLE = 2.0
#: Seconds over which the processor time of the hang detection is counted in each turn, and the workers that it watches.
_TICKING = 8.0
_WATCHED = 8
#: The same of the watch for a slow rank, which asks every 15 s, and its workers.
_STEPPING = 45.0
_STEPPERS = 4
#: Seconds after their first lines until it has taken its first look, which imports what looks need.
_FIRST_LOOK = 4.0
#: Seconds after the workers' first lines until a launcher has nothing left to do.
_SETTLING = 1.5
#: Seconds without a wake-up that tell a launcher at rest, and how long to wait for that at most: some never rest.
_QUIET = 0.5
_WAIT_LIMIT = 2.0
_NEVER_IMPORTED = frozenset(
    {"torch", "numpy", "asyncio", "multiprocessing", "importlib.metadata", "requests", "http.client", "ssl", "email"}
)
_IMPORT_LINE = re.compile(r"^import time:\s+\d+ \|\s+\d+ \|\s*(\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Idleness:
    """What a launcher takes while its workers sleep.

    Args:
        megabytes: Memory of its processes.
        wakes: How often they woke up in a second.
    """

    megabytes: float
    wakes: float


def measure(installation: Installation, effort: Effort) -> list[Figure]:
    """Let all launchers take turns, and look for modules that should not be there."""
    idle = take_turns(
        {launcher: partial(watch_idle, installation, launcher, _IDLE) for launcher in installation.launchers},
        rounds=effort.pairs,
    )
    wakes = compare(idle, lambda each: each.wakes)
    return [
        compared(
            compare(idle, lambda each: each.megabytes),
            benchmark="memory",
            name="memory of the launcher's processes (PSS), 2 workers asleep",
            unit="MB",
            bar=Bar(20.0),
            headline="the launcher alone: its memory",
            plots={"footprint": "launcher, 2 workers asleep"},
        ),
        compared(
            wakes,
            benchmark="memory",
            name="wake-ups of the launcher's processes, 2 workers asleep",
            unit="a second",
            bar=Bar(0.0),
            note=f"over {_IDLE:g} s each time; highest value of elastic-run: {wakes.worst('elastic-run'):g} a second",
        ),
        alone(
            [watch_hang_detection(installation, _TICKING) for _ in range(effort.pairs)],
            benchmark="memory",
            name=f"processor time of the launcher's processes with --hang-timeout=600, {_WATCHED} workers asleep",
            unit="% of a core",
            bar=Bar(0.1),
            note=f"over {_TICKING:g} s each time, after the first look at the workers",
        ),
        alone(
            [watch_slow_ranks(installation, _STEPPING)],
            benchmark="memory",
            name=f"processor time of the watch for a slow rank, {_STEPPERS} workers with 100 collectives a second",
            unit="% of a core",
            bar=Bar(3.0),
            note=f"over {_STEPPING:g} s: the launcher's processes, and the recorder's thread in each worker",
        ),
        alone(
            [float(len(forbidden_imports(installation)))],
            benchmark="memory",
            name=f"modules that the launcher imports, out of {', '.join(sorted(_NEVER_IMPORTED))}",
            unit="",
            bar=Bar(0.0),
        ),
    ]


def watch_idle(installation: Installation, launcher: str, seconds: float) -> Idleness:
    """Let two workers sleep under a launcher."""
    command = installation.launcher(launcher, 2, installation.worker("sleeper"))
    with Job(command, directory=installation.directory) as job:
        workers = {int(words[0]) for words in job.wait_lines(2)}
        time.sleep(_SETTLING)
        pids = [job.pid, *(set(descendants_of(job.pid)) - workers)]
        if launcher == "elastic-run" and any("libtorch" in _maps(pid) for pid in pids):
            message = "the launcher has torch in its memory"
            raise BenchmarkError(message)
        before = _wait_quiet(pids)
        time.sleep(seconds)
        wakes = sum(map(_wakes, pids)) - before
        return Idleness(sum(map(proportional_megabytes, pids)), wakes / seconds)


def watch_hang_detection(installation: Installation, seconds: float) -> float:
    """Let workers sleep under elastic-run with --hang-timeout."""
    command = installation.launcher("elastic-run", _WATCHED, "--hang-timeout=600", installation.worker("sleeper"))
    with Job(command, directory=installation.directory) as job:
        workers = {int(words[0]) for words in job.wait_lines(_WATCHED)}
        time.sleep(_FIRST_LOOK)
        before, began_at = _processor_times(job.pid, workers), time.monotonic()
        time.sleep(seconds)
        after, passed = _processor_times(job.pid, workers), time.monotonic() - began_at
        return 100 * sum(after[pid] - before[pid] for pid in before.keys() & after.keys()) / passed


def watch_slow_ranks(installation: Installation, seconds: float) -> float:
    """Let workers take steps under elastic-run with --flight-recorder."""
    command = installation.launcher("elastic-run", _STEPPERS, "--flight-recorder", installation.worker("stepper"))
    with Job(command, directory=installation.directory) as job:
        workers = {int(words[0]) for words in job.wait_lines(_STEPPERS)}
        threads = [task for pid in workers for task in Path(f"/proc/{pid}/task").iterdir() if _is_recorder(task)]

        def count() -> float:
            own = sum(int((task / "schedstat").read_text(encoding="ascii").split()[0]) / 1e9 for task in threads)
            return own + sum(_processor_times(job.pid, workers).values())

        before, began_at = count(), time.monotonic()
        time.sleep(seconds)
        return 100 * (count() - before) / (time.monotonic() - began_at)


def _is_recorder(task: Path) -> bool:
    return (task / "comm").read_text(encoding="ascii").strip() == RECORDER_THREAD


def forbidden_imports(installation: Installation) -> set[str]:
    """Let two workers sleep under ``-X importtime``, and return which modules were imported that never should be."""
    command = installation.launcher("elastic-run", 2, installation.worker("sleeper"))
    with Job([installation.python, "-X", "importtime", *command], directory=installation.directory) as job:
        job.wait_lines(2)
        time.sleep(_SETTLING)
        _wait_quiet([job.pid])
        modules = set(_IMPORT_LINE.findall(job.errors))
    if "elastic_run.run" not in modules:
        message = "the list of imported modules can't be read"
        raise BenchmarkError(message)
    return modules & _NEVER_IMPORTED


def proportional_megabytes(pid: int) -> float:
    """Return a process's memory; pages that it shares count by share."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return int(text.partition("\nPss:")[2].split()[0]) * 1024 / 1e6


def _maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")


def _wait_quiet(pids: list[int]) -> int:
    """Wait until the launcher is done with its start, which a busy machine delays; return its wake-ups until then."""
    give_up_at = time.monotonic() + _WAIT_LIMIT
    wakes = sum(map(_wakes, pids))
    while time.monotonic() < give_up_at:
        time.sleep(_QUIET)
        before, wakes = wakes, sum(map(_wakes, pids))
        if wakes == before:
            break
    return wakes


def _wakes(pid: int) -> int:
    """Return how often a process's threads were put on a CPU."""
    return sum(int(fields[2]) for fields in _read_schedstats(pid))


def _processor_times(launcher: int, workers: set[int]) -> dict[int, float]:
    """Return the seconds that each of a launcher's processes has had a processor, by pid."""
    pids = [launcher, *(set(descendants_of(launcher)) - workers)]
    return {pid: sum(int(fields[0]) for fields in _read_schedstats(pid)) / 1e9 for pid in pids}


def _read_schedstats(pid: int) -> list[list[str]]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [(task / "schedstat").read_text(encoding="ascii").split() for task in tasks]
