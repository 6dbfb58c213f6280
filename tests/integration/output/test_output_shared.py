"""Several workers with one stdout that is no terminal: lines stay whole without --tee."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support.launch import ELASTIC_RUN, clean_environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]

#: Writes text and newline apart, as `print` does under `python -u`, and both streams at once.
#: The longest pause within a line goes into a file.
_TORN = """
import time
longest = 0.0
for number in range(300):
    for fd, name in ((1, "out"), (2, "err")):
        began_at = time.monotonic()  # at the end of `write` the reader may get the processor
        os.write(fd, f"{name} {rank} {number} {'x' * 80}".encode())
        os.write(fd, bytes([10]))
        longest = max(longest, time.monotonic() - began_at)
with open(os.path.join(sys.argv[1], str(rank)), "w") as file:
    file.write(str(longest))
"""
#: Seconds for which a worker may pause within a line: on a very busy machine it may get no processor for longer.
_PAUSE = 0.2
_WHOLE = re.compile(r"out \d \d+ x{80}")


def run_into(kind: str, command: list[str], path: Path) -> str:
    """Run a command with a file or a pipe as its stdout, and return what came there."""
    environment = clean_environment({})
    if kind == "pipe":
        job = subprocess.run(command, capture_output=True, env=environment, timeout=120, check=True)
        return job.stdout.decode()
    with path.open("wb") as file:
        subprocess.run(command, stdout=file, stderr=subprocess.DEVNULL, env=environment, timeout=120, check=True)
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_lines_of_workers_that_share_stdout_are_whole(kind: str, worker: Worker, tmp_path: Path) -> None:
    """Each line of each rank is there once, whichever of them writes at the same time."""
    command = [*ELASTIC_RUN, "--nproc-per-node=4", str(worker(_TORN)), str(tmp_path)]
    text = ""
    for _ in range(5):
        text = run_into(kind, command, tmp_path / "out")
        if all(float((tmp_path / str(rank)).read_text(encoding="ascii")) < _PAUSE for rank in range(4)):
            break
    lines = text.splitlines()
    assert [line for line in lines if not _WHOLE.fullmatch(line)] == []
    assert sorted(lines) == sorted(f"out {rank} {number} {'x' * 80}" for rank in range(4) for number in range(300))


def test_a_line_whose_worker_pauses_stays_whole(worker: Worker, tmp_path: Path) -> None:
    """A worker that gets no processor for 50 ms between text and newline still has its line for itself."""
    body = """
import time
for number in range(10):
    os.write(1, f"rank {rank}".encode())
    time.sleep(0.05)
    os.write(1, bytes([10]))
"""
    text = run_into("pipe", [*ELASTIC_RUN, "--nproc-per-node=2", str(worker(body))], tmp_path / "out")
    assert sorted(text.splitlines()) == ["rank 0"] * 10 + ["rank 1"] * 10


@pytest.mark.parametrize("flags", [("--nproc-per-node=1",), ("--nproc-per-node=2", "--no-capture")], ids=" ".join)
def test_one_worker_has_the_launchers_own_stdout(launch: Launch, worker: Worker, flags: tuple[str, ...]) -> None:
    """So do several with --no-capture."""
    job = launch(*flags, worker("say(os.readlink('/proc/self/fd/1') == os.readlink(f'/proc/{os.getppid()}/fd/1'))"))
    assert job.wait_exit() == 0
    assert set(job.stdout.split()) == {"True"}
