"""The running launcher: what is tried again after a failure, and what is not."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]


def test_restart_until_success(launch: Launch, worker: Worker) -> None:
    """The whole group is restarted, with the count in its environment, until it succeeds."""
    path = worker("say('rank', rank, 'attempt', attempt); sys.exit(rank == 1 and attempt < 2)")
    job = launch("--standalone", "--nproc-per-node=2", "--max-restarts=3", path)
    assert job.wait_exit() == 0
    seen = sorted(job.stdout.splitlines())
    assert [line for line in seen if "rank 1" in line] == [f"rank 1 attempt {attempt}" for attempt in range(3)]


def test_same_error_twice_ends_the_job(launch: Launch, worker: Worker) -> None:
    """An ImportError does not burn the whole restart budget."""
    job = launch("--standalone", "--max-restarts=5", worker("say('attempt', attempt); import no_such_module_at_all"))
    assert job.wait_exit() == 202
    assert job.stdout.count("attempt") == 2
    assert "no_such_module_at_all" in job.stderr


def test_min_uptime_ends_the_job_too(launch: Launch, worker: Worker) -> None:
    """With --min-uptime any failure that comes twice before it ends the job."""
    job = launch("--standalone", "--max-restarts=5", "--min-uptime=60", worker("say('attempt'); sys.exit(9)"))
    assert job.wait_exit() == 202
    assert job.stdout.count("attempt") == 2


def test_no_restart_exit_codes(launch: Launch, worker: Worker) -> None:
    """A listed exit code ends the job at once, with that code."""
    job = launch(
        "--standalone", "--max-restarts=5", "--no-restart-exit-codes=3,64-78", worker("say('attempt'); sys.exit(70)")
    )
    assert job.wait_exit() == 70
    assert job.stdout.count("attempt") == 1


def test_restart_window(launch: Launch, worker: Worker) -> None:
    """--restart-window allows so many restarts per period, and no more."""
    path = worker("say('attempt'); sys.exit(9)")
    job = launch("--standalone", "--restart-window=2/1h", "--max-backoff=0", path)
    assert job.wait_exit() == 9
    assert job.stdout.count("attempt") == 3


def test_every_round_has_its_own_store(launch: Launch, worker: Worker) -> None:
    """A restart gets a new port; --master-port keeps it."""
    path = worker("say('port', os.environ['MASTER_PORT']); sys.exit(attempt == 0)")
    job = launch("--standalone", "--max-restarts=1", path)
    assert job.wait_exit() == 0
    first, second = re.findall(r"port (\d+)", job.stdout)
    assert first != second
    with_port = launch(f"--master-port={first}", "--max-restarts=1", path)
    assert with_port.wait_exit() == 0
    assert re.findall(r"port (\d+)", with_port.stdout) == [first, first]
