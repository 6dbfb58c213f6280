"""Gives other nodes the state that this node keeps, and fetches copies of theirs; the launcher runs it.

    python -m elastic_run.worker.kept_server DESCRIPTOR

Each connection begins with the challenge of `multiprocessing.connection`: the secret is made by the launcher, and only
the workers of the job learn it, through their process group. Then come requests:

- read: bytes of one worker's part of a generation. A restart reads what other nodes hold.
- fetch: a worker of the node before asks to have its generation copied. This node reads it from that node's server,
  piece by piece, not faster than `--keep-state-bandwidth`, into a memory for copies.

It is a process of its own, so that the launcher's loop never moves these bytes. An answer is a short text; any that is
not in `_GOOD` is the reason why not.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from elastic_run.core.kept_generations import choose_half, decode, encode, half_of
from elastic_run.records import dataclass, replace
from elastic_run.worker.kept_memory import KeptStateError, NodeMemories, open_memories

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elastic_run.core.kept_generations import Record

__all__ = ["LOSSES", "StateClient", "StatePlace", "describe_loss"]

#: What a client raises when the other side is gone, is of another job, or has not what it was asked for.
LOSSES = (OSError, EOFError, AuthenticationError, KeptStateError)
#: Seconds without a byte after which the other side counts as lost, and connections at a time.
_SILENCE, _MOST_CONNECTIONS = 20, 256
_LONGEST_REQUEST, _PIECE = 1 << 16, 1 << 24
_WAIT, _GOOD = "wait", frozenset(("ready", "done"))
#: Of <asm-generic/socket.h>: the kernel sends no faster than so many bytes a second.
_SO_MAX_PACING_RATE = 47


@dataclass(frozen=True, slots=True)
class StatePlace:
    """Where a node's state is served: the name of its memories, its address for other nodes, its port and secret."""

    node: str
    address: str
    port: int
    secret: bytes


