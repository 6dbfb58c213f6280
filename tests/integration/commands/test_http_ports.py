"""--health-port and --metrics-port: a cluster and Prometheus ask the agent over HTTP."""

from __future__ import annotations

import http.client
import os
import signal
import socket
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.job_results import read_whole
from tests.support.programs import TELLS_SOON
from tests.support.sessions import free_port
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.launch import Launch, Launched, Worker


# --- --health-port ----------------------------------------------------------------------------------------------------
WAITING = "say('running')\nimport signal\nsignal.pause()\n"


def ask(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    """Return the status and the body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read().decode().strip()
    finally:
        connection.close()


def find_port(launcher: Launched) -> int:
    """Return the free port that the launcher has taken."""
    return int(launcher.wait_line(r"health checks are answered at port (\d+)")[1])


def test_a_running_node_is_alive_and_ready(launch: Launch, worker: Worker) -> None:
    """Other paths don't exist; HEAD is answered without a body; the port is closed when the launcher is killed."""
    launcher = launch("--health-port=0", worker(WAITING))
    port = find_port(launcher)
    launcher.wait_line("running")
    assert ask(port, "/healthz") == (200, "running")
    assert ask(port, "/readyz?verbose") == (200, "running")
    assert ask(port, "/readyz", "HEAD") == (200, "")
    assert ask(port, "/") == (404, "there are /healthz and /readyz")
    assert ask(port, "/readyz", "POST")[0] == 405
    launcher.send(signal.SIGKILL)

    def is_refused() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) != 0

    wait_until(is_refused, what="the port of a killed launcher closed")


def test_a_node_is_alive_before_it_meets_the_others_and_in_the_exit_barrier(
    launch: Launch, worker: Worker, tmp_path: Path
) -> None:
    """The first of two nodes waits; both run; the one that is done waits for the other, and still answers."""
    place = (f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-backend=c10d", "--rdzv-id=j", "--nnodes=2")
    end = tmp_path / "end"
    os.mkfifo(end)
    path = worker(f"say('running')\nif os.environ['GROUP_RANK'] == '1':\n    open({str(end)!r}).read()\n")
    first = launch("--health-port=0", "--node-rank=0", *place, path, program=TELLS_SOON)
    port = find_port(first)
    first.wait_line("waiting")
    assert ask(port, "/healthz") == (200, "joining")
    assert ask(port, "/readyz") == (503, "joining")
    second = launch("--node-rank=1", *place, path)
    second.wait_line("running")
    first.wait_line("running")
    wait_until(lambda: ask(port, "/readyz")[0] == 503, what="the first node done")
    assert ask(port, "/healthz")[0] == 200
    end.write_text("now", encoding="utf-8")
    assert (first.wait_exit(), second.wait_exit()) == (0, 0)


@pytest.mark.parametrize("name", ["health", "metrics"])
def test_a_port_in_use_is_refused_before_anything_starts(name: str, launch: Launch, worker: Worker) -> None:
    """One line, exit 2; also where the other port of the launcher has it."""
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        launcher = launch(f"--{name}-port={port}", worker("say('running')"))
        assert launcher.wait_exit() == 2
    assert f"error: --{name}-port: {name} port {port} is taken by pid {os.getpid()} (" in launcher.stderr
    launcher = launch(f"--metrics-port={port}", f"--health-port={port}", worker("say('running')"))
    assert launcher.wait_exit() == 2
    assert f"error: --metrics-port: metrics port {port} is taken by pid {launcher.pid} (" in launcher.stderr
    assert "running" not in launcher.stdout


# --- --metrics-port ---------------------------------------------------------------------------------------------------
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


def find_metrics_port(launcher: Launched) -> int:
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
    port = find_metrics_port(launcher)
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
    port = find_metrics_port(launcher)
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
