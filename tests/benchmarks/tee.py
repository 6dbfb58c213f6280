"""Output through ``--tee 3``: how fast, at what CPU time of the launcher, how soon a line is there, and if all are.

Two workers write numbered lines to stdout and stderr, in blocks that cut lines anywhere, as a buffered stdout does. The
launcher's console (both its descriptors, as under ``2>&1``) is a pipe, a terminal or a file. Every line is looked at.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tests.benchmarks.comparison import Comparison, interleave
from tests.benchmarks.figures import Bar, Figure
from tests.benchmarks.job import TICKS, BenchmarkError, Job

if TYPE_CHECKING:
    from tests.benchmarks.effort import Effort
    from tests.benchmarks.installation import Installation

_SINKS = ("pipe", "terminal", "file")
_WORKERS = 2
#: Megabytes of a turn of the comparison of speeds.
_SHORT = 30
#: Milliseconds that workers pause after each thousand lines of a long run: a reader that catches up has to wait for the
#: rest of a line, as it has to with most programs.
_PAUSE = 10
_LINE = re.compile(rb"\[default(\d)\]:([oe])\1 (\d{9}) \.{83}\r?\n")
_LINE_BYTES = 97
_BATCH = 1000


@dataclass(frozen=True)
class Damage:
    """What became of the lines on the way.

    Args:
        lost: Lines that never came whole.
        repeated: Lines that came again.
        cut: Lines on the console that no worker wrote like that.
    """

    lost: int
    repeated: int
    cut: int

    @property
    def total(self) -> int:
        """Lines that are not as they were written; one that came in pieces is lost and cut, and counts once."""
        return max(self.lost, self.cut) + self.repeated

    def text(self) -> str:
        """Return it in words."""
        return f"{self.lost} lost, {self.repeated} repeated, {self.cut} cut"


@dataclass(frozen=True)
class Flood:
    """One run.

    Args:
        speed: Megabytes that came to the console per second, from the first byte written to the last one there.
        cpu_seconds: The launcher's own, from the first byte written to its end: its start is measured elsewhere.
        damage: What became of the lines on the console.
        is_log_whole: Whether the log files hold all bytes.
        lines: How many lines were written.
    """

    speed: float
    cpu_seconds: float
    damage: Damage
    is_log_whole: bool
    lines: int


def measure(installation: Installation, effort: Effort) -> list[Figure]:
    """Measure speed in turns on each kind of console, then look at every line of a long run."""
    figures = [figure for sink in _SINKS for figure in _measure_speed(installation, effort, sink)]
    figures += [_measure_damage(installation, effort, sink) for sink in _SINKS]
    return [*figures, _measure_latency(installation, effort)]


def _measure_speed(installation: Installation, effort: Effort, sink: str) -> list[Figure]:
    floods: dict[str, list[Flood]] = {"elastic-run": [], "torchrun": []}

    def run(launcher: str) -> float:
        floods[launcher].append(flood(installation, launcher, sink, _SHORT))
        return floods[launcher][-1].speed

    speeds = interleave(
        {"elastic-run": lambda: run("elastic-run"), "torchrun": lambda: run("torchrun")}, rounds=effort.pairs
    )
    if any(each.damage.total or not each.is_log_whole for each in floods["elastic-run"]):
        message = f"lines were damaged on the way to a {sink}: {floods['elastic-run']}"
        raise BenchmarkError(message)
    cpu = Comparison({launcher: [[each.cpu_seconds] for each in runs] for launcher, runs in floods.items()})
    silent = [f"{launcher} {flood(installation, launcher, sink, 0).cpu_seconds:.2g} s" for launcher in floods]
    return [
        Figure(
            benchmark="tee",
            name=f"--tee to a {sink}",
            unit="MB/s",
            bar=Bar(2.0, "torchrun", is_least=True),
            elastic_run=speeds.median("elastic-run"),
            torchrun=speeds.median("torchrun"),
            ratio=speeds.ratio("elastic-run", "torchrun"),
            is_headline=sink == "pipe",
        ),
        Figure(
            benchmark="tee",
            name=f"launcher's CPU time for {_SHORT} MB to a {sink}",
            unit="s",
            bar=Bar(1.0, "torchrun"),
            elastic_run=cpu.median("elastic-run"),
            torchrun=cpu.median("torchrun"),
            ratio=cpu.ratio("elastic-run", "torchrun"),
            note=f"from the first byte written to the launcher's end; with nothing to write {', '.join(silent)}",
        ),
    ]


def _measure_damage(installation: Installation, effort: Effort, sink: str) -> Figure:
    ours = flood(installation, "elastic-run", sink, effort.megabytes, pause=_PAUSE)
    theirs = flood(installation, "torchrun", sink, effort.megabytes, pause=_PAUSE)
    logs = "log files whole" if ours.is_log_whole else "LOG FILES DAMAGED"
    return Figure(
        benchmark="tee",
        name=f"lines lost, repeated or cut of {ours.lines} ({effort.megabytes} MB) to a {sink}",
        unit="",
        bar=Bar(0.0),
        elastic_run=float(ours.damage.total + (not ours.is_log_whole)),
        torchrun=float(theirs.damage.total),
        note=f"elastic-run: {ours.damage.text()}, {logs}; torchrun: {theirs.damage.text()}",
        is_headline=sink == "pipe",
    )


def _measure_latency(installation: Installation, effort: Effort) -> Figure:
    latencies = interleave(
        {
            "elastic-run": lambda: line_latency(installation, "elastic-run"),
            "torchrun": lambda: line_latency(installation, "torchrun"),
        },
        rounds=effort.pairs,
    )
    return Figure(
        benchmark="tee",
        name="a worker's line written to the same line on the console",
        unit="ms",
        bar=Bar(10.0),
        elastic_run=latencies.median("elastic-run"),
        torchrun=latencies.median("torchrun"),
        ratio=latencies.ratio("elastic-run", "torchrun"),
        note="the 95th percentile of 50 lines, 20 ms apart",
        is_headline=True,
    )


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


def flood(installation: Installation, launcher: str, sink: str, megabytes: int, *, pause: int = 0) -> Flood:
    """Send output of two workers through a launcher to a console, and look at what came.

    Args:
        installation: The commands.
        launcher: Which one.
        sink: What kind of console: `pipe`, `terminal` or `file`.
        megabytes: How much in all.
        pause: Milliseconds between thousands of lines.

    Returns:
        What was measured and seen.
    """
    with TemporaryDirectory(dir=_roomy_directory(installation, megabytes)) as name:
        directory = Path(name)
        size = megabytes * 1_000_000 // (2 * _WORKERS)
        options = ("--tee=3", "--log-dir", str(directory / "logs"))
        script = (installation.worker("flood"), str(size), str(directory), str(pause))
        command = installation.launcher(launcher, _WORKERS, *options, *script)
        with Console(sink, directory / "console") as console:
            with Job(command, directory=directory, console=console.writer) as job:
                console.close_writer()
                job.wait_end(deadline=300.0)
            last_byte_at = console.wait_last_byte()
        starts = [(directory / str(rank)).read_text(encoding="ascii").split() for rank in range(_WORKERS)]
        begun_at, ticks_before = (min(int(words[column]) for words in starts) for column in (0, 1))
        received = (directory / "console").read_bytes()
        numbers = _lines_written(size)
        return Flood(
            speed=len(received) / 1e6 / ((last_byte_at - begun_at) / 1e9),
            cpu_seconds=job.cpu_seconds - ticks_before / TICKS,
            damage=look_for_damage(received, numbers),
            is_log_whole=_is_log_whole(directory / "logs", numbers),
            lines=numbers * 2 * _WORKERS,
        )


class Console:
    """What a launcher writes to; all of it is kept in a file.

    Args:
        sink: `pipe`, `terminal` or `file`.
        path: The file.
    """

    def __init__(self, sink: str, path: Path) -> None:
        self._path = path
        self._last_byte_at = 0
        self._reader = -1
        self._thread: threading.Thread | None = None
        if sink == "file":
            self.writer = os.open(path, os.O_WRONLY | os.O_CREAT)
            return
        self._reader, self.writer = os.pipe() if sink == "pipe" else os.openpty()
        self._thread = threading.Thread(target=self._copy)
        self._thread.start()

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *error: object) -> None:
        self.close_writer()
        self.wait_last_byte()

    def close_writer(self) -> None:
        """Leave the writing end to those who inherited it."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def wait_last_byte(self) -> int:
        """Wait until all writers are gone, and return the monotonic time in ns at which the last byte was there."""
        if self._thread is None:
            return time.monotonic_ns() - (time.time_ns() - self._path.stat().st_mtime_ns)
        self._thread.join()
        return self._last_byte_at

    def _copy(self) -> None:
        with self._path.open("wb", buffering=0) as file, contextlib.suppress(OSError):  # a terminal ends with EIO
            while chunk := os.read(self._reader, 1 << 20):
                self._last_byte_at = time.monotonic_ns()
                file.write(chunk)
        os.close(self._reader)


