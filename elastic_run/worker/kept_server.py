"""Gives other nodes the state that this node keeps, and fetches copies of theirs; the launcher runs it.

Each connection begins with the challenge of `multiprocessing.connection`: only the workers of the job learn the
launcher's secret, through their process group. `read` asks for bytes of one worker's part of a generation. A
worker of another node sends `fetch` when it has saved: this node then reads a copy from that node's server, not faster
than `--keep-state-bandwidth`. An answer is a short text: one of `_GOOD`, or the reason of a failure.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import struct
import sys
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from elastic_run.core.kept_generations import decode, encode
from elastic_run.records import dataclass, replace
from elastic_run.worker.kept_memory import KeptStateError, NodeMemories, open_memories

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from elastic_run.core.kept_generations import Record

#: What a client raises when the other side is gone, is of another job, or has not what it was asked for.
LOSSES = (OSError, EOFError, AuthenticationError, KeptStateError)
#: Seconds without a byte after which the other side counts as lost, and connections at a time.
_SILENCE, _MOST_CONNECTIONS = 20, 256
_LONGEST_REQUEST, _PIECE = 1 << 16, 1 << 24
_WAIT, _GOOD, _REPLACED = "wait", frozenset(("ready", "done")), "later saves have replaced it"
#: Of <asm-generic/socket.h>: the kernel sends no faster than so many bytes a second, without a limit if all bits are 1.
_SO_MAX_PACING_RATE, _NO_LIMIT = 47, (1 << 8 * struct.calcsize("@L")) - 1


@dataclass(frozen=True, slots=True)
class StatePlace:
    """Where a node's state is served."""

    node: str  # The name of its memories
    address: str
    port: int
    secret: str


def find_place(node: NodeMemories) -> StatePlace:
    """Return where the state of this node is served."""
    address = _find_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])) if node.port else ""
    return StatePlace(node.name, address, node.port, node.secret)


@functools.cache  # each save needs it, and a name server may be slow
def _find_address(host: str, port: int) -> str:
    """Return the address by which this node reaches the workers' store: others reach this node there."""
    place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(*place[:3]) as unused:
        unused.connect(place[4])  # sends nothing
        address = str(unused.getsockname()[0])
    # The store's own node: Debian gives a machine's name 127.0.1.1 in its own /etc/hosts, and only there.
    return host if address.startswith("127.") or address == "::1" else address


def find_next(places: Iterable[StatePlace], name: str) -> StatePlace | None:
    """Return the node that keeps the copies of a node's state, the next one by rank; None if there is one node."""
    nodes = {place.node: place for place in places}
    names = list(nodes)
    following = names[(names.index(name) + 1) % len(names)]
    return None if following == name else nodes[following]


def copy_to(place: StatePlace, node: NodeMemories, kept: str, record: Record) -> None:
    """Have another node copy a generation of this worker, and keep the one with a key; a line says so if it can't."""
    try:
        with contextlib.closing(StateClient(place)) as client:
            client.fetch(node.own, record, kept, find_place(node))
    except LOSSES as error:
        step = record.generation.label or record.generation.number
        what = f"rank {record.rank} has no copy of {step} on another node: the node at {place.address}"
        sys.stderr.write(f"elastic-run: kept state: {what}: {describe_loss(error)}\n")


