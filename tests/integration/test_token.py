"""Jobs of several nodes with a token: who gets in, and what a stranger at the job's port can do (nothing)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run.core.node.messages import Ended, Formed
from elastic_run.store.jobstore.c10d import C10dJobStore
from elastic_run.store.tcpstore import wire
from elastic_run.store.tcpstore.token_proof import ClientAuthentication
from tests.support.local_rendezvous import place, wait_coordinated
from tests.support.sessions import free_port, tcp_node
from tests.support.wait import DEADLINE, stretched, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]

TOKEN = "3c1f9b0c the job's own"  # noqa: S105 - of no job
GIVEN = {"ELASTIC_RUN_RDZV_TOKEN": TOKEN}
_KEY = b"/elastic-run/j/k/d/store_id"
_MIB = 1 << 20


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A pipe with a name, from which each worker of `waits_at` reads a byte before it ends."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path


@contextlib.contextmanager
def opened(gate: Path, workers: int) -> Iterator[None]:
    """Let the workers go on."""
    with gate.open("wb", buffering=0) as writer:
        writer.write(b"." * workers)
        yield


def waits_at(gate: Path) -> str:
    """Return a worker's program: it says its rank, and ends when it may."""
    return f"say('rank', rank, 'of', os.environ['WORLD_SIZE'])\nos.read(os.open({str(gate)!r}, os.O_RDONLY), 1)"


def resident(pid: int) -> int:
    """Return the bytes of memory that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def is_refused(port: int, message: bytes) -> bool:
    """Tell whether a stranger's message closes its connection without an answer."""
    with socket.create_connection(("localhost", port), DEADLINE) as stranger:
        stranger.sendall(wire.encode_opening(os.getpid()))
        assert stranger.recv(4) == struct.pack("<I", os.getpid())
        try:
            stranger.sendall(message)
            return stranger.recv(1) == b""
        except ConnectionError:
            return True


def test_a_stranger_can_do_nothing(launch: Launch, worker: Worker, gate: Path) -> None:
    """Neither torch's client nor a raw socket reads, changes or fills anything, and none of them holds the job up."""
    port = free_port()
    path = worker(waits_at(gate))
    agents = [launch(*place(port), "--nnodes=2", path, env=GIVEN)]
    wait_coordinated(port, TOKEN.encode())
    agents.append(launch(*place(port), "--nnodes=2", path, env=GIVEN))
    for agent in agents:
        agent.wait_line("rank . of 2")
    before = resident(agents[0].pid)
    with contextlib.ExitStack() as strangers:
        for opening in (b"", wire.encode_opening(1), wire.encode_challenge(b"n" * 32), b"\0"):
            silent = strangers.enter_context(socket.create_connection(("localhost", port)))
            silent.sendall(opening)
        use_torchs_client(port)
        for message in (
            wire.encode(wire.GET, _KEY),
            wire.encode(wire.LIST_KEYS),
            wire.encode(wire.WAIT, 1, b"/nothing"),
            *[wire.encode(wire.SET, b"/mine%d" % number, b"x" * 8 * _MIB) for number in range(20)],
            wire.encode(wire.MULTI_GET, 3000, *[b"/mine"] * 3000),
        ):
            assert is_refused(port, message)
        assert resident(agents[0].pid) - before < 4 * _MIB
        begun = time.monotonic()
        with opened(gate, 2):
            assert [agent.wait_exit() for agent in agents] == [0, 0]
        assert time.monotonic() - begun < stretched(5)
    assert agents[0].stderr.count("refused a connection: it asks for something before it has proved the token") == 1


