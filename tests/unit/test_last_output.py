"""When a worker has last written, and what: of what the agent sees and what the log files have, the later counts."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from elastic_run.agent.driver.worker_readings import find_output

if TYPE_CHECKING:
    from pathlib import Path

    from elastic_run.agent.driver.round import Round

_NOW = 1000.0


def _find(path: Path, *, seen: tuple[float, str] | None, written: float | None) -> tuple[float | None, str]:
    """Return what is found of a worker that was seen, and whose file was written, so many seconds ago."""
    activities: dict[int, Any] = {}
    if seen is not None:
        activities[0] = SimpleNamespace(last=_NOW - seen[0], last_line=seen[1])
    if written is not None:
        path.write_text("first\nof the file\n")
        moment = time.time() - written
        os.utime(path, (moment, moment))
    current = SimpleNamespace(
        started=_NOW - 90.0,
        output=SimpleNamespace(activities=activities),
        output_files=lambda _: [str(path)],
        sees_stdout=lambda _: True,
    )
    return find_output(cast("Round", current), 0, _NOW)


@pytest.mark.parametrize(
    ("seen", "written", "silence", "line"),
    [
        (None, None, 90.0, ""),
        (None, 30.0, 30.0, "of the file"),
        ((20.0, "as seen"), None, 20.0, "as seen"),
        ((20.0, "as seen"), 30.0, 20.0, "as seen"),
        ((20.0, "as seen"), 10.0, 10.0, "of the file"),
        ((20.0, ""), 30.0, 20.0, "of the file"),
    ],
)
def test_the_later_output_counts(
    seen: tuple[float, str] | None, written: float | None, silence: float, line: str, tmp_path: Path
) -> None:
    """The line of a file counts also if the output that was seen since has none."""
    found, told = _find(tmp_path / "stderr.log", seen=seen, written=written)
    assert found == pytest.approx(silence, abs=5.0)
    assert told == line
