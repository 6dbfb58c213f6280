"""The last exception of a program that ends with exit code 1 is in the report, whatever the program wrote after it."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]

#: Captured, tee'd, and written by the worker itself.
FLAGS = ("", "--tee=2", "--redirects=2")
UNCERTAIN = "the last exception on its stderr, with more output after it:"
#: Writes lines of a thread of its own, or at the exit.
LINES = """
import atexit, threading
def write_lines(count, word="step"):
    for start in range(0, count, 10_000):
        sys.stderr.write("".join(f"{word} {number}\\n" for number in range(start, min(count, start + 10_000))))
def load():
    raise ValueError("batch 17 is broken")
"""


def run(launch: Launch, path: Path, directory: Path, flags: str = "") -> tuple[str, dict[str, Any]]:
    """Run a program that ends with exit code 1; return the report's text and failure.json's root cause."""
    job = launch(*([flags] if flags else []), f"--log-dir={directory}", path)
    assert job.wait_exit() == 1
    report = job.stderr.rpartition("-- elastic-run: ")[2]
    (failure,) = directory.glob("*_*/failure.json")
    return report, json.loads(failure.read_text(encoding="utf-8"))["root_cause"]


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize(
    "count", [30, 31, *(pytest.param(count, marks=pytest.mark.long) for count in (10_000, 1_000_000))]
)
def test_an_exception_is_found_before_any_number_of_lines(
    launch: Launch, worker: Worker, tmp_path: Path, flags: str, count: int
) -> None:
    """An exit handler writes them; beyond 30 the report says that the exception may have been handled."""
    path = worker(f"{LINES}\natexit.register(write_lines, {count})\nload()")
    report, root = run(launch, path, tmp_path, flags)
    assert "ValueError: batch 17 is broken" in report
    assert "in load" in report
    assert root["exception"]["type"] == "ValueError"
    assert (UNCERTAIN in report, root["exception"]["is_certain"]) == (count > 30, count <= 30)
    assert f"step {count - 1}" in report


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("length", [1 << 16, 1 << 20, pytest.param(10_000_000, marks=pytest.mark.long)])
def test_an_exception_is_found_behind_a_message_of_many_lines(
    launch: Launch, worker: Worker, tmp_path: Path, flags: str, length: int
) -> None:
    """As a checkpoint's missing keys make one; also when more lines follow."""
    path = worker(f"""
{LINES}
atexit.register(write_lines, 100)
def load():
    lines = [f"\\tlayer.{{n}}.weight \\u00e4\\u20ac\\n" for n in range({length} // 20)]
    raise KeyError("missing keys:\\n" + "".join(lines))
load()
""")
    report, root = run(launch, path, tmp_path, flags)
    assert root["exception"]["message"].lstrip("'").startswith("missing keys:")
    assert "KeyError: 'missing keys:" in report
    assert "in load" in report


@pytest.mark.parametrize("flags", FLAGS)
def test_an_exception_is_found_between_the_lines_of_threads(
    launch: Launch, worker: Worker, tmp_path: Path, flags: str
) -> None:
    """Four threads write before, between and after its lines, and tear none of them."""
    path = worker(f"""
{LINES}
sys.stderr = open(2, "w", buffering=1, closefd=False)  # whole lines, where the interpreter writes their parts
begun = threading.Barrier(5)
def talk(word):
    for number in range(5_000):
        os.write(2, f"{{word}} {{number}}\\n".encode())
        if number == 100: begun.wait()
for word in ("load", "step", "save", "send"):
    threading.Thread(target=talk, args=(word,)).start()
begun.wait()
load()
""")
    report, root = run(launch, path, tmp_path, flags)
    assert "ValueError: batch 17 is broken" in report
    assert root["exception"]["type"] == "ValueError"


CHAIN = """
try:
    try:
        raise OSError(28, "No space left on device")
    except OSError as full:
        raise RuntimeError("could not save the checkpoint") from full
except RuntimeError as failed:
    raise ValueError("training step failed") from failed
"""
GROUP = """
class Several(ExceptionGroup): pass
def fail(number):
    try: raise OSError(5, f"shard {number}")
    except OSError as error: return error
raise Several("loading failed", [fail(1), fail(2)])
"""


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("count", [100, pytest.param(30_000, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("program", "said"),
    [
        (
            CHAIN,
            ("ValueError: training step failed", "caused by OSError: [Errno 28] No space left on device (by"),
        ),
        pytest.param(
            GROUP,
            ("Several: loading failed (2 sub-exceptions)", "OSError: [Errno 5] shard 1"),
            marks=pytest.mark.skipif("sys.version_info < (3, 11)", reason="exception groups are new in Python 3.11"),
        ),
    ],
)
def test_what_an_exception_came_from_is_kept_with_it(
    launch: Launch, worker: Worker, tmp_path: Path, flags: str, count: int, program: str, said: tuple[str, str]
) -> None:
    """The exceptions of a chain and of a group, whatever follows them."""
    path = worker(f"{LINES}\natexit.register(write_lines, {count})\n{program}")
    report, _ = run(launch, path, tmp_path, flags)
    for text in said:
        assert text in " ".join(report.split()), report


def test_an_exception_is_found_between_progress_bars(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """They end in carriage returns, stand in the traceback's first line, and hold characters of several bytes."""
    path = worker(f"""
{LINES}
def show_progress(count):
    for number in range(count):
        sys.stderr.write(f"\\r 50%|\\u2588\\u2588\\u2588\\u258c   | {{number}}/9")
        sys.stderr.flush()
atexit.register(show_progress, 20_000)
show_progress(20_000)
load()
""")
    report, root = run(launch, path, tmp_path)
    assert "ValueError: batch 17 is broken" in report
    assert root["exception"]["where"].endswith("in load")


def test_an_exception_that_was_handled_long_ago_is_not_called_the_cause(
    launch: Launch, worker: Worker, tmp_path: Path
) -> None:
    """Before `sys.exit(1)` and much output it is named as the last one, with the last lines of stderr."""
    path = worker(f"""
{LINES}
import traceback
try: load()
except ValueError: traceback.print_exc()
write_lines(50_000)
sys.exit("the data server is gone")
""")
    report, root = run(launch, path, tmp_path)
    assert UNCERTAIN in report
    assert "the data server is gone" in report
    assert not root["exception"]["is_certain"]


def test_an_exception_within_a_flood_is_found(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """Where an exception waits in the middle of a full pipe the report names it."""
    path = worker(f"""
import fcntl, termios, traceback
size = fcntl.fcntl(2, 1032)
def bytes_in(): return int.from_bytes(fcntl.ioctl(2, termios.FIONREAD, bytes(4)), sys.byteorder)
try: raise ValueError("batch 17 is broken")
except ValueError: text = traceback.format_exc().encode()
os.kill(os.getppid(), signal.SIGSTOP)
half = b"step\\n" * (size // 10 - 1000)
os.write(2, half + text + half)
open({str(tmp_path / "filled")!r}, "w").close()
while bytes_in(): time.sleep(0.01)
sys.exit(1)
""")
    job = launch(f"--log-dir={tmp_path}", path)
    wait_until((tmp_path / "filled").exists)
    os.kill(job.pid, signal.SIGCONT)
    assert job.wait_exit() == 1
    report = job.stderr.rpartition("-- elastic-run: ")[2]
    assert "ValueError: batch 17 is broken" in report
    assert UNCERTAIN in report
