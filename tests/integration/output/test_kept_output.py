"""Log files that a user gets with --log-dir alone, and where the files of --tee are without it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]

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


def test_no_capture_keeps_nothing(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """With --no-capture nothing passes through the launcher, so that no file has a copy."""
    job = launch("--no-capture", "--log-dir", tmp_path, worker("say(os.readlink('/proc/self/fd/1'))"))
    assert job.wait_exit() == 0
    assert not [*tmp_path.glob("*_*/attempt_0")]


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
