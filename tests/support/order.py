"""The order of test files, longest first, so that no worker of pytest-xdist is left with a long one at the end.

`tests/durations.json` has the seconds of each file on two processors: `make test PYTEST=--record-durations` writes the
seconds of the files that it ran.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

_RECORD = Path(__file__).parents[1] / "durations.json"
#: Seconds of a file without a record: it comes before those that are over at once.
_UNKNOWN = 5.0
_spent: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that records."""
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.json")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first; the tests of a file keep their order."""
    known: dict[str, float] = json.loads(_RECORD.read_text(encoding="utf-8"))
    items.sort(key=lambda item: -known.get(_file_of(item.nodeid), _UNKNOWN))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count what a test took, its fixtures included."""
    _spent[_file_of(report.nodeid)] += report.duration  # type: ignore[assignment] # a counter of seconds


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the record, where it is asked for; a worker of pytest-xdist leaves that to its controller."""
    if not session.config.getoption("--record-durations") or hasattr(session.config, "workerinput"):
        return
    known: dict[str, float] = json.loads(_RECORD.read_text(encoding="utf-8"))
    known |= {file: round(seconds, 1) for file, seconds in _spent.items()}
    root = _RECORD.parents[1]
    known = {file: seconds for file, seconds in known.items() if seconds >= 1 and (root / file).exists()}
    text = json.dumps(dict(sorted(known.items(), key=lambda entry: -entry[1])), indent=1)
    _RECORD.write_text(text + "\n", encoding="utf-8")


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]
