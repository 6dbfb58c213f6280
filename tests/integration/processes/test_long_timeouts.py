"""Times that a user gives: large ones wait as long as they say, and what is no time is refused."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from elastic_run.cli.values import duration, seconds, whole_seconds
from elastic_run.contract import LONGEST_TIME
from elastic_run.core.job.config import JobConfig
from elastic_run.loop import Loop
from elastic_run.multiprocessing import DefaultLogsSpecs, start_processes
from elastic_run.rendezvous.backend_table import read_settings
from elastic_run.store.tcpstore.client import StoreClient
from tests.support.store import ServedStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]

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


@pytest.mark.parametrize("timeout", [2_700_000, 10**10, float("inf")])
def test_a_context_closes_with_a_long_timeout(tmp_path: Path, timeout: float) -> None:
    """`PContext.close` waits for a process that stops in its own time, whatever large timeout it is given."""
    done = tmp_path / "done"
    script = f"trap 'echo saved > {done}; exit 0' TERM; echo ready; while :; do read line; done"
    reading, writing = os.pipe()
    saved = os.dup(1)
    os.dup2(writing, 1)
    try:
        context = start_processes("sh", "sh", {0: ("-c", script)}, {0: {}}, DefaultLogsSpecs())
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(writing)
    assert os.read(reading, 6) == b"ready\n"
    os.close(reading)
    context.close(signal.SIGTERM, timeout)  # type: ignore[arg-type]  # torch's signature has whole seconds
    assert done.read_text() == "saved\n"


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


def test_a_store_with_a_long_timeout() -> None:
    """A connection whose timeouts are very large works as any other."""
    with ServedStore() as served, StoreClient("127.0.0.1", served.port, LONGEST_TIME) as client:
        client.set("k", "v")
        assert client.get("k") == b"v"


@pytest.mark.parametrize("text", ["inf", "nan", "-1", "-inf", "1e999", "one"])
@pytest.mark.parametrize("read", [seconds, whole_seconds, duration])
def test_what_is_no_time_is_refused(read: Callable[[str], float], text: str) -> None:
    """A value that is no number of seconds gets a message."""
    with pytest.raises(ValueError, match="is not"):
        read(text)


@pytest.mark.parametrize("read", [seconds, whole_seconds, duration])
def test_a_large_time_is_fine(read: Callable[[str], float]) -> None:
    """A number of seconds is never too large, and what is made of it can be waited for."""
    assert read("9" * 40) == LONGEST_TIME


@pytest.mark.parametrize("key", ["join_timeout", "last_call_timeout", "read_timeout"])
def test_large_times_of_the_rendezvous(key: str) -> None:
    """So it is with the rendezvous's settings."""
    settings = read_settings("c10d", {key: "1e300"})
    holder = settings if hasattr(settings, key) else settings.complete(JobConfig())
    assert getattr(holder, key) == LONGEST_TIME
    with pytest.raises(ValueError, match=key):
        read_settings("c10d", {key: "inf"})


@pytest.mark.parametrize("text", ["inf", "nan", "-1"])
def test_a_grace_period_that_is_none_is_refused(launch: Launch, text: str) -> None:
    """The command names flag and value, and starts nothing."""
    job = launch(f"--shutdown-timeout={text}", "--no-python", sys.executable, "-c", "print('ran')")
    assert job.wait_exit() == 2
    assert "--shutdown-timeout" in job.stderr
    assert "ran" not in job.stdout
