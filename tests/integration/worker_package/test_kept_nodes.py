"""--keep-state on several nodes: copies on the next node, ranges from other nodes, and who may ask for them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from typing import TYPE_CHECKING

import psutil
import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from elastic_run.agent.kept_memory import KeptMemories
from elastic_run.contract import ENV_KEPT_STATE
from elastic_run.core.kept_generations import HEADER, Generation, Record, half_of
from elastic_run.worker import KeptStateError, kept_checkpoint
from elastic_run.worker.kept_checkpoint import write_checkpoint
from elastic_run.worker.kept_memory import Entry, NodeMemories
from elastic_run.worker.kept_server import StateClient, StatePlace, find_place
from elastic_run.worker.memory_storage import list_parts
from tests.integration.worker_package.test_kept_state import TRAIN, WARM, memories
from tests.support.local_rendezvous import place, wait_coordinated
from tests.support.processes import is_gone
from tests.support.sessions import free_port
from tests.support.wait import stretched, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from elastic_run.worker.kept_memory import KeptMemory
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
        *("--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3", WARM, "--shutdown-timeout=100"),
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


#: Trains a sharded model, and notes world, step and loss; each step is kept, and a checkpoint on a disk as well.
SHARDED = """
import os, sys, torch
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from elastic_run.worker import KeptState
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
directory, begin, steps = sys.argv[1:]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
kept = KeptState(model=model, optimizer=optimizer)
if begin:
    step = int(begin)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.load(states, checkpoint_id=f"{directory}/{step}")
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
else:
    step = kept.restore() or 0
for _ in range(int(steps)):
    step += 1
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(1000 * step + rank))
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    if rank == 0:
        say("trained", world, step, repr(loss.item()))
    if not begin:
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        dcp.save(states, checkpoint_id=f"{directory}/{step}")
        kept.save(step)
dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.timeout(200)
def test_another_number_of_nodes_trains_as_from_a_checkpoint(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """Two nodes become one, and one becomes two: the losses are those of a job that loads the same step from a disk."""
    program, port, count = worker(SHARDED), free_port(), 10
    flags = (
        *place(port, "last_call_timeout=1,keep_alive_interval=0.5,keep_alive_max_attempt=4"),
        *("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", WARM),
        *("--keep-state=64MB", "--keep-state-copies=1", program, str(tmp_path), "", "1000000"),
    )
    first = launch(*flags)
    wait_coordinated(port)
    lost = launch(*flags)
    first.wait_lines("trained 2 ", count=count)
    lost.process.kill()
    first.wait_lines("trained 1 ", count=count)
    trained = len(re.findall("trained 2 ", first.stdout))
    third = launch(*flags)
    first.wait_lines("trained 2 ", count=trained + count)
    for node in (first, third):
        node.close()
    words = [line.split()[1:] for line in first.stdout.splitlines() if line.startswith("trained")]
    lives = [list(life) for _, life in itertools.groupby(words, key=lambda word: word[0])]
    assert [life[0][0] for life in lives] == ["2", "1", "2"]
    for life in lives[1:]:
        world, begin = life[0][0], int(life[0][1]) - 1
        assert begin > 0
        job = launch(f"--nproc-per-node={world}", program, str(tmp_path), f"{begin}", f"{count}")
        assert job.wait_exit() == 0, job.stderr
        assert [line.split()[1:] for line in job.stdout.splitlines()] == life[:count]


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[NodeMemories, StatePlace]]]:
    """Start the server of a node's state; more than one may be there."""
    ends = contextlib.ExitStack()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")

    def start(copies: int = 1, size: int = 4 << 20, bandwidth: int = 0) -> tuple[NodeMemories, StatePlace]:
        made = KeptMemories(size, 1, copies, bandwidth=bandwidth, is_served=True)
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


