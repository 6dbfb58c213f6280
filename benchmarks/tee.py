"""Output through ``--tee 3``: how fast, at what CPU time and memory of the launcher, how soon, and if every line comes.

Two workers write numbered lines to stdout and stderr, in blocks that cut lines anywhere, as a buffered stdout does. The
launcher's console (both its descriptors, as under ``2>&1``) is a pipe, a terminal or a file.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.figures import Bar, Figure, alone, compare, compared, interleave, take_turns
from benchmarks.job import TICKS, BenchmarkError, Job

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.installation import Effort, Installation

WORKERS = 2
_SINKS = ("pipe", "terminal", "file")
#: Milliseconds that workers pause after each thousand lines of a long run: a reader that catches up has to wait for the
#: rest of a line, as it has to with most programs.
_PAUSE = 10
_FIRST_LINE = "elastic-run imports the code that reads output while the workers start"
#: Seconds for which a reader stalls.
_STALL = 10.0
_LINE = re.compile(rb"\[default(\d)\]:([oe])\1 (\d{9}) \.{83}\r?\n")
_LINE_BYTES = 97
_STREAMS = 2
_EQUAL_WORKERS = 64
#: Bytes per read: what a pipe holds.
_READ_SIZE = 1 << 16
#: Reads after which the launcher's memory is read again.
_READS = 64
_PEAK = re.compile(r"^VmHWM:\s*(\d+) kB$", re.MULTILINE)


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
        _measure_equal_lines(installation, effort),
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


def _measure_equal_lines(installation: Installation, effort: Effort) -> Figure:
    return compared(
        interleave(
            {
                "elastic-run": partial(_run_equal_lines, installation),
                "floor": partial(_run_equal_lines, installation, "--no-fold"),
            },
            rounds=effort.pairs,
        ),
        benchmark="tee",
        name=f"a job of {_EQUAL_WORKERS} workers that each write the same 1,000 lines to stderr",
        unit="s",
        bar=Bar(1.1, "floor"),
        note="the floor is the same job with --no-fold, whose console has each line of each worker",
    )


def _run_equal_lines(installation: Installation, *flags: str) -> float:
    command = installation.launcher("elastic-run", _EQUAL_WORKERS, *flags, installation.worker("equal"))
    began_at = time.monotonic()
    with Job(command, directory=installation.directory) as job:
        job.wait_end()
    return time.monotonic() - began_at


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
    """Let workers write a line as the first thing they do and live on; return the first one's way to the console."""
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
    """Send output of two workers through a launcher to a console (`_SINKS`), and look at what came.

    The workers pause for `pause` milliseconds between thousands of lines; the reader of a pipe or terminal does nothing
    for `stall` seconds after the first bytes.
    """
    with TemporaryDirectory(dir=_roomy_directory(installation, megabytes)) as name:
        directory = Path(name)
        os.mkfifo(directory / "go")
        numbers = megabytes * 1_000_000 // (WORKERS * _STREAMS * _LINE_BYTES)  # of each worker in each stream
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


# --- the console ------------------------------------------------------------------------------------------------------
class Console:
    """A launcher's stdout and stderr.

    Args:
        sink: `pipe`, `terminal` or `file`.
        path: The file's, should it be one.
        stall: Seconds that the reader does nothing after its first read.

    Attributes:
        writer: The descriptor for the launcher.
        peak_megabytes: The largest resident memory that the launcher was seen to have had; of a file it isn't known.
    """

    def __init__(self, sink: str, path: Path, *, stall: float = 0.0) -> None:
        self._path = path
        self._stall = stall
        self._received: list[bytes] = []
        self._last_byte_at = 0
        self._thread: threading.Thread | None = None
        self.peak_megabytes = 0.0
        if sink == "file":
            self._reader, self.writer = -1, os.open(path, os.O_WRONLY | os.O_CREAT)
        else:
            self._reader, self.writer = os.pipe() if sink == "pipe" else os.openpty()

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *error: object) -> None:
        self._close_writer()
        if self._thread is not None:
            self._thread.join()
        if self._reader >= 0:
            os.close(self._reader)

    def read_from(self, pid: int) -> None:
        """Begin to read what a launcher and its workers write; they have inherited the writing end."""
        self._close_writer()
        if self._reader >= 0:
            self._thread = threading.Thread(target=self._read, args=[Path(f"/proc/{pid}/status")])
            self._thread.start()

    def wait_last_byte(self) -> int:
        """Wait until all writers are gone, and return the monotonic time in ns at which the last byte was there."""
        if self._thread is None:
            return time.monotonic_ns() - (time.time_ns() - self._path.stat().st_mtime_ns)
        self._thread.join()
        return self._last_byte_at

    def received(self) -> bytes:
        """Return all that came, after `wait_last_byte`."""
        return b"".join(self._received) if self._reader >= 0 else self._path.read_bytes()

    def _close_writer(self) -> None:
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def _read(self, status: Path) -> None:
        with contextlib.suppress(OSError):  # a terminal ends with EIO
            while chunk := os.read(self._reader, _READ_SIZE):
                self._last_byte_at = time.monotonic_ns()
                self._received.append(chunk)
                if self._stall and len(self._received) % _READS == 1:
                    if len(self._received) == 1:
                        time.sleep(self._stall)
                    self._look_at_memory(status)

    def _look_at_memory(self, status: Path) -> None:
        with contextlib.suppress(OSError):  # it has ended
            found = _PEAK.search(status.read_text(encoding="utf-8", errors="replace"))
            self.peak_megabytes = int(found[1]) * 1024 / 1e6 if found else self.peak_megabytes


# --- the lines --------------------------------------------------------------------------------------------------------
def look_for_damage(received: bytes, numbers: int) -> Damage:
    """Look at every line."""
    seen = {(rank, name): bytearray(numbers) for rank in (b"0", b"1") for name in (b"o", b"e")}
    lost = WORKERS * _STREAMS * numbers
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


def are_logs_whole(logs: Path, numbers: int) -> bool:
    """Tell whether each log file holds exactly what its worker wrote."""
    files = {name: sorted(logs.rglob(f"{stream}.log")) for stream, name in (("stdout", b"o"), ("stderr", b"e"))}
    return all(
        len(paths) == WORKERS
        and all(path.read_bytes() == _text_written(name, rank, numbers) for rank, path in enumerate(paths))
        for name, paths in files.items()
    )


def _text_written(name: bytes, rank: int, numbers: int) -> bytes:
    padding = b"." * 83
    return b"".join([b"%s%d %09d %s\n" % (name, rank, line, padding) for line in range(numbers)])
