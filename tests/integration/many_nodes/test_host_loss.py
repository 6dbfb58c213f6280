"""The ending of a job whose store was served by a node that is lost: it says what would have saved the job."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.programs import shortened
from tests.support.sessions import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]

CONF = "--rdzv-conf=keep_alive_interval=0.3,keep_alive_max_attempt=3,last_call_timeout=0.2"


def start_job(launch: Launch, program: Path, endpoint: str) -> list[Launched]:
    """Start two nodes, of which the first serves the store, and wait until their workers run."""
    flags = (
        "--nnodes=1:2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        "--rdzv-id=lost",
        f"--rdzv-endpoint={endpoint}",
        CONF,
    )
    agents = [launch(*flags, program)]
    agents[0].wait_line("rank 0 of 1", deadline=60)
    soon = shortened({"elastic_run.rendezvous.coordination.outage.REFUSED_FOR": 1.0})
    agents.append(launch(*flags, program, program=soon))
    for agent in agents:
        agent.wait_line("rank . of 2")
    return agents


def report_of(agent: Launched) -> str:
    """Return an agent's closing report as one line."""
    return " ".join(agent.stderr[agent.stderr.index("-- elastic-run: ") :].split())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_ending_names_what_would_have_saved_the_job(launch: Launch, worker: Worker, number: signal.Signals) -> None:
    """With one endpoint the job ends with the node that serves its store, and the report names the remedy."""
    program = worker("say('rank', rank, 'of', os.environ['WORLD_SIZE'])\nsignal.pause()")
    port = free_port()
    host, other = start_job(launch, program, f"127.0.0.1:{port}")
    host.send(number)
    host.wait_exit()
    assert other.wait_exit() != 0
    assert "--rdzv-endpoint=a,b,c" in report_of(other)
    assert f"127.0.0.1:{port}" in report_of(other)


def test_several_endpoints_save_the_job(launch: Launch, worker: Worker) -> None:
    """With the remedy that the report names the other node goes on after the host's loss."""
    program = worker("say('rank', rank, 'of', os.environ['WORLD_SIZE'])\nsignal.pause()")
    endpoints = ",".join(f"127.0.0.1:{port}" for port in (free_port(), free_port()))
    host, other = start_job(launch, program, endpoints)
    host.send(signal.SIGKILL)
    other.wait_line("rank 0 of 1")
    other.send(signal.SIGTERM)
    assert other.wait_exit() == 143
