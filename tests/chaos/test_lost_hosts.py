"""Hosts that go dark, are cut off or die, in jobs of plain workers: how soon the others go on, and how nodes return."""

from __future__ import annotations

import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.hosts import virtual_hosts
from tests.support.wait import DeadlinePassedError, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.support.hosts import HostProcess, VirtualHost, VirtualHosts

#: A worker that would write checkpoints until it is told to stop.
_WORKER = """
import os, signal, sys
def stop(*_):
    print("told to stop", flush=True)
    sys.exit(1)
signal.signal(signal.SIGTERM, stop)
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
while True:
    signal.pause()
"""


class _Job:
    """A job with a worker on each of some hosts; the first `endpoints` of them may serve the store."""

    def __init__(self, hosts: VirtualHosts, place: Path, *flags: str, nnodes: str, conf: str, endpoints: int) -> None:
        script = place / "worker.py"
        script.write_text(_WORKER, encoding="utf-8")
        endpoint = ",".join(f"{host.name}:29400" for host in hosts[:endpoints])
        self._command = (
            *(sys.executable, "-m", "elastic_run", f"--nnodes={nnodes}", "--nproc-per-node=1", "--rdzv-id=j"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-conf={conf}", "--scale-up-delay=0"),
            *(*flags, str(script)),
        )
        self.agents = [self.start(host) for host in hosts]
        wait_round(self.agents, len(self.agents))

    def start(self, host: VirtualHost) -> HostProcess:
        """Start an agent on a host."""
        return host.start(self._command, merge=True)


def wait_round(agents: Sequence[HostProcess], size: int, *, count: int = 1) -> float:
    """Wait until the agents' workers run in a round of this size, for this time; return the time."""
    for agent in agents:
        agent.wait_lines(f"rank . of {size}", count=count, deadline=60)
    return time.monotonic()


# --- the others go on ------------------------------------------------------------------------------------------------
_ENDS: dict[str, Callable[[VirtualHost, HostProcess], None]] = {
    "power": lambda host, _: host.poweroff(),
    "darkness": lambda host, _: host.go_dark(),
    "kill": lambda _, agent: agent.kill(),  # connections are refused from then on
}


@pytest.mark.parametrize("end", _ENDS)
def test_the_host_of_the_store_is_not_waited_for_twice(tmp_path: Path, end: str) -> None:
    """The next round comes one lease later than where a node says that it goes, not two."""
    lease, busy_machine = 6.0, 3.0
    conf = "keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=30"
    with virtual_hosts(4) as hosts:
        job = _Job(hosts, tmp_path, "--shutdown-timeout=1", nnodes="2:4", conf=conf, endpoints=3)
        begin = time.monotonic()
        job.agents[3].send(signal.SIGTERM)
        usual = wait_round(job.agents[:3], 3) - begin
        begin = time.monotonic()
        _ENDS[end](hosts[0], job.agents[0])
        assert wait_round(job.agents[1:3], 2) - begin < lease + busy_machine + usual


@pytest.mark.timeout(120)
@pytest.mark.parametrize("comes_back", [True, False], ids=["restarted", "gone"])
def test_the_job_forms_at_once_after_two_deaths(tmp_path: Path, comes_back: bool) -> None:
    """The host of the store is killed and restarted, then another node is killed: nobody waits for a lease."""
    # Nothing that could end a wait is short: no lease, no last call, no join timeout.
    conf = "keep_alive_interval=5,keep_alive_max_attempt=6,last_call_timeout=600,join_timeout=600"
    with virtual_hosts(3) as hosts:
        job = _Job(hosts, tmp_path, "--shutdown-timeout=1", nnodes="1:3", conf=conf, endpoints=3)
        first, second, third = job.agents
        first.kill()
        first.process.wait(30)
        time.sleep(0.5)  # the schedule is the subject
        restarted = job.start(hosts[0])
        time.sleep(1.5)
        seen = third.stdout.count("rank ")
        second.kill()
        second.process.wait(30)
        living = [restarted, third]
        if comes_back:
            time.sleep(0.5)
            living.append(job.start(hosts[1]))

        def are_together() -> bool:
            last = f"of {len(living)}"
            return all(agent.stdout.rstrip().endswith(last) for agent in living) and third.stdout.count("rank ") > seen

        try:
            wait_until(are_together, deadline=15.0, what=f"a round of {len(living)}")  # half a lease
        except DeadlinePassedError as error:
            raise AssertionError("\n---\n".join(agent.stdout for agent in (*job.agents, *living))) from error


# --- the node that is cut off ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("after", ["lease", "never"])
def test_a_dark_node_stops_its_workers_if_it_is_asked_to(tmp_path: Path, after: str) -> None:
    """The others go on in a round of two; the dark node says why it stops its workers, and is in the next round."""
    flags = (f"--fence-after={after}", "--shutdown-timeout=5")
    conf = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=30"
    with virtual_hosts(3) as hosts:
        job = _Job(hosts, tmp_path, *flags, nnodes="2:3", conf=conf, endpoints=1)
        hosts[2].go_dark()
        wait_round(job.agents[:2], 2)
        dark = job.agents[2]
        if after == "lease":
            dark.wait_line("stopping the workers: this node can't reach its job .--fence-after=lease.: no answer for")
            dark.wait_line("told to stop")
        else:
            dark.wait_line("has been out of reach for")
            assert "told to stop" not in dark.stdout
        hosts[2].come_to_light()
        for agent in job.agents:
            agent.wait_line("new round: 3 nodes", deadline=60)


@pytest.mark.long
@pytest.mark.parametrize("alone", [0, 2], ids=["the host", "another"])
def test_a_node_that_was_alone_joins_again(tmp_path: Path, alone: int) -> None:
    """The node forms no round of its own while it is cut off, and is in the others' round when it isn't any more."""
    conf = "keep_alive_interval=0.5,keep_alive_max_attempt=4,last_call_timeout=0"
    with virtual_hosts(3) as hosts:
        job = _Job(hosts, tmp_path, "--shutdown-timeout=1", nnodes="2:3", conf=conf, endpoints=3)
        hosts[alone].link_down()
        wait_round([agent for number, agent in enumerate(job.agents) if number != alone], 2)
        job.agents[alone].wait_line(r"waiting: 1/|stopping the workers|going on at", deadline=60)
        hosts[alone].link_up()
        wait_round(job.agents, 3, count=2)
        assert "rank 0 of 1" not in job.agents[alone].stdout


# --- two halves, as --on-split says ----------------------------------------------------------------------------------
def _split(hosts: VirtualHosts, directory: Path, *, on_split: str, join_timeout: int) -> list[HostProcess]:
    """Start an agent on each of two hosts, and cut the hosts from one another when all workers run."""
    conf = f"keep_alive_interval=0.5,keep_alive_max_attempt=4,last_call_timeout=30,join_timeout={join_timeout}"
    flags = (f"--on-split={on_split}", "--shutdown-timeout=1")
    job = _Job(hosts, directory, *flags, nnodes="1:2", conf=conf, endpoints=2)
    hosts.silent_drop(hosts[0], hosts[1])
    return job.agents


def test_stop_lets_neither_go_on(tmp_path: Path) -> None:
    """With `stop` no node trains alone: both wait for the other, and end with 206 when it doesn't come."""
    with virtual_hosts(2) as hosts:
        for agent in _split(hosts, tmp_path, on_split="stop", join_timeout=8):
            assert agent.wait_exit(deadline=60) == 206, agent.stdout
            assert "rank 0 of 1" not in agent.stdout


@pytest.mark.long
def test_stop_goes_on_together_again(tmp_path: Path) -> None:
    """With `stop` the two train together again when the cut is mended in time."""
    with virtual_hosts(2) as hosts:
        agents = _split(hosts, tmp_path, on_split="stop", join_timeout=120)
        for agent in agents:
            agent.wait_line("stopping the workers|going on at", deadline=60)
        hosts.heal()
        wait_round(agents, 2, count=2)
        assert not any("rank 0 of 1" in agent.stdout for agent in agents)


def test_continue_lets_both_go_on(tmp_path: Path) -> None:
    """With `continue` each of the two trains alone at once, without waiting for the other."""
    with virtual_hosts(2) as hosts:
        wait_round(_split(hosts, tmp_path, on_split="continue", join_timeout=120), 1)
