"""What workers write, from real processes through the launcher's pipes, files and sockets."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import termios
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.wait import DEADLINE, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Start = "Callable[..., subprocess.Popen[bytes]]"

#: Writes all of `data` to a descriptor.
WRITE = """
def write(fd, data):
    data = memoryview(data)
    while data:
        data = data[os.write(fd, data):]
"""


def tee(path: Path | str = "", rank: int = 0, **others: Any) -> dict[str, Any]:  # noqa: ANN401 - arguments of `open`
    """Return the arguments of `open` that tee stdout."""
    return {"stdout": str(path), "stderr": "", "tee_stdout": True, "stdout_prefix": f"[{rank}]:", **others}


CONSOLE = {"stdout": "", "stderr": ""}


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """Give the directory where a job leaves its notes."""
    path = tmp_path / "notes"
    path.mkdir()
    return path


@pytest.fixture
def start(notes: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start jobs of `tests.support.output_job`; what still runs at the end is killed."""
    jobs = []

    def run(
        *workers: tuple[dict[str, Any], str],
        stdout: Any = subprocess.PIPE,
        stderr: Any = subprocess.PIPE,  # noqa: ANN401
        program: tuple[str, ...] = (),
        **spec: Any,
    ) -> subprocess.Popen[bytes]:  # noqa: ANN401
        spec["workers"] = [{"streams": streams, "code": WRITE + code} for streams, code in workers]
        spec["notes"] = str(notes)
        command = [*program, sys.executable, "-m", "tests.support.output_job", json.dumps(spec)]
        job = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=Path(__file__).parents[2],
        )
        jobs.append(job)
        return job

    yield run
    for job in jobs:
        job.kill()
        for rank in range(9):
            if (notes / f"pid{rank}").exists():
                kill_group(int((notes / f"pid{rank}").read_bytes()))
        job.communicate()


def kill_group(pid: int) -> None:
    """Kill a worker's session, if it lives."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def finish(job: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Read to the end; return both outputs of a job that succeeded."""
    out, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    return out, err


# --- tee -------------------------------------------------------------------------------------------------------------
def test_tee_writes_file_and_prefixed_lines(start: Start, tmp_path: Path) -> None:
    """A tee'd stream is in the file as written, and on the console line by line after the prefix."""
    data = b"".join(b"line %d %s\n" % (number, b"x" * (number % 200)) for number in range(20000))
    (tmp_path / "data").write_bytes(data)
    code = f"data = open({str(tmp_path / 'data')!r}, 'rb').read()\nfor at in range(0, len(data), 777): write(1, data[at:at + 777])"
    out, err = finish(start((tee(tmp_path / "out.log"), code)))
    assert (tmp_path / "out.log").read_bytes() == data
    assert out == b"".join(b"[0]:" + line for line in data.splitlines(keepends=True))
    assert err == b""


def test_ranks_do_not_mix_within_lines(start: Start, tmp_path: Path) -> None:
    """Lines of four flooding ranks, cut anywhere by their writers, arrive whole, each once and in order."""
    code = """
block, size = b"", int(sys.argv[1]) if len(sys.argv) > 1 else 4099
for number in range(40000):
    block += b"%09d %s\\n" % (number, b"." * (number % 83))
    while len(block) > size:
        write(1, block[:size]); block = block[size:]
write(1, block)
"""
    out, _ = finish(start(*((tee(tmp_path / f"{rank}.log", rank), code) for rank in range(4))))
    lines = out.splitlines()
    for rank in range(4):
        own = [line for line in lines if line.startswith(b"[%d]:" % rank)]
        assert own == [b"[%d]:%09d %s" % (rank, number, b"." * (number % 83)) for number in range(40000)]
    assert len(lines) == 160000


@pytest.mark.parametrize("prefix", ["", "[0]:", "[a prefix that is much longer than the line, {}]: " * 40])
def test_tee_is_binary_safe(start: Start, tmp_path: Path, prefix: str) -> None:
    """Any bytes, empty lines and carriage returns included, come out as they went in, whatever the prefix."""
    data = bytes(range(256)) * 64 + b"\n" * 5000 + b"\r\n\r\0\xff\n"
    (tmp_path / "data").write_bytes(data)
    code = f"write(1, open({str(tmp_path / 'data')!r}, 'rb').read())"
    out, _ = finish(start((tee(tmp_path / "log", stdout_prefix=prefix), code)))
    assert (tmp_path / "log").read_bytes() == data
    assert out == b"".join(prefix.encode() + line + b"\n" for line in data[:-1].split(b"\n"))


