"""Handlers of events that other packages bring, found by their installed metadata, in real jobs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]

_PACKAGE = Path(__file__).parents[2] / "data" / "event_plugin"
_ENTRY_POINTS = """[elastic_run.event_handlers]
to-file = event_place:ToFile
failing = event_place:Failing
broken = event_place:broken
no-handler = builtins:list
"""


@pytest.fixture
def site(tmp_path: Path) -> dict[str, str]:
    """Install the package, and give the environment in which it is found."""
    metadata = tmp_path / "event_place-2.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: event_place\nVersion: 2.5\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(_ENTRY_POINTS, encoding="utf-8")
    path = os.pathsep.join([str(_PACKAGE), str(tmp_path)])
    return {"PYTHONPATH": path, "EVENT_FILE": str(tmp_path / "events.jsonl")}


def test_events_go_to_a_plugin_s_handler(launch: Launch, tmp_path: Path, site: dict[str, str]) -> None:
    """A handler that is chosen by the name of an entry point gets every event of the job, and stderr gets none."""
    job = launch("--standalone", "--event-log-handler=to-file", "--no-python", "true", env=site)
    assert job.wait_exit() == 0, job.stderr
    lines = (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()
    states = [(event["source"], event["metadata"]["state"]) for event in map(json.loads, lines)]
    assert states == [
        ("AGENT", "RENDEZVOUS"),
        ("AGENT", "ASSIGN_WORKER_RANKS"),
        ("WORKER", "START"),
        ("WORKER", "SUCCEEDED"),
        ("AGENT", "SUCCEEDED"),
    ]
    assert "torchelastic" not in job.stderr


def test_events_say_how_long_a_step_and_the_job_took(launch: Launch, tmp_path: Path, site: dict[str, str]) -> None:
    """A step takes milliseconds of those that the whole job takes; the last event has the job's seconds."""
    began = time.monotonic()
    job = launch("--standalone", "--event-log-handler=to-file", "--no-python", "true", env=site)
    assert job.wait_exit() == 0, job.stderr
    took = 1000 * (time.monotonic() - began)
    path = tmp_path / "events.jsonl"
    first = json.loads(path.read_text(encoding="utf-8").splitlines()[0])["metadata"]
    assert first["state"] == "RENDEZVOUS"
    assert 0 < first["duration_ms"] <= took
    job = launch("--standalone", "--event-log-handler=to-file", "--no-python", "sleep", "1.1", env=site)
    assert job.wait_exit() == 0, job.stderr
    last = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])["metadata"]
    assert last["total_run_time"] >= 1


def test_a_plugin_that_raises_harms_nothing(launch: Launch, site: dict[str, str]) -> None:
    """A handler that fails while the job runs is one line on stderr, and the job ends as it would have without."""
    job = launch("--standalone", "--event-log-handler=failing", "--no-python", "echo", "ran", env=site)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "ran\n"
    assert job.stderr == (
        "event handler 'failing' raised ConnectionError: no collector for torchelastic-events-failing; "
        "the job goes on (shown once)\n"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "broken",
            "plug-in event_place 2.5 (event_place:broken) can't be loaded: ImportError: no module of the site's",
        ),
        (
            "no-handler",
            "'no-handler': plug-in event_place 2.5 (builtins:list) returned [], not a logging.Handler",
        ),
        ("to-fil", "'to-fil' is none of null, console, dynamic_rendezvous"),
    ],
)
def test_a_broken_plugin_is_one_line(launch: Launch, site: dict[str, str], name: str, message: str) -> None:
    """An unknown name, one that can't be loaded, one that is no handler: package and error, before anything started."""
    job = launch("--standalone", f"--event-log-handler={name}", "--no-python", "echo", "ran", env=site)
    assert job.wait_exit() == 2
    assert job.stdout == ""
    assert message in job.stderr
    assert "Traceback" not in job.stderr
