"""The question of `status` and `stacks` to all nodes of a job, as far as the answers of the agents decide it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from elastic_run.cli.commands import nodes, stacks, status
from elastic_run.cli.commands.nodes import JOB_STATUS, ask_nodes
from elastic_run.contract import EXIT_FAILURE
from elastic_run.control.client import Answer
from elastic_run.control.jobs import RunningAgent, RunningJob

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest

    from elastic_run.control.wire import Call

_JOB = RunningJob((RunningAgent("a", 1, max_nodes=2), RunningAgent("b", 2, max_nodes=2)))


def test_an_agent_that_cannot_ask_the_others_leaves_each_agent_its_own_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agents of this machine are asked one by one, the first one too, and those that fail are named."""
    own = {"a": Answer("a", 1, {"pid": 1, "host": "h", "node_rank": 0}), "b": Answer("b", 2, error="no answer of b")}

    def ask_all(paths: Iterable[str], call: Call, *, wait_limit: float = 0.0) -> Iterable[Answer]:
        assert wait_limit == (JOB_STATUS.wait_limit if call.name == JOB_STATUS.of_job else 0.0)
        return [Answer(path, 1, error="no store") if wait_limit else own[path] for path in paths]

    monkeypatch.setattr(nodes, "ask_all", ask_all)
    assert ask_nodes(_JOB, JOB_STATUS) == ([own["a"].document], ["no answer of b"])


def test_nodes_that_have_all_answered_leave_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is told that 0 nodes have not answered."""
    found = [{"pid": pid, "host": "h", "node_rank": pid} for pid in (1, 2)]
    answer = Answer("a", 1, {"nodes": found, "members": 2, "missing": 0})
    monkeypatch.setattr(nodes, "ask_all", lambda paths, *_, **__: [answer for _ in paths])
    assert ask_nodes(_JOB, JOB_STATUS) == (found, [])


def test_stacks_of_a_job_without_workers_say_why_there_are_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command fails with one line."""
    monkeypatch.setattr(stacks, "find_job", lambda *_: _JOB)
    monkeypatch.setattr(stacks, "ask_nodes", lambda *_: ([{"workers": [], "state": "waiting for nodes"}], []))
    assert stacks.main([]) == EXIT_FAILURE
    told = capsys.readouterr().err
    assert re.fullmatch(r"elastic-run: no worker of job .* runs now: it is waiting for nodes\n", told)


def test_the_status_of_a_job_that_does_not_answer_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reasons are all that is said."""
    monkeypatch.setattr(status, "find_jobs", lambda *_: [_JOB])
    monkeypatch.setattr(status, "ask_nodes", lambda *_: ([], ["no answer of a"]))
    assert status.main([]) == EXIT_FAILURE
    assert capsys.readouterr().err == "elastic-run: no answer of a\n"