def test_unfinished_last_line(start: Start, tmp_path: Path) -> None:
    """A worker that dies within a line loses nothing; only the console gets the missing newline."""
    code = "write(1, b'one\\ntwo'); os.kill(os.getpid(), 9)"
    out, _ = finish(start((tee(tmp_path / "log"), code)))
    assert out == b"[0]:one\n[0]:two\n"
    assert (tmp_path / "log").read_bytes() == b"one\ntwo"


def test_line_of_100_megabytes(start: Start, tmp_path: Path, notes: Path) -> None:
    """A line of 100 MB passes in one piece under one prefix, beside another rank's lines, in bounded memory."""
    long = "block = b'x' * 1000000\nfor _ in range(100): write(1, block)\nwrite(1, b'\\n')"
    short = "for number in range(20000): write(1, b'%d\\n' % number)"
    job = start((tee(tmp_path / "long"), long), (tee(tmp_path / "short", 1), short))
    assert job.stdout is not None
    with job.stdout as reader:
        lines = iter(reader.readline, b"")
        sizes = [(line[:4], len(line)) for line in lines]
    assert job.wait(60) == 0
    assert [size for prefix, size in sizes if prefix == b"[0]:"] == [100000005]
    assert len(sizes) == 20001
    assert (tmp_path / "long").stat().st_size == 100000001
    assert peak_memory(notes) < 64 << 20


def peak_memory(notes: Path) -> int:
    """Return the largest memory of this test's children that have ended, in bytes (the job among them)."""
    assert (notes / "pid").exists()
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def test_a_stalled_long_line_does_not_silence_others(start: Start, tmp_path: Path) -> None:
    """When a rank stops within a line of megabytes, others are heard after a second, and it goes on under a new prefix."""
    go = tmp_path / "go"
    os.mkfifo(go)
    long = f"write(1, b'x' * 3000000); open({str(go)!r}).read(); write(1, b'y\\nend\\n')"
    short = f"import time\nwrite(1, b'heard\\n')"
    job = start((tee(rank=0), long), (tee(rank=1), short))
    assert job.stdout is not None
    with job.stdout as reader:
        got = b""
        while b"[1]:heard\n" not in got:
            got += os.read(reader.fileno(), 1 << 20)
        with go.open("w"):
            pass
        got += reader.read()
    lines = [re.sub(rb"x+", b"x", line) for line in got.splitlines()]
    assert lines in (
        [b"[0]:x", b"[1]:heard", b"[0]:xy", b"[0]:end"],
        [b"[0]:x", b"[1]:heard", b"[0]:y", b"[0]:end"],
        [b"[1]:heard", b"[0]:xy", b"[0]:end"],
    )
    assert got.count(b"x") == 3000000


def test_progress_bar_is_shown_before_its_line_ends(start: Start, tmp_path: Path) -> None:
    """A tee'd progress bar, all carriage returns, is shown while it runs; the file has it unchanged."""
    go = tmp_path / "go"
    os.mkfifo(go)
    code = f"write(1, b' 10%\\r 20%\\r 30%'); open({str(go)!r}).read(); write(1, b'\\r100%\\n')"
    job = start((tee(tmp_path / "log"), code))
    assert job.stdout is not None
    with job.stdout as reader:
        assert reader.readline() == b"[0]: 10%\r[0]: 20%\r\n"
        with go.open("w"):
            pass
        assert reader.read() == b"[0]: 30%\r100%\n"
    assert (tmp_path / "log").read_bytes() == b" 10%\r 20%\r 30%\r100%\n"


