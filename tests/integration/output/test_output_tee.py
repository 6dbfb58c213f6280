"""--tee and --no-capture."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support.launch import ELASTIC_RUN, clean_environment
from tests.support.output import CONSOLE, Jobs, peak_memory, tee
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.launch import Launch, Worker


def test_tee_writes_file_and_prefixed_lines(jobs: Jobs, tmp_path: Path) -> None:
    """A tee'd stream is in the file as written, and on the console line by line after the prefix."""
    data = b"".join(b"line %d %s\n" % (number, b"x" * (number % 200)) for number in range(20000))
    (tmp_path / "data").write_bytes(data)
    source = str(tmp_path / "data")
    code = f"data = open({source!r}, 'rb').read()\nfor at in range(0, len(data), 777): write(1, data[at:at + 777])"
    out, err = jobs.run((tee(tmp_path / "out.log"), code))
    assert (tmp_path / "out.log").read_bytes() == data
    assert out == b"".join(b"[0]:" + line for line in data.splitlines(keepends=True))
    assert err == b""


@pytest.mark.parametrize(
    ("flag", "merge"),
    [("--tee=2", True), ("--tee=0:2", True), ("--tee=0:3", False), ("--redirects=0:2", True), ("--tee=0:1", False)],
)
def test_streams_that_are_not_teed_tear_no_lines(
    launch: Launch, worker: Worker, tmp_path: Path, flag: str, *, merge: bool
) -> None:
    """Two flooding ranks leave each other's lines whole where some of their streams are tee'd and some are not."""
    program = worker("""
        for number in range(20000):
            os.write(1, b"<o%d %07d>\\n" % (rank, number))
            os.write(2, b"<e%d %07d %s>\\n" % (rank, number, b"." * 60))
    """)
    job = launch("--nproc-per-node=2", f"--log-dir={tmp_path / 'logs'}", flag, program, merge=merge)
    assert job.wait_exit() == 0
    lines = (job.stdout + job.stderr).splitlines()
    whole = re.compile(r"(\[default\d\]:)?<(o\d \d{7}|e\d \d{7} \.{60})>|elastic-run: .*")
    assert [line for line in lines if not whole.fullmatch(line)] == []
    assert sum("<" in line for line in lines) == (60000 if "redirects" in flag else 80000)


@pytest.mark.parametrize("prefix", ["", "[0]:", "[a prefix that is much longer than the line, {}]: " * 40])
def test_tee_is_binary_safe(jobs: Jobs, tmp_path: Path, prefix: str) -> None:
    """Any bytes, empty lines and carriage returns included, come out as they went in, whatever the prefix."""
    data = bytes(range(256)) * 64 + b"\n" * 5000 + b"\r\n\r\0\xff\n"
    (tmp_path / "data").write_bytes(data)
    code = f"write(1, open({str(tmp_path / 'data')!r}, 'rb').read())"
    out, _ = jobs.run((tee(tmp_path / "log", prefix=prefix), code))
    assert (tmp_path / "log").read_bytes() == data
    assert out == b"".join(prefix.encode() + line + b"\n" for line in data[:-1].split(b"\n"))


def test_unfinished_last_line(jobs: Jobs, tmp_path: Path) -> None:
    """A worker that dies within a line loses nothing; only the console gets the missing newline."""
    code = "write(1, b'one\\ntwo'); os.kill(os.getpid(), 9)"
    out, _ = jobs.run((tee(tmp_path / "log"), code))
    assert out == b"[0]:one\n[0]:two\n"
    assert (tmp_path / "log").read_bytes() == b"one\ntwo"


def test_line_of_100_megabytes(jobs: Jobs, tmp_path: Path) -> None:
    """A line of 100 MB passes in one piece under one prefix, beside another rank's lines, in bounded memory."""
    long = "block = b'x' * 1000000\nfor _ in range(100): write(1, block)\nwrite(1, b'\\n')"
    short = "for number in range(20000): write(1, b'%d\\n' % number)"
    job = jobs.start((tee(tmp_path / "long"), long), (tee(tmp_path / "short", 1), short))
    assert job.stdout is not None
    with job.stdout as reader:
        lines = iter(reader.readline, b"")
        sizes = [(line[:4], len(line)) for line in lines]
    assert job.wait(60) == 0
    assert [size for prefix, size in sizes if prefix == b"[0]:"] == [100000005]
    assert len(sizes) == 20001
    assert (tmp_path / "long").stat().st_size == 100000001
    assert peak_memory(jobs.notes / "status") < 64 << 20


