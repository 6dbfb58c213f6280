"""What every test gets: the promise that nothing it started is left, and the tools to start things.

Every process started by a test carries the test's token in its environment, so that it is found wherever it hides.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import uuid
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_run.contract import ENV_CONTROL_DIR
from tests.support import launch as launching
from tests.support.processes import (
    TEST_TOKEN,
    describe,
    kill_processes,
    processes_with_environment,
    read_children,
)
from tests.support.system import pytest_itemcollected, pytest_runtest_setup
from tests.support.terminal import Terminal
from tests.support.torchrun import TORCHRUN, with_hosts_file, write_hosts_file
from tests.support.wait import DeadlinePassedError, wait_until

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping

    from tests.support.launch import Launch, Launched

__all__ = ["pytest_itemcollected", "pytest_runtest_setup"]

#: Law 6: seconds that anything may outlive the launcher, however that ended.
_LEFTOVER_DEADLINE = 2.0
#: Seconds of each file on two processors, and beside them those of its `long`, `system` and `soak` tests.
_RECORD = Path(__file__).with_name("durations.json")
#: Seconds of a file without a record: it comes before those that are over at once.
_UNKNOWN = 5.0
_spent: Counter[str] = Counter()

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


# --- the order of test files ------------------------------------------------------------------------------------------
def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that records."""
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.json")


@pytest.hookimpl(trylast=True)  # when the tests that do not run are gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first, so that no worker of pytest-xdist is left with a long one at the end."""
    known: dict[str, float] = json.loads(_RECORD.read_text(encoding="utf-8"))
    seconds: Counter[str] = Counter()
    for file, key in {(_file_of(item.nodeid), _key(item.nodeid, item.keywords)) for item in items}:
        seconds[file] += known.get(key, known.get(file, _UNKNOWN))  # type: ignore[assignment] # of seconds
    items.sort(key=lambda item: -seconds[_file_of(item.nodeid)])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count what a test took, its fixtures included."""
    _spent[_key(report.nodeid, report.keywords)] += report.duration  # type: ignore[assignment] # of seconds


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the record, where it is asked for; a worker of pytest-xdist leaves that to its controller."""
    if not session.config.getoption("--record-durations") or hasattr(session.config, "workerinput"):
        return
    known: dict[str, float] = json.loads(_RECORD.read_text(encoding="utf-8"))
    known |= {key: round(seconds, 1) for key, seconds in _spent.items()}
    root = _RECORD.parents[1]
    known = {key: seconds for key, seconds in known.items() if seconds >= 1 and (root / key.split()[0]).exists()}
    text = json.dumps(dict(sorted(known.items(), key=lambda entry: -entry[1])), indent=1)
    _RECORD.write_text(text + "\n", encoding="utf-8")


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _key(nodeid: str, keywords: Container[str]) -> str:
    marker = next((marker for marker in ("soak", "system", "long") if marker in keywords), "")
    return f"{_file_of(nodeid)} {marker}".rstrip()


# --- fixtures ---------------------------------------------------------------------------------------------------------
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
    if before == resource.getrusage(resource.RUSAGE_CHILDREN) and not read_children("self"):
        return
    if not processes_with_environment(token):
        return
    try:
        wait_until(lambda: not processes_with_environment(token), deadline=_LEFTOVER_DEADLINE)
    except DeadlinePassedError:
        left = processes_with_environment(token)
        described = [describe(pid) for pid in left]
        kill_processes(left)
        pytest.fail("left behind:\n" + "\n".join(described), pytrace=False)
    kill_processes(processes_with_environment(token))


@pytest.fixture
def launch() -> Iterator[Launch]:
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
def launch_torchrun(launch: Launch, tmp_path: Path) -> Launch:
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
