"""Gives other nodes the state that this node keeps, and copies it to the next node; the launcher runs it.

    python -m elastic_run.worker.kept_server DESCRIPTOR

Each connection begins with the challenge of `multiprocessing.connection`: the secret is made by the launcher, and only
the workers of the job learn it, through their process group. Then come requests:

- read: bytes of one worker's part of a generation. A restart reads what other nodes hold.
- copy: a worker of this node asks to have its generation sent to another node's server.
- take: the generation of another node's worker comes, into a memory for copies.

It is a process of its own, so that the launcher's loop never moves these bytes. Its answers are short texts, of which
the good ones are in `_GOOD`; any other is the reason why not.
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
    from elastic_run.worker.kept_memory import KeptMemory

__all__ = ["StateClient", "StatePlace", "describe_loss"]

#: Seconds without a byte after which the other side counts as lost, and connections at a time.
_SILENCE, _MOST_CONNECTIONS = 20, 256
_LONGEST_REQUEST, _PIECE = 1 << 16, 1 << 22
_GOOD = frozenset(("ready", "received", "done"))


@dataclass(frozen=True, slots=True)
class StatePlace:
    """Where a node's state is served.

    Args:
        node: The name of its memories.
        address: Of the node, for other nodes.
        port: Of the server.
        secret: Its secret.
    """

    node: str
    address: str
    port: int
    secret: bytes


class StateClient:
    """A connection to the server of a node's state.

    Args:
        place: The server.
        is_patient: Wait for answers without a limit, as a worker does whose copy is sent.

    Raises:
        OSError: It can't be reached.
        AuthenticationError: It is of another job.
    """

    def __init__(self, place: StatePlace, *, is_patient: bool = False) -> None:
        client = socket.create_connection((place.address, place.port), timeout=_SILENCE)
        _limit_silence(client)
        self._connection = Connection(client.detach())
        answer_challenge(self._connection, place.secret)
        deliver_challenge(self._connection, place.secret)
        if is_patient:
            with socket.socket(fileno=os.dup(self._connection.fileno())) as same:
                _limit_silence(same, 0)

    def read(self, memory: int, record: Record, position: int, target: memoryview) -> None:
        """Read bytes of a generation into a buffer.

        Args:
            memory: The number of the node's memory.
            record: The record of the part.
            position: The first byte, from the beginning of the half.
            target: Where they go.

        Raises:
            KeptStateError: It is not there any more.
            OSError: The connection is lost.
            EOFError: Ditto.
        """
        key = record.generation.key
        self._ask({"do": "read", "memory": memory, "key": key, "position": position, "length": len(target)})
        _receive(self._connection.fileno(), target)
        _expect_good(self._connection)

    def copy(self, memory: int, record: Record, kept: str, to: StatePlace) -> None:
        """Have the node's server send a generation to another node's; return when it is there.

        Args:
            memory: The number of the node's memory.
            record: The record of the part.
            kept: The key of the generation that must not be replaced over there; "" for none.
            to: The other node.

        Raises:
            KeptStateError: The other node can't take it; the message says why.
            OSError: The node's own server is gone.
            EOFError: Ditto.
        """
        where = [to.node, to.address, to.port, to.secret.hex()]
        self._ask({"do": "copy", "memory": memory, "key": record.generation.key, "kept": kept, "to": where})

    def send(self, memory: KeptMemory, number: int, record: Record, kept: str) -> None:
        """Send a generation of a memory to this server, which takes it into its memory for copies with that number.

        Raises:
            KeptStateError: The node can't take it, or a save has replaced it meanwhile.
            OSError: The connection is lost.
            EOFError: Ditto.
        """
        self._ask({"do": "take", "memory": number, "record": encode(record).hex(), "kept": kept})
        _send(self._connection.fileno(), memory.part(record.start, record.length))
        _expect_good(self._connection)
        # A save may have begun to write there.
        if memory.find(record.generation.key) != record:
            message = "a later save has replaced it"
            raise KeptStateError(message)
        self._ask({"do": "commit"})

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _ask(self, request: dict[str, Any]) -> None:
        self._connection.send_bytes(json.dumps(request).encode())
        _expect_good(self._connection)


class _Server:
    """Answers the requests of one connection after the other, each connection in a thread."""

    def __init__(self, memories: NodeMemories) -> None:
        self._node = memories
        self._is_taking = [threading.Lock() for _ in memories.memories]
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
                client.close()
                while True:
                    request = json.loads(connection.recv_bytes(_LONGEST_REQUEST))
                    if request["do"] == "read":
                        self._read(connection, request)
                    elif request["do"] == "take":
                        self._take(connection, request)
                    elif request["do"] == "copy":
                        self._copy(connection, request)
        except (OSError, EOFError, AuthenticationError, ValueError, KeyError, IndexError, TypeError):
            pass  # the other side is gone, or a stranger: it sees the end of the connection
        finally:
            self._strangers.pop(client, None)
            self._places.release()

    def _find(self, request: dict[str, Any]) -> tuple[KeptMemory, Record | None]:
        memory = self._node.memories[request["memory"]]
        return memory, memory.find(request["key"])

    def _read(self, connection: Connection[Any, Any], request: dict[str, Any]) -> None:
        memory, record = self._find(request)
        position, length = request["position"], request["length"]
        if record is None or not 0 <= position <= position + length <= record.length:
            connection.send_bytes(b"later saves have replaced it")
            return
        connection.send_bytes(b"ready")
        _send(connection.fileno(), memory.part(record.start + position, length))
        is_there = memory.find(request["key"]) == record
        connection.send_bytes(b"done" if is_there else b"later saves have replaced it")

    def _copy(self, connection: Connection[Any, Any], request: dict[str, Any]) -> None:
        memory, record = self._find(request)
        node, address, port, secret = request["to"]
        try:
            if record is None:
                connection.send_bytes(b"a later save has replaced it")
                return
            client = StateClient(StatePlace(node, address, port, bytes.fromhex(secret)))
            try:
                client.send(memory, request["memory"], record, request["kept"])
            finally:
                client.close()
        except (OSError, EOFError, AuthenticationError, KeptStateError) as error:
            connection.send_bytes(f"the node at {address}: {describe_loss(error)}".encode()[:_LONGEST_REQUEST])
            return
        connection.send_bytes(b"done")

    def _take(self, connection: Connection[Any, Any], request: dict[str, Any]) -> None:
        record, number = decode(bytes.fromhex(request["record"])), self._node.workers + request["memory"]
        if record is None or not self._node.workers <= number < len(self._node.memories):
            connection.send_bytes(b"it has no memory for this copy (--keep-state-copies, --nproc-per-node)")
            return
        memory = self._node.memories[number]
        if record.length > memory.room:
            text = (
                f"the copy has {record.length / 1e6:,.1f} MB, and --keep-state leaves {memory.room / 1e6:,.1f} MB to it"
            )
            connection.send_bytes(text.encode())
            return
        with self._is_taking[number]:
            whole = memory.find(request["kept"])
            half = choose_half(memory.read_records(), None if whole is None else whole.generation)
            memory.clear(half)
            connection.send_bytes(b"ready")
            start, _ = half_of(memory.size, half)
            _receive(connection.fileno(), memory.part(start, record.length))
            connection.send_bytes(b"received")
            if json.loads(connection.recv_bytes(_LONGEST_REQUEST))["do"] == "commit":
                memory.write_record(half, replace(record, start=start))
        connection.send_bytes(b"done")


def _expect_good(connection: Connection[Any, Any]) -> None:
    """Read an answer.

    Raises:
        KeptStateError: It is a reason why not.
    """
    answer = connection.recv_bytes(_LONGEST_REQUEST).decode(errors="replace")
    if answer not in _GOOD:
        raise KeptStateError(answer)


def describe_loss(error: Exception) -> str:
    """Say why a connection did not do what it was for."""
    if isinstance(error, BlockingIOError):  # as the kernel names the end of SO_RCVTIMEO
        return f"it has been silent for {_SILENCE} s"
    return str(error) or "the connection ended"


def _limit_silence(client: socket.socket, seconds: int = _SILENCE) -> None:
    """Let reads and writes fail after a time without a byte; 0 is for ever."""
    client.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        client.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", seconds, 0))


def _send(to: int, content: memoryview) -> None:
    while content:
        content = content[os.write(to, content[:_PIECE]) :]


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
