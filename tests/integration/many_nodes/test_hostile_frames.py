"""Garbage at an agent's port: the sender gets a bounded answer, the user at most one line, and the job goes on."""

from __future__ import annotations

import contextlib
import json
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run.core.job.codec import to_message
from elastic_run.core.job.documents import NodeInfo, NodeState, Promise, Proposal, Round, RoundEnd, StoreAddress
from elastic_run.core.job.membership import Ended, Formed
from elastic_run.records import replace
from elastic_run.rendezvous.coordination.link import DOCUMENT, MESSAGE, PREAMBLE, FrameReader
from elastic_run.rendezvous.coordination.opening import NODE, Credentials, Hello, ask, make_nonce
from elastic_run.store import wire
from tests.support.launch import ELASTIC_RUN
from tests.support.local_rendezvous import RUN_ID, place, wait_coordinated
from tests.support.sessions import can_connect, free_port, plain_config, tcp_node
from tests.support.wait import DEADLINE, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.launch import Launch, Worker


_MIB = 1 << 20
_LIMIT = 1024
_LIMITED = ("sh", "-c", f'ulimit -n {_LIMIT} && exec "$@"', "limited", *ELASTIC_RUN)


@pytest.fixture
def many_files() -> Iterator[None]:
    """Allow the test more open connections than the launcher may have: a usual shell permits 1,024 files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("has_token", "knows_it"),
    [(False, False), (True, False), (True, True)],
    ids=["no token", "a stranger to the token", "a process with the token"],
)
def test_a_job_bears_hostile_frames(*, has_token: bool, knows_it: bool) -> None:
    """Random and altered frames end only their own connections, memory stays bounded, and a node joins afterwards."""
    outcome = run(1, 5_000, has_token=has_token, knows_it=knows_it)
    assert outcome.growth < 16 * _MIB
    assert len(outcome.lines) <= 6
    assert "defect" not in "".join(outcome.lines)


def test_a_connection_that_was_reset_before_it_is_read_ends_nothing(launch: Launch, worker: Worker) -> None:
    """Such as one of a killed worker, at the port that agents and workers share; the job begins afterwards."""
    port = free_port()
    words = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}", worker("say('ran')"))
    first = launch("--node-rank=0", *words)
    wait_until(lambda: can_connect("127.0.0.1", port), what="the port")
    first.send(signal.SIGSTOP)
    for data in (wire.encode_opening(1), PREAMBLE, b"elastic"):
        connected = _open(port)
        assert connected is not None
        connected.sendall(data)
        connected.close()
    first.send(signal.SIGCONT)
    second = launch("--node-rank=1", *words)
    assert (first.wait_exit(), second.wait_exit()) == (0, 0), first.stderr
    assert "defect" not in first.stderr


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"elastic-run 0\n", r"127\.0\.0\.1:\d+ speaks protocol 0 of another release of elastic-run"),
        (b"GET / HTTP/1.1\r\n\r\n", r"127\.0\.0\.1:\d+ is no agent of elastic-run, or one of an older release"),
        (b"\x00\x07", r"127\.0\.0\.1:\d+ is no agent of elastic-run, or one of an older release"),  # torch's TCPStore
    ],
    ids=["another release", "http", "torch"],
)
def test_another_protocol_is_named_once(launch: Launch, worker: Worker, data: bytes, line: str) -> None:
    """The agent closes the connection at once, and one line tells its user where the connection came from."""
    port, path = free_port(), worker("say('trained')")
    agents = [launch(*place(port), "--nnodes=2", path)]
    wait_coordinated(port)
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port), DEADLINE) as stranger:
            stranger.sendall(data)
            with suppress(ConnectionResetError):
                assert stranger.recv(64) in (b"", PREAMBLE)
    agents[0].wait_line(line)
    agents.append(launch(*place(port), "--nnodes=2", path))
    assert [agent.wait_exit() for agent in agents] == [0, 0]
    assert agents[0].stderr.count("127.0.0.1:") == 1


@pytest.mark.usefixtures("many_files")
def test_connections_that_say_nothing_keep_no_node_away(launch: Launch, worker: Worker) -> None:
    """10,000 silent connections take no descriptor that a node or a worker needs: a node joins, and the job ends."""
    port, path = free_port(), worker("say('trained')")
    agents = [launch(*place(port), "--nnodes=2", path, program=_LIMITED)]
    wait_coordinated(port)
    with ExitStack() as held:
        for _ in range(10_000):
            held.enter_context(socket.create_connection(("127.0.0.1", port), DEADLINE))
        agents.append(launch(*place(port), "--nnodes=2", path))
        assert [agent.wait_exit() for agent in agents] == [0, 0]
    assert "closed a connection" not in agents[0].stderr


@pytest.mark.usefixtures("many_files")
def test_an_agent_without_descriptors_names_the_limit(launch: Launch, worker: Worker) -> None:
    """With more nodes than files that the process may open, one line says so; a node joins when one is free again."""
    port, path = free_port(), worker("say('trained')")
    agents = [launch(*place(port), "--nnodes=2", path, program=_LIMITED)]
    wait_coordinated(port)
    with ExitStack() as held:
        for number in range(_LIMIT):
            hello = Hello(RUN_ID, f"node{number}", "there")
            try:
                _, connected, _ = ask(("127.0.0.1", port), hello, 1.0, None, dark_after=DEADLINE)
            except OSError:
                break
            if connected is not None:
                held.enter_context(closing(connected))
        agents[0].wait_line(f"its process may open {_LIMIT} files: raise ulimit -n, a job needs one for each node")
    agents.append(launch(*place(port), "--nnodes=2", path))
    assert [agent.wait_exit() for agent in agents] == [0, 0]
    assert agents[0].stderr.count("raise ulimit -n") == 1


TOKEN = b"the token of this job"
_AT_ONCE = 24
_HEADER = struct.Struct(">Ic")
#: A node that waits for another one, until its input ends.
_NODE = """
import sys
from tests.support.sessions import tcp_node
from tests.support.wait import wait_until
from elastic_run.core.job.membership import Ended
port, token = int(sys.argv[1]), sys.argv[2].encode()
with tcp_node(port, (2, 2), secret=token or None, conf={"join_timeout": "600", "keep_alive_interval": "2"}) as node:
    wait_until(lambda: node.is_waiting)
    print("waits", flush=True)
    node._finishes = True
    print(node.wait_for(Ended, deadline=1e6).end.verdict)
