"""A TCPStore server in plain Python, on the agent's loop: torch's own clients can't tell it from torch's.

Rules
- It serves a socket that already listens, and lives in the loop's thread. It never blocks, never looks up a name
  (torch's server asks the DNS for every peer) and starts no thread.
- Nothing that arrives can harm it: what isn't the protocol is closed without a word; what is too long is refused.
- An operation of the protocol that it doesn't know is told to the owner, once, and closes that client's connection:
  silence would leave the worker waiting for ever.
- When descriptors run out it stops accepting until a client leaves or a second has passed: clients wait in the backlog.
"""

from __future__ import annotations

import _socket  # `socket` builds enums when it is imported: 3 ms, and this is on the launcher's way to its first worker
import errno

from elastic_run.store import wire
from elastic_run.store.connection import Connection
from elastic_run.store.groups import Member, ProcessGroups
from elastic_run.store.listener import PortTakenError, open_listener, raise_descriptor_limit
from elastic_run.store.memory import MemoryStore

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elastic_run.loop import Loop, Timer

__all__ = ["PortTakenError", "StoreServer", "open_listener", "raise_descriptor_limit"]

_ACCEPTS_PER_TURN = 64
_ACCEPT_AGAIN = 1.0
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class StoreServer:
    """Serves a store on a socket.

    Args:
        loop: The loop whose thread this lives in.
        listener: A listening, non-blocking socket; the server owns it from now on.
        data: What to serve; a new, empty store if None.
        on_unknown_operation: Called once, with the operation's number, when a client asks for one that we don't know.
        separates_groups: Whether process groups that a worker forms one after another are kept apart (see `groups`).
    """

    def __init__(
        self,
        loop: Loop,
        listener: _socket.socket,
        data: MemoryStore | None = None,
        on_unknown_operation: Callable[[int], None] | None = None,
        *,
        separates_groups: bool = False,
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._data = MemoryStore() if data is None else data
        self._on_unknown_operation = on_unknown_operation
        self._groups = ProcessGroups(self._data) if separates_groups else None
        self._has_told = False
        self._connections: set[Connection] = set()
        self._pause: Timer | None = None
        self._is_closed = False
        self._answers = self._make_answers()
        self.address: tuple[str, int] = listener.getsockname()[:2]
        loop.add_reader(listener.fileno(), self._accept)

    def reset(self) -> None:
        """Forget all keys and close all connections, those not yet accepted too; the port stays open."""
        self._close_connections()
        while (waiting := self._take_connection()) is not None:
            waiting.close()
        self._data.clear()
        if self._groups is not None:
            self._groups.clear()
        self._has_told = False

    def close(self) -> None:
        """Close the port and all connections; harmless when closed."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stop_pause()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        self._close_connections()

    def _close_connections(self) -> None:
        for connection in tuple(self._connections):
            connection.close()

    # --- connections ---------------------------------------------------------------------------------------------
    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            socket = self._take_connection()
            if socket is None:
                return
            connection = Connection(self._loop, socket, self._answer, self._forget)
            if self._groups is not None:
                connection.member = Member(_peer_host(socket))
            self._connections.add(connection)

    def _take_connection(self) -> _socket.socket | None:
        try:
            # What socket.accept itself calls; the descriptor is close-on-exec.
            fd, _ = self._listener._accept()  # type: ignore[attr-defined]  # noqa: SLF001
        except OSError as error:
            if error.errno in _OUT_OF_DESCRIPTORS:
                self._pause_accepting()
            # Anything else is that client's: it left the backlog before its turn (ECONNABORTED), or there is none.
            return None
        socket = _socket.socket(self._listener.family, self._listener.type, self._listener.proto, fd)
        socket.setblocking(False)  # noqa: FBT003 - the socket's own signature
        try:
            socket.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        except OSError:
            pass  # it is gone already; the first read will say so
        return socket

    def _pause_accepting(self) -> None:
        if self._pause is None:
            self._loop.remove_reader(self._listener.fileno())
            self._pause = self._loop.call_later(_ACCEPT_AGAIN, self._resume_accepting)

    def _resume_accepting(self) -> None:
        if self._pause is not None:
            self._stop_pause()
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _stop_pause(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None

    def _forget(self, connection: Connection, error: wire.WireError | None) -> None:
        self._connections.discard(connection)
        if connection.waiter is not None:
            self._data.cancel(connection.waiter)
        self._settle_queue(connection)
        if self._groups is not None and connection.member is not None:
            self._groups.leave(connection.member)
        self._resume_accepting()
        if isinstance(error, wire.UnknownOperationError) and self._on_unknown_operation and not self._has_told:
            self._has_told = True
            self._on_unknown_operation(error.operation)

    # --- answers -------------------------------------------------------------------------------------------------
    def _answer(self, connection: Connection, operation: int, fields: list[bytes | int]) -> None:
        if connection.woken_by is not None and operation != wire.QUEUE_POP:
            self._settle_queue(connection)
        if self._groups is not None and connection.member is not None and connection.member.number != 1:
            fields = self._groups.rename(connection.member, operation, fields)
        try:
            self._answers[operation](connection, *fields)
        except ValueError as error:
            raise wire.WireError(str(error)) from error

    def _make_answers(self) -> Mapping[int, Callable[..., None]]:
        data = self._data
        return {
            wire.VALIDATE: _validate,
            wire.PING: lambda connection, nonce: connection.reply(wire.U32.pack(nonce)),
            wire.SET: lambda _, key, value: data.set(key, value),
            wire.COMPARE_SET: lambda connection, *fields: _reply_string(connection, data.compare_set(*fields)),
            wire.GET: lambda connection, key: _reply_string(connection, data.get(key) or b""),
            wire.ADD: lambda connection, key, amount: _reply_number(connection, data.add(key, amount)),
            wire.CHECK: lambda connection, *keys: connection.reply(wire.READY if data.check(keys) else wire.NOT_READY),
            wire.WAIT: self._wait,
            wire.NUM_KEYS: lambda connection: _reply_number(connection, data.num_keys()),
            wire.DELETE: lambda connection, key: _reply_number(connection, data.delete_key(key)),
            wire.APPEND: lambda _, key, value: data.append(key, value),
            wire.MULTI_GET: self._multi_get,
            wire.MULTI_SET: lambda _, *pairs: data.multi_set(pairs[::2], pairs[1::2]),
            wire.CANCEL_WAIT: self._cancel_wait,
            wire.QUEUE_PUSH: lambda _, key, value: data.queue_push(key, value),
            wire.QUEUE_POP: self._queue_pop,
            wire.QUEUE_LEN: lambda connection, key: _reply_number(connection, data.queue_len(key)),
            wire.LIST_KEYS: self._list_keys,
            wire.BARRIER: self._barrier,
        }

    def _multi_get(self, connection: Connection, *keys: bytes) -> None:
        for value in self._data.multi_get(keys):
            _reply_string(connection, value or b"")

    def _list_keys(self, connection: Connection) -> None:
        keys = self._data.list_keys()
        _reply_number(connection, len(keys))
        for key in keys:
            _reply_string(connection, key)

    def _queue_pop(self, connection: Connection, key: bytes) -> None:
        if connection.woken_by == key:
            connection.woken_by = None
        self._settle_queue(connection)
        length, value = self._data.queue_pop(key)
        _reply_number(connection, length)
        if length:
            _reply_string(connection, value)

    # --- waits ---------------------------------------------------------------------------------------------------
    def _wait(self, connection: Connection, *keys: bytes) -> None:
        _refuse_second_wait(connection)
        connection.waiter = self._data.on_key(keys, lambda: self._end_wait(connection))
        if connection.waiter is None:
            connection.reply(wire.WAIT_OVER)

    def _barrier(self, connection: Connection, key: bytes, world_size: int) -> None:
        _refuse_second_wait(connection)
        connection.waiter = self._data.barrier(key, world_size, lambda: self._end_wait(connection))
        if connection.waiter is None:
            connection.reply(wire.WAIT_OVER)

    def _end_wait(self, connection: Connection) -> None:
        if connection.waiter is not None:
            connection.woken_by = connection.waiter.queue
            connection.waiter = None
            connection.reply(wire.WAIT_OVER)
            connection.flush()

    def _cancel_wait(self, connection: Connection) -> None:
        if connection.waiter is not None:
            self._data.cancel(connection.waiter)
            connection.waiter = None
        connection.reply(wire.WAIT_CANCELLED)

    def _settle_queue(self, connection: Connection) -> None:
        """Let the next have what this one was woken for and did not take."""
        if connection.woken_by is not None:
            queue, connection.woken_by = connection.woken_by, None
            self._data.pass_on(queue)


def _peer_host(socket: _socket.socket) -> str:
    try:
        return str(socket.getpeername()[0])
    except OSError:
        return ""  # it is gone already


def _validate(_: Connection, magic: int) -> None:
    if magic != wire.MAGIC:
        message = f"magic number {magic:#x}"
        raise wire.WireError(message)


def _refuse_second_wait(connection: Connection) -> None:
    if connection.waiter is not None:
        message = "a wait within a wait"
        raise wire.WireError(message)


def _reply_number(connection: Connection, number: int) -> None:
    connection.reply(wire.I64.pack(number))


def _reply_string(connection: Connection, value: bytes) -> None:
    connection.reply(wire.U64.pack(len(value)))
    connection.reply(value)
