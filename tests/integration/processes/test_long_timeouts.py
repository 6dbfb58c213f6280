"""Times that a user gives: large ones wait as long as they say, and what is no time is refused."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from elastic_run.cli.values import duration, seconds, whole_seconds
from elastic_run.contract import LONGEST_TIME
from elastic_run.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launch, Worker


#: Saves a checkpoint when it is told to stop, which takes until somebody writes to the FIFO.
SAVING = """
def save(number, _):
    say("saving")
    open({gate!r}).read()
    say("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
say("ready")
while True:
    signal.pause()
"""
#: Seconds: more milliseconds than 31 bits hold, more than a thread waits for, more than a float holds.
LONG = ("2700000", "4294968", "10000000000", "9" * 400)


@pytest.mark.parametrize("given", LONG)
@pytest.mark.parametrize("way", ["flag", "variable"])
def test_a_long_grace_period_is_kept(launch: Launch, worker: Worker, tmp_path: Path, given: str, way: str) -> None:
    """Workers that save a checkpoint are not killed because --shutdown-timeout is very large."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    flags = (f"--shutdown-timeout={given}",) if way == "flag" else ()
    env = {} if way == "flag" else {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": given}
    job = launch("--standalone", *flags, worker(SAVING.format(gate=str(gate))), env=env)
    job.wait_line("ready")
    job.send(signal.SIGTERM)
    job.wait_line("saving")
    gate.write_text("")
    assert job.wait_exit() == 143
    assert "saved" in job.stdout


def test_a_timer_beyond_the_kernel_s_range() -> None:
    """A loop that waits for a time in years makes its other calls meanwhile."""
    with Loop() as loop:
        never: list[int] = []
        loop.call_later(LONGEST_TIME, lambda: never.append(1))
        seen: list[int] = []
        assert loop._timeout(loop.now(), None) == pytest.approx(86400.0)
        loop.call_later(0.0, lambda: seen.append(1))
        assert loop.run_until(lambda: bool(seen), loop.now() + 20)
        assert not never


@pytest.mark.parametrize("text", ["inf", "nan", "-1", "-inf", "1e999", "one"])
@pytest.mark.parametrize("read", [seconds, whole_seconds, duration])
def test_what_is_no_time_is_refused(read: Callable[[str], float], text: str) -> None:
    """A value that is no number of seconds gets a message."""
    with pytest.raises(ValueError, match="is not"):
        read(text)


@pytest.mark.parametrize("text", ["inf", "nan", "-1"])
def test_a_grace_period_that_is_none_is_refused(launch: Launch, text: str) -> None:
    """The command names flag and value, and starts nothing."""
    job = launch(f"--shutdown-timeout={text}", "--no-python", sys.executable, "-c", "print('ran')")
    assert job.wait_exit() == 2
    assert "--shutdown-timeout" in job.stderr
    assert "ran" not in job.stdout
