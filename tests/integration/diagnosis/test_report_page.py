"""The page of a job's history, and the report on terminals of any width."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import stat
import subprocess
import sys
import time
from functools import partial
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import pytest

from tests.support.launch import ELASTIC_RUN
from tests.support.wait import stretched, wait_until
from tests.unit.test_event_log import encode, event, history

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.launch import Launch, Worker
    from tests.support.terminal import Terminal


#: Elements that have no end tag.
_VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """A page whose elements are all closed, in their order; its text, and what it would load."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.loaded: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open an element."""
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close the innermost element."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Take text that a reader sees."""
        if self.open and self.open[-1] not in ("style", "title"):
            self.words.append(data)


def report(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    command = [*ELASTIC_RUN, "report", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)


def read_page(*words: str | Path) -> Page:
    """Run the command, and return the page that it prints."""
    done = report(*words, "-o", "-")
    assert (done.returncode, done.stderr) == (0, "")
    return Page(done.stdout)


def test_the_page_of_a_real_job(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """Cause, rounds and restarts are there; the page loads nothing, and a message with markup stays text.

    The name of the page is printed without control characters.
    """
    script = worker("""
        if rank == 1 and attempt == 0: raise ValueError("<script>alert(1)</script> & loss is nan")
        if attempt == 0: signal.pause()
    """)
    logs = tmp_path / "\x1b[31mlogs"
    assert launch("--nproc-per-node=2", "--max-restarts=1", f"--log-dir={logs}", script).wait_exit() == 0
    done = report(logs)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/\\x1b[31mlogs/report.html\n")
    source = (logs / "report.html").read_text(encoding="utf-8")
    page = Page(source)
    assert page.loaded == []
    assert "<script" not in source
    assert "ValueError: <script>alert(1)</script> & loss is nan" in page.text
    assert "rank 1 on " in page.text
    assert "rounds 2 restarts 1 " in page.text
    assert page.text.count("success") == 2


def test_the_page_of_a_job_that_was_killed(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """Kill -9 of the launcher: the logs do not say the end, and the page says so."""
    launcher = launch("--tee=3", f"--log-dir={tmp_path}", worker("say('here')\nsignal.pause()"))
    launcher.wait_line("here")
    logs = partial(tmp_path.glob, "*/events.jsonl")
    wait_until(lambda: any(log.stat().st_size for log in logs()), what="the event log, which follows the first lines")
    launcher.send(signal.SIGKILL)
    launcher.wait_exit()
    page = read_page(tmp_path)
    assert "The logs do not say how the job ended" in page.text
    assert "it was killed, or still runs" in page.text


def test_torn_and_foreign_lines_are_counted_and_named(tmp_path: Path) -> None:
    """Half a line at the end, a foreign file, one that can't be read, and stacks beside them."""
    (tmp_path / "run").mkdir()
    log = tmp_path / "run" / "events.jsonl"
    log.write_bytes(encode(history())[:-9])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "events.jsonl").write_bytes(b'{"level": "info"}\n' * 3 + b"\xff" * 200_000 + b"\n")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "events.jsonl")
    os.mkfifo(tmp_path / "pipe" / "stacks.txt")
    (tmp_path / "run" / "stacks.txt").write_bytes(b'File "train.py", line 88, in step\xff')
    page = read_page(tmp_path)
    assert (
        f"{log}: 1 line is not an event, and left out (line {len(history())} is not a whole line of JSON)" in page.text
    )
    assert "4 lines are not events, and left out (line 1 is not an event of elastic-run)" in page.text
    assert f"{tmp_path}/pipe/events.jsonl can't be read: it is not a regular file" in page.text
    assert "train.py" in page.text


def test_parts_of_a_job_are_named(tmp_path: Path) -> None:
    """The log of one of three nodes, and of another job; --run chooses."""
    one = [each | {"nodes": 3, "workers": 3} if each["event"] == "round_formed" else each for each in history()]
    late = [each | {"agent": "z", "job": "z", "run_id": "late", "time": each["time"] + 9} for each in history()]
    path = tmp_path / "events.jsonl"
    path.write_bytes(encode(one) + encode(late))
    page = read_page(tmp_path, "--run", "text")
    assert "the event logs of up to 2 nodes are not here" in page.text
    assert "1 other job in these logs" in page.text
    assert "late" in read_page(path).text


@pytest.mark.parametrize("missing", range(len(history())))
def test_a_page_is_made_whatever_line_is_missing(missing: int, tmp_path: Path) -> None:
    """Also of single lines."""
    from elastic_run.report.history_page import render_page
    from elastic_run.report.job_history import fold, read_logs

    path = tmp_path / "events.jsonl"
    whole = history()
    for lines in ([whole[missing]], whole[missing:], [each for each in whole if each is not whole[missing]]):
        path.write_bytes(encode(lines))
        logs = read_logs(str(tmp_path))
        for job in fold(logs.events):
            Page(render_page(job, logs, []))


@pytest.mark.long
def test_a_hundred_thousand_events_make_a_page_of_bearable_size(tmp_path: Path) -> None:
    """Ten thousand rounds; what there is no room for is counted."""
    with (tmp_path / "events.jsonl").open("wb") as file:
        for number in range(10_000):
            base = number * 20.0
            place = {"agent": "a", "node": "node1", "job": "a", "round": number, "restart": number}
            sequence = [
                event("rendezvous_started", **place),
                event("round_formed", **place, nodes=1, workers=1, node_rank=0, round_id=""),
                event("worker_started", **place, rank=0),
                event("workers_started", **place),
                event("first_output", **place, rank=0),
                event("worker_exited", **place, rank=0, exit_code=1, signal=None, was_stopped=False, silence_s=12.0),
                event("workers_stopping", **place, reason="failure"),
                event("worker_failed", **place, rank=0, exit_code=1, signal=None, cause=f"ValueError: {number % 50}"),
                event("workers_stopped", **place),
                event("pause_started", **place),
            ]
            for index, each in enumerate(sequence):
                file.write(encode([each | {"time": 1e9 + base + index, "monotonic": base + index}]))
    began = time.monotonic()
    done = report(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - began < stretched(30)
    page = (tmp_path / "report.html").stat().st_size
    assert page < 300_000
    text = Page((tmp_path / "report.html").read_text(encoding="utf-8")).text
    assert "9900 rounds in the middle are not shown" in text
    assert "30 more failures are not shown" in text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "no events.jsonl in "),
        (b"", "events.jsonl' is empty"),
        (b"\n\n", "events.jsonl' is empty"),
        (b"hello\n", "no event in .*: line 1 is not a whole line of JSON"),
        (b'{"version": 7, "event": "x"}\n', "no event in .*: line 1 has version 7; this release reads version 1"),
    ],
)
def test_a_directory_without_events_is_one_line(content: bytes | None, expected: str, tmp_path: Path) -> None:
    """Exit 2."""
    if content is not None:
        (tmp_path / "events.jsonl").write_bytes(content)
    refused(expected, tmp_path)


