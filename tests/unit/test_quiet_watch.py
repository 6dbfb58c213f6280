"""The watch that finds out that nothing happens any more."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from elastic_run.agent.driver.worker_readings import Activity, is_quiet, read_activity

if TYPE_CHECKING:
    from collections.abc import Iterator

_COMPUTES = "print('ready', flush=True)\nwhile True: pass"


@pytest.fixture
def worker(request: pytest.FixtureRequest) -> Iterator[int]:
    """Start a program that leads its session, and return its pid."""
    command = (sys.executable, "-c", request.param)
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


@pytest.mark.parametrize("worker", [_COMPUTES], indirect=True)
def test_the_processes_of_a_worker_count(worker: int) -> None:
    """Processor time is read of its session; a worker that is gone has none."""
    assert read_activity([worker]).workers == 1
    assert read_activity([]) == Activity(0.0, 0, 0)


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (Activity(10.0, 100, 2), True),
        (Activity(12.9, 100, 2), True),
        (Activity(13.1, 100, 2), False),
        (Activity(6.0, 100, 2), False),
        (Activity(10.0, 101, 2), False),
        (Activity(10.0, 100, 1), False),
    ],
)
def test_what_is_quiet(after: Activity, expected: bool) -> None:
    """A byte, half a percent of a processor for each worker, or another number of workers is a sign of life."""
    assert is_quiet(Activity(10.0, 100, 2), after, 300.0) is expected
    assert not is_quiet(Activity(0.0, 0, 0), Activity(0.0, 0, 0), 300.0)
