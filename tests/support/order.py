"""The order of test files, longest first, so that no worker of pytest-xdist is left with a long one at the end.

`tests/durations.json` has the seconds of each file on two processors, and beside it those of its tests with the marker
`long`: `make test PYTEST=--record-durations` writes the first, `make test-long PYTEST=--record-durations` the second.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

_RECORD = Path(__file__).parents[1] / "durations.json"
#: Seconds of a file without a record: it comes before those that are over at once.
_UNKNOWN = 5.0
_spent: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that records."""
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.json")


@pytest.hookimpl(trylast=True)  # when the tests that do not run are gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first; the tests of a file keep their order."""
    known: dict[str, float] = json.loads(_RECORD.read_text(encoding="utf-8"))
    seconds: Counter[str] = Counter()
    for file, is_long in {(_file_of(item.nodeid), item.get_closest_marker("long") is not None) for item in items}:
        seconds[file] += known.get(_key(file, is_long=is_long), known.get(file, _UNKNOWN))  # type: ignore[assignment] # of seconds
    items.sort(key=lambda item: -seconds[_file_of(item.nodeid)])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count what a test took, its fixtures included."""
    _spent[_key(_file_of(report.nodeid), is_long="long" in report.keywords)] += report.duration  # type: ignore[assignment] # of seconds


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


def _key(file: str, *, is_long: bool) -> str:
    return f"{file} long" if is_long else file