def use_torchs_client(port: int) -> None:
    """Try all that torch's own client can do."""
    from datetime import timedelta  # noqa: PLC0415 - beside torch, which takes a second to import

    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415 - torch exports it nowhere else

    key = _KEY.decode()[1:]
    trials: list[Callable[[Any], object]] = [
        lambda store: store.get(key),
        lambda store: store.add(key, 1),
        lambda store: store.compare_set(key, "", "x"),
        lambda store: store.delete_key(key),
        lambda store: store.check([key]),
        lambda store: store.num_keys(),
        lambda store: store.multi_get([key]),
        # These have no answer: the next operation finds the connection closed.
        lambda store: (store.set(key, "x"), store.num_keys()),
        lambda store: (store.append(key, "x"), store.num_keys()),
        lambda store: (store.multi_set([key], ["x"]), store.num_keys()),
    ]
    for trial in trials:
        store = TCPStore("localhost", port, None, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
        with pytest.raises(Exception, match=r"(?i)reset|closed|broken pipe|recv|connection"):
            trial(store)


@pytest.mark.parametrize(
    ("job", "joiner", "words"),
    [
        (TOKEN, "another", "has another token than this node"),
        (TOKEN, "", "has a token, and this node was given none"),
        ("", TOKEN, "has no token, and this node was given one"),
    ],
    ids=["another", "none", "needless"],
)
def test_a_node_with_another_token_is_refused(
    launch: Launch, worker: Worker, *, job: str, joiner: str, words: str
) -> None:
    """A node whose token is not the job's ends with 208 and says why; the job goes on without it."""
    port, variable = free_port(), "ELASTIC_RUN_RDZV_TOKEN"
    path = worker("say('rank', rank)")
    first = launch(*place(port), "--nnodes=2", path, env={variable: job})
    wait_coordinated(port, job.encode() or None)
    stranger = launch(*place(port), "--nnodes=2", path, env={variable: joiner})
    assert stranger.wait_exit() == 208
    assert f"the job at localhost:{port} {words}" in stranger.stderr
    second = launch(*place(port), "--nnodes=2", path, env={variable: job})
    assert [first.wait_exit(), second.wait_exit()] == [0, 0]
    assert first.stderr.count("refused a connection: ") == bool(job)


def test_a_job_on_one_port_with_its_workers(launch: Launch, worker: Worker, gate: Path) -> None:
    """With static rendezvous workers need no token at the shared port, and agents do."""
    port = free_port()
    static = ("--rdzv-backend=static", "--master-addr=localhost", f"--master-port={port}", "--nnodes=2")
    path = worker(
        "from elastic_run.store.tcpstore.client import StoreClient\n"
        "with StoreClient('localhost', int(os.environ['MASTER_PORT']), 20.0) as store:\n"
        "    store.set(f'here/{rank}', b'x')\n"
        "    store.wait(['here/0', 'here/1'])\n" + waits_at(gate)
    )
    first = launch(*static, "--node-rank=0", path, env=GIVEN)
    stranger = launch(*static, "--node-rank=1", path)
    assert stranger.wait_exit() == 208
    second = launch(*static, "--node-rank=1", path, env=GIVEN)
    for agent in (first, second):
        agent.wait_line("rank . of 2")
    assert is_refused(port, wire.encode(wire.GET, _KEY))
    with opened(gate, 2):
        assert [first.wait_exit(), second.wait_exit()] == [0, 0]


def test_a_guardian_proves_the_token_as_well(launch: Launch, worker: Worker) -> None:
    """When an agent is killed its guardian tells the others: they don't wait for a lease."""
    port = free_port()
    path = worker("say('rank', rank, 'of', os.environ['WORLD_SIZE'])\nsignal.pause()")
    words = (*place(port, "last_call_timeout=60,keep_alive_interval=20"), "--nnodes=1:2", path)
    agents = [launch(*words, env=GIVEN)]
    wait_coordinated(port, TOKEN.encode())
    agents.append(launch(*words, env=GIVEN))
    for agent in agents:
        agent.wait_line("rank . of 2")
    begun = time.monotonic()
    agents[1].send(signal.SIGKILL)
    agents[0].wait_line("rank 0 of 1")
    assert time.monotonic() - begun < stretched(10)
    agents[0].send(signal.SIGTERM)
    assert agents[0].wait_exit() == 143


def test_a_successor_asks_for_the_token_too(launch: Launch, worker: Worker, gate: Path) -> None:
    """When the host of the store is killed the next one serves it, for those who prove the token."""
    ports = free_port(), free_port()
    words = list(place(ports[0]))
    words[1] = f"--rdzv-endpoint=localhost:{ports[0]},localhost:{ports[1]}"
    path = worker(waits_at(gate))
    host = launch(*words, "--nnodes=2:3", path, env=GIVEN)
    wait_coordinated(ports[0], TOKEN.encode())
    others = [launch(*words, "--nnodes=2:3", path, env=GIVEN) for _ in range(2)]
    for agent in (host, *others):
        agent.wait_line("rank . of 3")
    host.send(signal.SIGKILL)
    for agent in others:
        agent.wait_line("rank . of 2")
    assert is_refused(ports[1], wire.encode(wire.LIST_KEYS))
    with opened(gate, 2):
        assert [agent.wait_exit() for agent in others] == [0, 0]


def test_lost_connections_are_proved_anew() -> None:
    """A node whose connections break opens others, and proves the token on each of them."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(tcp_node(port, (2, 2), secret=TOKEN.encode())) for _ in range(2)]
        assert {node.wait_for(Formed).assignment.group_world_size for node in nodes} == {2}
        broken = [connection.store for node in nodes for connection in node.session._context.connections]  # type: ignore[attr-defined]
        for store in broken:
            store.close()
        for node in nodes:
            node.done()
        assert {node.wait_for(Ended).end.verdict for node in nodes} == {"success"}


def test_silent_strangers_do_not_keep_the_host() -> None:
    """The host of the store ends when all nodes have heard the end, whoever else is connected."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(tcp_node(port, (2, 2), secret=TOKEN.encode())) for _ in range(2)]
        for node in nodes:
            node.wait_for(Formed)
        with contextlib.ExitStack() as strangers:
            for _ in range(50):
                strangers.enter_context(socket.create_connection(("localhost", port)))
            hosted = nodes[0].session._context.backend.hosted or nodes[1].session._context.backend.hosted  # type: ignore[attr-defined]
            wait_until(lambda: len(hosted._server._connections) > 50)
            store = C10dJobStore("localhost", port, "job", authentication=ClientAuthentication(TOKEN.encode()))
            with store:
                assert store.get(["d/store_id"]) != [None]
            for node in nodes:
                node.done()
            begun = time.monotonic()
            for node in nodes:
                node.wait_for(Ended)
                node.close()
            assert time.monotonic() - begun < stretched(3)
