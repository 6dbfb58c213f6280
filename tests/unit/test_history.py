"""The rounds of a job as the agent remembers them: the causes, and from when on the OOM killer's kills count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from elastic_run import contract
from elastic_run.agent.history import History, _search
from elastic_run.cluster import limits
from elastic_run.core.config import JobConfig
from elastic_run.core.failure.job_result import Rule
from elastic_run.core.failure.root_cause import ExceptionText, OomKills
from elastic_run.core.job.documents import End
from elastic_run.core.job.restart_policy import Failure
from elastic_run.report.failure_documents import encode_root_cause
from tests.support.job_results import stopped, worker_end

if TYPE_CHECKING:
    from pathlib import Path

    from elastic_run.agent.context import AgentContext


def test_kills_count_from_the_first_start_of_workers_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later start of workers hides no kill, and each kill is told once."""
    readings = iter([OomKills(3, 7), OomKills(4, 9), OomKills(4, 9)])
    monkeypatch.setattr(limits, "read_oom_kills", lambda: next(readings))
    history = History(cast("AgentContext", None))
    history.begin()
    history.begin()
    assert history._count_oom_kills() == OomKills(1, 2)
    assert history._count_oom_kills() == OomKills(0, 0)


@pytest.fixture
def history() -> History:
    """Return the history of a job whose last round was stopped on this node."""
    made = History(cast("AgentContext", None))
    made.ends = stopped(0, 1)
    return made


def test_a_cause_of_another_node_stands_before_the_ends_of_this_node(history: History) -> None:
    """All nodes report the same root cause."""
    root = worker_end(3, 7, host="gpu08")
    history.add_verdict(End("worker_failed", 7, root=encode_root_cause(root, Failure(7))))
    assert history.root is not None
    assert (history.root.rank, history.root.host) == (3, "gpu08")
    assert [end.rank for end in history.ends] == [3, 0, 1]


def test_a_cause_of_this_node_is_the_end_that_it_knows(history: History) -> None:
    """The document of the job has less of it than this node; the order of the ends stays."""
    own = worker_end(1, 7, stderr_tail=("a line",) * 30)
    history.ends = (*stopped(0), own)
    history.add_verdict(End("worker_failed", 7, root=encode_root_cause(own, Failure(7))))
    assert history.root is own
    assert [end.rank for end in history.ends] == [0, 1]


def test_a_job_that_has_succeeded_has_no_cause(history: History) -> None:
    """Nor an end without a worker."""
    history.add_verdict(End("success", 0))
    assert history.root is None
    assert history.ends == stopped(0, 1)


def test_a_search_that_fails_finds_no_rule(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The process may be killed in the middle of a rule: that rule has fitted nothing."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 0\nkill -9 $$\n")
    program.chmod(0o755)
    monkeypatch.setattr("elastic_run.agent.history.own_interpreter", lambda: str(program))
    with pytest.raises(ValueError, match=r"rules.toml: no rule is used, as the process that searches failed"):
        _search([Rule("bucket-7", "Ask Anna.")], "bucket-8", "rules.toml")


@pytest.mark.parametrize(
    ("exception", "verdict", "is_told"),
    [
        (ExceptionText(contract.HANG, "no progress"), "worker_failed", True),
        (ExceptionText(contract.HANG, "no progress"), "hung", False),
        (ExceptionText("ValueError", "x"), "worker_failed", False),
        (None, "success", False),
    ],
)
def test_a_hang_that_found_no_restart_left_says_so(
    exception: ExceptionText | None,
    verdict: str,
    is_told: bool,
) -> None:
    """The user has asked for a restart; a worker may end with the exit code of a hang by itself."""
    context = SimpleNamespace(options=SimpleNamespace(job_config=JobConfig(max_restarts=2)))
    history = History(cast("AgentContext", context))
    history.root = None if exception is None else worker_end(0, contract.EXIT_HUNG, exception=exception)
    text = "no restart is left for --hang-action=restart (--max-restarts=2)"
    assert history._hang_detail(verdict) == (text if is_told else "")


@pytest.mark.parametrize(
    ("nodes", "rank", "own_host", "survivors", "is_brief"),
    [
        (17, 1, "gpu01", (), True),
        (16, 1, "gpu01", (), False),
        (None, None, "gpu01", (), False),
        (17, 0, "gpu01", (), False),
        (17, 1, "gpu08", (), False),
        (17, 1, "gpu01", ((7, ""),), False),
    ],
)
def test_a_large_job_has_the_whole_report_on_two_nodes(
    history: History,
    nodes: int | None,
    rank: int | None,
    own_host: str,
    survivors: tuple[tuple[int, str], ...],
    *,
    is_brief: bool,
) -> None:
    """The node of the failure and node 0 show it, and a node that has something of its own to tell."""
    group = SimpleNamespace(group_world_size=nodes, group_rank=rank)
    history._context = cast("AgentContext", SimpleNamespace(group=group, hostname=own_host))
    history._survivors = survivors
    history.root = worker_end(3, 7, host="gpu08")
    assert history._is_brief(None) == is_brief


def test_a_signal_to_a_large_job_has_the_whole_report_on_one_node(history: History) -> None:
    """Nodes whose workers had to be killed show it, too. All nodes show the end of a job for another reason."""
    group = SimpleNamespace(group_world_size=64, group_rank=1)
    history._context = cast("AgentContext", SimpleNamespace(group=group, hostname="gpu01"))
    assert history._is_brief(15)
    assert not history._is_brief(None)
    history.ends = stopped(0, 1, exitcode=-9)
    assert not history._is_brief(15)