def refused(expected: str, *words: str | Path) -> None:
    """Check that the command refuses its arguments in one line."""
    done = report(*words)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert re.search(f"^elastic-run: error: report: .*{expected}", line), line


def test_places_that_cannot_be_read_or_written_are_one_line(tmp_path: Path) -> None:
    """A missing directory, an unknown run, an output in a directory that isn't there, or that is one."""
    refused("No such file or directory", tmp_path / "nothing")
    (tmp_path / "events.jsonl").write_bytes(encode(history()))
    refused("--run: no job 'x' in .*; there are text", tmp_path, "--run", "x")
    refused("can't be written: No such file or directory", tmp_path, "-o", tmp_path / "no" / "page.html")
    refused("can't be written: Is a directory", tmp_path, "-o", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["events.jsonl"]


def test_a_device_or_a_link_as_output_stays_what_it_is(tmp_path: Path) -> None:
    """`-o /dev/null` of a root user must not put a file in the place of the device."""
    (tmp_path / "events.jsonl").write_bytes(encode(history()))
    pipe, link = tmp_path / "pipe", tmp_path / "link.html"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 1 << 20)
    link.symlink_to("target.html")
    for place in (pipe, link):
        done = report(tmp_path, "-o", place)
        assert (done.returncode, done.stdout) == (0, f"{place}\n")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert b"</html>" in os.read(reader, 1 << 20)
    os.close(reader)
    assert link.is_symlink()
    assert "</html>" in (tmp_path / "target.html").read_text(encoding="utf-8")


