"""What every test gets: the promise that nothing it started is left, and the tools to start things.

Every process started by a test carries the test's token in its environment, so that it is found wherever it hides.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_run.contract import ENV_CONTROL_DIR
from tests.support import launch as launching
from tests.support.order import (
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_runtest_logreport,
    pytest_sessionfinish,
)
from tests.support.processes import TEST_TOKEN, describe, kill_processes, processes_with_environment
from tests.support.system import pytest_itemcollected, pytest_runtest_setup
from tests.support.terminal import Terminal
from tests.support.torchrun import TORCHRUN, with_hosts_file, write_hosts_file
from tests.support.wait import DeadlinePassedError, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tests.support.launch import Launched

__all__ = [
    "pytest_addoption",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_itemcollected",
    "pytest_runtest_logreport",
    "pytest_runtest_setup",
    "pytest_sessionfinish",
]

#: Law 6: seconds that anything may outlive the launcher, however that ended.
_LEFTOVER_DEADLINE = 2.0

# Each process of `make test` collects all tests, which makes many objects that all stay. The garbage collector would
# take two fifths of that time.
gc.disable()
# A user's shell has neither of these; pyc files are part of what users get.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Nor are signals ignored there, as under nohup or behind an `&` of a script. What has a handler goes on here, and is at
# its default in what a test starts.
for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)


def pytest_collection_finish() -> None:
    """Collect garbage from now on, but not among what the collection of tests has made."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def environment_token(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Mark everything the test starts, and fail the test when any of it lives on after it."""
    token = uuid.uuid4().hex
    monkeypatch.setenv(TEST_TOKEN, token)
    monkeypatch.setenv(ENV_CONTROL_DIR, str(tmp_path_factory.getbasetemp()))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    yield token
    changed = mask ^ signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert not changed, f"signals are blocked or unblocked after it: {sorted(changed)}"
    # To read the environment of every process costs more than most tests that start nothing: where no child has been
    # waited for, and none is there, the test has started nothing.
    if before == resource.getrusage(resource.RUSAGE_CHILDREN) and not has_children():
        return
    if not processes_with_environment(token):
        return
    try:
        wait_until(lambda: not find_left(token), deadline=_LEFTOVER_DEADLINE)
    except DeadlinePassedError:
        left = find_left(token)
        described = [describe(pid) for pid in left]
        kill_processes(left)
        pytest.fail("left behind:\n" + "\n".join(described), pytrace=False)
    kill_processes(processes_with_environment(token))


def has_children() -> bool:
    """Whether this process has children, zombies included."""
    return any(task.read_bytes() for task in Path("/proc/self/task").glob("*/children"))


def find_left(token: str) -> list[int]:
    """Return the processes that a test has left."""
    return processes_with_environment(token)


@pytest.fixture
def launch() -> Iterator[Callable[..., Launched]]:
    """Start launchers as `tests.support.launch.launch` does; what still runs at the end is killed."""
    started: list[Launched] = []

    def start(*arguments: str | Path, **options: object) -> Launched:
        job = launching.launch(*arguments, **options)  # type: ignore[arg-type] # passed through as they are
        started.append(job)
        return job

    yield start
    for job in started:
        job.close()


@pytest.fixture
def launch_torchrun(launch: Callable[..., Launched], tmp_path: Path) -> Callable[..., Launched]:
    """Start torchrun with the arguments of the fixture `launch`, where its look-ups don't stall."""
    program = with_hosts_file(TORCHRUN, write_hosts_file(tmp_path))

    def start(*arguments: str | Path, env: Mapping[str, str | None] | None = None, **options: object) -> Launched:
        return launch(*arguments, env=env, program=program, **options)

    return start


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    """Give a terminal of 24 x 80; what still runs in it at the end is killed."""
    with Terminal() as opened:
        yield opened
