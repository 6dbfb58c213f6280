"""Equal lines of several workers on a pipe, a terminal and under --tee: shown once, and whole in the log files."""

from __future__ import annotations

import re
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.wait import stretched, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.launch import Launch, Launched, Worker
    from tests.support.terminal import Terminal

#: Waits until the test has stopped the launcher, so that all have written when it reads; argument: a directory.
_TOGETHER = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # each writes all, whoever ends first
sign = lambda name: open(os.path.join(sys.argv[1], name), "w").close()
sign(f"ready{rank}")
while not os.path.exists(os.path.join(sys.argv[1], "go")): time.sleep(0.005)
"""
_FAILING = f"""
{_TOGETHER}
import warnings
def show(*error): sys.__excepthook__(*error), sign(f"done{{rank}}")
sys.excepthook = show
warnings.warn("slow")
raise ValueError("other" if rank == 3 else "no")
"""


def write_together(job: Launched, directory: Path, count: int) -> None:
    """Have all workers of `_TOGETHER` write while the launcher is stopped."""
    wait_until(lambda: len(list(directory.glob("ready*"))) == count, what="the workers are there")
    job.send(signal.SIGSTOP)
    (directory / "go").touch()
    wait_until(lambda: len(list(directory.glob("done*"))) == count, what="all have written")
    job.send(signal.SIGCONT)


@pytest.mark.parametrize("flags", [(), ("--tee=3",)], ids=["captured", "tee"])
def test_a_warning_and_a_traceback_of_eight_workers(
    launch: Launch, worker: Worker, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """Each stands once on the console, behind its ranks; the rank that differs stands for itself; files have all."""
    job = launch("--nproc-per-node=8", f"--log-dir={tmp_path / 'logs'}", *flags, worker(_FAILING), tmp_path)
    write_together(job, tmp_path, 8)
    assert job.wait_exit() == 1
    shown = job.stderr.partition("-- elastic-run: ")[0]
    assert len(re.findall(r"^\[ranks 0-7\] .*UserWarning: slow$", shown, re.MULTILINE)) == 1
    assert shown.count("UserWarning") == 1
    assert len(re.findall(r"^\[ranks 0-2,4-7\] Traceback", shown, re.MULTILINE)) == 1
    assert (shown.count("ValueError: no"), shown.count("ValueError: other")) == (1, 1)
    for path in tmp_path.glob("logs/*_*/attempt_0/*/stderr.log"):
        text = path.read_text(encoding="utf-8")
        assert (text.count("UserWarning"), text.count("Traceback"), text.count("ranks")) == (1, 1, 0)


@pytest.mark.long
def test_sixty_four_workers(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """Their equal lines are shown once, in their order."""
    body = "for number in range(5): print('line', number, file=sys.stderr)\nsign(f'done{rank}')"
    job = launch("--nproc-per-node=64", worker(_TOGETHER + body), tmp_path)
    write_together(job, tmp_path, 64)
    assert job.wait_exit() == 0
    assert re.findall(r".*line \d$", job.stderr, re.MULTILINE) == [f"[ranks 0-63] line {number}" for number in range(5)]


def test_a_terminal(terminal: Terminal, worker: Worker) -> None:
    """A terminal shows them once too, and a progress bar as it comes."""
    body = "say('equal')\nif rank == 0: os.write(2, b'\\r 10%\\r 20%\\n')"
    terminal.start("--nproc-per-node=4", worker(body))
    assert terminal.wait_exit() == 0
    assert b"\r 10%\r 20%\r\n" in terminal.output
    assert terminal.output.count(b"equal") <= 2  # rank 0 leaves its line for the bar


@pytest.mark.parametrize("way", ["one worker", "one shown", "flag", "variable", "filter"])
def test_nothing_is_folded(launch: Launch, worker: Worker, tmp_path: Path, way: str) -> None:
    """With one worker that is shown, with --no-fold or PET_NO_FOLD, and with a filter of stderr's lines."""
    flags = {
        "one worker": ["--nproc-per-node=1"],
        "one shown": ["--nproc-per-node=3", "--local-ranks-filter=1"],
        "flag": ["--nproc-per-node=3", "--no-fold"],
        "variable": ["--nproc-per-node=3"],
        "filter": ["--nproc-per-node=3", "--tee=3", f"--log-dir={tmp_path}", "--duplicate-stderr-filters=equal"],
    }[way]
    env = {"PET_NO_FOLD": "1"} if way == "variable" else {}
    job = launch(*flags, worker("os.write(2, b'equal\\n')"), env=env)
    assert job.wait_exit() == 0
    assert job.stderr.count("equal") == (1 if way.startswith("one") else 3)
    assert "[ranks" not in job.stderr


