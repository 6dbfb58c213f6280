"""Wrong arguments of the commands beside the start of a job, and a request that is refused."""

from __future__ import annotations

import os

import pytest

from elastic_run.cli.commands import stop
from elastic_run.cli.commands.parser import CommandParser
from elastic_run.cli.commands.stop import stop_job
from elastic_run.contract import EXIT_FAILURE
from elastic_run.control.client import Answer
from elastic_run.control.jobs import RunningAgent, RunningJob
from elastic_run.errors import UsageError


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
    parser = CommandParser("stacks")
    parser.add_argument("--rank", type=int)
    parser.add_argument("-n", "--lines", type=int)
    parser.add_argument("--interval", type=float)
    with pytest.raises(UsageError) as caught:
        parser.parse_args(words)
    assert str(caught.value) == f"{said} (see elastic-run stacks --help)"


def test_a_wrong_command_is_told_with_those_that_are_there() -> None:
    """The line of `elastic-run help` lists the commands."""
    parser = CommandParser("help")
    parser.add_argument("name", metavar="COMMAND", choices=("status", "top"))
    with pytest.raises(UsageError, match=r"^COMMAND: 'sttus' is none of '?status'?, '?top'? \(see"):
        parser.parse_args(["sttus"])


def test_a_launcher_that_refuses_to_stop_is_not_awaited(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its reason is the one line, and the command fails."""
    monkeypatch.setattr(stop, "ask_all", lambda *_, **__: [Answer("a", 1, error="a takes no request")])
    assert stop_job(RunningJob((RunningAgent("a", os.getpid()),)), None) == EXIT_FAILURE
    assert capsys.readouterr().err == "elastic-run: a takes no request\n"