def test_without_jinja2_one_line_names_the_extra(tmp_path: Path) -> None:
    """Exit 2."""
    (tmp_path / "events.jsonl").write_bytes(encode(history()))
    run = "from elastic_run.cli.commands import run; sys.exit(run(sys.argv[1:]))"
    code = f"import sys; sys.modules['jinja2'] = None; {run}"
    command = [sys.executable, "-c", code, "report", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "elastic-run: error: report: needs jinja2: pip install 'elastic-run[report]'\n"


# --- the width of the report ------------------------------------------------------------------------------------------
def lines_of_report(output: str) -> list[str]:
    """Return the lines from the report's title on, without colours."""
    lines = re.sub(r"\x1b\[\d*m", "", output).splitlines()
    return lines[next(number for number, line in enumerate(lines) if line.startswith("-- elastic-run: ")) :]


@pytest.mark.parametrize(("columns", "width"), [(40, 60), (60, 60), (72, 72), (100, 100), (120, 120), (200, 120)])
def test_the_report_is_as_wide_as_the_terminal(terminal: Terminal, worker: Worker, columns: int, width: int) -> None:
    """The title fills the line, and no line is wider; the limits are 60 and 120 columns."""
    terminal.resize(24, columns)
    program = worker("raise ValueError(' '.join(['many words'] * 60))")
    terminal.start("--nproc-per-node=1", f"--log-dir={program.parent}", "-r3", program)
    assert terminal.wait_exit() == 1
    lines = lines_of_report(terminal.output.decode())
    assert len(lines[0]) == width
    said = next(number for number, line in enumerate(lines) if line.strip().startswith("ValueError"))
    assert width - 15 < len(lines[said]) <= width
    assert all(len(line) <= width or "/" in line for line in lines)


def test_the_width_is_the_terminal_s_at_the_end(terminal: Terminal, worker: Worker) -> None:
    """A window that was resized while the job ran has a report of its new width."""
    terminal.resize(24, 80)
    program = worker("say('ready', os.getpid()); time.sleep(3600)")
    terminal.start("--nproc-per-node=1", program)
    terminal.wait_output("ready")
    terminal.resize(24, 110)
    terminal.type("\x03")
    terminal.wait_exit()
    assert len(lines_of_report(terminal.output.decode())[0]) == 110


def test_without_a_terminal_the_report_has_80_columns(launch: Launch, worker: Worker) -> None:
    """A pipe has no width, and the variable COLUMNS describes another terminal."""
    job = launch("--nproc-per-node=1", worker("sys.exit(3)"), env={"COLUMNS": "110"})
    assert job.wait_exit() == 3
    assert len(lines_of_report(job.stderr)[0]) == 80


def test_a_path_and_a_command_can_be_copied_from_a_narrow_terminal(
    terminal: Terminal, worker: Worker, tmp_path: Path
) -> None:
    """The place of an exception, the log directory and a command of the hint stand in one line each."""
    terminal.resize(24, 60)
    logs = tmp_path / ("a directory of words " * 4).strip() / "logs"
    logs.mkdir(parents=True)
    program = worker("""
        if rank == 0:
            open('/no/such/' + 'directory/' * 12 + 'file')
    """)
    terminal.start("--nproc-per-node=1", f"--log-dir={logs}", "-r3", program)
    assert terminal.wait_exit() == 1
    lines = lines_of_report(terminal.output.decode())
    for whole in (f"{program}:7 in <module>", "'/no/such/" + "directory/" * 12 + "file'", f"{logs}/"):
        assert sum(whole in line for line in lines) == 1, whole
    terminal.output.clear()
    terminal.start("--nproc-per-node=1", worker("os.kill(os.getpid(), signal.SIGKILL)"))
    assert terminal.wait_exit() == 137
    assert not re.search(r"dmesg \|?\r?\n", terminal.output.decode())
