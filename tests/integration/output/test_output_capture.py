"""What workers get as stdout and stderr without tee: captured, inherited, redirected, silenced."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.output import CONSOLE, Jobs, finish, tee
from tests.support.wait import DEADLINE


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


def test_descriptors_run_out() -> None:
    """When there are no descriptors left, opening a worker's output fails and leaves none behind."""
    program = """
import os, resource
from elastic_run.multiprocessing.output.wiring import Wiring
wiring = Wiring()
before = os.listdir("/proc/self/fd")
resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + 1, 64))
for tee in (True, False):
    try:
        wiring.open(0, stdout="/dev/null", stderr="", tee_stdout=tee)
    except OSError as error:
        print(error.strerror)
assert os.listdir("/proc/self/fd") == before
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE, check=True)
    assert done.stdout == (os.strerror(errno.EMFILE) + "\n") * 2
