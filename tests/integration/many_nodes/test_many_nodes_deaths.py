"""A job of several nodes whose agents are killed, stopped or told to go: the other nodes go on, or end clearly."""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.launch import launch as start
from tests.support.local_rendezvous import RUNS, LocalJob
from tests.support.processes import descendants_of, is_gone
from tests.support.wait import stretched, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.launch import Launch, Worker


@pytest.mark.parametrize("endpoints", [1, 3])
def test_a_killed_agent_is_missed_at_once(launch: Launch, worker: Worker, endpoints: int) -> None:
    """When an agent is killed, its guardian ends its workers, and the others form a round before a lease is over."""
    job = LocalJob(launch, worker(RUNS), "--nnodes=1:3", endpoints=endpoints, conf="keep_alive_interval=20")
    job.start_all(3)
    victim = job.nodes[-1]
    workers = descendants_of(victim.pid)
    begun = time.monotonic()
    job.kill(victim)
    job.wait_round(2)
    assert time.monotonic() - begun < stretched(3)
    assert all(map(is_gone, workers))
    job.finish()


def test_a_killed_host_of_two_nodes_is_replaced(launch: Launch, worker: Worker) -> None:
    """The node that is left and an agent that is started in place of the killed host are the next round, within 3 s."""
    job = LocalJob(launch, worker(RUNS), "--nnodes=2", conf="keep_alive_interval=20")
    job.start_all(2)
    begun = time.monotonic()
    job.kill(job.nodes[0])
    job.start()
    job.nodes[-1].wait_line("round of 2")
    assert time.monotonic() - begun < stretched(3)
    job.nodes[0].wait_lines("round of 2", count=2)
    job.finish()


def test_the_last_of_two_nodes_goes_on_after_the_death_of_the_host(launch: Launch, worker: Worker) -> None:
    """A dead host is told from a network that is cut: with two nodes, too, the other one goes on alone, within 3 s."""
    job = LocalJob(launch, worker(RUNS), "--nnodes=1:2", conf="keep_alive_interval=20")
    job.start_all(2)
    begun = time.monotonic()
    job.kill(job.nodes[0])
    job.wait_round(1)
    assert time.monotonic() - begun < stretched(3)
    job.finish()


@pytest.mark.parametrize("pause", [0.0, 1.5, *(pytest.param(pause, marks=pytest.mark.long) for pause in (0.5, 8.0))])
@pytest.mark.parametrize("second", [1, 3], ids=["the next host", "another node"])
def test_a_host_and_a_second_node_die(launch: Launch, worker: Worker, pause: float, second: int) -> None:
    """Three of five nodes are the next round, whenever the second one dies."""
    job = LocalJob(launch, worker(RUNS), "--nnodes=1:5", conf="keep_alive_interval=1")
    job.start_all(5)
    victims = job.nodes[0], job.nodes[second]
    job.kill(victims[0])
    threading.Event().wait(pause)  # the subject: whatever the others do at that time
    job.kill(victims[1])
    job.wait_round(3)
    job.finish()
    assert not any("round of 2 " in node.stdout or "round of 1 " in node.stdout for node in job.nodes)


def test_hosts_die_and_are_started_again(launch: Launch, worker: Worker) -> None:
    """An agent that is started at once in place of a killed host is in the next round, one time after the other."""
    job = LocalJob(launch, worker(RUNS), "--nnodes=1:3")
    job.start_all(3)
    for _ in range(2):
        job.kill(job.nodes[0])
        job.start()
        job.nodes[-1].wait_line("round of 3")
    job.finish()


@pytest.mark.parametrize("stopped", [0, 2], ids=["the coordinator", "another"])
@pytest.mark.parametrize("pause", [1.0, *(pytest.param(pause, marks=pytest.mark.long) for pause in (3.0, 10.0))])
def test_a_stopped_agent_spends_no_second_budget(launch: Launch, worker: Worker, *, stopped: int, pause: float) -> None:
    """While an agent is stopped a worker fails: one restart is spent, by one coordinator, and all run again."""
    conf = "keep_alive_interval=0.5"
    job = LocalJob(launch, worker(RUNS), "--nnodes=1:3", "--max-restarts=3", "--scale-up-delay=0", conf=conf)
    job.start_all(3)
    job.nodes[stopped].send(signal.SIGSTOP)
    job.fail(0, int(job.nodes[1].wait_line(r"rank (\d)")[1]))
    threading.Event().wait(pause)  # the subject
    job.nodes[stopped].send(signal.SIGCONT)
    job.wait_round(3, restart=1)
    job.finish()
    said = "".join(node.stdout for node in job.nodes)
    assert "restart 2" not in said
    assert "round of 1 " not in said


def test_a_node_that_was_stopped_while_it_waited_is_in_the_round(launch: Launch, worker: Worker) -> None:
    """A waiting node that does not accept a round within the lease is left out, and joins when it goes on."""
    job = LocalJob(
        launch, worker(RUNS), "--nnodes=2:3", "--scale-up-delay=0", conf="keep_alive_interval=0.3,last_call_timeout=3"
    )
    sleeper = job.start()
    job.start()
    sleeper.wait_line("waiting: 2/3 nodes")
    job.nodes[1].send(signal.SIGSTOP)
    job.start()
    for node in (job.nodes[0], job.nodes[2]):
        node.wait_line("round of 2 ")
    job.nodes[1].send(signal.SIGCONT)
    job.wait_round(3)
    job.finish()