def _keep(memories: NodeMemories, number: int, content: bytes, rank: int = 0, world_size: int = 1) -> Record:
    """Keep a generation of one rank, as a save does."""
    memory = memories.memories[0]
    start = memory.begin("")
    memory.part(start, len(content))[:] = content
    generation = Generation(number, f"{number:016}", f"{number}", world_size)
    memory.commit(start, generation, rank, [Entry("a", None, (), (), "", 0, len(content))], None)
    memory.wait_checked()
    record = memory.find(generation.key)
    assert record is not None
    return record


def test_a_copy_keeps_the_generation_that_is_whole(node: Callable[..., tuple[NodeMemories, StatePlace]]) -> None:
    """A generation is copied byte by byte; the next one takes the place of what is not needed any more."""
    (own, own_place), (other, other_place) = node(), node()
    whole = ""
    for number in range(1, 6):
        record = _keep(own, number, random.Random(number).randbytes(100_000))  # noqa: S311 - it repeats
        with contextlib.closing(StateClient(other_place)) as client:
            client.fetch(0, record, whole, own_place)
        copies = {each.generation.number: each for each in other.memories[1].read_records() if each is not None}
        assert sorted(copies) == ([number - 1, number] if whole else [number])
        other.memories[1].verify(copies[number])
        copied = other.memories[1].part(copies[number].start, record.length)
        assert copied == own.memories[0].part(record.start, record.length)
        whole = record.generation.key


def test_ranges_are_read_from_another_node(node: Callable[..., tuple[NodeMemories, StatePlace]]) -> None:
    """Only of the generation that was asked for, and each at once: a state has hundreds of tensors."""
    own, own_place = node()
    first = _keep(own, 1, bytes(range(256)))
    client, target, begun = StateClient(own_place), bytearray(7), time.monotonic()
    for position in range(200):
        client.read(0, first, position, memoryview(target))
        assert bytes(target) == bytes(range(position, position + 7))
    assert time.monotonic() - begun < stretched(4)  # an answer that waits for an acknowledgement takes 0.04 s
    for number in (2, 3):
        _keep(own, number, b"other")
    with pytest.raises(KeptStateError, match="later saves have replaced it"):
        client.read(0, first, 100, memoryview(target))
    client.close()


def test_a_copy_that_cannot_be_taken_says_why(node: Callable[..., tuple[NodeMemories, StatePlace]]) -> None:
    """The other node is gone, has no memory for copies, or less than is needed."""
    own, own_place = node()
    record = _keep(own, 1, bytes(1_000_000))
    for copies, size, reason in ((0, 4 << 20, "no memory for this copy"), (1, 1 << 20, "leaves 0.3 MB to it")):
        with pytest.raises(KeptStateError, match=reason):
            StateClient(node(copies, size)[1]).fetch(0, record, "", own_place)
    gone = StatePlace("gone", "127.0.0.1", free_port(), "?")
    with pytest.raises(KeptStateError, match=r"the node at 127\.0\.0\.1: .*Connection refused"):
        StateClient(node()[1]).fetch(0, record, "", gone)


def test_a_copy_takes_no_more_of_the_network_than_it_may(node: Callable[..., tuple[NodeMemories, StatePlace]]) -> None:
    """--keep-state-bandwidth holds for copies, and not for a restart that reads."""
    own, own_place = node(0, 16 << 20)
    record = _keep(own, 1, bytes(6_000_000))
    begun = time.monotonic()
    with contextlib.closing(StateClient(node(1, 32 << 20, bandwidth=4_000_000)[1])) as client:
        client.fetch(0, record, "", own_place)
    assert 1 < time.monotonic() - begun < stretched(3)
    begun = time.monotonic()
    with contextlib.closing(StateClient(own_place)) as client:
        client.read(0, record, 0, memoryview(bytearray(6_000_000)))
    assert time.monotonic() - begun < stretched(0.5)


