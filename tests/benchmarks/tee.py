"""Output through ``--tee 3``: how fast, at what CPU time and memory of the launcher, how soon, and if every line comes.

Two workers write numbered lines to stdout and stderr, in blocks that cut lines anywhere, as a buffered stdout does. The
launcher's console (both its descriptors, as under ``2>&1``) is a pipe, a terminal or a file.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tests.benchmarks.comparison import compare, interleave, take_turns
from tests.benchmarks.console import Console
from tests.benchmarks.figures import Bar, Figure, alone, compared
from tests.benchmarks.job import TICKS, BenchmarkError, Job
from tests.benchmarks.numbered_lines import WORKERS, Damage, are_logs_whole, lines_of, look_for_damage

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.benchmarks.effort import Effort
    from tests.benchmarks.installation import Installation

_SINKS = ("pipe", "terminal", "file")
#: Milliseconds that workers pause after each thousand lines of a long run: a reader that catches up has to wait for the
#: rest of a line, as it has to with most programs.
_PAUSE = 10
_FIRST_LINE = "elastic-run imports the code that reads output while the workers start"
#: Seconds for which a reader stalls.
_STALL = 10.0


@dataclass(frozen=True)
class Flood:
    """One run.

    Args:
        speed: Megabytes that came to the console per second, from the first byte written to the last one there.
        cpu_seconds: The launcher's own, from the first byte written to its end: its start is measured elsewhere.
        peak_megabytes: The launcher's largest resident memory, looked at where the reader stalls.
        damage: What became of the lines on the console.
        is_log_whole: Whether the log files hold all bytes.
        lines: How many lines were written.
    """

    speed: float
    cpu_seconds: float
    peak_megabytes: float
    damage: Damage
    is_log_whole: bool
    lines: int

    @property
    def loss(self) -> float:
        """Lines that are not as they were written, and one more where a log file isn't."""
        return float(self.damage.total + (not self.is_log_whole))

    def text(self) -> str:
        """Return what became of the output in words."""
        return f"{self.damage.text()}, {'log files whole' if self.is_log_whole else 'LOG FILES DAMAGED'}"


def measure(installation: Installation, effort: Effort) -> list[Figure]:
    """Measure speed in turns on each kind of console, then look at every line of slower runs, then at single lines."""
    return [
        *(figure for sink in _SINKS for figure in _measure_speed(installation, effort, sink)),
        *(_measure_damage(installation, effort, sink) for sink in _SINKS),
        *_measure_stall(installation, effort),
        *(
            _measure_latency(installation, effort, what, partial(first_line_latency, workers=workers), _FIRST_LINE)
            for what, workers in (("the first line of 1 worker", 1), (f"the first line of {WORKERS} workers", WORKERS))
        ),
        _measure_latency(
            installation, effort, "a worker's line", line_latency, "the 95th percentile of 50 lines, 20 ms apart"
        ),
    ]


def _measure_speed(installation: Installation, effort: Effort, sink: str) -> list[Figure]:
    floods = take_turns(
        {name: partial(flood, installation, name, sink, effort.megabytes) for name in installation.launchers},
        rounds=effort.pairs,
    )
    if any(each.loss for turn in floods["elastic-run"] for each in turn):
        message = f"lines were damaged on the way to a {sink}: {floods['elastic-run']}"
        raise BenchmarkError(message)
    silent = [f"{launcher} {flood(installation, launcher, sink, 0).cpu_seconds:.2g} s" for launcher in floods]
    return [
        compared(
            compare(floods, lambda each: each.speed),
            benchmark="tee",
            name=f"--tee to a {sink}",
            unit="MB/s",
            bar=Bar(3.0, "torchrun", is_least=True),
            note=f"{effort.megabytes} MB from {WORKERS} workers that have prepared their lines before",
            plots={"tee": f"to a {sink}"},
        ),
        compared(
            compare(floods, lambda each: each.cpu_seconds),
            benchmark="tee",
            name=f"launcher's CPU time for {effort.megabytes} MB to a {sink}",
            unit="s",
            bar=Bar(0.5, "torchrun"),
            note=f"from the first byte written to the launcher's end; with nothing to write {', '.join(silent)}",
        ),
    ]


def _measure_damage(installation: Installation, effort: Effort, sink: str) -> Figure:
    ours = flood(installation, "elastic-run", sink, effort.megabytes, pause=_PAUSE)
    theirs = flood(installation, "torchrun", sink, effort.megabytes, pause=_PAUSE)
    return Figure(
        benchmark="tee",
        name=f"lines lost, repeated or cut, out of {ours.lines} ({effort.megabytes} MB) to a {sink}",
        unit="",
        bar=Bar(0.0),
        elastic_run=ours.loss,
        torchrun=theirs.loss,
        values={"elastic-run": [[ours.loss]], "torchrun": [[theirs.loss]]},
        note=f"elastic-run: {ours.text()}; torchrun: {theirs.text()}",
    )


