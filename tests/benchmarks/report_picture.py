"""The README's pictures: the reports of a failed job by elastic-run and torchrun, and elastic-run's of a hang.

    python -m tests.benchmarks.report_picture

The command runs `workers/nan_loss.py` under both launchers, takes what each says after its workers' own lines, and
writes docs/pictures/report.svg (side by side) and docs/pictures/report-phone.svg (one above the other). Then it runs
`workers/stuck_loader.py` with `--hang-timeout`, and writes docs/pictures/hang.svg. The texts are those of the runs;
only the paths of the Python environment and of the script are replaced, and the machine's name.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import tempfile
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from tests.benchmarks.recording import ROOT
from tests.support.launch import ELASTIC_RUN
from tests.support.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Sequence

_PICTURES = ROOT / "docs" / "pictures"
_WORKERS = Path(__file__).parent / "workers"
#: Columns of the terminal, which are those of elastic-run's report as well.
_COLUMNS = 80
#: What the training fails with; torchrun's last lines don't have it.
_CAUSE = "loss is nan"
#: The lines that are emphasised: the cause, and what stands in its place.
_EMPHASISED = re.compile(r"^\s+ValueError: loss is nan|error_file: <N/A>|traceback : |the job hangs|rank 3 is in ")
_HANG_TIMEOUT = "5s"
#: The width of a letter, as a share of the font's size.
_LETTER = 0.604
_STYLE = """\
<style>
.paper{fill:#f6f8fa;stroke:#d1d9e0}text{fill:#1f2328;white-space:pre}
.line{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.title{font-family:system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;font-size:15px;font-weight:600}
.quiet{fill:#59636e}.cause{fill:#0550ae;font-weight:700}.nothing{fill:#cf222e;font-weight:700}
@media (prefers-color-scheme:dark){
.paper{fill:#0d1117;stroke:#3d444d}text{fill:#f0f6fc}.quiet{fill:#9198a1}.cause{fill:#79c0ff}.nothing{fill:#ff7b72}}
</style>"""


@dataclass(frozen=True)
class Panel:
    """What one launcher said.

    Args:
        title: The panel's heading.
        lines: Its lines, as they were written.
        size: Of the font, in units of the picture.
        kind: How the emphasised lines are shown: `cause` or `nothing`.
    """

    title: str
    lines: Sequence[str]
    size: float
    kind: str

    def draw(self, left: float, top: float, width: float) -> tuple[str, float]:
        """Return the panel as SVG, lines wrapped as a terminal wraps them, and its height."""
        columns = int((width - 24) / (self.size * _LETTER))
        pitch = self.size * 1.3
        middle = top + 46
        rows = []
        for line in self.lines:
            kind = f"line {self.kind}" if _EMPHASISED.search(line) else "line"
            for start in range(0, max(1, len(line)), columns):
                rows.append(_text(left + 12, middle, line[start : start + columns], kind, self.size))
                middle += pitch
        height = middle - pitch - top + 16
        paper = (
            f'<rect class="paper" x="{left + 0.5}" y="{top + 0.5}" width="{width - 1}" height="{height:.1f}" rx="8"/>'
        )
        return "\n".join([paper, _text(left + 12, top + 24, self.title, "title", 15), *rows]), height


def draw(ours: Sequence[str], theirs: Sequence[str], *, is_narrow: bool) -> str:
    """Draw both reports.

    Args:
        ours: The last lines of elastic-run.
        theirs: Those of torchrun.
        is_narrow: Whether the panels stand one above the other, for a phone.

    Returns:
        The whole file.
    """
    width = 480 if is_narrow else 558
    fitting = (width - 24) / (max(map(len, ours)) * _LETTER)
    panel = Panel(f"elastic-run: its last {len(ours)} lines", ours, fitting, "cause")
    other = Panel(f"torchrun: its last {len(theirs)} lines, no cause", theirs, 9 if is_narrow else 7, "nothing")
    first, height = panel.draw(0, 0, width)
    if is_narrow:
        second, lower = other.draw(0, height + 12, width)
        return _file(width, height + 12 + lower, [first, second])
    second, lower = other.draw(width + 10, 0, 392)
    return _file(width + 402, max(height, lower), [first, second])


def last_lines(text: str, script: str) -> list[str]:
    """Return what the launcher says after its workers' last lines.

    Args:
        text: All that came to the terminal.
        script: The path of the script, whose directory is a temporary one.
    """
    everything = _clean(text, script)
    end = max((number for number, line in enumerate(everything) if line.startswith("[rank")), default=-1)
    return everything[end + 1 :]


def _clean(text: str, script: str) -> list[str]:
    """Return the lines of a terminal, with a user's names in place of this machine's."""
    lines = text.replace("\r", "").replace(str(Path(script).parent), "/home/ada").replace(sys.prefix, "/venv")
    lines = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "node1", lines).rstrip("\n")
    return [line.rstrip() for line in lines.split("\n")]


def draw_hang(lines: Sequence[str]) -> str:
    """Draw elastic-run's report of a hang.

    Args:
        lines: Its lines.

    Returns:
        The whole file.
    """
    title = f"elastic-run --hang-timeout={_HANG_TIMEOUT}: a rank hangs, and the others wait for it"
    panel = Panel(title, lines, 9, "cause")
    width = 24 + max(map(len, lines)) * 9 * _LETTER
    drawn, height = panel.draw(0, 0, width)
    return _file(width, height, [drawn], "The lines of elastic-run about a job that hangs")


def hang_lines(text: str, script: str) -> list[str]:
    """Return what the launcher says of the hang, out of all that came to the terminal."""
    lines = _clean(text, script)
    start = next(number for number, line in enumerate(lines) if "the job hangs" in line)
    of_hang = [line for line in lines[start + 1 :] if line.startswith("elastic-run:   ")]
    return [lines[start], *of_hang]


def _file(
    width: float,
    height: float,
    parts: Sequence[str],
    label: str = "The last lines of elastic-run and of torchrun about the same failed job",
) -> str:
    size = f'viewBox="0 0 {width:.0f} {height + 2:.0f}" width="{width:.0f}" height="{height + 2:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">'
    return "\n".join([head, _STYLE, *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, kind: str, size: float) -> str:
    place = f'x="{x:g}" y="{y:.1f}" font-size="{size:g}" xml:space="preserve"'
    return f'<text class="{kind}" {place}>{escape(text)}</text>'


def _run(program: Sequence[str], worker: str, *arguments: str, columns: int = _COLUMNS) -> tuple[str, str]:
    """Run a job in a terminal, and return all that came to it and the path of the script."""
    with tempfile.TemporaryDirectory() as name, Terminal(rows=60, columns=columns) as terminal:
        script = str(Path(name) / "train.py")
        shutil.copy(_WORKERS / worker, script)
        terminal.start("--standalone", *arguments, script, program=program, env={"NO_COLOR": "1"})
        terminal.wait_exit()
        return terminal.output.decode(), script


def main() -> int:
    """Run the jobs, write the pictures, and return the exit code."""
    torchrun = (str(Path(sys.executable).parent / "torchrun"),)
    ours, theirs = (last_lines(*_run(one, "nan_loss.py", "--nproc-per-node=2")) for one in (ELASTIC_RUN, torchrun))
    if not any(_CAUSE in line for line in ours) or any(_CAUSE in line for line in theirs):
        print(*ours, *theirs, sep="\n", file=sys.stderr)
        print("the reports aren't what the picture says about them", file=sys.stderr)
        return os.EX_SOFTWARE
    flags = ("--nproc-per-node=4", f"--hang-timeout={_HANG_TIMEOUT}", "--hang-action=fail")
    hang = hang_lines(*_run(ELASTIC_RUN, "stuck_loader.py", *flags, columns=160))
    _PICTURES.mkdir(exist_ok=True)
    (_PICTURES / "report.svg").write_text(draw(ours, theirs, is_narrow=False), encoding="utf-8")
    (_PICTURES / "report-phone.svg").write_text(draw(ours, theirs, is_narrow=True), encoding="utf-8")
    (_PICTURES / "hang.svg").write_text(draw_hang(hang), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
