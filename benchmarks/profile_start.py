"""Where the time of a start goes: ``python -m benchmarks.profile_start [--workers N] [--starts N] [--write]``.

The launcher's interpreter imports a spy (sitecustomize), which notes the time, and the CPU time that the launcher has
used, at events of Python's audit hook; the workers don't get it. It costs some tenths of a millisecond itself. Of each
stage the median is printed, and the least, which other programs on the machine spoil least. --write puts the table
into docs/start-up.md, which has one for each of some numbers of workers; on a quiet machine, please.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.installation import install
from benchmarks.job import Job
from benchmarks.start import start_bare

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.installation import Installation

_PAGE = Path(__file__).resolve().parents[1] / "docs" / "start-up.md"
_BLOCK = r"(<!-- profile of {workers} -->\n).*?(<!-- /profile -->)"
_SPY = """
import os
report = os.environ.pop("SPY_REPORT", None)
if report:
    import atexit, sys, time
    del os.environ["PYTHONPATH"]
    notes = []
    def note(event):
        notes.append((event, time.monotonic_ns(), time.process_time_ns()))
    def listen(event, arguments):
        if event == "import":
            note("import " + arguments[0])
        elif event in ("os.fork", "os.posix_spawn"):
            note(event)
    def write():
        with open(report, "w") as file:
            file.writelines("%s\\t%d\\t%d\\n" % entry for entry in notes)
    note("interpreter")
    sys.addaudithook(listen)
    atexit.register(write)
"""


@dataclass(frozen=True)
class Stage:
    """A part of the way from exec to the last worker's first line.

    Args:
        name: What happens in it.
        end: The event that ends it; the last of that name where `is_last`, or "" for the last worker's first line.
        is_last: See there.
    """

    name: str
    end: str
    is_last: bool = False


_STAGES = (
    Stage("the launcher's interpreter starts", "interpreter"),
    Stage("command line: imported, read, checked", "import elastic_run.launcher"),
    Stage("what launches workers: imported", "import elastic_run.rendezvous.registry"),
    Stage("rendezvous, store, log directories, environments", "os.fork"),
    Stage("guardian, and the way to the first worker's exec", "os.posix_spawn"),
    Stage("exec of the others", "os.posix_spawn", is_last=True),
    Stage("the last worker's interpreter starts", ""),
)


@dataclass(frozen=True)
class Cost:
    """What one stage of one start took.

    Args:
        wall: Milliseconds.
        cpu: Milliseconds of the CPU time of who starts the workers.
    """

    wall: float
    cpu: float


def profile(installation: Installation, workers: int) -> list[Cost]:
    """Start a job once."""
    directory = installation.directory
    report = directory / "spy.txt"
    (directory / "sitecustomize.py").write_text(_SPY, encoding="ascii")
    command = installation.launcher("elastic-run", workers, installation.worker("first_line"))
    with Job(command, directory=directory, env={"PYTHONPATH": str(directory), "SPY_REPORT": str(report)}) as job:
        lines = job.wait_lines(workers)
        job.wait_end()
    last_line = max(int(words[0]) for words in lines)
    notes = [line.split("\t") for line in report.read_text(encoding="ascii").splitlines()]
    notes = [note for note in notes if int(note[1]) <= last_line]
    notes.append(["", str(last_line), notes[-1][2]])
    return list(_costs(job.started_at, notes))


def _costs(started_at: int, notes: Sequence[Sequence[str]]) -> Iterator[Cost]:
    then, cpu = started_at, 0
    for stage in _STAGES:
        found = [note for note in notes if note[0] == stage.end]
        _, at, used = found[-1 if stage.is_last else 0]
        yield Cost(wall=(int(at) - then) / 1e6, cpu=(int(used) - cpu) / 1e6)
        then, cpu = int(at), int(used)


def floor(installation: Installation, workers: int) -> Cost:
    """Start as many workers by a bare loop, without a launcher."""
    before = time.process_time_ns()
    return Cost(wall=start_bare(installation, workers), cpu=(time.process_time_ns() - before) / 1e6)


def table(starts: Sequence[Sequence[Cost]], floors: Sequence[Cost]) -> list[str]:
    """Return the profile of several starts as lines of Markdown."""
    lines = ["| stage | ms | least | CPU of the starter |", "|---|---:|---:|---:|"]
    lines += [_row(stage.name, costs) for stage, costs in zip(_STAGES, zip(*starts, strict=True), strict=True)]
    totals = [Cost(sum(cost.wall for cost in start), sum(cost.cpu for cost in start)) for start in starts]
    lines.append(_row("**all of it**", totals))
    lines.append(_row("floor: a loop of Popen in an interpreter that runs already", floors))
    ratio, least = (find(_walls(totals)) / find(_walls(floors)) for find in (median, min))
    place = f"Python {platform.python_version()}, {len(os.sched_getaffinity(0))} cores, {len(starts)} starts"
    return [*lines, "", f"{ratio:.2f} times the floor, {least:.2f} at the least ({place})."]


def _row(name: str, costs: Sequence[Cost]) -> str:
    walls, cpu = _walls(costs), median(cost.cpu for cost in costs)
    return f"| {name} | {median(walls):.1f} | {min(walls):.1f} | {cpu:.1f} |"


def _walls(costs: Sequence[Cost]) -> list[float]:
    return [cost.wall for cost in costs]


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile_start", description="a start, in stages")
    parser.add_argument("--workers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--starts", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--write", action="store_true", help="put the table into docs/start-up.md")
    options = parser.parse_args()
    block = re.compile(_BLOCK.format(workers=options.workers), re.DOTALL)
    if options.write and not block.search(_PAGE.read_text(encoding="utf-8")):
        parser.error(f"--write: {_PAGE.name} has no table for --workers={options.workers}")
    with TemporaryDirectory(prefix="elastic-run-profile-") as directory:
        installation = install(Path(directory))
        profile(installation, options.workers)  # the page cache is warm for all
        pairs = [
            (profile(installation, options.workers), floor(installation, options.workers))
            for _ in range(options.starts)
        ]
    text = "\n".join(table([start for start, _ in pairs], [bare for _, bare in pairs]))
    print(text)
    if options.write:
        page = _PAGE.read_text(encoding="utf-8")
        _PAGE.write_text(block.sub(lambda match: f"{match[1]}{text}\n{match[2]}", page), encoding="utf-8")


if __name__ == "__main__":
    main()
