"""The order of test files, longest first, so that no worker of pytest-xdist is left with a long one at the end.

`tests/durations.json` has the seconds of each file on two processors, and beside them those of its tests with the
marker `long` or `system`: PYTEST=--record-durations makes `make test`, `test-long` and `test-system` write them.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Container

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
    marker = next((marker for marker in ("system", "long") if marker in keywords), "")
    return f"{_file_of(nodeid)} {marker}".rstrip()
