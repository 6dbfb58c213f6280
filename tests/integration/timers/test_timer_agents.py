"""Timers of workers that an agent of torch's style starts by itself, and the seam for health checks."""

from __future__ import annotations

import re
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.sessions import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]

PROGRAM = """
import os, sys, threading
from elastic_run import timer
from elastic_run.agent import LocalElasticAgent, WorkerSpec, health_check_server
from elastic_run.multiprocessing import DefaultLogsSpecs
from elastic_run.rendezvous import RendezvousParameters, get_rendezvous_handler


class OwnServer(health_check_server.HealthCheckServer):
    def start(self):
        print("health check on", self._port, self._timeout, self.alive_callback() > 1e9, flush=True)

    def stop(self):
        print("health check stopped", flush=True)


class Polling(LocalElasticAgent):
    def _invoke_run(self, role="default"):
        return super()._invoke_run(role)


def train():
    with timer.expires(after=0.3, scope="train_step"):
        threading.Event().wait()


if __name__ == "__main__":
    health_check_server.create_healthcheck_server = OwnServer
    handler = get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "job", 1, 1))
    spec = WorkerSpec("trainer", 1, handler, entrypoint=train, max_restarts=0, monitor_interval=0.02)
    agent = globals()[sys.argv[1]](spec, DefaultLogsSpecs(log_dir=sys.argv[2]))
    result = agent.run("trainer")
    failure = result.failures[0]
    print("failed", result.is_failed(), failure.exitcode, failure.message.partition(";")[0], flush=True)
"""


@pytest.mark.parametrize("agent", ["LocalElasticAgent", "Polling"])
def test_an_agent_s_workers_have_timers(launch: Launch, tmp_path: Path, agent: str) -> None:
    """Whether the agent is ours or goes through torch's hooks: the worker is killed, its failure names the scope."""
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    places = tmp_path / "places"
    places.mkdir()
    env = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_HEALTH_CHECK_PORT": "8080", "TMPDIR": str(places)}
    words = [tmp_path / "program.py", agent, tmp_path / "logs"]
    job = launch(*words, program=[sys.executable], env=env)
    assert job.wait_exit() == 0, job.stderr
    failed = "failed True -9 timer scope 'train_step' expired after 0.3 s"
    assert job.stdout.splitlines() == ["health check on 8080 60 True", "health check stopped", failed]
    assert not [path for path in places.iterdir() if path.is_fifo() or re.search("timers", path.name)]


@pytest.mark.parametrize("lives", [1, 2], ids=["fails", "restarts"])
def test_an_expiry_on_one_of_two_nodes(launch: Launch, tmp_path: Path, lives: int) -> None:
    """The worker that hangs is killed on its node; its scope is the cause on both, and both restart or end alike."""
    path = tmp_path / "train.py"
    path.write_text(
        "import os, signal, time\n"
        "from elastic_run import timer\n"
        "rank, life = os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "with timer.expires(after=0.4 if (rank, life) == ('1', '0') else 100, scope=f'step of {rank}'):\n"
        "    if life == '0': signal.pause()\n"
        "os.write(1, f'rank {rank} in life {life}\\n'.encode())\n",
        encoding="utf-8",
    )
    place = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=j")
    # One environment for both, as it is where a job's script sets the path.
    env = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_TIMER_FILE": str(tmp_path / "pipe")}
    agents = [launch(*place, f"--max-restarts={lives - 1}", path, env=env) for _ in range(2)]
    codes = [agent.wait_exit() for agent in agents]
    said = [agent.stderr for agent in agents]
    killed = r"rank 1 \(pid \d+\): timer scope 'step of 1' expired .*; it gets SIGKILL"
    assert sum(len(re.findall(killed, text)) for text in said) == 1, said
    if lives == 1:
        assert codes == [128 + signal.SIGKILL] * 2
        assert all("TimerExpired: scope 'step of 1' expired" in text for text in said), said
    else:
        assert codes == [0, 0], said
        assert sorted("".join(agent.stdout for agent in agents).splitlines()) == [
            f"rank {rank} in life 1" for rank in range(2)
        ]
    assert not (tmp_path / "pipe").exists()


def test_a_deadline_that_passes_while_the_job_is_stopped(launch: Launch, tmp_path: Path) -> None:
    """A worker that saves in its grace period is not killed by a timer of its loop, and leaves the scope as ever."""
    path = tmp_path / "train.py"
    path.write_text(
        "import os, signal, threading\n"
        "from elastic_run import timer\n"
        "stop = threading.Event()\n"
        "signal.signal(signal.SIGTERM, lambda *_: stop.set())\n"
        "with timer.expires(after=1.5, scope='step'):\n"
        "    os.write(1, b'in it\\n')\n"
        "    stop.wait()\n"
        "    threading.Event().wait(2)\n"
        "with timer.expires(after=100, scope='saving'):\n"
        "    os.write(1, b'saved\\n')\n",
        encoding="utf-8",
    )
    job = launch("--standalone", path, env={"TORCHELASTIC_ENABLE_FILE_TIMER": "1"})
    job.wait_line("in it")
    job.send(signal.SIGTERM)
    assert job.wait_exit() == 128 + signal.SIGTERM
    assert job.stdout == "in it\nsaved\n", job.stderr
    assert "expired" not in job.stderr


@pytest.mark.parametrize("port", ["", "http", "99999", pytest.param("9" * 6000, id="6000 digits")])
def test_a_port_that_is_none_starts_no_health_check(launch: Launch, port: str) -> None:
    """Nothing is started, and the job runs."""
    env = {"TORCHELASTIC_HEALTH_CHECK_PORT": port}
    job = launch("--standalone", "--no-python", "true", env=env)
    assert job.wait_exit() == 0, job.stderr
    assert ("is not a port, so no health check server starts" in job.stderr) is bool(port)
