"""Output that nobody reads fast enough, and what is kept of it for the report."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.output import CONSOLE, Jobs, finish, peak_memory, tee
from tests.support.system import small_disk
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.support.launch import Launch, Worker


_LINES = 20_000
_LINE_BYTES = 1000
#: Writes numbered lines, cut anywhere, as `RANK`.
_FLOOD = f"""
text = b"".join([b"%d %0*d\\n" % (RANK, {_LINE_BYTES - 3}, number) for number in range({_LINES})])
for at in range(0, len(text), 8192): write(1, text[at:at + 8192])
"""


def flooded(rank: int) -> bytes:
    """Return what a worker with `_FLOOD` writes."""
    return b"".join([b"%d %0*d\n" % (rank, _LINE_BYTES - 3, number) for number in range(_LINES)])


def shown(out: bytes, rank: int) -> bytes:
    """Return what the console has of a rank, without the prefix."""
    prefix = b"[%d]:" % rank
    return b"".join([line[len(prefix) :] for line in out.splitlines(keepends=True) if line.startswith(prefix)])


def test_nobody_waits_for_a_stuck_console(jobs: Jobs, tmp_path: Path) -> None:
    """While nobody reads, workers with log files run to their ends, within 64 MB; then every line is shown."""
    workers = ((tee(tmp_path / f"{rank}", rank), f"RANK = {rank}\n{_FLOOD}") for rank in range(4))
    job = jobs.start(*workers, stderr=subprocess.STDOUT, say="end")
    wait_until(lambda: jobs.has_note("tail3"), what="all workers at their ends")
    assert [(tmp_path / f"{rank}").read_bytes() == flooded(rank) for rank in range(4)] == [True] * 4
    assert peak_memory(Path(f"/proc/{job.pid}/status")) < 64 << 20
    out, _ = finish(job)
    assert [shown(out, rank) == flooded(rank) for rank in range(4)] == [True] * 4
    assert out.endswith(b"\nelastic-run: end\n")
    assert out.count(b"\n") == 4 * _LINES + 1
    assert peak_memory(jobs.notes / "status") < 64 << 20


def test_a_living_worker_is_caught_up_with(jobs: Jobs, tmp_path: Path) -> None:
    """When a console is read again while the worker lives, it shows all, and then each line at once."""
    go, done = tmp_path / "go", tmp_path / "done"
    code = f"""
RANK = 0
os.mkfifo({str(go)!r}); os.mkfifo({str(done)!r})
{_FLOOD}
open({str(done)!r}, 'w').close()
open({str(go)!r}).read(); write(1, b'now\\n')
open({str(go)!r}).read()
"""
    job = jobs.start((tee(tmp_path / "log"), code))
    wait_until(done.exists)
    done.read_bytes()
    assert job.stdout is not None
    out = b"".join([job.stdout.readline() for _ in range(_LINES)])
    assert shown(out, 0) == flooded(0)
    go.write_bytes(b"")
    assert job.stdout.readline() == b"[0]:now\n"
    go.write_bytes(b"")
    assert finish(job) == (b"", b"")


def skip_gap(out: bytes) -> int:
    """See that a flood's beginning is shown, and then how many bytes are missing; return where that line ends."""
    missing = re.search(rb"\n\[0\]:elastic-run: (\d+) bytes are missing here[^\n]*\n", out)
    assert missing
    kept = shown(out[: missing.start() + 1], 0).removesuffix(b"\n")
    assert flooded(0).startswith(kept)
    assert len(kept) + int(missing[1]) == _LINE_BYTES * _LINES
    return missing.end()


def test_a_file_that_was_truncated(jobs: Jobs, tmp_path: Path) -> None:
    """What somebody took out of a log file before the console had it is told as missing, to the byte."""
    log = tmp_path / "log"
    job = jobs.start((tee(log), f"RANK = 0\n{_FLOOD}"))
    wait_until(lambda: jobs.has_note("tail0"))
    with log.open("r+b") as file:
        file.truncate(10_000_000)
    out, _ = finish(job)
    skip_gap(out)


