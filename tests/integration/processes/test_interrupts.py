"""Ctrl-C: workers that end with the same KeyboardInterrupt show one traceback."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]

#: Ranks 0 to 2 are interrupted at one place, rank 3 at another, also if Ctrl-C comes before they wait.
_WAITING = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
print("runs", rank, flush=True)
signal.sigwait({signal.SIGINT})
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
if rank == 3:
    signal.raise_signal(signal.SIGINT)
signal.raise_signal(signal.SIGINT)
"""

_LEAVING = """
import signal
signal.signal(signal.SIGTERM, signal.default_int_handler)
print("runs", rank, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("flags", [[], ["--tee=3"]], ids=["captured", "tee"])
def test_equal_interrupts_are_one_traceback(launch: Launch, worker: Worker, tmp_path: Path, flags: list[str]) -> None:
    """The console shows one traceback for each place, with the ranks that were there; each log file has its own."""
    job = launch("--nproc-per-node=4", f"--log-dir={tmp_path / 'logs'}", *flags, str(worker(_WAITING)))
    job.wait_lines(r"runs \d", count=4)
    job.send(signal.SIGINT)
    assert job.wait_exit() == 128 + signal.SIGINT
    assert job.stderr.count("Traceback (most recent call last)") == 2
    assert job.stderr.count("elastic-run: ranks 0-2: the same KeyboardInterrupt at ") == 1
    logs = [path.read_text(encoding="utf-8") for path in tmp_path.glob("logs/*_*/attempt_0/*/stderr.log")]
    assert [log.count("KeyboardInterrupt") for log in logs] == [1] * 4


def test_sigterm_folds_nothing(launch: Launch, worker: Worker) -> None:
    """Only Ctrl-C folds: a traceback that a program writes for another reason is shown for each rank."""
    job = launch("--nproc-per-node=2", str(worker(_LEAVING)))
    job.wait_lines(r"runs \d", count=2)
    job.send(signal.SIGTERM)
    job.wait_exit()
    assert job.stderr.count("\nKeyboardInterrupt") == 2
