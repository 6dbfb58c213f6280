"""--inject-fault on real jobs: each fault comes at its time, in its worker, and is told."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]


def test_a_killed_worker(launch: Launch, worker: Worker) -> None:
    """The worker of the given rank gets SIGKILL in the first attempt only, and a line says by whom."""
    path = worker("say(f'rank {rank} attempt {attempt}')\nif attempt == 0:\n    signal.pause()")
    job = launch("--nproc-per-node=2", "--max-restarts=1", "--inject-fault=kill@0.2s:rank=1", path)
    assert job.wait_exit() == 0, job.stderr
    # On a busy machine a worker dies before its first line.
    again = [line for line in job.stdout.splitlines() if line.endswith("attempt 1")]
    assert sorted(again) == ["rank 0 attempt 1", "rank 1 attempt 1"]
    assert job.stderr.count("(--inject-fault)") == 1
    assert "elastic-run: SIGKILL to rank 1 (pid " in job.stderr
    assert "rank 1 (local 1, pid " in job.stderr
    assert "was killed by SIGKILL" in job.stderr


def test_a_worker_that_is_stopped_for_a_while_goes_on(launch: Launch, worker: Worker) -> None:
    """A worker that is stopped sees nothing of the pause but the time, and the job succeeds."""
    path = worker(
        "import time\n"
        "last = time.monotonic()\n"
        "longest = 0.0\n"
        "end = last + 60\n"
        "while longest < 0.4 and last < end:\n"
        "    time.sleep(0.01)\n"
        "    longest, last = max(longest, time.monotonic() - last), time.monotonic()\n"
        "say('paused', longest >= 0.4)"
    )
    # Several times, because a worker on a busy machine takes its time to start.
    pauses = ",".join(f"stop=0.5s@{second}s" for second in (0.5, 2, 5, 15, 30))
    job = launch(f"--inject-fault={pauses}", path)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "paused True\n"
    assert "SIGSTOP to rank 0" in job.stderr


def test_any_signal(launch: Launch, worker: Worker) -> None:
    """A signal by name ends the job as it would from anywhere else."""
    job = launch("--inject-fault=signal=SIGSEGV@0.1s", worker("signal.pause()"))
    assert job.wait_exit() == 128 + signal.SIGSEGV
    assert "SIGSEGV to rank 0" in job.stderr


def test_a_killed_agent(launch: Launch, worker: Worker) -> None:
    """The agent of the rank's node dies at once, and no worker outlives it."""
    job = launch("--inject-fault=agent@0.2s", worker("say('there')\nsignal.pause()"))
    assert job.wait_exit() == -signal.SIGKILL
    assert "SIGKILL to this agent, of rank 0, after 0.20 s (--inject-fault)" in job.stderr
