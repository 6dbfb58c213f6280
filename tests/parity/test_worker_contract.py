"""Every command line of the matrix under torchrun and elastic-run: what differs must be on the list of differences.

torchrun takes two seconds of a CPU for each, so it runs ahead of the tests, two at a time, each case once.
"""

from __future__ import annotations

import copy
import shutil
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.parity.differences import ABSENT, DIFFERENCES, Difference
from tests.parity.matrix import CASES, Case
from tests.parity.observed import Run
from tests.support.processes import kill_processes, processes_with_environment
from tests.support.torchrun import with_hosts_file, write_hosts_file

if TYPE_CHECKING:
    from collections.abc import Iterator

_DOCUMENT = Path(__file__).parents[2] / "docs" / "migrating-from-torchrun.md"


class Rehearsal:
    """Runs cases under both launchers: under torchrun ahead of time, and each only once.

    Args:
        directory: Where the runs get their directories.
        ahead: The cases that will be asked for, in order.
    """

    def __init__(self, directory: Path, ahead: list[Case]) -> None:
        self._directory = directory
        self._programs = directory / "programs of the job"
        self._prefix = with_hosts_file([], write_hosts_file(directory))
        self._pool = ThreadPoolExecutor(2)
        self.token = uuid.uuid4().hex
        self._ours: dict[str, dict[str, Any]] = {}
        shutil.copytree(Path(__file__).with_name("programs"), self._programs)
        self._theirs = {case.name: self._start(case) for case in ahead}

    def under_torchrun(self, case: Case) -> dict[str, Any]:
        """Return what was seen of a case under torchrun."""
        if case.name not in self._theirs:
            self._theirs[case.name] = self._start(case)
        return self._theirs[case.name].result()

    def under_elastic_run(self, case: Case, token: str) -> dict[str, Any]:
        """Return what was seen of a case under elastic-run; `token` is the test's."""
        if case.name not in self._ours:
            self._ours[case.name] = self._observe(case, "elastic-run", token)
        return self._ours[case.name]

    def differences(self, case: Case, token: str) -> list[tuple[str, Any, Any]]:
        """Return key, torchrun's and elastic-run's for all that isn't the same."""
        ours = self.under_elastic_run(case, token)
        theirs = self.under_torchrun(case)
        keys = ["workers"] if theirs["workers"] != ours["workers"] else sorted({*theirs, *ours})
        pairs = ((key, theirs.get(key, ABSENT), ours.get(key, ABSENT)) for key in keys)
        return [(key, left, right) for key, left, right in pairs if left != right]

    def close(self) -> list[int]:
        """Wait for what runs, and return the pids of what torchrun has left behind, killed by now."""
        self._pool.shutdown(cancel_futures=True)
        left = processes_with_environment(self.token)
        kill_processes(left)
        return left

    def _start(self, case: Case) -> Future[dict[str, Any]]:
        return self._pool.submit(self._observe, case, "torchrun", self.token)

    def _observe(self, case: Case, launcher: str, token: str) -> dict[str, Any]:
        out = self._directory / launcher / case.name.replace(" ", "_")
        out.mkdir(parents=True)
        return Run(case, launcher, out=out, programs=self._programs, prefix=self._prefix, token=token).observe()


@pytest.fixture(scope="module")
def rehearsal(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    """Begin to run, under torchrun, the cases of the tests that were selected."""
    selected = [getattr(item, "callspec", None) for item in request.session.items]
    cases = [spec.params["case"] for spec in selected if spec is not None and "case" in spec.params]
    opened = Rehearsal(tmp_path_factory.mktemp("parity"), [case for case in cases if isinstance(case, Case)])
    yield opened
    opened.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_job_runs_as_under_torchrun(case: Case, rehearsal: Rehearsal, environment_token: str) -> None:
    """Workers, console, files and exit code are as under torchrun, but for documented differences."""
    unexplained = [
        f"{key}:\n    torchrun     {theirs!r}\n    elastic-run  {ours!r}"
        for key, theirs, ours in rehearsal.differences(case, environment_token)
        if not any(difference.covers(case, key, theirs, ours) for difference in DIFFERENCES)
    ]
    assert not unexplained, "\n".join(unexplained)


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda difference: difference.name)
def test_a_difference_is_still_there(difference: Difference, rehearsal: Rehearsal, environment_token: str) -> None:
    """Each difference of the list shows in the case that it names, so that the list holds nothing stale."""
    case = next(case for case in CASES if case.name == difference.seen_in)
    found = rehearsal.differences(case, environment_token)
    assert any(difference.covers(case, key, theirs, ours) for key, theirs, ours in found)


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda difference: difference.name)
def test_a_difference_is_documented(difference: Difference) -> None:
    """Users can read about each difference of the list in the page on migrating."""
    assert difference.documented in _DOCUMENT.read_text(encoding="utf-8")


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