def test_complete_lines_are_not_held_back(start: Start, tmp_path: Path) -> None:
    """A line is on the console while its worker waits, also when the next one has begun."""
    go = tmp_path / "go"
    os.mkfifo(go)
    job = start((tee(), f"write(1, b'first\\nsec'); open({str(go)!r}).read(); write(1, b'ond\\n')"))
    assert job.stdout is not None
    with job.stdout as reader:
        assert reader.readline() == b"[0]:first\n"
        with go.open("w"):
            pass
        assert reader.read() == b"[0]:second\n"


def test_filtered_files(start: Start, tmp_path: Path) -> None:
    """Lines of all tee'd ranks that contain a filter's text stand in the filtered file with their prefixes."""
    filters = {
        "stdout": str(tmp_path / "fo"),
        "stderr": str(tmp_path / "fe"),
        "stdout_filters": ["loss", "step"],
        "stderr_filters": ["warn"],
    }
    code = "write(1, b'loss 1\\nother\\nstep 2'); write(2, b'warn me\\nnot\\n')"
    workers = [(tee(rank=rank, tee_stderr=True, stderr_prefix=f"[{rank}]:"), code) for rank in range(2)]
    finish(start(*workers, (CONSOLE, code), filters=filters))
    expected = [b"[0]:loss 1", b"[0]:step 2", b"[1]:loss 1", b"[1]:step 2"]
    assert sorted((tmp_path / "fo").read_bytes().splitlines()) == expected
    assert sorted((tmp_path / "fe").read_bytes().splitlines()) == [b"[0]:warn me", b"[1]:warn me"]


# --- capture and redirects -------------------------------------------------------------------------------------------
def test_capture_passes_bytes_unchanged(start: Start, notes: Path) -> None:
    """Captured stderr comes out byte for byte, stdout is inherited, and the last 64 KiB are kept for the report."""
    code = "write(2, bytes(range(256)) * 4000); write(1, b'out'); write(2, b'the end')"
    out, err = finish(start((CONSOLE, code)))
    data = bytes(range(256)) * 4000 + b"the end"
    assert out == b"out"
    assert err == data
    assert (notes / "tail0").read_bytes() == data[-65536:]


def test_capture_is_unbuffered(start: Start, tmp_path: Path) -> None:
    """A prompt without a newline is on the console while its worker waits for the answer."""
    go = tmp_path / "go"
    os.mkfifo(go)
    job = start((CONSOLE, f"write(2, b'name? '); open({str(go)!r}).read()"))
    assert job.stderr is not None
    assert os.read(job.stderr.fileno(), 100) == b"name? "
    with go.open("w"):
        pass
    assert finish(job) == (b"", b"")


def test_no_capture_inherits(start: Start, notes: Path) -> None:
    """Without capture a worker has the launcher's own descriptors, and there is nothing for the report."""
    code = "write(1, os.readlink('/proc/self/fd/2').encode()); write(2, b'x')"
    job = start((CONSOLE, code), capture=False)
    assert job.stderr is not None
    wanted = os.readlink(f"/proc/self/fd/{job.stderr.fileno()}").encode()
    assert finish(job) == (wanted, b"x")
    assert (notes / "tail0").read_bytes() == b""


@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_order_is_kept_when_both_are_one_file(start: Start, tmp_path: Path, kind: str) -> None:
    """Under ``2>&1`` what a worker writes alternately to stdout and stderr keeps its order."""
    code = "for number in range(3000): write(1 + number % 2, b'%d\\n' % number)"
    expected = b"".join(b"%d\n" % number for number in range(3000))
    if kind == "pipe":
        out, _ = finish(start((CONSOLE, code), stderr=subprocess.STDOUT))
    else:
        with (tmp_path / "both").open("ab") as file:
            file.write(b"before\n")
            file.flush()
            finish(start((CONSOLE, code), stdout=file, stderr=file))
        before, _, out = (tmp_path / "both").read_bytes().partition(b"\n")
        assert before == b"before"
    assert out == expected


def test_a_file_is_continued_where_it_is(start: Start, tmp_path: Path) -> None:
    """Output redirected by the shell without append goes on at the shell's offset, as `(a; b) > file` needs it."""
    with (tmp_path / "out").open("wb") as file:
        file.write(b"before\n")
        file.flush()
        finish(start((tee(), "write(1, b'mine\\n')"), stdout=file))
        file.seek(0, os.SEEK_CUR)
        os.write(file.fileno(), b"after\n")
    assert (tmp_path / "out").read_bytes() == b"before\n[0]:mine\nafter\n"


