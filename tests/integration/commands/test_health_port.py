"""--health-port: a cluster asks over HTTP whether the agent is alive and whether its workers run."""

from __future__ import annotations

import http.client
import os
import signal
import socket
from typing import TYPE_CHECKING

import pytest

from tests.support.programs import TELLS_SOON
from tests.support.sessions import free_port
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]

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


def test_a_port_in_use_is_refused_before_anything_starts(launch: Launch, worker: Worker) -> None:
    """One line, exit 2."""
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        launcher = launch(f"--health-port={port}", worker("say('running')"))
        assert launcher.wait_exit() == 2
    expected = f"error: --health-port: health port {port} is taken by pid {os.getpid()} ("
    assert expected in launcher.stderr
    assert "running" not in launcher.stdout


@pytest.mark.parametrize("port", ["http", "-1", "65536"])
def test_what_is_no_port_is_refused(launch: Launch, worker: Worker, port: str) -> None:
    """One line that says what a port is."""
    launcher = launch(f"--health-port={port}", worker("say('running')"))
    assert launcher.wait_exit() == 2
    assert "is not a port from 0 to 65535" in launcher.stderr