@pytest.mark.parametrize("stopped", [0, 1], ids=["the coordinator", "another"])
def test_a_stopped_agent_is_not_missed_while_nobody_asks_it(launch: Launch, worker: Worker, stopped: int) -> None:
    """An agent that is stopped for longer than the lease costs no round: its workers run on, its machine answers."""
    job = LocalJob(launch, worker(RUNS), "--nnodes=1:3", conf="keep_alive_interval=0.3")
    job.start_all(3)
    job.nodes[stopped].send(signal.SIGSTOP)
    threading.Event().wait(2.0)  # the subject: more than two leases
    job.nodes[stopped].send(signal.SIGCONT)
    job.finish()
    assert all(node.stdout.count("round of") == 1 for node in job.nodes)


def test_a_spare_takes_the_rank_of_a_killed_node(launch: Launch, worker: Worker) -> None:
    """A node beyond the maximum waits, and runs with the rank of a node that is lost; this uses no restart."""
    job = LocalJob(launch, worker(RUNS), "--nnodes=2", conf="keep_alive_interval=20")
    job.start_all(2)
    spare = job.start()
    spare.wait_line("waiting: as a spare")
    victim = job.nodes[1]
    rank = victim.wait_line(r"round of 2 restart 0 rank (\d)")[1]
    job.kill(victim)
    spare.wait_line(f"round of 2 restart 0 rank {rank}")
    job.nodes[0].wait_lines("round of 2 restart 0", count=2)
    job.finish()


def test_the_next_host_goes_on_with_the_budget_of_the_job(launch: Launch, worker: Worker) -> None:
    """Restarts that a coordinator has spent are spent for the coordinator after it, too."""
    job = LocalJob(launch, worker(RUNS), "--nnodes=1:3", "--max-restarts=1")
    job.start_all(3)
    job.fail(0, 0)
    job.wait_round(3, restart=1)
    job.kill(job.nodes[0])
    job.wait_round(2, restart=1)
    job.fail(1, 0)
    assert [node.wait_exit() for node in job.nodes] == [5, 5]
    assert all("restart 1 of 1" in node.stderr for node in job.nodes)


#: Takes a second to stop on the other nodes, so that the node that leaves is gone before them.
STOPS_LATE = """
import time
path = sys.argv[1]
if rank != 0:
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(0)))
say('round of', os.environ['WORLD_SIZE'], 'restart', attempt, 'rank', rank)
while not os.path.exists(path):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("script", [RUNS, STOPS_LATE], ids=["soon", "late"])
@pytest.mark.parametrize(("size", "leaving"), [(2, 0), (3, 0), (3, 1)])
def test_a_node_that_is_told_to_stop_leaves_a_round_to_the_others(
    launch: Launch, worker: Worker, script: str, size: int, leaving: int
) -> None:
    """An agent that gets SIGTERM ends with 143; with several endpoints the others are the next round at once."""
    job = LocalJob(launch, worker(script), f"--nnodes=1:{size}", conf="keep_alive_interval=20")
    job.start_all(size)
    gone = job.nodes.pop(leaving)
    begun = time.monotonic()
    gone.send(signal.SIGTERM)
    job.wait_round(size - 1)
    assert time.monotonic() - begun < stretched(4)
    assert gone.wait_exit() == 143
    job.finish()


class Way:
    """A way to a port of this machine, whose connections a test resets, as a firewall does.

    Args:
        port: The port.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Way:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self.reset()
        self._listener.close()

    def reset(self) -> None:
        """Reset all connections."""
        while self._open:
            one = self._open.pop()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RD)  # wakes its thread
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(("127.0.0.1", self._port))
                self._open += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)


def test_a_connection_that_breaks_costs_no_round(launch: Launch, worker: Worker) -> None:
    """A node whose connection was reset connects again within the lease, and nobody's workers notice."""
    job = LocalJob(launch, worker(RUNS), "--nnodes=2", endpoints=1)
    job.start()
    with Way(job.port) as way:
        job.start(f"--rdzv-endpoint=127.0.0.1:{way.port}", "--rdzv-conf=last_call_timeout=30,is_host=false")
        job.wait_round(2)
        for _ in range(3):
            way.reset()
            with start("status", str(job.nodes[1].pid)) as command:  # passes through the coordinator
                assert command.wait_exit() == 0
        job.finish()
    assert all(node.stdout.count("round of") == 1 for node in job.nodes)


def test_too_few_nodes_wait_for_a_replacement(launch: Launch, worker: Worker) -> None:
    """Fewer nodes than the minimum stop their workers, and wait until join_timeout; then they end with 206."""
    job = LocalJob(launch, worker(RUNS), "--nnodes=2", conf="join_timeout=4,keep_alive_interval=0.5")
    job.start_all(2)
    job.kill(job.nodes[1])
    (left,) = job.nodes
    workers = descendants_of(left.pid)
    wait_until(lambda: sum(not is_gone(pid) for pid in workers) < len(workers))
    assert left.wait_exit() == 206


@pytest.mark.long
def test_a_node_that_waits_notices_a_coordinator_that_stands_still(
    launch: Launch, worker: Worker, tmp_path: Path
) -> None:
    """It has said how its round has ended, and that was acknowledged; it joins the round of the next coordinator."""
    conf = "store_type=file,last_call_timeout=0,keep_alive_interval=0.5"
    job = LocalJob(launch, worker(RUNS), "--nnodes=3", conf=conf, place=("c10d", f"{tmp_path}/store"))
    coordinator = job.start()
    coordinator.wait_line("waiting")
    waiting, lost = job.start(), job.start()
    job.wait_round(3)
    job.kill(lost)
    waiting.wait_line("waiting: 2/3")
    coordinator.send(signal.SIGSTOP)
    job.nodes.remove(coordinator)
    job.start()
    job.start()
    waiting.wait_lines("round of 3", count=2)
    coordinator.send(signal.SIGKILL)
    job.finish()