class StateClient:
    """A connection to the server of a node's state; each method may raise any of `LOSSES`."""

    def __init__(self, place: StatePlace) -> None:
        client = socket.create_connection((place.address, place.port), timeout=_SILENCE)
        _set_up(client)
        self._connection = Connection(client.detach())
        answer_challenge(self._connection, place.secret.encode())
        deliver_challenge(self._connection, place.secret.encode())

    def read(self, memory: int, record: Record, position: int, target: memoryview, *, rate: int = 0) -> None:
        """Read bytes of a generation into a buffer, at most so many a second unless the rate is 0."""
        where = {"memory": memory, "key": record.generation.key, "position": position, "length": len(target)}
        self._ask({"do": "read", "rate": rate, **where})
        while target:
            received = os.readv(self._connection.fileno(), [target[:_PIECE]])
            if not received:
                raise EOFError
            target = target[received:]
        self._wait_good()

    def fetch(self, memory: int, record: Record, kept: str, source: StatePlace) -> None:
        """Let the node copy a generation from another node, and keep the one with a key; return when it is whole."""
        where = [source.node, source.address, source.port, source.secret]
        self._ask({"do": "fetch", "memory": memory, "record": encode(record).decode(), "kept": kept, "source": where})

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
        self._places = threading.BoundedSemaphore(min(_MOST_CONNECTIONS, os.sysconf("SC_OPEN_MAX") // 4))
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
                self._places.acquire()
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            with client, Connection(os.dup(client.fileno())) as connection:
                _set_up(client)
                self._strangers[client] = None
                deliver_challenge(connection, self._node.secret.encode())
                answer_challenge(connection, self._node.secret.encode())
                del self._strangers[client]
                while True:
                    request = json.loads(connection.recv_bytes(_LONGEST_REQUEST))
                    if request["do"] == "read":
                        rate = struct.pack("@L", request["rate"] or _NO_LIMIT)
                        client.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)
                        answer = self._read(connection, request)
                    else:
                        answer = self._fetch(connection, request)
                    connection.send_bytes(answer.encode()[:_LONGEST_REQUEST])
        except (*LOSSES, ValueError, KeyError, IndexError, TypeError):
            pass  # the other side is gone, or a stranger: it sees the end of the connection
        finally:
            self._strangers.pop(client, None)
            self._places.release()

    def _read(self, connection: Connection[Any, Any], request: dict[str, Any]) -> str:
        memory, position, length = self._node.memories[request["memory"]], request["position"], request["length"]
        record = memory.find(request["key"])
        if record is None or not 0 <= position <= position + length <= record.length:
            return _REPLACED
        connection.send_bytes(b"ready")
        content = memory.part(record.start + position, length)
        while content:
            content = content[os.write(connection.fileno(), content[:_PIECE]) :]
        return "done" if memory.find(request["key"]) == record else _REPLACED

    def _fetch(self, connection: Connection[Any, Any], request: dict[str, Any]) -> str:
        record, number = decode(request["record"].encode()), self._node.workers + request["memory"]
        source = StatePlace(*request["source"])
        if record is None or not self._node.workers <= number < len(self._node.memories):
            return "it has no memory for this copy (--keep-state-copies, --nproc-per-node)"
        memory = self._node.memories[number]
        if record.length > memory.room:
            return f"the copy has {record.length / 1e6:,.1f} MB: --keep-state leaves {memory.room / 1e6:,.1f} MB to it"
        try:
            client = StateClient(source)
            if number in self._sources:  # the node that it reads from may be lost, and is silent for 20 s then
                self._sources[number].cancel()
            self._sources[number] = client
            with self._is_fetching[number], contextlib.closing(client):
                start = memory.begin(request["kept"])
                for position in range(0, record.length, _PIECE):
                    piece = memory.part(start + position, min(_PIECE, record.length - position))
                    client.read(request["memory"], record, position, piece, rate=self._node.rate)
                    connection.send_bytes(_WAIT.encode())
                # Each piece is of this generation: its key was there behind each of them, and no other one has it.
                memory.write_record(start, replace(record, start=start))
        except LOSSES as error:
            return f"the node at {source.address}: {describe_loss(error)}"
        return "done"


def describe_loss(error: Exception) -> str:
    """Say why a connection did not do what it was for."""
    if isinstance(error, BlockingIOError):  # as the kernel names the end of SO_RCVTIMEO
        return f"it has been silent for {_SILENCE} s"
    return str(error) or "the connection ended"


def _set_up(client: socket.socket) -> None:
    """Set two limits on a connection.

    A read or write fails if no byte has moved for a time. The kernel sends a short answer at once, and does not hold it
    back until the other side has acknowledged the bytes before.
    """
    client.settimeout(None)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        client.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", _SILENCE, 0))


def main() -> None:
    """Serve until the launcher ends this process."""
    listening = socket.socket(fileno=int(sys.argv[1]))
    node = open_memories(os.environ)
    if node is not None:
        _Server(node).serve(listening)


if __name__ == "__main__":
    main()
