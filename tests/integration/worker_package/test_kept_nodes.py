"""--keep-state on several nodes: copies on the next node, ranges from other nodes, and who may ask for them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
from multiprocessing import AuthenticationError
from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from elastic_run.agent.kept_memory import KeptMemories
from elastic_run.contract import ENV_KEPT_STATE
from elastic_run.core.kept_generations import Generation
from elastic_run.worker import KeptStateError
from elastic_run.worker.kept_checkpoint import IncompleteError, write_checkpoint
from elastic_run.worker.kept_memory import Entry, NodeMemories
from elastic_run.worker.kept_server import StateClient, StatePlace
from tests.integration.worker_package.test_kept_state import TRAIN, memories
from tests.support.local_rendezvous import place, wait_coordinated
from tests.support.sessions import free_port
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from elastic_run.core.kept_generations import Record
    from tests.support.launch import Launch, Worker


__all__ = ["memories"]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


@pytest.mark.long
def test_a_lost_node_loses_no_state(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """Two nodes become one, which goes on from the copy of the other's part; one becomes two; then both are stopped."""
    program = worker(TRAIN.replace("kept.save(step)\n", "kept.save(step); __import__('time').sleep(0.02)\n"))
    port = free_port()
    kept = tmp_path / "kept"
    flags = (
        *place(port, "last_call_timeout=1,keep_alive_interval=0.5,keep_alive_max_attempt=4"),
        *("--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3", "--preload=torch", "--shutdown-timeout=100"),
        *("--keep-state=64MB", "--keep-state-copies=1", f"--keep-state-dir={kept}"),
    )
    book = tmp_path / "book.0"

    def steps() -> list[int]:
        return [int(line.split()[0]) for line in book.read_text().splitlines() if " " in line] if book.exists() else []

    words = (program, str(tmp_path / "book"), "", "1000000")
    other = launch(*flags, *words)
    wait_coordinated(port)
    lost = launch(*flags, *words)
    wait_until(lambda: len(steps()) > 20, what="20 steps of two nodes")
    lost.process.kill()
    other.wait_line("new round: 1 node, 2 workers")
    other.wait_line(r"kept state: the training goes on from step (\d+)")
    before = len(steps())
    wait_until(lambda: len(steps()) > before + 20, what="20 steps of one node")
    third = launch(*flags, *words)
    other.wait_line("nodes joined")
    other.wait_line("goes on from step")
    before = len(steps())
    wait_until(lambda: len(steps()) > before + 20, what="20 steps of two nodes again")
    # Each step is there, and one is trained again at most when a node is lost; the last one after a stop.
    jumps = [(earlier, later) for earlier, later in itertools.pairwise(steps()) if later - earlier != 1]
    assert all(later - earlier in (0, -1) for earlier, later in jumps), jumps
    assert len(jumps) <= 3
    for node in (other, third):
        node.send(signal.SIGTERM)
    for node in (other, third):
        assert node.wait_exit() == 128 + signal.SIGTERM, node.stderr
    state = {"model": {"0.weight": torch.zeros(8, 8)}}
    load(state, checkpoint_id=kept / "latest", no_dist=True)
    assert state["model"]["0.weight"].count_nonzero() > 0
    assert [each.name for each in kept.iterdir() if each.name.startswith(".")] == []


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[NodeMemories, StatePlace]]]:
    """Start the server of a node's state; more than one may be there."""
    ends = contextlib.ExitStack()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")

    def start(copies: int = 1, size: int = 4 << 20) -> tuple[NodeMemories, StatePlace]:
        made = KeptMemories(size, 1, copies, is_served=True)
        ends.callback(made.close)
        assert made._listening is not None
        number = made._listening.fileno()
        command = [sys.executable, "-m", "elastic_run.worker.kept_server", f"{number}"]
        server = subprocess.Popen(command, pass_fds=(number,), env={**os.environ, **made.describe(0)})
        ends.callback(server.wait)
        ends.callback(server.kill)
        memories = NodeMemories(made.describe(0)[ENV_KEPT_STATE])
        return memories, StatePlace(memories.name, "127.0.0.1", memories.port, memories.secret)

    with ends:
        yield start


def _keep(memories: NodeMemories, number: int, content: bytes) -> Record:
    """Keep a generation of one rank, as a save does."""
    memory = memories.memories[0]
    half, start = memory.begin(None)
    memory.write(start, content)
    generation = Generation(number, f"{number}", f"{number}", 1)
    memory.commit(half, generation, 0, [Entry("a", None, (), (), "", 0, len(content))], None)
    memory.wait_checked()
    record = memory.find(f"{number}")
    assert record is not None
    return record


