"""`elastic-run top` on a terminal, and where it can't be shown."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from elastic_run.contract import ENV_CONTROL_DIR
from elastic_run.control.socket_directory import find_sockets
from tests.support.launch import launch as start
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched
    from tests.support.terminal import Terminal

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]

WAITING = "say('rank', rank, 'waits')\nsignal.pause()\n"


@pytest.fixture(autouse=True)
def own_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the control sockets of other tests' jobs out, which a killed launcher leaves."""
    monkeypatch.setenv(ENV_CONTROL_DIR, str(tmp_path))


def test_where_it_can_not_be_shown_one_line_says_why(tmp_path: Path) -> None:
    """No terminal; no rich, where the line names the extra; an interval that would only load the agent."""
    missing = tmp_path / "rich"
    missing.mkdir()
    (missing / "__init__.py").write_text("raise ImportError\n", encoding="utf-8")
    for words, env, error in (
        ((), {}, "standard output is not a terminal"),
        ((), {"PYTHONPATH": str(tmp_path)}, "pip install 'elastic-run[live]'"),
        (("--interval=0",), {}, "--interval: 0.0 must be 0.2 or more seconds"),
    ):
        with start("top", *words, env=env) as command:
            assert command.wait_exit() == 2
        assert error in command.stderr
        assert len(command.stderr.splitlines()) == 1


def test_the_table_is_drawn_until_the_job_ends(
    launch: Launch, worker: Worker, terminal: Terminal, tmp_path: Path
) -> None:
    """It has the workers' last lines as they change, and leaves the terminal as it was."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    body = f"say('first line')\nopen({str(gate)!r}).read()\nsay('second line')\nopen({str(gate)!r}).read()\n"
    job = launch(worker(body), merge=True)
    wait_until(lambda: find_sockets(os.environ)[0], what="the control socket")
    top = terminal.start("top", "--interval=0.2", env={"TERM": "xterm"})
    terminal.wait_output("first line")
    gate.write_text("", encoding="utf-8")
    terminal.wait_output("second line")
    gate.write_text("", encoding="utf-8")
    assert job.wait_exit() == 0
    terminal.wait_output(f"job {job.pid} has ended")
    assert terminal.wait_exit() == 0
    assert top.returncode == 0
    assert bytes(terminal.output).count(b"\x1b[?1049l") == 1


def test_ctrl_c_ends_it_and_not_the_job(launch: Launch, worker: Worker, terminal: Terminal) -> None:
    """Exit code 0: a view was looked at long enough."""
    job = launch(worker(WAITING), merge=True)
    wait_until(lambda: find_sockets(os.environ)[0], what="the control socket")
    terminal.start("top", env={"TERM": "xterm"})
    terminal.wait_output("rank 0 waits")
    terminal.type("\x03")
    assert terminal.wait_exit() == 0
    assert job.process.poll() is None
