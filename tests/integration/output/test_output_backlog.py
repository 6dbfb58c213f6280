"""A tee'd worker with a log file and a console that takes nothing: who waits, who doesn't, and that nothing is lost."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.support.isolation import small_disk
from tests.support.output import Jobs, finish, peak_memory, tee
from tests.support.wait import wait_until

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