def test_a_later_copy_does_not_wait_for_one_before(node: Callable[..., tuple[NodeMemories, StatePlace]]) -> None:
    """The node that it comes from may be lost, and would be waited for in each save."""
    (own, own_place), (other, other_place) = node(0, 16 << 20), node(0)
    copies, place = node(1, 32 << 20, bandwidth=100_000)
    slow, quick = _keep(own, 1, b"?" * 6_000_000), _keep(other, 2, b"!")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(StateClient(place).fetch, 0, slow, "", own_place)
        start, _ = half_of(copies.memories[1].size, 0)
        wait_until(lambda: bytes(copies.memories[1].part(start, 1)) == b"?", what="the copy's first byte")
        StateClient(place).fetch(0, quick, "", other_place)
        with pytest.raises(KeptStateError, match="the node at"):
            first.result()
    assert copies.memories[1].find(quick.generation.key) is not None


def test_a_stranger_gets_nothing(node: Callable[..., tuple[NodeMemories, StatePlace]]) -> None:
    """Without the secret, with bytes of another protocol, and with silence of any number: the server goes on."""
    own, own_place = node()
    record = _keep(own, 1, b"state")
    with pytest.raises(AuthenticationError):
        StateClient(dataclasses.replace(own_place, secret=own_place.node))
    silent = [socket.create_connection(("127.0.0.1", own_place.port)) for _ in range(300)]
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
        start = own.begin("")
        own.part(start, 4)[:] = struct.pack("f", rank)
        entry = Entry("a", (rank,), (1,), (2,), "float32", 0, 4)
        own.commit(start, Generation(1, "a" * 16, "9", 2), rank, [entry], None)
        own.wait_checked()
    with pytest.raises(KeptStateError, match=r"1 of 2 parts of 9 are in .*/\.step-9-a+, which all nodes have to share"):
        write_checkpoint(tmp_path)
    monkeypatch.setenv(ENV_KEPT_STATE, described[1])
    assert write_checkpoint(tmp_path) == tmp_path / f"step-9-{'a' * 16}"
    state = {"a": torch.full((2,), 7.0)}
    load(state, checkpoint_id=tmp_path / "latest", no_dist=True)
    assert state["a"].tolist() == [0.0, 1.0]
    other.close()