def test_a_full_disk_and_a_stuck_console(jobs: Jobs, tmp_path: Path) -> None:
    """When the disk is full too the worker waits at last, memory stays bounded, and the console gets every line."""
    with small_disk(tmp_path, 4096) as disk:
        job = jobs.start((tee(disk / "log"), f"RANK = 0\n{_FLOOD}"))
        wait_until(jobs.is_blocked_writing)
        wait_until(lambda: (disk / "log").stat().st_size == 4 << 20)
        wait_until(jobs.is_blocked_writing)
        assert peak_memory(Path(f"/proc/{job.pid}/status")) < 64 << 20
        out, err = finish(job)
    assert shown(out, 0) == flooded(0)
    assert err.count(b"elastic-run: ") == 1


def test_the_reader_goes_away_while_it_is_behind(jobs: Jobs, tmp_path: Path) -> None:
    """When nobody will ever read what waits, that is told once, and the job ends; its files are whole."""
    job = jobs.start((tee(tmp_path / "log"), f"RANK = 0\n{_FLOOD}"))
    wait_until(lambda: jobs.has_note("tail0"))
    assert job.stdout is not None
    job.stdout.close()
    job.stdout = None
    _, err = finish(job)
    assert re.fullmatch(rb"elastic-run: standard output has no reader any more: [^\n]*\n", err)
    assert (tmp_path / "log").read_bytes() == flooded(0)


# --- what is kept of each rank's stderr -------------------------------------------------------------------------------
#: Writes to both streams in turns, and no whole line at the end.
BOTH = "for number in range(500): os.write(1 + number % 2, b'%d\\n' % number)\nos.write(1, b'end')"
NUMBERS = [str(number) for number in range(500)]


def read(directory: Path, name: str) -> str:
    """Return a file of the only worker of the last run."""
    return (directory / "latest" / "attempt_0" / "0" / name).read_text(encoding="utf-8")


