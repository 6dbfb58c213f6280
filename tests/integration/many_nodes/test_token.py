"""Jobs of several nodes with a token: who gets in."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from typing import TYPE_CHECKING

import pytest

from elastic_run.rendezvous.coordination.link import DOCUMENT, PREAMBLE, encode_frame
from tests.support.local_rendezvous import place, wait_coordinated
from tests.support.sessions import free_port
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]

TOKEN = "3c1f9b0c the job's own"  # noqa: S105 - of no job
GIVEN = {"ELASTIC_RUN_RDZV_TOKEN": TOKEN}


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


def is_refused(port: int, data: bytes) -> bool:
    """Tell whether a stranger's bytes close its connection without an answer."""
    with socket.create_connection(("localhost", port), DEADLINE) as stranger:
        try:
            stranger.sendall(data)
            return stranger.recv(1) == b""
        except ConnectionError:
            return True


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
    assert is_refused(port, PREAMBLE + encode_frame(DOCUMENT, {}))
    with opened(gate, 2):
        assert [first.wait_exit(), second.wait_exit()] == [0, 0]


def test_a_successor_asks_for_the_token_too(launch: Launch, worker: Worker, gate: Path) -> None:
    """When the coordinator is killed, the next one takes nodes in that prove the token."""
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
    assert is_refused(ports[1], PREAMBLE + encode_frame(DOCUMENT, {}))
    with opened(gate, 2):
        assert [agent.wait_exit() for agent in others] == [0, 0]
