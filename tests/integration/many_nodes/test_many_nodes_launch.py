"""Jobs of several nodes from the command line: how they meet, where they are, and where their logs are."""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run.core.job.membership import Formed
from elastic_run.rendezvous.coordination.places import Place
from elastic_run.store.worker_store import PortTakenError
from tests.support.local_rendezvous import COPIED, copied, place, wait_coordinated
from tests.support.processes import children_of
from tests.support.sessions import free_port, tcp_node
from tests.support.wait import stretched, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack
    from pathlib import Path

    from tests.support.launch import Launch, Launched, Worker

    Nodes = Callable[..., list[Launched]]


#: A last call that no test waits for, and heartbeats that show a loss soon.
CONF = "last_call_timeout=3,keep_alive_interval=0.5"


@pytest.fixture
def nodes(launch: Launch) -> Nodes:
    """Launch agents that meet at one endpoint; each gets the flags, and each its own words of `each`."""

    def start(
        *words: object, count: int = 2, each: tuple[tuple[str, ...], ...] = (), **options: object
    ) -> list[Launched]:
        place = (
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=localhost:{free_port()}",
            "--rdzv-id=j",
            f"--rdzv-conf={CONF}",
        )
        own = each or ((),) * count
        return [launch(*place, *own[number], *words, **options) for number in range(count)]

    return start


def test_ranks_of_nodes_of_different_size(nodes: Nodes, worker: Worker) -> None:
    """Workers are numbered through all nodes, and all nodes end with 0."""
    path = worker("say('rank', rank, 'of', os.environ['WORLD_SIZE'], os.environ['GROUP_WORLD_SIZE'])")
    agents = nodes("--nnodes=2", path, each=(("--nproc-per-node=1",), ("--nproc-per-node=2",)))
    assert [agent.wait_exit() for agent in agents] == [0, 0]
    lines = sorted("".join(agent.stdout for agent in agents).splitlines())
    assert lines == [f"rank {rank} of 3 2" for rank in range(3)]


def test_the_notice_about_threads_comes_once(nodes: Nodes, worker: Worker) -> None:
    """The node with rank 0 says once for the whole job that workers get one OpenMP thread, also over a restart."""
    path = worker("sys.exit(rank == 3 and attempt == 0)")
    unset = {"OMP_NUM_THREADS": None}
    agents = nodes("--nnodes=2", "--nproc-per-node=2", "--max-restarts=1", path, env=unset)
    assert [agent.wait_exit() for agent in agents] == [0, 0]
    assert "".join(agent.stderr for agent in agents).count("OMP_NUM_THREADS is not set: each of the 2 workers") == 1


def test_one_cause_and_one_exit_code(nodes: Nodes, worker: Worker, tmp_path: Path) -> None:
    """After its last restart a failed job has one cause, exit code and size on every node, within 2 s."""
    path = worker("if rank == 1:\n    raise SystemExit(7) if attempt == 0 else ValueError('the cause')\nsignal.pause()")
    agents = nodes("--nnodes=2", "--max-restarts=1", "--log-dir", tmp_path, path)
    codes = [agent.wait_exit() for agent in agents]
    assert codes == [1, 1]
    for agent in agents:
        assert "ValueError: the cause" in agent.stderr
        assert "rank 1 on" in agent.stderr
        assert "restart 1 of 1" in agent.stderr
    documents = [json.loads(file.read_text()) for file in tmp_path.glob("*_*/failure.json")]
    assert [(document["nnodes"], document["world_size"]) for document in documents] == [(2, 2)] * 2
    ends = [document["ended_at"] for document in documents]
    assert abs(ends[0] - ends[1]) < stretched(2)


def test_the_store_of_a_round_outlives_the_workers_of_its_node(nodes: Nodes, worker: Worker) -> None:
    """Workers of other nodes keep the store when all workers beside it have ended."""
    path = worker(
        "import socket\n"
        "if rank == 0:\n    sys.exit(0)\n"
        "from elastic_run.store.client import StoreClient\n"
        "where = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])\n"
        "with StoreClient(*where, timeout=10) as store:\n"
        "    store.set('key', 'value')\n"
        "    open(sys.argv[1], 'w').close()\n"
        "    open(sys.argv[2]).read()\n"
        "    say(store.get('key').decode())\n"
        "with StoreClient(*where, timeout=10) as store:\n"
        "    say('again', store.get('key').decode())\n"
    )
    gate = path.with_name("gate")
    os.mkfifo(gate)
    agents = nodes("--nnodes=2", path, str(path.with_name("there")), str(gate))
    with gate.open("w"):  # opens when rank 1 waits there
        wait_until(lambda: any(len(children_of(agent.pid)) < 2 for agent in agents), what="only a guardian left of one")
    assert [agent.wait_exit() for agent in agents] == [0, 0]
    assert "value\nagain value" in "".join(agent.stdout for agent in agents)


