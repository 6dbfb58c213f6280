"""--metrics-port: Prometheus scrapes restarts, causes, durations, silences and goodput."""

from __future__ import annotations

import http.client
import os
import signal
import socket
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.event_logs import read_whole
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]

Labels = tuple[tuple[str, str], ...]


def scrape(port: int) -> dict[tuple[str, Labels], float]:
    """Return the values of a scrape by name and labels."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        text = response.read().decode()
        assert response.status == 200, text
        assert response.getheader("Content-Type", "").startswith("text/plain; version=")
    finally:
        connection.close()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}


def find_port(launcher: Launched) -> int:
    """Return the free port that the launcher has taken."""
    return int(launcher.wait_line(r"metrics are at port (\d+)")[1])


def test_a_scrape_tells_of_restarts_causes_durations_and_goodput(
    launch: Launch, worker: Worker, tmp_path: Path
) -> None:
    """After two failures of different kinds; what the event log says is what is scraped."""
    script = worker("""
        say("hello")
        if rank == 1 and attempt == 0: raise ValueError("loss is nan")
        if rank == 1 and attempt == 1: os.kill(os.getpid(), signal.SIGKILL)
        if attempt == 2: say("running")
        signal.pause()
    """)
    flags = ["--nproc-per-node=2", "--max-restarts=3", "--tee=3", f"--events-file={tmp_path / 'e'}"]
    launcher = launch("--metrics-port=0", *flags, script)
    port = find_port(launcher)
    launcher.wait_lines("running", count=2)
    found = scrape(port)
    plain = {name: value for (name, labels), value in found.items() if not labels}
    assert plain["elastic_run_restarts_total"] == 2
    assert plain["elastic_run_rounds_total"] == 3
    assert (plain["elastic_run_nodes"], plain["elastic_run_workers"], plain["elastic_run_local_workers"]) == (1, 2, 2)
    assert found["elastic_run_failures_total", (("cause", "ValueError"),)] == 1
    assert found["elastic_run_failures_total", (("cause", "SIGKILL"),)] == 1
    assert {rank: found["elastic_run_seconds_since_output", (("rank", rank),)] < 60 for rank in "01"} == {
        "0": True,
        "1": True,
    }
    assert 0 < plain["elastic_run_goodput_ratio"] < 1
    assert plain["elastic_run_recovery_seconds_count"] == 2
    events = read_whole(tmp_path / "e")
    recoveries = [event["recovery_s"] for event in events if event["event"] == "workers_started"][1:]
    assert plain["elastic_run_recovery_seconds_sum"] == pytest.approx(sum(recoveries))
    running = plain["elastic_run_running_seconds_total"]
    assert scrape(port)["elastic_run_running_seconds_total", ()] > running
    launcher.send(signal.SIGTERM)
    launcher.wait_exit()


def test_an_idle_scrape_says_that_nodes_are_awaited(launch: Launch, worker: Worker) -> None:
    """Before the nodes meet the port answers with the agent's state; other paths don't exist."""
    launcher = launch("--metrics-port=0", "--nnodes=2", worker(""))
    port = find_port(launcher)
    states = {dict(labels)["state"] for name, labels in scrape(port) if name == "elastic_run_info"}
    assert states == {"joining"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/")
    assert connection.getresponse().status == 404
    connection.close()
    launcher.send(signal.SIGTERM)
    launcher.wait_exit()

    def is_refused() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) != 0

    wait_until(is_refused, what="the port closed")


def test_a_port_in_use_is_refused_before_anything_starts(launch: Launch, worker: Worker) -> None:
    """One line, exit 2; also where --health-port has it."""
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        launcher = launch(f"--metrics-port={port}", worker("say('running')"))
        assert launcher.wait_exit() == 2
    expected = f"error: --metrics-port: metrics port {port} is taken by pid "
    assert f"{expected}{os.getpid()} (" in launcher.stderr
    launcher = launch(f"--metrics-port={port}", f"--health-port={port}", worker("say('running')"))
    assert launcher.wait_exit() == 2
    assert f"{expected}{launcher.pid} (" in launcher.stderr
    assert "running" not in launcher.stdout


def test_without_prometheus_client_one_line_names_the_extra(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """Exit 2, before anything starts."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'prometheus_client' else found(name, *rest)\n",
        encoding="utf-8",
    )
    launcher = launch("--metrics-port=0", worker("say('running')"), env={"PYTHONPATH": str(tmp_path)})
    assert launcher.wait_exit() == 2
    assert "error: --metrics-port: metrics port needs prometheus-client: pip install 'elastic-run[metrics]'" in (
        launcher.stderr
    )
