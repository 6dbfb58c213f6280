"""Full disks, and log files that cannot be made: told once, never fatal."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_run.multiprocessing.output.logs import DefaultLogsSpecs
from tests.support import isolation
from tests.support.output import Jobs, finish, tee

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.launch import Launched


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a disk of 256 KiB."""
    with isolation.small_disk(tmp_path, 256) as disk:
        yield disk


def test_full_disk_under_a_tee(jobs: Jobs, small_disk: Path) -> None:
    """A full disk is told once for all ranks; the console gets every line, and the file says what is missing."""
    (small_disk / "ballast").write_bytes(bytes(240000))
    code = f"""
for number in range(6000): write(1, b'%09d\\n' % number)
if RANK == 0:
    while not os.path.exists({str(small_disk / "gone")!r}): pass
    write(1, b'again\\n')
"""
    job = jobs.start(*((tee(small_disk / f"{rank}", rank), f"RANK = {rank}\n{code}") for rank in range(2)))
    assert job.stdout is not None
    got = b""
    while got.count(b"[0]:") < 6000:
        got += os.read(job.stdout.fileno(), 1 << 16)
    (small_disk / "ballast").unlink()
    (small_disk / "gone").touch()
    out, err = finish(job)
    own = [line for line in (got + out).splitlines() if line.startswith(b"[0]:")]
    assert own == [b"[0]:%09d" % number for number in range(6000)] + [b"[0]:again"]
    assert err.count(b"elastic-run: ") == 1
    reason = os.strerror(errno.ENOSPC)
    assert err.startswith(f"elastic-run: the file system at {small_disk} is full ({reason}): the log file ".encode())
    assert b"the console gets all output, and the job goes on" in err
    text = (small_disk / "0").read_bytes()
    missing = re.search(rb"\nelastic-run: (\d+) bytes are missing here[^\n]*\nagain\n\Z", text)
    assert missing
    assert missing.start() + int(missing[1]) == 60000


def test_full_disk_under_the_console(jobs: Jobs) -> None:
    """With stdout on a full disk stderr says so once, and the job goes on."""
    with Path("/dev/full").open("wb", buffering=0) as full:
        _, err = jobs.run((tee(), "for _ in range(999): write(1, b'x\\n')"), stdout=full)
    assert re.fullmatch(rb"elastic-run: standard output: No space left on device: [^\n]*\n", err)


def test_a_log_file_that_cannot_be_made(jobs: Jobs, tmp_path: Path) -> None:
    """Where a log file can't be opened its output goes to the console, and one line says why."""
    code = "write(1, b'out\\n'); write(2, b'err\\n')"
    streams = {"stdout": str(tmp_path / "no" / "out"), "stderr": str(tmp_path / "no" / "err")}
    out, err = jobs.run((streams, code), (tee(tmp_path / "no" / "tee", 1), code))
    assert sorted(out.splitlines()) == [b"[1]:out", b"out"]
    assert err.count(b"elastic-run: ") == 1
    assert err.count(b"err\n") == 2


def test_full_temporary_directory(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When TMPDIR is full the workers' error files go elsewhere, and nothing is left in TMPDIR."""
    (small_disk / "ballast").write_bytes(bytes(256 << 10))
    monkeypatch.setenv("TMPDIR", str(small_disk))
    specs = DefaultLogsSpecs()
    error_file = Path(specs.reify({0: {}}).error_files[0])
    error_file.write_text("{}", encoding="ascii")
    assert not error_file.is_relative_to(small_disk)
    assert [path.name for path in small_disk.iterdir()] == ["ballast"]
    specs.cleanup()
    assert not error_file.exists()


@pytest.mark.parametrize("flag", ["--tee", "--redirects"])
def test_a_failure_beside_a_full_log_disk(
    flag: str, launch: Callable[..., Launched], worker: Callable[[str], Path], small_disk: Path
) -> None:
    """Under a tee a full disk is no worker's trouble, so the report looks for another cause than under a redirect."""
    (small_disk / "ballast").write_bytes(bytes(200000))
    path = worker("print('x' * 200000, flush=True)\nsys.exit(3)")
    job = launch("--log-dir", small_disk, flag, "3", path)
    assert job.wait_exit() == (3 if flag == "--tee" else 1)
    assert job.stdout.count("x" * 200000) == (flag == "--tee")
    assert ("The disk of the log directory is full" in job.stderr) == (flag == "--redirects")
    assert (f"the file system at {small_disk} is full" in job.stderr) == (flag == "--tee")
