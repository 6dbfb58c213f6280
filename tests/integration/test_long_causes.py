"""Exceptions that are long, in words or in steps: the report has their type, their place and where they began."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]


@pytest.mark.parametrize("length", [70_000, 10_000_000])
@pytest.mark.parametrize("flags", ["", "--tee=2", "--redirects=2", "--redirects=1"])
def test_a_message_of_megabytes_hides_no_cause(
    launch: Launch, worker: Worker, tmp_path: Path, flags: str, length: int
) -> None:
    """Whichever way stderr goes; a log file that the worker writes alone is searched."""
    path = worker(f"def load():\n    raise KeyError('layer.0 ' + 'x' * {length})\nload()")
    job = launch(*([flags, f"--log-dir={tmp_path}"] if flags else []), path)
    assert job.wait_exit() == 1
    report = job.stderr.rpartition("-- elastic-run: ")[2]
    assert "KeyError: 'layer.0 xxx" in report
    assert "in load" in report


def test_a_recorded_message_of_megabytes_is_read(launch: Launch, worker: Worker) -> None:
    """What `record` has written the launcher reads, though the message stands in it twice."""
    path = worker("""
        from elastic_run import record
        @record
        def main():
            raise KeyError('layer.0 ' + 'x' * 5_000_000)
        main()
    """)
    job = launch("--redirects=2", path)
    assert job.wait_exit() == 1
    assert "KeyError: 'layer.0 xxx" in job.stderr.rpartition("-- elastic-run: ")[2]


def test_a_chain_names_its_beginning(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """The first of three exceptions is the one that happened; the report and failure.json have it."""
    path = worker("""
        def step(error, cause):
            try:
                if cause: cause()
            except Exception as before:
                raise error from before
            raise error
        full = OSError(28, "No space left on device", "/data/ckpt.pt")
        save = RuntimeError("could not save checkpoint")
        step(RuntimeError("training step failed"), lambda: step(save, lambda: step(full, None)))
    """)
    job = launch(f"--log-dir={tmp_path}", path)
    assert job.wait_exit() == 1
    report = " ".join(job.stderr.split())
    assert "RuntimeError: training step failed caused by OSError: [Errno 28] No space left on device" in report
    (failure,) = tmp_path.glob("*_*/failure.json")
    cause = json.loads(failure.read_text(encoding="utf-8"))["root_cause"]["exception"]["cause"]
    assert cause == (
        "OSError: [Errno 28] No space left on device: '/data/ckpt.pt' "
        "(by way of RuntimeError: could not save checkpoint)"
    )
