"""A stranger at a job's port who knows the protocol, but not the token: he forges, replays and reflects proofs.

    python -m tests.support.impostor 1000000            a million messages to a store that only agents use
    python -m tests.support.impostor 1000000 --shared   the same to a port that workers use as well

The store runs in a process of its own. The stranger has recorded what a member has sent, and what the store has sent to
him. Each connection is closed by the store, or left open and silent. The last line says how many messages were sent and
how the store's memory has grown. The command fails if he was answered with anything but the opening, or if a key of the
job was changed. `hostile` sends what is no protocol at all.
"""

from __future__ import annotations

import argparse
import random
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_run.store.tcpstore import wire
from elastic_run.store.tcpstore.client import StoreClient
from elastic_run.store.tcpstore.token_proof import ClientAuthentication
from tests.support.store import LOOPBACK
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MIB = 1 << 20
_TOKEN = b"what no stranger knows"
_SECRET = b"what no stranger may read"
_PREFIX = wire.AGENT_PREFIX.decode() + "job/"
_KEYS = ("k/head", "k/status", "s/facts/1")
_AGENTS_KEYS = [f"{_PREFIX}{key}".encode() for key in _KEYS]
_GREETING = bytes((wire.VALIDATE,)) + wire.U32.pack(wire.MAGIC)
#: Connections that are left open, and say no more.
_SILENT = 2000
_CHALLENGE_ANSWER = wire.U64.size + wire.NONCE_SIZE + wire.PROOF_SIZE
_SERVER = """
import sys
from elastic_run.rendezvous.elastic.backend.hosting import HostedStore
from elastic_run.store.tcpstore.listener import open_listener, raise_descriptor_limit
raise_descriptor_limit()
store = HostedStore(open_listener(), serves_workers=sys.argv[2] == "shared", token=sys.argv[1].encode())
print(store.port, flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run.

    Attributes:
        messages: How many were sent.
        connections: Over how many connections.
        growth: Bytes by which the store's memory had grown at its greatest.
    """

    messages: int
    connections: int
    growth: int


class Store:
    """A job's store in a process of its own.

    Args:
        is_shared: Whether workers use its port as well.
    """

    def __init__(self, *, is_shared: bool) -> None:
        kind = "shared" if is_shared else "own"
        command = [sys.executable, "-c", _SERVER, _TOKEN.decode(), kind]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def memory(self, name: str) -> int:
        """Return the bytes that the process has (VmRSS), or had at its greatest (VmHWM)."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))

    def member(self) -> StoreClient:
        """Connect as a node of the job does."""
        return StoreClient(LOOPBACK, self.port, DEADLINE, _PREFIX, authentication=ClientAuthentication(_TOKEN))


@dataclass(frozen=True, slots=True)
class Recording:
    """What the stranger has recorded of one member's connection.

    Attributes:
        sent: What the member has sent: its nonce, its proof and a question.
        nonce: The member's nonce.
        answered: What the store has answered to that nonce: its own nonce and its proof.
        proof: The member's proof.
    """

    sent: bytes
    nonce: bytes
    answered: bytes
    proof: bytes


def record(store: Store) -> Recording:
    """Let a member connect, and listen."""
    proving, nonce = ClientAuthentication(_TOKEN), b""
    sent, answered = bytearray(), b""

    class Listened:
        """The member's connection, as `ClientAuthentication` uses it."""

        def send(self, data: bytes, _: float) -> None:
            sent.extend(data)
            connection.sendall(data)

        def receive(self, size: int, _: float) -> bytes:
            nonlocal answered
            data = connection.recv(size, socket.MSG_WAITALL)
            answered += data
            return data

    with socket.create_connection((LOOPBACK, store.port), DEADLINE) as connection:
        proof = proving.challenge(Listened(), "the store", DEADLINE)  # type: ignore[arg-type]  # all that it uses
        question = proof + wire.encode(wire.GET, _AGENTS_KEYS[0])
        connection.sendall(question)
        assert connection.recv(4096).endswith(_SECRET)
    nonce = bytes(sent[-wire.NONCE_SIZE :])
    return Recording(bytes(sent) + question, nonce, answered[wire.U64.size :], proof[-wire.PROOF_SIZE :])


# --- what he says ----------------------------------------------------------------------------------------------------
def draw_conversation(generator: random.Random, recorded: Recording) -> tuple[list[bytes], int]:
    """Draw what is sent on one connection, message by message, and how many bytes the store may answer at most."""
    if generator.random() < 0.05:
        return [recorded.sent], _CHALLENGE_ANSWER
    messages: list[bytes] = []
    most = 0
    for _ in range(generator.randrange(5)):
        kind = generator.randrange(6)
        if kind == 0:
            nonce = generator.choice((1, wire.AGENT_NONCE, wire.PROOF_WANTED, generator.getrandbits(32)))
            messages.append(bytes((wire.PING,)) + wire.U32.pack(nonce))
            most += wire.U32.size
        elif kind <= 2:
            messages.append(wire.encode(wire.CHALLENGE, _draw_secret(generator, recorded)))
            most += _CHALLENGE_ANSWER
        else:
            messages.append(wire.encode(wire.PROVE, _draw_secret(generator, recorded)))
    messages += [_draw_question(generator) for _ in range(generator.randrange(4))]
    if generator.random() < 0.2:
        messages.append(generator.randbytes(generator.choice((1, 40, 2000))))
        most += 2000  # noise may be anything, PINGs among it
    return messages, most


