"""The pictures of the README and the docs: reports of a failed job and of a hang, and the page of a job's history.

``python -m benchmarks.pictures reports`` runs `workers/nan_loss.py` under both launchers, takes what each says
after its workers' own lines, and writes docs/pictures/report.svg (side by side) and report-phone.svg (below each
other). Then it runs `workers/stuck_loader.py` with `--hang-timeout`, and writes hang.svg. The texts are those of the
runs; only the paths of the Python environment and of the script are replaced, and the machine's name.

``python -m benchmarks.pictures history`` runs a job of three nodes on this machine, each in a UTS namespace with
a name of its own: a worker raises an exception, a silent worker is killed by SIGKILL, a launcher is killed by SIGKILL
and started again. Of the page of the job's history headless Chromium makes pictures. It needs root and Chromium.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.recording import ROOT
from tests.support.launch import ELASTIC_RUN
from tests.support.sessions import free_port
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
#: Name, width, height and whether it is dark.
_SIZES = (("history", 1280, 2190, False), ("history-phone", 390, 3180, True))
#: Seconds after the start: the launcher of a node is killed and started again; the job may end.
_KILL_AT, _START_AT, _END_AT = 44.0, 49.0, 58.0
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
    """Draw both reports."""
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
    """Return what the launcher says after its workers' last lines."""
    everything = _clean(text, script)
    end = max((number for number, line in enumerate(everything) if line.startswith("[rank")), default=-1)
    return everything[end + 1 :]


def _clean(text: str, script: str) -> list[str]:
    """Return the lines of a terminal, with a user's names in place of this machine's."""
    lines = text.replace("\r", "").replace(str(Path(script).parent), "/home/ada").replace(sys.prefix, "/venv")
    lines = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "node1", lines).rstrip("\n")
    return [line.rstrip() for line in lines.split("\n")]


def draw_hang(lines: Sequence[str]) -> str:
    """Draw elastic-run's report of a hang."""
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


def draw_reports() -> int:
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


# --- the history ------------------------------------------------------------------------------------------------------
def draw_history(place: Path) -> None:
    """Run the job and take pictures of its page."""
    run_job(place)
    page = place / "report.html"
    subprocess.run([*ELASTIC_RUN, "report", "logs", "-o", page], check=True, cwd=place)
    for name, width, height, is_dark in _SIZES:
        take_picture(page, _PICTURES / f"{name}.png", width, height, is_dark=is_dark)


def run_job(place: Path) -> None:
    """Run a job of three nodes to its end."""
    end, port = place / "end", free_port()
    flags = ["--nnodes=2:3", "--nproc-per-node=2", "--max-restarts=5", "--rdzv-backend=c10d", "--rdzv-id=train-7b"]
    flags += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=keep_alive_interval=1,last_call_timeout=20"]
    shutil.copy(_WORKERS / "history_job.py", place / "train.py")
    command = [*ELASTIC_RUN, *flags, "--tee=3", "--log-dir=logs", "--events-file=all.jsonl", "train.py", str(end)]

    def start(node: int) -> subprocess.Popen[bytes]:
        named = ["unshare", "--uts", "sh", "-c", f'hostname node{node} && exec "$@"', "sh", *command]
        return subprocess.Popen(named, cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    began = time.monotonic()

    def wait_until(age: float) -> None:
        time.sleep(max(0.0, age - (time.monotonic() - began)))

    launchers = [start(node) for node in range(3)]
    wait_until(_KILL_AT)
    launchers[1].kill()
    wait_until(_START_AT)
    launchers.append(start(1))
    wait_until(_END_AT)
    end.touch()
    for launcher in launchers:
        launcher.wait()


def take_picture(page: Path, picture: Path, width: int, height: int, *, is_dark: bool) -> None:
    """Let headless Chromium draw a page."""
    dark = ["--blink-settings=preferredColorScheme=0"] if is_dark else ["--blink-settings=preferredColorScheme=1"]
    window = [f"--window-size={width},{height}", "--hide-scrollbars", f"--screenshot={picture}"]
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", *dark, *window, page.as_uri()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main(what: str) -> int:
    """Make the pictures, and return the exit code."""
    if what == "reports":
        return draw_reports()
    with tempfile.TemporaryDirectory() as directory:
        draw_history(Path(directory))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