def test_two_writes_make_one_line(start: Start) -> None:
    """Ranks whose `print` makes two writes, text and newline, share one console without mixing lines."""
    code = "for number in range(2000): os.write(2, b'%s%d' % (NAME, number)); os.write(2, b'\\n')"
    workers = [(CONSOLE, f"NAME = b'{name}'\n{code}") for name in "abc"]
    _, err = finish(start(*workers))
    lines = err.splitlines()
    assert sorted(lines) == sorted(b"%s%d" % (name, number) for name in (b"a", b"b", b"c") for number in range(2000))


def test_redirect_appends(start: Start, tmp_path: Path, notes: Path) -> None:
    """A redirected worker writes its file itself, after what is there; the report reads the file's end."""
    (tmp_path / "err").write_bytes(b"earlier\n")
    code = "write(1, os.readlink('/proc/self/fd/1').encode()); write(2, b'y' * 70000)"
    streams = {"stdout": str(tmp_path / "out"), "stderr": str(tmp_path / "err")}
    assert finish(start((streams, code))) == (b"", b"")
    assert (tmp_path / "out").read_text(encoding="utf-8") == str(tmp_path / "out")
    assert (tmp_path / "err").read_bytes() == b"earlier\n" + b"y" * 70000
    assert (notes / "tail0").read_bytes() == b"y" * 65536


def test_silenced_rank_is_still_explained(start: Start, notes: Path) -> None:
    """A rank that --local-ranks-filter silences shows nothing, and yet its last words reach the report."""
    streams = {"stdout": os.devnull, "stderr": os.devnull}
    assert finish(start((streams, "write(1, b'out'); write(2, b'why')"))) == (b"", b"")
    assert (notes / "tail0").read_bytes() == b"why"


def test_worker_gets_no_other_descriptor(start: Start) -> None:
    """A worker has descriptors 0, 1 and 2, and none of the launcher's pipes, files or terminals."""
    code = "write(1, repr(sorted(int(fd) for fd in os.listdir('/proc/self/fd'))).encode())"
    workers = [(CONSOLE, "pass"), (tee(), "pass"), (CONSOLE, code)]
    out, _ = finish(start(*workers))
    assert out == b"[0, 1, 2, 3]"  # 3 is the listing itself


def test_a_descendant_that_holds_the_pipe(start: Start, tmp_path: Path) -> None:
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
    out, err = finish(start((tee(), f"CHILD = {str(path)!r}\n{code}")))
    os.kill(int(path.read_text(encoding="utf-8")), signal.SIGKILL)
    assert (out, err) == (b"[0]:last\n", b"words")


def test_the_launcher_speaks_last_and_on_its_own_line(start: Start) -> None:
    """What the launcher says at the end stands after the workers' last words, on a line of its own."""
    _, err = finish(start((CONSOLE, "write(2, b'z' * 900000 + b'dying')"), say="it died"))
    assert err == b"z" * 900000 + b"dying\nelastic-run: it died\n"


# --- a reader that is slow, or gone ----------------------------------------------------------------------------------
def is_blocked_writing(pid: int) -> bool:
    """Whether a process sleeps in a write to a pipe."""
    return Path(f"/proc/{pid}/syscall").read_text(encoding="ascii").startswith("1 ")


@pytest.mark.parametrize("streams", [tee(), CONSOLE], ids=["tee", "capture"])
def test_stuck_console(start: Start, notes: Path, streams: dict[str, Any]) -> None:
    """While nobody reads the loop goes on, memory stays below 64 MB, the worker waits; then all arrives, in order."""
    code = "block = b'w' * 99 + b'\\n'\nfor number in range(300): write(FD, block * 1000)"
    fd = 1 if streams is not CONSOLE else 2
    job = start(*((dict(streams), f"FD = {fd}\n{code}") for _ in range(4)), say="end")
    wait_until(lambda: (notes / "pid").exists())
    pids = [int((notes / f"pid{rank}").read_bytes()) for rank in range(4)]
    wait_until(lambda: all(is_blocked_writing(pid) for pid in pids), what="all workers blocked")
    job.send_signal(signal.SIGUSR1)
    wait_until((notes / "usr1").exists, what="the loop lives")
    status = Path(f"/proc/{job.pid}/status").read_text(encoding="ascii")
    assert int(re.search(r"VmHWM:\s*(\d+)", status)[1]) < 64 << 10  # type: ignore[index] # every process has it
    out, err = finish(job)
    got = (out if fd == 1 else err).replace(b"[0]:", b"").replace(b"elastic-run: end\n", b"")
    assert got == (b"w" * 99 + b"\n") * 1200000


