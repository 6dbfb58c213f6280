"""Every command line of the matrix under torchrun and elastic-run: what differs must be on the list of differences.

torchrun takes two seconds of a CPU for each, so it runs ahead of the tests, two at a time, each case once.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.parity.differences import DIFFERENCES, Difference
from tests.parity.matrix import CASES, Case
from tests.parity.rehearsal import Rehearsal

if TYPE_CHECKING:
    from collections.abc import Iterator

_DOCUMENT = Path(__file__).parents[2] / "docs" / "migrating-from-torchrun.md"


@pytest.fixture(scope="module")
def rehearsal(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    """Begin to run, under torchrun, the cases of the tests that were selected."""
    selected = [getattr(item, "callspec", None) for item in request.session.items]
    cases = [spec.params["case"] for spec in selected if spec is not None and "case" in spec.params]
    ahead = [case for case in cases if isinstance(case, Case)]
    opened = Rehearsal(tmp_path_factory.mktemp("parity"), ahead)
    yield opened
    opened.close()


#: The cases that run with `make test`, and those that run with `make test-long`: each difference shows in one of them.
_SHORT = {"plain"}
_LONG = {difference.seen_in for difference in DIFFERENCES} | {
    *("restarted", "c10d, settings", "surroundings", "recorded by torch", "recorded by elastic-run"),
}


def marks_of(name: str) -> tuple[pytest.MarkDecorator, ...]:
    """Return the marks of a case."""
    return () if name in _SHORT else (pytest.mark.long if name in _LONG else pytest.mark.soak,)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=marks_of(case.name)) for case in CASES],
    ids=lambda case: case.name,
)
def test_a_job_runs_as_under_torchrun(case: Case, rehearsal: Rehearsal, environment_token: str) -> None:
    """Workers, console, files and exit code are as under torchrun, but for documented differences."""
    unexplained = [
        f"{key}:\n    torchrun     {theirs!r}\n    elastic-run  {ours!r}"
        for key, theirs, ours in rehearsal.differences(case, environment_token)
        if not any(difference.covers(case, key, theirs, ours) for difference in DIFFERENCES)
    ]
    assert not unexplained, "\n".join(unexplained)


@pytest.mark.parametrize(
    "difference",
    [pytest.param(each, marks=marks_of(each.seen_in)) for each in DIFFERENCES],
    ids=lambda difference: difference.name,
)
def test_a_difference_is_still_there(difference: Difference, rehearsal: Rehearsal, environment_token: str) -> None:
    """Each difference of the list shows in the case that it names, so that the list holds nothing stale."""
    case = next(case for case in CASES if case.name == difference.seen_in)
    found = rehearsal.differences(case, environment_token)
    assert any(difference.covers(case, key, theirs, ours) for key, theirs, ours in found)


def test_differences_are_documented() -> None:
    """Users can read about each difference of the list in the page on migrating."""
    text = _DOCUMENT.read_text(encoding="utf-8")
    assert [difference.name for difference in DIFFERENCES if difference.documented not in text] == []


@pytest.mark.long
def test_error_files_of_both_records_have_one_form(rehearsal: Rehearsal, environment_token: str) -> None:
    """What our @record leaves under torchrun, and torch's under elastic-run, have the same keys and message."""
    by_torch, by_us = (next(case for case in CASES if case.name == f"recorded by {who}") for who in _RECORDS)
    theirs = _error_files(rehearsal.under_elastic_run(by_torch, environment_token))
    ours = _error_files(rehearsal.under_torchrun(by_us))
    assert ours == theirs


#: Whose @record, as in the names of the cases.
_RECORDS = ("torch", "elastic-run")


def _error_files(seen: dict[str, Any]) -> dict[str, Any]:
    """Return the error files of a run without the call stack, which names the file of @record itself."""
    seen = copy.deepcopy(seen)
    files = {key: value for key, value in seen.items() if key.endswith("/error.json") or key == "parent's error file"}
    assert len(files) == 2
    for content in files.values():
        stack = content["message"]["extraInfo"]
        stack["py_callstack"] = stack["py_callstack"].splitlines()[-1]
    return files