def _draw_secret(generator: random.Random, recorded: Recording) -> bytes:
    """Draw a nonce or a proof: recorded, reflected, with one bit changed, of another length, or any."""
    pieces = (
        recorded.nonce,
        recorded.proof,
        recorded.answered[: wire.NONCE_SIZE],
        recorded.answered[wire.NONCE_SIZE :],
    )
    piece = generator.choice(pieces)
    kind = generator.randrange(5)
    if kind == 0:
        return generator.randbytes(wire.PROOF_SIZE)
    if kind == 1:
        return generator.randbytes(generator.randrange(wire.PROOF_SIZE + 1))
    if kind == 2:
        position = generator.randrange(len(piece))
        return piece[:position] + bytes((piece[position] ^ 1 << generator.randrange(8),)) + piece[position + 1 :]
    return piece


def _draw_question(generator: random.Random) -> bytes:
    key = generator.choice(_AGENTS_KEYS)
    value = generator.choice((b"", b"x", b"x" * 1000))
    return generator.choice(
        (
            wire.encode(wire.GET, key),
            wire.encode(wire.LOOK, 1, key),
            wire.encode(wire.WAIT_LOOK, 1, key),
            wire.encode(wire.STREAM_APPEND, key, value),
            wire.encode(wire.SET, key, value),
            wire.encode(wire.APPEND, key, value),
            wire.encode(wire.ADD, key, 1),
            wire.encode(wire.DELETE, key),
            wire.encode(wire.COMPARE_SET, key, _SECRET, value),
            wire.encode(wire.MULTI_SET, 1, key, value),
            wire.encode(wire.MULTI_GET, len(_AGENTS_KEYS), *_AGENTS_KEYS),
            wire.encode(wire.WAIT, 1, key),
            wire.encode(wire.CHECK, 1, key),
            wire.encode(wire.QUEUE_PUSH, key, value),
            wire.encode(wire.QUEUE_POP, key),
            wire.encode(wire.BARRIER, key, 1),
        )
    )


# --- how he says it --------------------------------------------------------------------------------------------------
def attack(store: Store, recorded: Recording, seed: int, count: int) -> Iterator[tuple[int, bytes, int]]:
    """Send messages over one connection after the other; gives for each their number, the answer and its bound."""
    generator = random.Random(seed)  # noqa: S311 - it must be the same again
    silent: list[socket.socket] = []
    sent = 0
    try:
        while sent < count:
            messages, most = draw_conversation(generator, recorded)
            sent += len(messages) + 1
            connection = _open(store.port)
            if generator.random() < 0.02:
                connection.sendall((_GREETING + b"".join(messages))[: generator.randrange(60)])
                silent.append(connection)
                if len(silent) > _SILENT:
                    silent.pop(generator.randrange(_SILENT)).close()
                continue
            opening = b"" if messages == [recorded.sent] else _GREETING
            yield len(messages) + 1, _exchange(connection, opening, messages), most
    finally:
        for connection in silent:
            connection.close()


def _open(port: int) -> socket.socket:
    connection = socket.create_connection((LOOPBACK, port), DEADLINE)
    # It is reset when it is closed: so many connections would else take all ports for a minute.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    return connection


def _exchange(connection: socket.socket, opening: bytes, messages: Sequence[bytes]) -> bytes:
    """Send messages and the end, and return all that comes back."""
    received = b""
    with connection:
        try:
            connection.sendall(opening + b"".join(messages))
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                received += part
        except OSError:
            pass  # refused, with bytes of ours that nobody has read
    return received


def run(seed: int, count: int, *, is_shared: bool) -> Outcome:
    """Attack a store, and see that nothing was read and nothing changed.

    Args:
        seed: Decides what is sent; the same seed, the same messages.
        count: How many messages.
        is_shared: Whether workers use the store's port as well.

    Raises:
        AssertionError: Something was.
    """
    with Store(is_shared=is_shared) as store, store.member() as member:
        member.multi_set(_KEYS, [_SECRET] * len(_KEYS))
        recorded = record(store)
        before = store.memory("VmRSS")
        sent = connections = 0
        for number, answer, most in attack(store, recorded, seed, count):
            sent, connections = sent + number, connections + 1
            assert _SECRET not in answer
            assert len(answer) <= most, f"{answer!r} after {sent} messages"
        assert sorted(member.list_keys()) == sorted(_KEYS)
        assert member.multi_get(_KEYS) == [_SECRET] * len(_KEYS)
        with store.member() as late:
            assert late.get(_KEYS[0]) == _SECRET
        return Outcome(sent, connections, store.memory("VmHWM") - before)


def main() -> int:
    """Run from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.impostor")
    parser.add_argument("count", type=int, help="how many messages")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shared", action="store_true", help="workers use the port as well")
    arguments = parser.parse_args()
    outcome = run(arguments.seed, arguments.count, is_shared=arguments.shared)
    print(  # noqa: T201 - a command prints
        f"impostor: {outcome.messages} messages over {outcome.connections} connections, nothing read, nothing "
        f"changed, memory grew by {outcome.growth / _MIB:.1f} MiB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