def test_stuck_at_the_end(start: Start, notes: Path) -> None:
    """Workers that die while nobody reads lose nothing, and the launcher's last line comes after theirs."""
    workers = [(tee(stdout_prefix="[0]:"), "write(1, b'v' * 99999 + b'\\n')") for _ in range(8)]
    job = start(*workers, stderr=subprocess.STDOUT, say="end")
    wait_until((notes / "tail7").exists)
    out, _ = finish(job)
    assert out == (b"[0]:" + b"v" * 99999 + b"\n") * 8 + b"elastic-run: end\n"


def test_reader_of_stdout_goes_away(start: Start, tmp_path: Path) -> None:
    """After ``| head -1`` one line on stderr says so, the workers go on, and their files are complete."""
    code = "for number in range(50000): write(1, b'%d\\n' % number)"
    job = start((tee(tmp_path / "log"), code))
    assert job.stdout is not None
    assert job.stdout.readline() == b"[0]:0\n"
    job.stdout.close()
    job.stdout = None
    _, err = finish(job)
    assert re.fullmatch(rb"elastic-run: standard output has no reader any more: [^\n]*\n", err)
    assert (tmp_path / "log").read_bytes() == b"".join(b"%d\n" % number for number in range(50000))


def test_reader_of_stderr_goes_away(start: Start, notes: Path) -> None:
    """When nobody reads stderr the workers go on, and stdout has one line about it."""
    code = "for number in range(5000): write(2, b'%d\\n' % number)\nwrite(1, b'alive\\n')"
    job = start((CONSOLE, code))
    assert job.stderr is not None
    job.stderr.close()
    job.stderr = None
    out, _ = finish(job)
    assert b"elastic-run: standard error has no reader any more" in out
    assert b"alive\n" in out
    assert (notes / "tail0").read_bytes().endswith(b"\n4999\n")


def test_nobody_reads_anything(start: Start) -> None:
    """With both readers gone the job still runs to its end."""
    job = start((tee(), "for number in range(5000): write(2, b'%d\\n' % number); write(1, b'x\\n')"), say="unheard")
    for reader in (job.stdout, job.stderr):
        assert reader is not None
        reader.close()
    job.stdout = job.stderr = None
    assert job.wait(60) == 0


def test_the_shells_descriptor_stays_blocking(start: Start, notes: Path) -> None:
    """The mode of the descriptors that we share with the user's shell is not touched."""
    reading, writing = os.pipe()
    job = start((tee(), "write(1, b'x' * 500000)"), stdout=writing)
    wait_until((notes / "pid0").exists)
    wait_until(lambda: is_pipe_full(reading))
    assert os.get_blocking(writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as reader:
        assert len(reader.read()) == 500005
    finish(job)


def is_pipe_full(fd: int) -> bool:
    """Whether a pipe holds as much as its standard capacity, less a page."""
    waiting = int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)
    return waiting > (1 << 16) - 4096


def test_stdout_is_a_socket(start: Start, tmp_path: Path) -> None:
    """A socket as stdout is written to without blocking, its mode untouched, and loses nothing."""
    ours, theirs = socket.socketpair()
    job = start((tee(tmp_path / "log"), "for _ in range(30): write(1, b'x' * 99999 + b'\\n')"), stdout=theirs)
    assert theirs.getblocking()
    theirs.close()
    with ours, ours.makefile("rb") as reader:
        assert reader.read() == (b"[0]:" + b"x" * 99999 + b"\n") * 30
    finish(job)