"""
_ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1 << 62, 10**400, 1.5, -0.0, float("nan"), "", "x" * 5000, "\ud800", "\x1b[2J", "0"),
    *([], {}, [[]] * 50, {"a": {}}, ["x"] * 3000),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run.

    Attributes:
        frames: How many were sent.
        connections: Over how many connections.
        growth: Bytes by which the agent's memory had grown at its greatest.
        lines: What the agent told its user.
    """

    frames: int
    connections: int
    growth: int
    lines: tuple[str, ...]


class _Stranger:
    """Draws what is sent.

    Args:
        seed: Decides all of it.
        knows: The token that it proves, or None.
    """

    def __init__(self, seed: int, knows: bytes | None) -> None:
        self._random = random.Random(seed)  # noqa: S311 - it must be the same again
        self._credentials = None if knows is None else Credentials(knows)
        self._number = 0
        config = replace(plain_config(), min_nodes=3, max_nodes=3)  # no node of the job that is attacked
        one = Round(1, 1, "x", "1/1/x", 3, 0)
        self._state = to_message(
            NodeState(
                "stranger",
                NodeInfo("there", 1, 1),
                config,
                StoreAddress("127.0.0.1", 1),
                promise=Promise(1, "x"),
                started=one,
                accepted=(Proposal(one, 0, one, ("x",)),),
                ended=RoundEnd("stopped", {"exit_code": 1}),
            )
        )

    def draw_bool(self, probability: float) -> bool:
        """Draw whether something is so."""
        return self._random.random() < probability

    def exchange(self, connected: socket.socket) -> int:
        """Send what is drawn for one connection; returns the number of frames."""
        begin = self._random.choice((self._send_noise, self._send_other_protocol, *[self._send_frames] * 6))
        return begin(connected)

    def _send_noise(self, connected: socket.socket) -> int:
        noise = self._random.randbytes(self._random.choice((1, 300, 70_000)))
        connected.sendall(self._random.choice((b"", PREAMBLE)) + noise)
        return 1

    def _send_other_protocol(self, connected: socket.socket) -> int:
        others = (wire.encode_opening(1), b"elastic-run 0\nx", b"elastic", b"GET / HTTP/1.1\r\n\r\n")
        connected.sendall(self._random.choice(others))
        return 1

    def _send_frames(self, connected: socket.socket) -> int:
        self._number += 1
        name = f"stranger{self._number}"
        nonce = make_nonce() if self._credentials else ""
        one = Hello("job", name, "there", nonce=nonce)
        hello = {key: getattr(one, key) for key in Hello.__slots__}
        connected.sendall(PREAMBLE + _frame(MESSAGE, self._alter(hello) if self.draw_bool(0.1) else hello))
        count = 1
        if self._credentials is not None and self.draw_bool(0.9):
            count += self._prove(connected, nonce)
        for document in range(self._random.randrange(20)):
            del document
            connected.sendall(self._draw_frame(name))
            count += 1
        return count

    def _prove(self, connected: socket.socket, nonce: str) -> int:
        assert self._credentials is not None
        reader = FrameReader()
        while not (found := list(reader.read())):
            if not (data := connected.recv(65536)):
                return 0
            reader.rest += data
        if "nonce" not in found[0][1]:
            return 0  # the agent closes the connection
        proof = self._credentials.prove(NODE, nonce, str(found[0][1]["nonce"]))
        connected.sendall(_frame(MESSAGE, {"kind": "proof", "proof": proof if self.draw_bool(0.95) else "0"}))
        return 1

    def _draw_frame(self, name: str) -> bytes:
        kind = self._random.random()
        if kind < 0.05:  # a length that is not so, and a kind that does not exist
            size = self._random.choice((0, 5000, 1 << 23, (1 << 32) - 1))
            return _HEADER.pack(size, self._random.choice((DOCUMENT, b"?"))) + self._random.randbytes(50)
        if kind < 0.55:
            state = {**self._state, "node": name}
            return _frame(DOCUMENT, self._alter(state) if self.draw_bool(0.8) else state)
        message: dict[str, object] = {
            "kind": self._random.choice(("wait", "ask", "answer", "proof", "parting", "asked")),
            "number": 1,
            "question": self._random.choice(("status", "x")),
            "wait": 0.01,
            "document": {},
        }
        return _frame(MESSAGE, self._alter(message) if self.draw_bool(0.7) else message)

    def _alter(self, document: dict[str, Any]) -> dict[str, Any]:
        """Put an odd value somewhere into a document."""
        altered: dict[str, Any] = json.loads(json.dumps(document))
        place: Any = altered
        while True:
            key = self._random.choice(list(place) if isinstance(place, dict) else range(len(place)))
            inner = place[key]
            if not isinstance(inner, dict | list) or not inner or self.draw_bool(0.2):
                place[key] = self._random.choice(_ODD)
                return altered
            place = inner


