"""Hostile messages to a store's server, drawn by a seed; and a stranger that fills a store and reads it.

Whatever arrives, the server must live, serve others, and stay within its bounds. As a program the stranger fills the
stores of some hosts and reads them: ``python -m tests.support.hostile PORT HOST …``.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_run.store import wire
from elastic_run.store.client import StoreClient
from elastic_run.store.wire import COUNT_LIMIT, KEY_LIMIT, VALUE_LIMIT
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Iterator

_MIB = 1 << 20
#: The server's measure here: its real one is for jobs of thousands of hosts, and would make this slow.
MEASURE = 16 * _MIB
#: Memory that the server may take at all, so that a defect harms no other program.
_ADDRESS_SPACE = 4096 * _MIB
_KEYS = [b"/a", b"/b", b"/q"]
_AT_ONCE = 24
#: Seconds after which a connection that takes nothing more is left as it is.
_STUCK = 0.005
_SERVER = """
import resource, sys
space, measure = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (space, space))
from elastic_run.loop import Loop
from elastic_run.store import server
from elastic_run.store.worker_store import open_listeners
server.measure = lambda hosts: measure
with Loop() as loop:
    listener = open_listeners(["127.0.0.1"])[0]
    serving = server.StoreServer(loop, listener, on_refusal=print)
    print(serving.address[1], flush=True)
    loop.run_until(lambda: False)
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run.

    Attributes:
        messages: How many were sent.
        connections: Over how many connections.
        growth: Bytes by which the server's memory had grown at its greatest.
    """

    messages: int
    connections: int
    growth: int


class Server:
    """A server in a process of its own."""

    def __init__(self) -> None:
        arguments = (str(_ADDRESS_SPACE), str(MEASURE))
        self._process = subprocess.Popen([sys.executable, "-c", _SERVER, *arguments], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def memory(self, name: str = "VmHWM") -> int:
        """Return the bytes that the process has, or had at its greatest."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))

    def client(self) -> StoreClient:
        """Connect as a worker does."""
        return StoreClient("127.0.0.1", self.port, DEADLINE)


def draw_messages(generator: random.Random, count: int) -> Iterator[bytes]:
    """Draw one connection's messages: proper ones and long lists, then one that no server takes."""
    for _ in range(count - 1):
        yield generator.choice((_draw_proper, _draw_proper, _draw_list))(generator)
    yield generator.choice((_draw_lie, _draw_half, _draw_noise))(generator)


def _draw_size(generator: random.Random) -> int:
    """Draw the length of a value: mostly small, now and then as large as can be."""
    kind = generator.random()
    if kind < 0.9:
        return generator.randrange(100)
    return generator.randrange(100_000) if kind < 0.996 else VALUE_LIMIT


def _draw_key(generator: random.Random) -> bytes:
    if generator.random() < 0.8:
        return generator.choice(_KEYS)
    return b"/" + generator.randbytes(generator.choice((1, 8, 200, 8000)))


def _draw_proper(generator: random.Random) -> bytes:
    operation = generator.choice(tuple(wire.LAYOUTS))
    fields: list[bytes | int] = []
    for kind in wire.LAYOUTS[operation].kinds:
        if kind == KEY_LIMIT:
            fields.append(_draw_key(generator))
        elif kind > 0:
            fields.append(bytes(_draw_size(generator)))
        else:
            fields.append(generator.choice((0, 1, -1, 1 << 62, generator.randrange(1 << 16))))
    if operation == wire.PING:
        return bytes((operation,)) + generator.randbytes(4)
    if wire.LAYOUTS[operation].is_list:
        fields = [1, *fields]
    return wire.encode(operation, *fields)


def _draw_list(generator: random.Random) -> bytes:
    """Draw a list of many keys, the same or all different, to read, wait for or set."""
    count = generator.choice((0, 2, 100, 3000))
    key = _draw_key(generator)
    is_same = generator.random() < 0.5
    keys = [key if is_same else b"%s/%d" % (key[:20], number) for number in range(count)]
    operation = generator.choice((wire.MULTI_GET, wire.CHECK, wire.WAIT, wire.MULTI_SET))
    if operation == wire.MULTI_SET:
        return wire.encode(operation, count, *[part for key in keys for part in (key, b"v" * 50)])
    return wire.encode(operation, count, *keys)


