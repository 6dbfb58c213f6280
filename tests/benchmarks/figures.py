"""A figure, its bar, and the forms in which figures are shown: lines on the console, JSON, Markdown."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.benchmarks.comparison import Ratio

_ROOT = Path(__file__).resolve().parents[2]
JSON_FILE = _ROOT / "docs" / "benchmarks.json"
MARKDOWN_FILE = _ROOT / "docs" / "benchmarks.md"
README_FILE = _ROOT / "README.md"
_README_BLOCK = re.compile(r"(<!-- benchmarks -->\n).*?(<!-- /benchmarks -->)", re.DOTALL)

_PAGE = """\
# Benchmarks

`make bench` measures this and writes this page. elastic-run and torchrun take turns within one run on one machine;
figures are medians, ratios are those of the medians, with the lowest and highest of any turn in brackets. The *floor*
is the same workers started by a bare loop of `subprocess.Popen` in the same run.

Both launchers are installed as pip does it, not editable, in one environment without test tools. Their workers hardly
import anything, torch least of all: the launcher is what is measured.

Nodes are agents on one machine. In rounds of many the store, the coordinator and one node are a real agent's; the other
nodes share two processes, where they decide and speak as real ones do, without their threads. The column of torchrun
then stands for torch's `DynamicRendezvousHandler`, one thread each in two processes, at torch's own TCPStore.

"""


@dataclass(frozen=True)
class Bar:
    """What a figure has to hold.

    Args:
        limit: The bound.
        of: What the bound is a multiple of: `torchrun` or `floor`; empty where it is in the figure's own unit.
        is_least: Whether the bound is one from below.
    """

    limit: float
    of: str = ""
    is_least: bool = False

    def is_met(self, value: float) -> bool:
        """Tell whether a value, or a ratio, is within the bound."""
        return value >= self.limit if self.is_least else value <= self.limit

    def text(self, unit: str) -> str:
        """Return the bar in words."""
        sign = "≥" if self.is_least else "≤"
        return f"{sign} {self.limit:g} x {self.of}" if self.of else f"{sign} {self.limit:g} {unit}".rstrip()


@dataclass(frozen=True)
class Figure:
    """One row of the table.

    Args:
        benchmark: The benchmark that it belongs to.
        name: What was measured.
        unit: Unit of the values.
        bar: What it has to hold, or None where it stands for information.
        elastic_run: Our value.
        torchrun: torchrun's, where it was measured.
        floor: The floor's, where there is one.
        ratio: Our value by the one that the bar names.
        note: What a reader should know.
        is_headline: Whether the README shows it.
    """

    benchmark: str
    name: str
    unit: str
    bar: Bar | None
    elastic_run: float
    torchrun: float | None = None
    floor: float | None = None
    ratio: Ratio | None = None
    note: str = ""
    is_headline: bool = False

    @property
    def is_met(self) -> bool:
        """Whether it holds its bar; no bar, nothing to miss."""
        if self.bar is None:
            return True
        value = self.ratio.value if self.bar.of and self.ratio else self.elastic_run
        return self.bar.is_met(value)

    def cells(self) -> list[str]:
        """Return the row's cells, in the order of `HEADINGS`."""
        values = (self.elastic_run, self.torchrun, self.floor)
        ratio = f"{self.ratio.value:.3g} [{self.ratio.low:.3g}, {self.ratio.high:.3g}]" if self.ratio else ""
        verdict = "" if self.bar is None else "yes" if self.is_met else "NO"
        bar = self.bar.text(self.unit) if self.bar else ""
        return [self.name, bar, *(_with_unit(value, self.unit) for value in values), ratio, verdict]


HEADINGS = ("figure", "bar", "elastic-run", "torchrun", "floor", "ratio", "met")


def _with_unit(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    number = f"{value:.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"
    return f"{number} {unit}".rstrip()


def console_lines(figures: Iterable[Figure]) -> list[str]:
    """Return the table for a console, notes included."""
    rows = [list(HEADINGS), *(figure.cells() for figure in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def record(figures: Iterable[Figure], *, load: float) -> None:
    """Put figures into docs/benchmarks.json, in place of those of the same benchmarks, and write docs/benchmarks.md.

    Args:
        figures: The new ones.
        load: The machine's load average when the run began: what else it did.
    """
    new = [_as_record(figure, load) for figure in figures]
    measured = {row["benchmark"] for row in new}
    old = json.loads(JSON_FILE.read_text(encoding="utf-8"))["figures"] if JSON_FILE.exists() else []
    rows = sorted(
        [row for row in old if row["benchmark"] not in measured] + new, key=lambda row: ORDER.index(row["benchmark"])
    )
    JSON_FILE.write_text(
        json.dumps({"version": 1, "figures": rows}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    MARKDOWN_FILE.write_text(_PAGE + _table(rows) + _remarks(rows), encoding="utf-8")


#: The benchmarks' names, in the order in which they run and are shown.
ORDER = (
    *("start", "functions", "memory", "detection", "orphans", "meetings", "nodes", "meetings_of_nodes", "scale"),
    "tee",
)


def write_readme() -> bool:
    """Rewrite the block between the README's benchmark markers from docs/benchmarks.json.

    Returns:
        Whether the README has such a block.
    """
    rows = json.loads(JSON_FILE.read_text(encoding="utf-8"))["figures"]
    text = README_FILE.read_text(encoding="utf-8")
    if not _README_BLOCK.search(text):
        return False
    lines = [f"| | elastic-run | torchrun {rows[0]['versions']['torch']} |", "|---|--:|--:|"]
    lines += [f"| {row['name']} | {row['cells'][2]} | {row['cells'][3]} |" for row in rows if row["is_headline"]]
    block = "\n".join(lines) + "\n"
    README_FILE.write_text(
        _README_BLOCK.sub(lambda match: match[1] + block + match[2], text, count=1), encoding="utf-8"
    )
    return True


def _as_record(figure: Figure, load: float) -> dict[str, object]:
    """Return a figure with what it depends on: machine, versions, day, load."""
    row = asdict(figure)
    row["bar"] = figure.bar.text(figure.unit) if figure.bar else None
    row["is_met"] = figure.is_met
    row["cells"] = figure.cells()
    row["day"] = datetime.now(tz=timezone.utc).date().isoformat()
    row["machine"] = f"{len(os.sched_getaffinity(0))} cores, {_processor()}, Linux {platform.release().split('-')[0]}"
    row["load"] = round(load, 1)
    row["versions"] = {"torch": version("torch"), "python": platform.python_version()}
    return row


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return sys.platform


def _table(rows: list[dict[str, object]]) -> str:
    lines = [f"| {' | '.join(HEADINGS)} |", "|---|---|--:|--:|--:|--:|---|"]
    lines += [f"| {' | '.join(row['cells'])} |" for row in rows]  # type: ignore[arg-type] # they are texts
    return "\n".join(lines) + "\n"


def _remarks(rows: list[dict[str, object]]) -> str:
    notes = [f"- {row['name']}: {row['note']}" for row in rows if row["note"]]
    places = dict.fromkeys(
        f"{row['machine']}; {_versions(row)}; {row['day']}; load average before {row['load']}" for row in rows
    )
    return "\n" + "\n".join(notes) + "\n\nMeasured on " + " and ".join(places) + ".\n"


def _versions(row: dict[str, object]) -> str:
    versions = row["versions"]
    return f"Python {versions['python']}, torch {versions['torch']}"  # type: ignore[index] # a dict from our own JSON
