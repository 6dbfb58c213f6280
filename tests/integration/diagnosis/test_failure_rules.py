"""A rule of --failure-rules decides what follows a failure of a real worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elastic_run import contract
from tests.integration.failures.test_exclusion import LEMON, start

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]


def write_rule(directory: Path, match: str, decision: str) -> str:
    """Write a file with one rule, and return the flag for it."""
    path = directory / "rules.toml"
    path.write_text(f'[[rule]]\nmatch = "{match}"\nhelp = "Ask Anna."\ndecision = "{decision}"\n', encoding="utf-8")
    return f"--failure-rules={path}"


@pytest.mark.parametrize(
    ("decision", "flags", "attempts"),
    [
        ("stop", ("--max-restarts=3",), 1),
        ("restart", ("--max-restarts=2", "--no-restart-exit-codes=1"), 3),
    ],
)
def test_a_rule_decides_whether_a_job_restarts(
    decision: str, flags: tuple[str, ...], attempts: int, launch: Launch, worker: Worker, tmp_path: Path
) -> None:
    """`stop` leaves the budget unused, `restart` uses it up against --no-restart-exit-codes."""
    path = worker('print("attempt", flush=True)\nraise OSError("quota of bucket-7")')
    job = launch(write_rule(tmp_path, "bucket-7", decision), *flags, "--max-backoff=0", path)
    assert job.wait_exit() == 1
    assert job.stdout.count("attempt") == attempts
    report = " ".join(job.stderr.split())
    assert "hint Ask Anna." in report
    assert ("the rule 'bucket-7' of --failure-rules decides stop" in report) == (decision == "stop")


def test_a_rule_excludes_the_node(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """The node whose worker said what the rule knows leaves; the others go on without a restart."""
    agents, _ = start(launch, worker(LEMON), write_rule(tmp_path, "fallen off the bus", "exclude"), code=5)
    assert [agent.wait_exit() for agent in agents] == [0, contract.EXIT_EXCLUDED, 0]
    assert "is excluded, the rule 'fallen off the bus' of --failure-rules decides exclude" in agents[0].stderr
    assert "restart 0" in agents[0].stderr


def test_a_wrong_decision_is_one_line(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """A decision that is unknown is refused before anything starts, with file and line."""
    job = launch(write_rule(tmp_path, "x", "retry"), worker("raise SystemExit(9)"))
    assert job.wait_exit() == contract.EXIT_USAGE
    assert job.stderr.count("\n") == 1
    assert "rules.toml:1: the rule's decision is 'retry', which is none of restart, stop, exclude" in job.stderr
