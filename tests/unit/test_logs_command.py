"""`elastic-run logs`: how its values are read, and what it says of files that it can't read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest

from elastic_run.cli.commands import logs
from elastic_run.cli.commands.logs import _read_span
from elastic_run.notices import UsageError


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