def _frame(kind: bytes, document: dict[str, Any]) -> bytes:
    content = json.dumps(document).encode("ascii")
    return _HEADER.pack(len(content), kind) + content


@contextlib.contextmanager
def _waiting_node(port: int, token: bytes) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _NODE, str(port), token.decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _end(process: subprocess.Popen[str]) -> str:
    process.kill()
    return process.communicate()[1][-3000:]


def read_memory(pid: int, name: str = "VmHWM") -> int:
    """Return a process's memory in bytes: its peak (`VmHWM`), or what it has now (`VmRSS`)."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def run(seed: int, count: int, *, has_token: bool, knows_it: bool = False, deadline: float = 4 * DEADLINE) -> Outcome:
    """Attack a node that waits; then let another one come, and see that they are a job."""
    port, token = free_port(), TOKEN if has_token else b""
    stranger = _Stranger(seed, TOKEN if knows_it else None)
    begun, sent, connections = time.monotonic(), 0, 0
    kept: list[socket.socket] = []
    with _waiting_node(port, token) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        before = read_memory(process.pid, "VmRSS")
        while sent < count:
            assert time.monotonic() - begun < deadline, f"{sent} of {count} frames"
            connected = _open(port)
            assert connected is not None, _end(process)
            connections += 1
            with contextlib.suppress(OSError):
                sent += stranger.exchange(connected)
            kept.append(connected)
            if len(kept) > _AT_ONCE:
                kept.pop(0).close()
        growth = read_memory(process.pid) - before
        for connected in kept:
            connected.close()
        assert process.poll() is None, _end(process)
        with tcp_node(port, (2, 2), secret=token or None, conf={"keep_alive_interval": "2"}) as node:
            node.wait_for(Formed)
            node.finish()
            assert node.wait_for(Ended).end.verdict == "success"
        verdict, told = process.communicate(timeout=DEADLINE)
    assert verdict == "success\n"
    return Outcome(sent, connections, growth, tuple(told.splitlines()))


def _open(port: int) -> socket.socket | None:
    try:
        connected = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE)
    except ConnectionRefusedError:
        return None
    # It is reset when it is closed: a million connections would else take all ports for a minute.
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return connected
