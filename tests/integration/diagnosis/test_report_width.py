"""The closing report on terminals of several widths, and where stderr is no terminal."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched
    from tests.support.terminal import Terminal


def lines_of_report(output: str) -> list[str]:
    """Return the lines from the report's title on, without colours."""
    lines = re.sub(r"\x1b\[\d*m", "", output).splitlines()
    return lines[next(number for number, line in enumerate(lines) if line.startswith("-- elastic-run: ")) :]


@pytest.mark.parametrize(("columns", "width"), [(40, 60), (60, 60), (72, 72), (100, 100), (120, 120), (200, 120)])
def test_the_report_is_as_wide_as_the_terminal(
    terminal: Terminal, worker: Callable[[str], Path], columns: int, width: int
) -> None:
    """The title fills the line, and no line is wider; the limits are 60 and 120 columns."""
    terminal.resize(24, columns)
    program = worker("raise ValueError(' '.join(['many words'] * 60))")
    terminal.start("--nproc-per-node=1", f"--log-dir={program.parent}", "-r3", program)
    assert terminal.wait_exit() == 1
    lines = lines_of_report(terminal.output.decode())
    assert len(lines[0]) == width
    said = next(number for number, line in enumerate(lines) if line.strip().startswith("ValueError"))
    assert width - 15 < len(lines[said]) <= width
    assert all(len(line) <= width or "/" in line for line in lines)


def test_the_width_is_the_terminal_s_at_the_end(terminal: Terminal, worker: Callable[[str], Path]) -> None:
    """A window that was resized while the job ran has a report of its new width."""
    terminal.resize(24, 80)
    program = worker("say('ready', os.getpid()); time.sleep(3600)")
    terminal.start("--nproc-per-node=1", program)
    terminal.wait_output("ready")
    terminal.resize(24, 110)
    terminal.type("\x03")
    terminal.wait_exit()
    assert len(lines_of_report(terminal.output.decode())[0]) == 110


def test_without_a_terminal_the_report_has_80_columns(
    launch: Callable[..., Launched], worker: Callable[[str], Path]
) -> None:
    """A pipe has no width, and the variable COLUMNS describes another terminal."""
    job = launch("--nproc-per-node=1", worker("sys.exit(3)"), env={"COLUMNS": "110"})
    assert job.wait_exit() == 3
    assert len(lines_of_report(job.stderr)[0]) == 80


def test_a_path_and_a_command_can_be_copied_from_a_narrow_terminal(
    terminal: Terminal, worker: Callable[[str], Path], tmp_path: Path
) -> None:
    """The place of an exception, the log directory and a command of the hint stand in one line each."""
    terminal.resize(24, 60)
    logs = tmp_path / ("a directory of words " * 4).strip() / "logs"
    logs.mkdir(parents=True)
    program = worker("""
        if rank == 0:
            open('/no/such/' + 'directory/' * 12 + 'file')
    """)
    terminal.start("--nproc-per-node=1", f"--log-dir={logs}", "-r3", program)
    assert terminal.wait_exit() == 1
    lines = lines_of_report(terminal.output.decode())
    for whole in (f"{program}:7 in <module>", "'/no/such/" + "directory/" * 12 + "file'", f"{logs}/"):
        assert sum(whole in line for line in lines) == 1, whole
    terminal.output.clear()
    terminal.start("--nproc-per-node=1", worker("os.kill(os.getpid(), signal.SIGKILL)"))
    assert terminal.wait_exit() == 137
    assert not re.search(r"dmesg \|?\r?\n", terminal.output.decode())
