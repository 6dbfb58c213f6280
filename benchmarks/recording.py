"""What is kept of a run: docs/benchmarks.json, of which the page, the plots and the README's block are made.

A run of some benchmarks takes the place of what was recorded of these; the others' figures stay, each with the day, the
machine and the busyness of its own run.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.figures import Bar, Figure, Ratio

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ROOT = Path(__file__).resolve().parents[1]
JSON_FILE = ROOT / "docs" / "benchmarks.json"
#: The benchmarks' names, in the order in which they run.
ORDER = (
    *("start", "warm", "functions", "memory", "detection", "orphans", "worker_connections", "nodes"),
    *("hosts", "node_connections", "scale", "state", "tee", "diagnosis"),
)
_VERSION = 4


@dataclass(frozen=True)
class Run:
    """Where and when a benchmark ran.

    Args:
        day: In UTC, as YYYY-MM-DD.
        machine: Processor and kernel.
        cores: That the run might use.
        memory: Gigabytes.
        python: Its version.
        torch: Its version.
        ft_launcher: The version of nvidia-resiliency-ext; empty where it was not there.
        seconds: What the benchmark took.
        busy: The share of the processors that others kept busy right before.
    """

    day: str
    machine: str
    cores: int
    memory: float
    python: str
    torch: str
    ft_launcher: str
    seconds: float
    busy: float


@dataclass(frozen=True)
class Record:
    """All that is recorded.

    Args:
        runs: By benchmark.
        figures: In the order of the benchmarks.
    """

    runs: Mapping[str, Run]
    figures: tuple[Figure, ...]


def describe_run(*, busy: float, seconds: float, ft_launcher: str) -> Run:
    """Return where and when this process runs."""
    return Run(
        day=datetime.now(tz=timezone.utc).date().isoformat(),
        machine=f"{_processor()}, Linux {platform.release().split('-')[0]}",
        cores=len(os.sched_getaffinity(0)),
        memory=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        python=platform.python_version(),
        torch=version("torch"),
        ft_launcher=ft_launcher,
        seconds=round(seconds),
        busy=round(busy, 2),
    )


def read_record(path: Path = JSON_FILE) -> Record:
    """Read what is recorded; nothing, where there is no file."""
    if not path.exists():
        return Record({}, ())
    content = json.loads(path.read_text(encoding="utf-8"))
    figures = []
    for fields in content["figures"]:
        bar, ratio = fields["bar"], fields["ratio"]
        figures.append(Figure(**{**fields, "bar": bar and Bar(**bar), "ratio": ratio and Ratio(**ratio)}))
    return Record({name: Run(**run) for name, run in content["runs"].items()}, tuple(figures))


def merge(record: Record, runs: Mapping[str, Run], figures: Iterable[Figure]) -> Record:
    """Put new figures in place of those of the same benchmarks."""
    rows = [figure for figure in record.figures if figure.benchmark not in runs] + list(figures)
    everything = {**record.runs, **runs}
    return Record(
        {name: everything[name] for name in ORDER if name in everything},
        tuple(sorted(rows, key=lambda figure: ORDER.index(figure.benchmark))),
    )


def write_record(record: Record, path: Path = JSON_FILE) -> None:
    """Write what is recorded: a line for each field, so that a new run is a diff of what it changed."""
    runs = ",\n".join(f"  {_text(name)}: {_text(asdict(run))}" for name, run in record.runs.items())
    figures = []
    for figure in record.figures:
        fields = ",\n".join(f"   {_text(name)}: {_text(value)}" for name, value in asdict(figure).items())
        figures.append(f"  {{\n{fields}\n  }}")
    joined = ",\n".join(figures)
    text = f'{{\n "version": {_VERSION},\n "runs": {{\n{runs}\n }},\n "figures": [\n{joined}\n ]\n}}\n'
    path.write_text(text, encoding="utf-8")


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return sys.platform