def test_progress_bar_is_shown_before_its_line_ends(jobs: Jobs, tmp_path: Path) -> None:
    """A tee'd progress bar, all carriage returns, is shown while it runs; the file has it unchanged."""
    go = tmp_path / "go"
    os.mkfifo(go)
    code = f"write(1, b' 10%\\r 20%\\r 30%'); open({str(go)!r}).read(); write(1, b'\\r100%\\n')"
    job = jobs.start((tee(tmp_path / "log"), code))
    assert job.stdout is not None
    with job.stdout as reader:
        assert reader.readline() == b"[0]: 10%\r[0]: 20%\r\n"
        with go.open("w"):
            pass
        assert reader.read() == b"[0]: 30%\r100%\n"
    assert (tmp_path / "log").read_bytes() == b" 10%\r 20%\r 30%\r100%\n"


def test_filtered_files(jobs: Jobs, tmp_path: Path) -> None:
    """Lines of all tee'd ranks that contain a filter's text stand in the filtered file with their prefixes."""
    filters = {
        "stdout": str(tmp_path / "fo"),
        "stderr": str(tmp_path / "fe"),
        "stdout_filters": ["loss", "step"],
        "stderr_filters": ["warn"],
    }
    code = "write(1, b'loss 1\\nother\\nstep 2'); write(2, b'warn me\\nnot\\n')"
    workers = [(tee(rank=rank, tee_stderr=True, prefix=f"[{rank}]:"), code) for rank in range(2)]
    jobs.run(*workers, (CONSOLE, code), filters=filters)
    expected = [b"[0]:loss 1", b"[0]:step 2", b"[1]:loss 1", b"[1]:step 2"]
    assert sorted((tmp_path / "fo").read_bytes().splitlines()) == expected
    assert sorted((tmp_path / "fe").read_bytes().splitlines()) == [b"[0]:warn me", b"[1]:warn me"]


def test_a_descendant_that_holds_the_pipe(jobs: Jobs, tmp_path: Path) -> None:
    """When a worker's child keeps its output open, the worker's last words come and the end isn't delayed."""
    code = """
import signal
child = os.fork()
if child == 0:
    signal.pause()
open(CHILD, 'w').write(str(child))
write(1, b'last'); write(2, b'words')
"""
    path = tmp_path / "child"
    out, err = jobs.run((tee(), f"CHILD = {str(path)!r}\n{code}"))
    os.kill(int(path.read_text(encoding="utf-8")), signal.SIGKILL)
    assert (out, err) == (b"[0]:last\n", b"words")


# --- --no-capture -----------------------------------------------------------------------------------------------------
FAILURE = "os.write(2, b'the reason'); os._exit(3)"


def test_a_pipe_is_named(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """With --no-capture the report and failure.json say that stderr went to the launcher's own, a pipe."""
    job = launch("--nproc-per-node=1", "--no-capture", f"--log-dir={tmp_path}", "-r1", worker(FAILURE))
    assert job.wait_exit() == 3
    assert "the reason" in job.stderr
    assert "stderr   (not captured: it went to elastic-run's stderr, a pipe)" in job.stderr
    assert "nothing was written" not in job.stderr
    (file,) = tmp_path.rglob("failure.json")
    assert json.loads(file.read_text())["root_cause"]["stderr_target"] == "elastic-run's stderr, a pipe"


def test_a_file_is_named_by_its_path(worker: Worker, tmp_path: Path) -> None:
    """Where the launcher's stderr is a file, that file has the last lines."""
    errors = tmp_path / "errors of today.log"
    with errors.open("wb") as file:
        command = [*ELASTIC_RUN, "--nproc-per-node=1", "--no-capture", str(worker(FAILURE))]
        subprocess.run(command, env=clean_environment(), stderr=file, timeout=DEADLINE, check=False)
    assert f"it went to elastic-run's stderr, '{errors}')" in " ".join(errors.read_text().split())


def test_a_rank_that_is_filtered_out_wrote_to_nowhere(launch: Launch, worker: Worker) -> None:
    """With --local-ranks-filter the stderr of other ranks goes to /dev/null where nothing is captured."""
    program = worker("if rank: " + FAILURE + "\ntime.sleep(3600)")
    job = launch("--nproc-per-node=2", "--no-capture", "--local-ranks-filter=0", program)
    assert job.wait_exit() == 3
    assert "(not captured: it went to /dev/null)" in job.stderr


@pytest.mark.parametrize("flags", [(), ("-t3",), ("-r3",), ("-r3", "--no-capture")])
def test_a_silent_worker_is_told_as_such(
    launch: Launch, worker: Worker, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """A stderr that a pipe or a log file has kept, and that is empty, is a fact."""
    job = launch("--nproc-per-node=1", f"--log-dir={tmp_path}", *flags, worker("os._exit(3)"))
    assert job.wait_exit() == 3
    assert "stderr   (nothing was written)" in job.stderr