def test_workers_are_told_before_a_new_node_comes(launch: Launch, worker: Worker) -> None:
    """With --scale-up-signal workers get it, and time to save, before they are stopped for a node that has come."""
    path = worker(
        "signal.signal(signal.SIGUSR1, lambda *_: (say('saving'), sys.exit(0)))\n"
        "say('rank', rank, 'of', os.environ['WORLD_SIZE'])\n"
        "if os.environ['WORLD_SIZE'] == '1':\n    signal.pause()\n"
    )
    flags = ("--nnodes=1:2", "--scale-up-signal=SIGUSR1", "--scale-up-grace=20", "--scale-up-delay=0")
    first = launch(*flags, path)
    first.wait_line("rank 0 of 1")
    second = launch(program=copied(first), env=COPIED)
    assert [first.wait_exit(), second.wait_exit()] == [0, 0]
    assert "saving" in first.stdout
    assert "rank 1 of 2" in first.stdout + second.stdout
    assert "new nodes wait" in first.stderr


def test_a_worker_that_dies_of_the_scale_up_signal(launch: Launch, worker: Worker) -> None:
    """Where --scale-up-signal kills a worker without a handler, the report says that elastic-run sent it."""
    flags = ("--nnodes=1:2", "--max-restarts=0", "--scale-up-signal=SIGUSR1", "--scale-up-grace=20")
    first = launch(*flags, "--scale-up-delay=0", worker("say('rank', rank)\nsignal.pause()\n"))
    first.wait_line("rank 0")
    launch(program=copied(first), env=COPIED)
    assert first.wait_exit() == 128 + signal.SIGUSR1
    assert "elastic-run sent SIGUSR1 to say that new nodes wait (--scale-up-signal)" in " ".join(first.stderr.split())


def make_place() -> tuple[int, tuple[str, ...]]:
    """Return a free port, and the flags that make nodes meet there."""
    port = free_port()
    return port, ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=j", f"--rdzv-conf={CONF}")


def test_a_program_that_one_node_cannot_start(launch: Launch, worker: Worker) -> None:
    """A program that can't be started on one node ends the job on all, with that cause and exit code."""
    path = worker("signal.pause()")
    path.chmod(0o755)  # it has no line that names an interpreter
    _, place = make_place()
    agents = [launch(*place, "--nnodes=2", path), launch(*place, "--nnodes=2", "--no-python", path)]
    assert [agent.wait_exit() for agent in agents] == [126, 126]
    assert all("is not in a format that can be executed" in " ".join(agent.stderr.split()) for agent in agents)
    assert not any("chmod" in agent.stderr for agent in agents)


def test_disagreement_is_refused_with_both_values(launch: Launch, worker: Worker) -> None:
    """A node whose flags differ from the job's is refused with both values, and the job goes on."""
    path = worker("say('rank', rank, 'of', os.environ['WORLD_SIZE'])")
    port, place = make_place()
    first = launch(*place, "--nnodes=2", path)
    wait_coordinated(port)
    other = launch(*place, "--nnodes=2", "--max-restarts=5", path)
    assert other.wait_exit() == 208
    assert "--max-restarts is 5 here and 0 in the job" in " ".join(other.stderr.split())
    second = launch(*place, "--nnodes=2", path)
    assert [first.wait_exit(), second.wait_exit()] == [0, 0]


def test_other_times_are_settled_by_the_first_node(launch: Launch, worker: Worker) -> None:
    """A node with other timeouts is taken in, and the first node's hold."""
    path = worker("say('rank', rank, 'of', os.environ['WORLD_SIZE'])")
    port, place = make_place()
    first = launch(*place, "--nnodes=2", path)
    wait_coordinated(port)
    second = launch(*place, "--nnodes=2", "--max-backoff=7", "--exit-barrier-timeout=99", path)
    assert [first.wait_exit(), second.wait_exit()] == [0, 0], second.stderr
    assert "--max-backoff" not in first.stderr + second.stderr