def _draw_lie(generator: random.Random) -> bytes:
    """Draw a length or a count that isn't so."""
    operation = generator.choice((wire.SET, wire.GET, wire.MULTI_GET, wire.MULTI_SET, wire.WAIT, wire.APPEND))
    length = generator.choice((KEY_LIMIT, KEY_LIMIT + 1, COUNT_LIMIT, 1 << 31, (1 << 64) - 1))
    return bytes((operation,)) + wire.U64.pack(length) + generator.randbytes(generator.randrange(200))


def _draw_half(generator: random.Random) -> bytes:
    message = _draw_proper(generator)
    return message[: generator.randrange(len(message) + 1)]


def _draw_noise(generator: random.Random) -> bytes:
    return generator.randbytes(generator.choice((1, 30, 3000)))


def attack(server: Server, seed: int, count: int, *, deadline: float = 60.0) -> Outcome:
    """Send messages over connection after connection, of which some are kept open and not read."""
    generator = random.Random(seed)  # noqa: S311 - it must be the same again
    before, begun = server.memory("VmRSS"), time.monotonic()
    kept: list[socket.socket] = []
    sent = connections = 0
    while sent < count:
        assert time.monotonic() - begun < deadline, f"{sent} of {count} messages"
        connection = _open(server.port)
        connections += 1
        batch = list(draw_messages(generator, min(generator.randrange(1, 60), count - sent)))
        sent += len(batch)
        _exchange(connection, batch, reads=generator.random() < 0.8)
        kept.append(connection)
        if len(kept) > _AT_ONCE:
            kept.pop(generator.randrange(len(kept))).close()
    for connection in kept:
        connection.close()
    return Outcome(sent, connections, server.memory() - before)


def _open(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE)
    # It is reset when it is closed: a million connections would else take all ports for a minute.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.sendall(wire.encode_opening(1))
    return connection


def _exchange(connection: socket.socket, batch: list[bytes], *, reads: bool) -> None:
    """Send messages as far as the server takes them; read what it answers, where that is read at all."""
    left = memoryview(b"".join(batch))
    connection.settimeout(0)
    with contextlib.suppress(OSError):
        while left:
            readable, writable, _ = select.select([connection] if reads else [], [connection], [], _STUCK)
            if writable:
                left = left[connection.send(left[:_MIB]) :]
            if readable and not connection.recv(_MIB):
                break
            if not readable and not writable:
                break


def run(seed: int, count: int, *, deadline: float) -> Outcome:
    """Attack a server, and see that it serves others after that."""
    with Server() as server:
        outcome = attack(server, seed, count, deadline=deadline)
        with server.client() as late:
            # Strangers may have filled the store, so that nothing more can be set.
            assert late.multi_get([]) == []
    return outcome


# --- a stranger that fills and reads a store -------------------------------------------------------------------------
MIB = 1 << 20
_COPIES = 3000
_FILLINGS = 60
_WAIT_LIMIT = 30.0


def open_store(host: str, port: int) -> socket.socket:
    """Connect as a TCPStore client does."""
    connected = socket.create_connection((host, port), timeout=_WAIT_LIMIT)
    connected.sendall(wire.encode_opening(1))
    return connected


def ask(host: str, port: int, *messages: bytes) -> int:
    """Send messages over one connection and read until the server closes it or has answered a PING behind them."""
    received = 0
    with open_store(host, port) as connected, contextlib.suppress(OSError):
        for message in messages:
            connected.sendall(message)
        connected.sendall(bytes((wire.PING,)) + wire.U32.pack(7))
        while received < 4 * MIB and (part := connected.recv(MIB)):
            received += len(part)
            if part.endswith(wire.U32.pack(7)):
                break
    return received


def multiply(host: str, port: int, *, key: bytes = b"/stranger") -> None:
    """Ask for one value of 8 MiB three thousand times in one message of 66 KB: 24 GB, where each were a copy."""
    value = bytes(8 * MIB)
    ask(
        host,
        port,
        wire.encode(wire.SET, key, value),
        wire.encode(wire.APPEND, key, b"x"),
        wire.encode(wire.MULTI_GET, _COPIES, *[key] * _COPIES),
    )


def fill(host: str, port: int, *, key: bytes = b"/stranger") -> None:
    """Set sixty values of 8 MiB, each over a connection of its own."""
    value = bytes(8 * MIB)
    for number in range(_FILLINGS):
        ask(host, port, wire.encode(wire.SET, key + b"/%d" % number, value))


def main() -> None:
    """Do all of it, wherever a store answers."""
    port, hosts = int(sys.argv[1]), sys.argv[2:]
    for host in hosts:
        with contextlib.suppress(OSError):
            multiply(host, port)
            fill(host, port)


if __name__ == "__main__":
    main()
