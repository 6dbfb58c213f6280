"""`elastic-run logs` and other commands: how their values are read, and what is refused."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

from elastic_run.cli.commands import CommandParser, jobs, logs, stacks
from elastic_run.cli.commands.jobs import stop_job
from elastic_run.cli.commands.logs import _read_span
from elastic_run.contract import EXIT_FAILURE
from elastic_run.control.client import Answer, RunningAgent, RunningJob
from elastic_run.notices import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable


# --- logs -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("10m", 600.0), ("2h", 7200.0), ("1.5d", 129_600.0)]
)
def test_a_time_may_have_a_unit(text: str, seconds: float) -> None:
    """`--since=10m` is ten minutes."""
    assert _read_span(text) == seconds


def _deny(*_: object) -> NoReturn:
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_log_file_that_may_not_be_read_is_told(
    ranks: int, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It belongs to another user, for example; the lines of the other files are shown."""
    for rank in range(ranks):
        (tmp_path / f"attempt_0/{rank}").mkdir(parents=True)
        (tmp_path / f"attempt_0/{rank}/stdout.log").write_text("a line\n")
    denied = str(tmp_path / "attempt_0/0/stdout.log")

    def open_allowed(path: str, mode: str) -> object:
        return _deny() if path == denied else Path(path).open(mode)

    monkeypatch.setattr(logs, "open", open_allowed, raising=False)
    assert logs.run_logs([str(tmp_path)]) == (0 if ranks > 1 else 1)
    shown, told = capfd.readouterr()
    assert ("a line" in shown) == (ranks > 1)
    assert told == f"elastic-run: logs: {denied} can't be read: Permission denied\n"


def test_a_log_file_that_may_not_be_read_is_told_before_the_wait_for_new_lines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--follow` has no end if RUN is a directory, and the user ends it with Ctrl-C."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    (tmp_path / "attempt_0/0").mkdir(parents=True)
    (tmp_path / "attempt_0/0/stdout.log").write_text("a line\n")
    monkeypatch.setattr(logs, "open", _deny, raising=False)
    monkeypatch.setattr(logs, "_follow", interrupt)
    with pytest.raises(KeyboardInterrupt):
        logs.run_logs(["--follow", str(tmp_path)])
    assert "can't be read: Permission denied\n" in capfd.readouterr().err


def test_a_directory_that_may_not_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not called empty."""
    monkeypatch.setattr(os, "listdir", _deny)
    with pytest.raises(UsageError, match=r"can't be read: Permission denied$"):
        logs.run_logs([str(tmp_path)])


# --- wrong arguments, requests that are refused, nodes that don't answer ----------------------------------------------
_JOB = RunningJob((RunningAgent("a", 1, max_nodes=2), RunningAgent("b", 2, max_nodes=2)))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rank=x"], "--rank: 'x' is not a whole number"),
        (["-n=1.5"], "--lines: '1.5' is not a whole number"),
        (["--interval=soon"], "--interval: 'soon' is not a number"),
        (["--rank"], "--rank: needs a value"),
        (["--other"], "unrecognized arguments: --other"),
    ],
)
def test_a_wrong_value_is_told_as_for_the_flags_of_a_job(words: list[str], said: str) -> None:
    """The line names the flag, the value and what is allowed, in the same words as for flags of elastic-run itself."""
    parser = CommandParser("ps")
    parser.add_argument("--rank", type=int)
    parser.add_argument("-n", "--lines", type=int)
    parser.add_argument("--interval", type=float)
    with pytest.raises(UsageError) as caught:
        parser.parse_args(words)
    assert str(caught.value) == f"{said} (see elastic-run ps --help)"


def test_a_wrong_command_is_told_with_those_that_are_there() -> None:
    """The line of `elastic-run help` lists the commands."""
    parser = CommandParser("ps")
    parser.add_argument("name", metavar="COMMAND", choices=("status", "top"))
    with pytest.raises(UsageError, match=r"^COMMAND: 'sttus' is none of '?status'?, '?top'? \(see"):
        parser.parse_args(["sttus"])


def test_a_launcher_that_refuses_to_stop_is_not_awaited(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its reason is the one line, and the command fails."""
    monkeypatch.setattr(jobs, "ask_all", lambda *_, **__: [Answer("a", 1, error="a takes no request")])
    assert stop_job(RunningJob((RunningAgent("a", os.getpid()),)), None) == EXIT_FAILURE
    assert capsys.readouterr().err == "elastic-run: a takes no request\n"


def test_an_agent_that_cannot_ask_the_others_leaves_each_agent_its_own_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agents of this machine are asked one by one, the first one too, and those that fail are named."""
    own = {"a": Answer("a", 1, {"pid": 1, "host": "h", "node_rank": 0}), "b": Answer("b", 2, error="no answer of b")}

    def ask_all(paths: Iterable[str], name: str, *, wait_limit: float = 0.0) -> Iterable[Answer]:
        assert wait_limit == (6.0 if name == "nodes" else 0.0)
        return [Answer(path, 1, error="no store") if wait_limit else own[path] for path in paths]

    monkeypatch.setattr(jobs, "ask_all", ask_all)
    assert jobs.ask_nodes(_JOB, of_node="status", of_job="nodes") == ([own["a"].document], ["no answer of b"])


def test_nodes_that_have_all_answered_leave_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is told that 0 nodes have not answered."""
    found = [{"pid": pid, "host": "h", "node_rank": pid} for pid in (1, 2)]
    answer = Answer("a", 1, {"nodes": found, "members": 2, "missing": 0})
    monkeypatch.setattr(jobs, "ask_all", lambda paths, *_, **__: [answer for _ in paths])
    assert jobs.ask_nodes(_JOB, of_node="status", of_job="nodes") == (found, [])


def test_stacks_of_a_job_without_workers_say_why_there_are_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command fails with one line."""
    monkeypatch.setattr(stacks, "find_job", lambda *_: _JOB)
    monkeypatch.setattr(stacks, "ask_nodes", lambda *_, **__: ([{"workers": [], "state": "waiting for nodes"}], []))
    assert stacks.run_stacks([]) == EXIT_FAILURE
    told = capsys.readouterr().err
    assert re.fullmatch(r"elastic-run: no worker of job .* runs now: it is waiting for nodes\n", told)


def test_the_status_of_a_job_that_does_not_answer_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reasons are all that is said."""
    monkeypatch.setattr(jobs, "find_jobs", lambda *_: [_JOB])
    monkeypatch.setattr(jobs, "ask_nodes", lambda *_, **__: ([], ["no answer of a"]))
    assert jobs.run_status([]) == EXIT_FAILURE
    assert capsys.readouterr().err == "elastic-run: no answer of a\n"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("node7", "job j has no node 'node7'; it has h0, h1 (node rank 0)"),
        ("3", "job j has no node of rank 3 in the round of this node; it has h0, h1 (node rank 0)"),
    ],
)
def test_where_no_node_is_meant_all_are_named(name: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is one of the round of the node where it was asked; a spare has none."""
    nodes = [
        {"host": "h0", "node_rank": None, "is_leaving": False},
        {"host": "h1", "node_rank": 0, "is_leaving": False},
    ]
    monkeypatch.setattr(jobs, "find_job", lambda *_: RunningJob((RunningAgent("", 1, run_id="j", max_nodes=2),)))
    answer = Answer("a", 1, {"nodes": nodes, "members": 1, "missing": 0})
    monkeypatch.setattr(jobs, "ask_all", lambda *_, **__: [answer])
    with pytest.raises(UsageError) as raised:
        jobs.run_drain([name])
    assert str(raised.value) == told