def test_a_node_sees_the_checkpoint_that_another_has_made_meanwhile(
    memories: KeptMemories, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A node that still writes the generation before says where the newest is, and not that a directory is gone."""
    assert memories.size
    other = KeptMemories(1 << 20, 1)
    described = (os.environ[ENV_KEPT_STATE], other.describe(0)[ENV_KEPT_STATE])
    for rank, text in enumerate(described):
        for number in (1, 2):
            _keep(NodeMemories(text), number, b"state", rank, 2)
    write_part, checkpoint = kept_checkpoint._write_part, tmp_path / f"step-2-{2:016}"

    def write(memory: KeptMemory, record: Record, rank: int, directory: Path) -> None:
        if (record.generation.number, rank) == (1, 0):
            with monkeypatch.context() as elsewhere:
                elsewhere.setenv(ENV_KEPT_STATE, described[1])
                assert write_checkpoint(tmp_path) == checkpoint
        write_part(memory, record, rank, directory)

    monkeypatch.setattr(kept_checkpoint, "_write_part", write)
    assert write_checkpoint(tmp_path) == checkpoint
    assert (tmp_path / "latest").resolve() == checkpoint
    other.close()


def test_other_nodes_get_an_address_that_leads_to_this_one(
    node: Callable[..., tuple[NodeMemories, StatePlace]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of rank 0's node may be a loopback address in its own /etc/hosts; a name server is asked once."""
    asked = []

    def look_up(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", port))]

    monkeypatch.setenv("MASTER_ADDR", "node0.example")
    own, _ = node()
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert [find_place(own).address for _ in range(2)] == ["node0.example"] * 2
    assert asked == ["node0.example"]


def test_the_workers_of_a_node_share_the_check_of_copies() -> None:
    """Each memory is one worker's, so that a restart does not wait for one that reads all copies."""
    made = KeptMemories(4 << 20, 2, 1)
    workers = [NodeMemories(made.describe(number)[ENV_KEPT_STATE]) for number in range(2)]
    for number, memory in enumerate(workers[0].memories):
        memory.write_record(HEADER, Record(Generation(1, "a", "1", 4), number, HEADER, 0, 0, 0))
    assert [[part.memory for part in list_parts(each)] for each in workers] == [[0, 2], [1, 3]]
    made.close()


@pytest.mark.long
def test_a_node_without_the_flag_is_an_error(launch: Launch, worker: Worker) -> None:
    """Else the others would wait in a save for workers that keep nothing."""
    program = worker(
        "import os, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp\n"
        "from elastic_run.worker import KeptState, KeptStateError, MemoryWriter\n"
        "dist.init_process_group('gloo')\n"
        "for without in ('0', '1'):\n"
        "    if os.environ['RANK'] == without:\n"
        f"        kept = os.environ.pop('{ENV_KEPT_STATE}')\n"
        "    for call in (KeptState(model=torch.nn.Linear(1, 1)).restore,\n"
        "                 lambda: dcp.save({'a': torch.ones(1)}, storage_writer=MemoryWriter())):\n"
        "        try:\n"
        "            call()\n"
        "        except (KeptStateError, dcp.api.CheckpointException) as error:\n"
        "            print(type(error).__name__, error, flush=True)\n"
        "    if os.environ['RANK'] == without:\n"
        f"        os.environ['{ENV_KEPT_STATE}'] = kept\n"
        "dist.destroy_process_group()\n"
    )
    job = launch("--nproc-per-node=2", "--keep-state=8MB", program)
    assert job.wait_exit() == 0, job.stderr
    for rank in range(2):
        line = f"KeptStateError the node of rank {rank} was started without --keep-state: give it to all nodes"
        assert job.stdout.count(line) == 2, job.stdout
    assert job.stdout.count("1 of 2 workers save their state; all have to, on nodes with --keep-state") >= 4, job.stdout


def test_a_server_that_is_killed_is_started_again(launch: Launch, worker: Worker) -> None:
    """The system may kill it when memory runs out; a line says so, and the workers live. It ends with the launcher."""
    flags = ("--nnodes=1:2", "--nproc-per-node=1", "--keep-state=8MB", *place(free_port(), "last_call_timeout=0.1"))
    job = launch(*flags, worker("import os, signal\nprint('begun', os.getpid(), flush=True)\nsignal.pause()\n"))

    def find_servers() -> set[int]:
        children = psutil.Process(job.process.pid).children(recursive=True)
        return {each.pid for each in children if "elastic_run.worker.kept_server" in each.cmdline()}

    pid = int(job.wait_line(r"begun (\d+)")[1])
    (first,) = wait_until(find_servers, what="a server")
    begun = time.monotonic()
    wait_until(lambda: time.monotonic() - begun > 1.1, what="a server that did not fail to start")
    os.kill(first, signal.SIGKILL)
    job.wait_line("the process that serves the kept state was killed by SIGKILL; it is started again")
    (second,) = wait_until(lambda: find_servers() - {first}, what="another server")
    assert not is_gone(pid)
    job.process.kill()
    wait_until(lambda: is_gone(second) and is_gone(pid), what="their end")


def test_what_a_worker_left_in_the_background_lives_after_a_success(launch: Launch, worker: Worker) -> None:
    """The end of the process that serves the kept state ends nothing else."""
    flags = ("--nnodes=1:2", "--nproc-per-node=1", "--keep-state=8MB", *place(free_port(), "last_call_timeout=0.1"))
    body = (
        "import subprocess\nquiet = {name: subprocess.DEVNULL for name in ('stdout', 'stderr')}\n"
        "print('left', subprocess.Popen(['sleep', '100'], start_new_session=True, **quiet).pid, flush=True)\n"
    )
    job = launch(*flags, worker(body))
    pid = int(job.wait_line(r"left (\d+)")[1])
    assert job.wait_exit() == 0
    assert not is_gone(pid)
    os.kill(pid, signal.SIGKILL)