def test_a_pipe_that_may_not_be_opened_again(start: Start, notes: Path, tmp_path: Path) -> None:
    """As another user (`su`, a container) the shared pipe can't be reopened, and still the loop never blocks."""
    notes.chmod(0o777)
    for parent in (notes.parent, *notes.parent.parents):
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    program = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    job = start((tee(), "write(1, (b'x' * 99 + b'\\n') * 30000)"), program=program)
    wait_until((notes / "pid0").exists)
    wait_until(lambda: is_blocked_writing(int((notes / "pid0").read_bytes())))
    job.send_signal(signal.SIGUSR1)
    wait_until((notes / "usr1").exists, what="the loop lives")
    out, _ = finish(job)
    assert out == (b"[0]:" + b"x" * 99 + b"\n") * 30000


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_descriptors(start: Start, closed: str, tmp_path: Path) -> None:
    """Started with standard descriptors closed, no file or pipe of ours takes their place, and the job runs."""
    program = ("sh", "-c", f'exec "$@" {closed}', "sh")
    code = "assert os.readlink('/proc/self/fd/0') == '/dev/null'; write(1, b'out\\n'); write(2, b'err\\n')"
    out, err = finish(start((tee(tmp_path / "log"), code), program=program))
    assert out == (b"" if closed.endswith(">&-") and "2>&-" != closed or closed == ">&-" else b"[0]:out\n")
    assert err == (b"err\n" if closed == ">&-" else b"")
    assert (tmp_path / "log").read_bytes() == b"out\n"


# --- disks -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], check=True)
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def test_full_disk_under_a_tee(start: Start, small_disk: Path) -> None:
    """A full disk is told once for all ranks; the console gets every line, and the file says what is missing."""
    (small_disk / "ballast").write_bytes(bytes(200000))
    code = f"""
for number in range(6000): write(1, b'%09d\\n' % number)
if RANK == 0:
    while not os.path.exists({str(small_disk / "gone")!r}): pass
    write(1, b'again\\n')
"""
    job = start(*((tee(small_disk / f"{rank}", rank), f"RANK = {rank}\n{code}") for rank in range(2)))
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
    assert os.strerror(errno.ENOSPC).encode() in err
    text = (small_disk / "0").read_bytes()
    missing = re.search(rb"\nelastic-run: (\d+) bytes are missing here[^\n]*\nagain\n\Z", text)
    assert missing
    assert missing.start() + int(missing[1]) == 60000


def test_full_disk_under_the_console(start: Start) -> None:
    """With stdout on a full disk stderr says so once, and the job goes on."""
    with Path("/dev/full").open("wb", buffering=0) as full:
        _, err = finish(start((tee(), "for _ in range(999): write(1, b'x\\n')"), stdout=full))
    assert re.fullmatch(rb"elastic-run: standard output: No space left on device: [^\n]*\n", err)


def test_a_log_file_that_cannot_be_made(start: Start, tmp_path: Path) -> None:
    """Where a log file can't be opened its output goes to the console, and one line says why."""
    code = "write(1, b'out\\n'); write(2, b'err\\n')"
    streams = {"stdout": str(tmp_path / "no" / "out"), "stderr": str(tmp_path / "no" / "err")}
    out, err = finish(start((streams, code), (tee(tmp_path / "no" / "tee", 1), code)))
    assert sorted(out.splitlines()) == [b"[1]:out", b"out"]
    assert err.count(b"elastic-run: ") == 1
    assert err.count(b"err\n") == 2


def test_descriptors_run_out(notes: Path) -> None:
    """When there are no descriptors left, opening a worker's output fails and leaves none behind."""
    program = """
import os, resource
from elastic_run.loop import Loop
from elastic_run.multiprocessing.output import Console, WorkerOutput
with Loop() as loop:
    output = WorkerOutput(loop, Console(loop))
    before = os.listdir("/proc/self/fd")
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + 1, 64))
    for tee in (True, False):
        try:
            output.open(0, stdout="/dev/null", stderr="", tee_stdout=tee)
        except OSError as error:
            print(error.strerror)
    assert os.listdir("/proc/self/fd") == before
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE, check=True)
    assert done.stdout == (os.strerror(errno.EMFILE) + "\n") * 2
    assert select.PIPE_BUF