def look_for_damage(received: bytes, numbers: int) -> Damage:
    """Look at every line.

    Args:
        received: What came to the console. Lines of the launcher itself are no damage.
        numbers: How many lines each worker wrote to each stream.

    Returns:
        What is missing, what is there twice, and what is not a line of a worker.
    """
    seen = {(rank, name): bytearray(numbers) for rank in (b"0", b"1") for name in (b"o", b"e")}
    lost = _WORKERS * 2 * numbers
    repeated = whole = 0
    for match in _LINE.finditer(received):
        rank, name, number = match.groups()
        stream = seen[rank, name]
        index = int(number)
        whole += match.end() - match.start()
        if stream[index]:
            repeated += 1
        else:
            stream[index] = 1
            lost -= 1
    cut = 0 if whole == len(received) else sum(map(_is_cut, _LINE.sub(b"", received).splitlines()))
    return Damage(lost=lost, repeated=repeated, cut=cut)


def _is_cut(line: bytes) -> bool:
    """Tell a piece of a worker's line from a line that the launcher wrote itself."""
    return b"...." in line or line.startswith(b"[default")


def _lines_written(size: int) -> int:
    """Return how many lines the script `flood` writes to one stream for so many bytes."""
    return -(-size // (_LINE_BYTES * _BATCH)) * _BATCH


def _is_log_whole(logs: Path, numbers: int) -> bool:
    """Tell whether each log file holds exactly what its worker wrote."""
    files = {name: sorted(logs.rglob(f"{stream}.log")) for stream, name in (("stdout", b"o"), ("stderr", b"e"))}
    return all(
        len(paths) == _WORKERS
        and all(path.read_bytes() == _text_written(name, rank, numbers) for rank, path in enumerate(paths))
        for name, paths in files.items()
    )


def _text_written(name: bytes, rank: int, numbers: int) -> bytes:
    padding = b"." * 83
    return b"".join([b"%s%d %09d %s\n" % (name, rank, line, padding) for line in range(numbers)])


def _roomy_directory(installation: Installation, megabytes: int) -> Path:
    """Return a directory in memory where there is one with room, so that no disk is measured."""
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free > 4_000_000 * megabytes:
        return shared
    return installation.directory