class StateClient:
    """A connection to the server of a node's state; each method may raise any of `LOSSES`."""

    def __init__(self, place: StatePlace) -> None:
        client = socket.create_connection((place.address, place.port), timeout=_SILENCE)
        _limit_silence(client)
        self._connection = Connection(client.detach())
        answer_challenge(self._connection, place.secret)
        deliver_challenge(self._connection, place.secret)

    def read(self, memory: int, record: Record, position: int, target: memoryview, *, rate: int = 0) -> None:
        """Read bytes of a generation into a buffer, at most so many a second unless the rate is 0."""
        where = {"memory": memory, "key": record.generation.key, "position": position, "length": len(target)}
        self._ask({"do": "read", "rate": rate, **where})
        _receive(self._connection.fileno(), target)
        self._wait_good()

    def fetch(self, memory: int, record: Record, kept: str, source: StatePlace) -> None:
        """Let the node copy a generation from another node; return when the copy is whole.

        The generation with the key `kept` stays there.
        """
        where = [source.node, source.address, source.port, source.secret.hex()]
        request = {"do": "fetch", "memory": memory, "record": encode(record).hex(), "kept": kept, "source": where}
        self._ask(request)

    def cancel(self) -> None:
        """End what another thread does with the connection, unless it is closed."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _ask(self, request: dict[str, Any]) -> None:
        self._connection.send_bytes(json.dumps(request).encode())
        self._wait_good()

    def _wait_good(self) -> None:
        while (answer := self._connection.recv_bytes(_LONGEST_REQUEST).decode(errors="replace")) == _WAIT:
            pass
        if answer not in _GOOD:
            raise KeptStateError(answer)


class _Server:
    """Answers the requests of one connection after the other, each connection in a thread."""

    def __init__(self, memories: NodeMemories) -> None:
        self._node = memories
        self._is_fetching = [threading.Lock() for _ in memories.memories]
        self._sources: dict[int, StateClient] = {}
        limit = os.sysconf("SC_OPEN_MAX")
        self._places = threading.BoundedSemaphore(min(_MOST_CONNECTIONS, max(1, limit // 4)) if limit > 0 else 1)
        #: Those that have not proved that they know the secret, the oldest first.
        self._strangers: dict[socket.socket, None] = {}

    def serve(self, listening: socket.socket) -> None:
        """Take connections, without an end."""
        while True:
            try:
                client, _ = listening.accept()
            except ConnectionError:
                continue  # it was gone before
            if not self._places.acquire(blocking=False):
                for oldest in list(self._strangers)[:1]:
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # the thread that waits for its proof closes it
                if not self._places.acquire(timeout=1):
                    client.close()
                    continue
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            with client, Connection(os.dup(client.fileno())) as connection:
                _limit_silence(client)
                self._strangers[client] = None
                deliver_challenge(connection, self._node.secret)
                answer_challenge(connection, self._node.secret)
                del self._strangers[client]
                while True:
                    request = json.loads(connection.recv_bytes(_LONGEST_REQUEST))
                    if request["do"] == "read":
                        if request["rate"]:
                            client.setsockopt(
                                socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("@L", request["rate"])
                            )
                        self._read(connection, request)
                    elif request["do"] == "fetch":
                        self._fetch(connection, request)
        except (*LOSSES, ValueError, KeyError, IndexError, TypeError):
            pass  # the other side is gone, or a stranger: it sees the end of the connection
        finally:
            self._strangers.pop(client, None)
            self._places.release()

    def _read(self, connection: Connection[Any, Any], request: dict[str, Any]) -> None:
        memory, position, length = self._node.memories[request["memory"]], request["position"], request["length"]
        record = memory.find(request["key"])
        if record is None or not 0 <= position <= position + length <= record.length:
            connection.send_bytes(b"later saves have replaced it")
            return
        connection.send_bytes(b"ready")
        content = memory.part(record.start + position, length)
        while content:
            content = content[os.write(connection.fileno(), content[:_PIECE]) :]
        is_there = memory.find(request["key"]) == record
        connection.send_bytes(b"done" if is_there else b"later saves have replaced it")

    def _fetch(self, connection: Connection[Any, Any], request: dict[str, Any]) -> None:
        record, number = decode(bytes.fromhex(request["record"])), self._node.workers + request["memory"]
        node, address, port, secret = request["source"]
        if record is None or not self._node.workers <= number < len(self._node.memories):
            connection.send_bytes(b"it has no memory for this copy (--keep-state-copies, --nproc-per-node)")
            return
        memory = self._node.memories[number]
        if record.length > memory.room:
            sizes = (record.length / 1e6, memory.room / 1e6)
            connection.send_bytes(
                "the copy has {:,.1f} MB, and --keep-state leaves {:,.1f} MB to it".format(*sizes).encode()
            )
            return
        try:
            client = StateClient(StatePlace(node, address, port, bytes.fromhex(secret)))
            if number in self._sources:  # the node that it reads from may be lost, and is silent for 20 s then
                self._sources[number].cancel()
            self._sources[number] = client
            with self._is_fetching[number], contextlib.closing(client):
                whole = memory.find(request["kept"])
                half = choose_half(memory.read_records(), None if whole is None else whole.generation)
                memory.clear(half)
                start, _ = half_of(memory.size, half)
                for position in range(0, record.length, _PIECE):
                    piece = memory.part(start + position, min(_PIECE, record.length - position))
                    client.read(request["memory"], record, position, piece, rate=self._node.rate)
                    connection.send_bytes(_WAIT.encode())
                # Each piece is of this generation: its key was there behind each of them, and no other one has it.
                memory.write_record(half, replace(record, start=start))
        except LOSSES as error:
            connection.send_bytes(f"the node at {address}: {describe_loss(error)}".encode()[:_LONGEST_REQUEST])
            return
        connection.send_bytes(b"done")


def describe_loss(error: Exception) -> str:
    """Say why a connection did not do what it was for."""
    if isinstance(error, BlockingIOError):  # as the kernel names the end of SO_RCVTIMEO
        return f"it has been silent for {_SILENCE} s"
    return str(error) or "the connection ended"


def _limit_silence(client: socket.socket) -> None:
    """Let reads and writes fail after a time without a byte."""
    client.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        client.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", _SILENCE, 0))


def _receive(source: int, target: memoryview) -> None:
    while target:
        length = os.readv(source, [target[:_PIECE]])
        if not length:
            raise EOFError
        target = target[length:]


def main() -> None:
    """Serve until the launcher ends this process."""
    listening = socket.socket(fileno=int(sys.argv[1]))
    node = open_memories(os.environ)
    if node is not None:
        _Server(node).serve(listening)


if __name__ == "__main__":
    main()
