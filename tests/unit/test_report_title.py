"""The title of the closing report on terminals of several widths."""

from __future__ import annotations

import pytest

from elastic_run import contract
from elastic_run.report import JobResult, render
from elastic_run.report.failure import ending_sentence
from tests.support.job_results import result, stopped, worker_end


@pytest.mark.parametrize(
    ("code", "verdict"), [(code, name) for code, name, _ in contract.EXIT_CODES if isinstance(code, int) and code != 0]
)
def test_the_sentence_of_each_verdict_is_whole_on_80_columns(code: int, verdict: str) -> None:
    """The title of a job with a script such as smallest.py is not shortened, whatever the verdict is."""
    job = result(verdict=verdict, exit_code=code, entrypoint="smallest.py")
    assert f" {ending_sentence(job)} -" in render(job, width=80)[0]


@pytest.mark.parametrize(
    "job",
    [
        result(*stopped(0), verdict="signal", exit_code=131, signal=3),
        result(worker_end(0, 1), verdict="hung", exit_code=212),
        result(worker_end(0, 1), verdict="repeated_failure", exit_code=202),
    ],
    ids=["stopped", "hung", "repeated"],
)
def test_a_narrow_terminal_shows_the_sentence_in_full(job: JobResult) -> None:
    """On 60 columns the name of the launcher is left out rather than a part of the sentence."""
    title = render(job, width=60)[0]
    assert title.startswith(f"-- {ending_sentence(job)} -")
    assert len(title) == 60


def test_a_long_name_leaves_room_for_the_ending() -> None:
    """Where the title is too long, the program's name is shortened, and not what became of the job."""
    job = result(verdict="rendezvous", exit_code=201, entrypoint="package.with_a.long_name.of_its_module")
    title = render(job, width=80)[0]
    assert ": the nodes did not come together -" in title
    assert len(title) == 80
    assert "module: the" in title