def test_a_signal_at_the_end_is_heard(nodes: Nodes, worker: Worker) -> None:
    """A node whose workers are done waits for the others; a signal makes it leave, and the job succeeds without it."""
    path = worker("say('rank', rank, 'is there')\nif rank == 1:\n    open(sys.argv[1]).read()\n")
    gate = path.with_name("gate")
    os.mkfifo(gate)
    agents = nodes("--nnodes=2", path, str(gate))
    with gate.open("w"):
        done = wait_until(lambda: next((agent for agent in agents if "rank 0 is there" in agent.stdout), None))
        assert done is not None
        wait_until(lambda: len(children_of(done.pid)) < 2, what="this node is done")
        done.process.send_signal(signal.SIGTERM)
        assert done.wait_exit() == 143
    other = next(agent for agent in agents if agent is not done)
    assert other.wait_exit() in (0, 207)  # 207 where the node that left was the one that served the store


# --- logs -------------------------------------------------------------------------------------------------------------
def test_a_shared_log_directory(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """Each agent has a directory that names its host; nothing is overwritten, also by two agents on one host."""
    path = worker(
        "say('rank', rank, 'attempt', attempt)\n"
        "if attempt == 0 and rank == 0:\n    open(sys.argv[1], 'w')\n    signal.pause()\n"
        "if attempt == 0:\n    open(sys.argv[1]).read()\n    sys.exit(3)\n"
    )
    gate = tmp_path / "gate"  # opens when both have said their line
    os.mkfifo(gate)
    logs = tmp_path / "logs"
    words = ("--nnodes=2", "--max-restarts=1", f"--log-dir={logs}", "--redirects=3", path, gate)
    port = free_port()
    agents = [launch(*place(port), *words) for _ in range(2)]
    assert [agent.wait_exit() for agent in agents] == [0, 0]
    own = sorted(logs.glob("*_*"))
    host = re.escape(os.uname().nodename)
    assert len(own) == 2
    assert all(re.fullmatch(rf"j_\d{{8}}-\d{{4}}_{host}_[0-9a-f]{{4}}", directory.name) for directory in own)
    said: dict[str, list[str]] = {"attempt_0": [], "attempt_1": []}
    for file in logs.rglob("stdout.log"):
        said[file.relative_to(logs).parts[1]].append(file.read_text().strip())
    assert sorted(said["attempt_0"]) == ["rank 0 attempt 0", "rank 1 attempt 0"]
    assert sorted(said["attempt_1"]) == ["rank 0 attempt 1", "rank 1 attempt 1"]


# --- several agents of one machine that may serve one endpoint: one of them serves it ---------------------------------
# Linux may refuse both of two sockets that bind and listen at one address at the same moment (in 63 of 3,000 such
# moments of two processes here): each sees the other one listen.
def make_address(port: int, *, is_host: bool | None = None) -> Place:
    """Return the place of an agent of this machine."""
    return Place("c10d", "j", [("127.0.0.1", port)], is_host=is_host)


@pytest.mark.parametrize("is_host", [None, True])
def test_an_agent_whose_endpoint_is_served_by_another_one_does_not_serve_it(*, is_host: bool | None) -> None:
    """It goes on as one of the others; if the user says that it serves the endpoint, it can't."""
    port = free_port()
    with closing(make_address(port)) as first, closing(make_address(port, is_host=is_host)) as second:
        assert first.serve()
        if is_host:
            with pytest.raises(PortTakenError):
                second.serve()
        else:
            assert not second.serve()


def test_two_nodes_meet_when_both_were_refused(monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    """Two agents begin to listen at one address at the same moment, and both are refused: one serves in the end."""
    refused: set[Place] = set()

    def refuse_both(place: Place, *where: Any) -> None:
        """Refuse each agent's first attempt, as Linux does."""
        if place not in refused:
            refused.add(place)
            raise PortTakenError(port)
        listen(place, *where)

    listen, port = Place._listen, free_port()
    monkeypatch.setattr(Place, "_listen", refuse_both)
    nodes = [stack.enter_context(tcp_node(port, (2, 2))) for _ in range(2)]
    for node in nodes:
        node.wait_for(Formed)
        node.done()
    assert len(refused) == 2