def test_a_copy_keeps_the_generation_that_is_whole(node: Callable[..., tuple[NodeMemories, StatePlace]]) -> None:
    """A generation is copied byte by byte; the next one takes the place of what is not needed any more."""
    (own, own_place), (other, other_place) = node(), node()
    whole = ""
    for number in range(1, 6):
        record = _keep(own, number, random.Random(number).randbytes(100_000))  # noqa: S311 - it repeats
        client = StateClient(own_place, is_patient=True)
        client.copy(0, record, whole, other_place)
        client.close()
        copies = {each.generation.number: each for each in other.memories[1].read_records() if each is not None}
        assert sorted(copies) == ([number - 1, number] if whole else [number])
        other.memories[1].verify(copies[number], threads=1)
        copied = other.memories[1].read(copies[number].start, record.length)
        assert copied == own.memories[0].read(record.start, record.length)
        whole = f"{number}"


def test_ranges_are_read_from_another_node(node: Callable[..., tuple[NodeMemories, StatePlace]]) -> None:
    """Only of the generation that was asked for."""
    own, own_place = node()
    first = _keep(own, 1, bytes(range(256)))
    client = StateClient(own_place)
    target = bytearray(7)
    client.read(0, first, 100, memoryview(target))
    assert bytes(target) == bytes(range(100, 107))
    for number in (2, 3):
        _keep(own, number, b"other")
    with pytest.raises(KeptStateError, match="later saves have replaced it"):
        client.read(0, first, 100, memoryview(target))
    client.close()


def test_a_copy_that_cannot_be_taken_says_why(node: Callable[..., tuple[NodeMemories, StatePlace]]) -> None:
    """The other node is gone, has no memory for copies, or less than is needed."""
    own, own_place = node()
    record = _keep(own, 1, bytes(1_000_000))
    client = StateClient(own_place, is_patient=True)
    for copies, size, reason in ((0, 4 << 20, "no memory for this copy"), (1, 1 << 20, "leaves 0.3 MB to it")):
        with pytest.raises(KeptStateError, match=reason):
            client.copy(0, record, "", node(copies, size)[1])
    gone = StatePlace("gone", "127.0.0.1", free_port(), b"?")
    with pytest.raises(KeptStateError, match=r"the node at 127\.0\.0\.1: .*Connection refused"):
        client.copy(0, record, "", gone)
    client.close()


def test_a_stranger_gets_nothing(node: Callable[..., tuple[NodeMemories, StatePlace]]) -> None:
    """Without the secret, with bytes of another protocol, and with silence: the server goes on."""
    own, own_place = node()
    record = _keep(own, 1, b"state")
    with pytest.raises(AuthenticationError):
        StateClient(dataclasses.replace(own_place, secret=b"guess"))
    silent = [socket.create_connection(("127.0.0.1", own_place.port)) for _ in range(100)]
    for bytes_ in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096):
        with socket.create_connection(("127.0.0.1", own_place.port)) as stranger:
            stranger.sendall(bytes_)
    client = StateClient(own_place)
    target = bytearray(5)
    client.read(0, record, 0, memoryview(target))
    assert target == b"state"
    for each in silent:
        each.close()


def test_parts_of_other_nodes_are_waited_for_in_the_directory(
    memories: KeptMemories, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The node that writes last makes the checkpoint; without the others' parts a sentence says where this one's is."""
    assert memories.size
    other = KeptMemories(1 << 20, 1)
    described = (os.environ[ENV_KEPT_STATE], other.describe(0)[ENV_KEPT_STATE])
    for rank, text in enumerate(described):
        own = NodeMemories(text).memories[0]
        half, start = own.begin(None)
        own.view(start, 4).copy_(torch.full((1,), rank, dtype=torch.float32).view(torch.uint8))
        entry = Entry("a", (rank,), (1,), (2,), "float32", 0, 4)
        own.commit(half, Generation(1, "a" * 16, "9", 2), rank, [entry], None)
        own.wait_checked()
    with pytest.raises(
        IncompleteError, match=r"1 of 2 parts of 9 are in .*/\.step-9-a+, which all nodes have to share"
    ):
        write_checkpoint(tmp_path)
    monkeypatch.setenv(ENV_KEPT_STATE, described[1])
    assert write_checkpoint(tmp_path) == tmp_path / f"step-9-{'a' * 16}"
    state = {"a": torch.full((2,), 7.0)}
    load(state, checkpoint_id=tmp_path / "latest", no_dist=True)
    assert state["a"].tolist() == [0.0, 1.0]
    other.close()