def _measure_stall(installation: Installation, effort: Effort) -> list[Figure]:
    stalled = [flood(installation, "elastic-run", "pipe", effort.megabytes, stall=_STALL) for _ in range(effort.pairs)]
    what = f"{effort.megabytes} MB to a pipe whose reader stalls for {_STALL:g} s"
    return [
        alone(
            [each.peak_megabytes for each in stalled],
            summary=max,
            benchmark="tee",
            name=f"launcher's largest memory (RSS), {what}",
            unit="MB",
            bar=Bar(64.0),
            note="the largest value of all runs; shared pages count in full",
        ),
        alone(
            [each.loss for each in stalled],
            summary=max,
            benchmark="tee",
            name=f"lines lost, repeated or cut, {what}",
            unit="",
            bar=Bar(0.0),
        ),
    ]


def _measure_latency(
    installation: Installation, effort: Effort, what: str, latency: Callable[[Installation, str], float], note: str
) -> Figure:
    latencies = interleave(
        {launcher: partial(latency, installation, launcher) for launcher in installation.launchers},
        rounds=effort.pairs,
    )
    return compared(
        latencies,
        benchmark="tee",
        name=f"{what}, from its write to its appearance on the console",
        unit="ms",
        bar=Bar(5.0),
        note=note,
    )


def first_line_latency(installation: Installation, launcher: str, *, workers: int) -> float:
    """Let workers write a line as the first thing they do and live on; return the first one's way to the console.

    Args:
        installation: The commands.
        launcher: Which one.
        workers: How many.

    Returns:
        Milliseconds.
    """
    command = installation.launcher(launcher, workers, "--tee=3", installation.worker("ticker"))
    with Job(command, directory=installation.directory) as job:
        line = job.wait_lines(1)[0][0]
        came_at = time.monotonic_ns()
        job.wait_end()
    return (came_at - int(line.partition(":")[2])) / 1e6


def line_latency(installation: Installation, launcher: str) -> float:
    """Let a worker write lines with pauses, and return the 95th percentile of their ways to the console in ms."""
    command = installation.launcher(launcher, 1, "--tee=3", installation.worker("ticker"))
    with Job(command, directory=installation.directory) as job:
        late = []
        for count in range(1, 51):
            line = job.wait_lines(count)[count - 1][0]
            late.append((time.monotonic_ns() - int(line.partition(":")[2])) / 1e6)
        job.wait_end()
    return sorted(late)[47]


def flood(
    installation: Installation, launcher: str, sink: str, megabytes: int, *, pause: int = 0, stall: float = 0.0
) -> Flood:
    """Send output of two workers through a launcher to a console, and look at what came.

    Args:
        installation: The commands.
        launcher: Which one.
        sink: What kind of console: `pipe`, `terminal` or `file`.
        megabytes: How much in all.
        pause: Milliseconds between thousands of lines.
        stall: Seconds that the reader of a pipe or terminal does nothing after the first bytes.

    Returns:
        What was measured and seen.
    """
    with TemporaryDirectory(dir=_roomy_directory(installation, megabytes)) as name:
        directory = Path(name)
        os.mkfifo(directory / "go")
        numbers = lines_of(megabytes)
        options = ("--tee=3", "--log-dir", str(directory / "logs"))
        script = (installation.worker("flood"), str(numbers), str(directory), str(pause))
        command = installation.launcher(launcher, WORKERS, *options, *script)
        with Console(sink, directory / "console", stall=stall) as console:
            with Job(command, directory=directory, console=console.writer) as job:
                console.read_from(job.pid)
                job.wait_end(deadline=300.0)
            last_byte_at = console.wait_last_byte()
            received = console.received()
        starts = [(directory / str(rank)).read_text(encoding="ascii").split() for rank in range(WORKERS)]
        begun_at, ticks_before = (min(int(words[column]) for words in starts) for column in (0, 1))
        return Flood(
            speed=len(received) / 1e6 / ((last_byte_at - begun_at) / 1e9),
            cpu_seconds=job.cpu_seconds - ticks_before / TICKS,
            peak_megabytes=console.peak_megabytes,
            damage=look_for_damage(received, numbers),
            is_log_whole=are_logs_whole(directory / "logs", numbers),
            lines=numbers * 2 * WORKERS,
        )


def _roomy_directory(installation: Installation, megabytes: int) -> Path:
    """Return a directory in memory where there is one with room, so that no disk is measured."""
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free > 4_000_000 * megabytes:
        return shared
    return installation.directory