def test_a_log_directory_alone_keeps_all_output(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """The console is as without --log-dir, without a prefix, and each stream has a file."""
    job = launch("--log-dir", tmp_path / "logs", worker(BOTH))
    assert job.wait_exit() == 0
    assert job.stdout.splitlines() == [*NUMBERS[::2], "end"]
    assert job.stderr.splitlines() == NUMBERS[1::2]
    assert read(tmp_path / "logs", "stdout.log") == job.stdout
    assert read(tmp_path / "logs", "stderr.log") == job.stderr


def test_the_order_of_both_streams_is_kept(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """Under ``2>&1`` console and file have both streams in the order in which the worker wrote them."""
    job = launch("--log-dir", tmp_path / "logs", worker(BOTH), merge=True)
    assert job.wait_exit() == 0
    assert job.stdout.splitlines() == [*NUMBERS, "end"]
    for name in ("stdout.log", "stderr.log"):
        assert read(tmp_path / "logs", name) == job.stdout
    shown = launch("logs", tmp_path / "logs")
    assert shown.wait_exit() == 0
    assert [line.partition("]")[2].strip(": ") for line in shown.stdout.splitlines()[1:]] == [*NUMBERS, "end"]


def test_the_report_names_the_file(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """After a failure the report names the kept file of the worker that failed first."""
    job = launch("--log-dir", tmp_path / "logs", worker("raise ValueError('the cause')"))
    assert job.wait_exit() == 1
    assert "rank 0: attempt_0/0/stderr.log" in job.stderr
    assert "the cause" in read(tmp_path / "logs", "stderr.log")


def test_ranks_that_are_not_shown_are_kept(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """--local-ranks-filter keeps ranks off the console, not out of the files."""
    words = ("--nproc-per-node=2", "--local-ranks-filter=0", "--log-dir", tmp_path)
    job = launch(*words, worker("say(f'out {rank}')\nos.write(2, b'err %d\\n' % rank)"))
    assert job.wait_exit() == 0
    assert job.stdout == "out 0\n"
    assert "err 1" not in job.stderr
    (hidden,) = tmp_path.glob("*_*/attempt_0/1")
    assert [(hidden / name).read_text(encoding="utf-8") for name in ("stdout.log", "stderr.log")] == [
        "out 1\n",
        "err 1\n",
    ]


@pytest.mark.parametrize("flag", ["--tee=3", "--redirects=1"])
def test_a_success_says_where_the_files_are(launch: Launch, worker: Worker, tmp_path: Path, flag: str) -> None:
    """Without --log-dir the last line of a successful job names the directory of the log files."""
    job = launch(flag, worker("say('out')"), env={"TMPDIR": str(tmp_path)})
    assert job.wait_exit() == 0
    found = re.search(
        r"^elastic-run: the log files are in (\S+) \(--log-dir names another place\)$", job.stderr, re.MULTILINE
    )
    assert found is not None
    assert (Path(found[1]) / "attempt_0" / "0" / "stdout.log").read_text(encoding="utf-8") == "out\n"
    named = launch(flag, "--log-dir", tmp_path / "logs", worker("say('out')"))
    assert named.wait_exit() == 0
    assert not named.stderr


# --- capture ----------------------------------------------------------------------------------------------------------
def test_capture_passes_bytes_unchanged(jobs: Jobs) -> None:
    """Captured stderr comes out byte for byte, stdout is inherited, and the last 64 KiB are kept for the report."""
    code = "write(2, bytes(range(256)) * 4000); write(1, b'out'); write(2, b'the end')"
    out, err = jobs.run((CONSOLE, code))
    data = bytes(range(256)) * 4000 + b"the end"
    assert out == b"out"
    assert err == data
    assert jobs.note("tail0") == data[-65536:]


def test_capture_is_unbuffered(jobs: Jobs, tmp_path: Path) -> None:
    """A prompt without a newline is on the console while its worker waits for the answer."""
    go = tmp_path / "go"
    os.mkfifo(go)
    job = jobs.start((CONSOLE, f"write(2, b'name? '); open({str(go)!r}).read()"))
    assert job.stderr is not None
    assert os.read(job.stderr.fileno(), 100) == b"name? "
    with go.open("w"):
        pass
    assert finish(job) == (b"", b"")


def test_no_capture_inherits(jobs: Jobs) -> None:
    """Without capture a worker has the launcher's own descriptors, and there is nothing for the report."""
    code = "write(1, os.readlink('/proc/self/fd/2').encode()); write(2, b'x')"
    job = jobs.start((CONSOLE, code), capture=False)
    assert job.stderr is not None
    wanted = os.fsencode(Path(f"/proc/self/fd/{job.stderr.fileno()}").readlink())
    assert finish(job) == (wanted, b"x")
    assert jobs.note("tail0") == b""


@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_order_is_kept_when_both_are_one_file(jobs: Jobs, tmp_path: Path, kind: str) -> None:
    """Under ``2>&1`` what a worker writes alternately to stdout and stderr keeps its order."""
    code = "for number in range(3000): write(1 + number % 2, b'%d\\n' % number)"
    expected = b"".join(b"%d\n" % number for number in range(3000))
    if kind == "pipe":
        out, _ = jobs.run((CONSOLE, code), stderr=subprocess.STDOUT)
    else:
        with (tmp_path / "both").open("ab") as file:
            file.write(b"before\n")
            file.flush()
            jobs.run((CONSOLE, code), stdout=file, stderr=file)
        before, _, out = (tmp_path / "both").read_bytes().partition(b"\n")
        assert before == b"before"
    assert out == expected


def test_redirect_appends(jobs: Jobs, tmp_path: Path) -> None:
    """A redirected worker writes its file itself, after what is there; the report reads the file's end."""
    (tmp_path / "err").write_bytes(b"earlier\n")
    code = "write(1, os.readlink('/proc/self/fd/1').encode()); write(2, b'y' * 70000)"
    streams = {"stdout": str(tmp_path / "out"), "stderr": str(tmp_path / "err")}
    assert jobs.run((streams, code)) == (b"", b"")
    assert (tmp_path / "out").read_text(encoding="utf-8") == str(tmp_path / "out")
    assert (tmp_path / "err").read_bytes() == b"earlier\n" + b"y" * 70000
    assert jobs.note("tail0") == b"y" * 65536


def test_silenced_rank_is_still_explained(jobs: Jobs) -> None:
    """A rank that --local-ranks-filter silences shows nothing, and yet its last words reach the report."""
    streams = {"stdout": os.devnull, "stderr": os.devnull}
    assert jobs.run((streams, "write(1, b'out'); write(2, b'why')")) == (b"", b"")
    assert jobs.note("tail0") == b"why"


def test_worker_gets_no_other_descriptor(jobs: Jobs) -> None:
    """A worker has descriptors 0, 1 and 2, and none of the launcher's pipes, files or terminals."""
    code = "write(1, repr(sorted(int(fd) for fd in os.listdir('/proc/self/fd'))).encode())"
    workers = [(CONSOLE, "pass"), (tee(), "pass"), (CONSOLE, code)]
    out, _ = jobs.run(*workers)
    assert out == b"[0, 1, 2, 3]"  # 3 is the listing itself