def test_the_first_byte_of_an_equal_line(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """Comes within a quarter of a second, also where a rank never writes it."""
    body = f"""
import time
open({str(tmp_path)!r} + f"/at{{rank}}", "w").write(str(time.monotonic()))
if rank:
    os.write(2, b"equal\\n")
time.sleep(3600)
"""
    job = launch("--nproc-per-node=3", worker(body))
    job.wait_line(r"\[ranks 1-2\] equal")
    came_at = time.monotonic()
    assert came_at - min(float((tmp_path / f"at{rank}").read_text()) for rank in (1, 2)) < stretched(0.25)
    job.send(signal.SIGTERM)
    job.wait_exit()


#: Writes words of a list that all ranks share, and now and then one of its own, in pieces of any size.
_RANDOM = """
import random, time
common, own = random.Random(sys.argv[1]), random.Random(sys.argv[1] + str(rank))
trace = b'Traceback (most recent call last):\\n  File "x.py", line 1, in f\\n    g()\\nValueError: no\\n'
words = [b"a\\n", b"b\\n", trace, b"x.py:1: UserWarning: w\\n  w()\\n", b"\\n", b"\\xff\\0\\x1b[m\\n"]
words.append(b"y" * 70000 + b"\\n")
for _ in range(60):
    word = common.choice(words)
    word = own.choice([word] * 9 + [b"rank %d\\n" % rank])
    while word:
        size = own.choice([len(word), len(word), 30])
        os.write(2, word[:size])
        word = word[size:]
    time.sleep(own.choice([0, 0, 0, 0.001, 0.03]))
"""


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(6, 200))])
def test_no_byte_of_a_random_program_is_lost(launch: Launch, worker: Worker, tmp_path: Path, seed: int) -> None:
    """The console has each line of each rank, in the order of the rank's log file."""
    flags = ("--nproc-per-node=4", "--tee=3", f"--log-dir={tmp_path / 'logs'}")
    job = launch(*flags, worker(_RANDOM), str(seed))
    assert job.wait_exit() == 0
    shown: dict[int, list[str]] = {rank: [] for rank in range(4)}
    for line in re.sub(r"(?m)^elastic-run: .*\n", "", job.stderr).removesuffix("\n").split("\n"):
        found = re.fullmatch(r"(?s)\[default(\d)\]:(.*)|\[ranks ([\d,-]+)\] (.*)", line)
        assert found, line
        for rank in [int(found[1])] if found[1] else read_ranks(found[3]):
            shown[rank].append(found[2] if found[1] else found[4])
    for rank, lines in shown.items():
        (path,) = tmp_path.glob(f"logs/*_*/attempt_0/{rank}/stderr.log")
        assert lines == path.read_bytes().decode(errors="replace").removesuffix("\n").split("\n")


def read_ranks(text: str) -> list[int]:
    """Return the ranks of a list such as `0-2,4`."""
    ranges = [part.partition("-") for part in text.split(",")]
    return [rank for first, _, last in ranges for rank in range(int(first), int(last or first) + 1)]
