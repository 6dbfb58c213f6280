"""The commands beside the start of a job, as a user types them."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from elastic_run.cli.commands import COMMANDS

if TYPE_CHECKING:
    from pathlib import Path


def _run(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "elastic_run", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=cwd)


def test_help_lists_every_command() -> None:
    """`elastic-run help` shows each command once, in a line of its own, and then the most used flags."""
    shown = _run("help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert all(f"\n  {name} " in shown.stdout for name in COMMANDS)
    assert shown.stdout.count("Commands (") == 1
    assert "--nproc-per-node" in shown.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(name: str) -> None:
    """`elastic-run help COMMAND` and `elastic-run COMMAND --help` show the same text."""
    by_help, by_flag = _run("help", name), _run(name, "--help")
    assert (by_help.returncode, by_flag.returncode) == (0, 0)
    assert by_help.stdout == by_flag.stdout
    assert by_help.stdout.startswith(f"usage: elastic-run {name}")


@pytest.mark.parametrize("name", COMMANDS)
def test_wrong_flag_of_a_command_is_one_line(name: str) -> None:
    """A flag that a command doesn't have is told in one line that names the command's help."""
    job = _run(name, "--no-such-flag")
    assert (job.returncode, job.stdout) == (2, "")
    assert len(job.stderr.splitlines()) == 1
    assert f"error: {name}: " in job.stderr
    assert f"(see elastic-run {name} --help)" in job.stderr


def test_script_with_the_name_of_a_command_is_started_by_its_path(tmp_path: Path) -> None:
    """The name alone is the command, also where such a script is there; with ./ it is the script."""
    (tmp_path / "help").write_text("print('the script')\n")
    assert "usage: elastic-run" in _run("help", cwd=tmp_path).stdout
    job = _run("./help", cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    assert job.stdout == "the script\n"
