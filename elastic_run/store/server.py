"""A TCPStore server in plain Python, on the agent's loop: torch's own clients can't tell it from torch's.

Rules
- It serves a socket that already listens, and lives in the loop's thread. It never blocks, never looks up a name
  (torch's server asks the DNS for every peer) and starts no thread.
- Nothing that arrives can harm it: what isn't the protocol is closed without a word. What passes a bound of `wire`,
  asks for an unknown operation (silence would leave the worker waiting for ever) or makes the server fail ends its
  connection and is told to the owner, each kind once.
- Its bounds grow with the hosts whose clients have come, as the needs of a job do.
- `reset` begins a round: the keys go, the port stays.
- When descriptors run out it stops accepting until a client leaves or a second has passed: clients wait in the backlog.
  Some descriptors are left to the rest of the process. A client that would take one of these is closed.
"""

from __future__ import annotations

import _socket  # `socket` builds enums when it is imported: 3 ms, and this is on the launcher's way to its first worker
import errno
import os

from elastic_run.store import wire
from elastic_run.store.connection import Connection, Holdings
from elastic_run.store.errors import WireError
from elastic_run.store.memory_store import MemoryStore
from elastic_run.store.wire import COUNTED_HOSTS, FEW_DESCRIPTORS, RESERVED_DESCRIPTORS, measure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from elastic_run.loop import Loop, Timer

_ACCEPTS_PER_TURN = 64
_ACCEPT_AGAIN = 1.0
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class StoreServer:
    """Serves a store on listening, non-blocking sockets, which it owns; on new, empty data if none are given.

    `on_refusal` is called with the kind of a `WireError`, and with the client and what was wrong, when a client is
    closed for it, once for each kind. With `is_fed` somebody else listens, and hands connections on with `serve`.
    """

    def __init__(
        self,
        loop: Loop,
        listener: _socket.socket,
        data: MemoryStore | None = None,
        *,
        further: Sequence[_socket.socket] = (),
        on_refusal: Callable[[str, str], None] | None = None,
        is_fed: bool = False,
    ) -> None:
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._loop = loop
        self._listeners = () if is_fed else (listener, *further)
        self._data = MemoryStore() if data is None else data
        self._answers = self._make_answers()
        self._on_refusal = on_refusal
        self._refused_kinds: set[str] = set()
        self._connections: set[Connection] = set()
        self._holdings = Holdings(self._connections)
        self._hosts: set[str] = set()
        self._pause: Timer | None = None
        self._is_closed = False
        self._set_limits()
        self._watch_listeners()

    def reset(self) -> None:
        """Forget all keys and close all connections, those included that were not accepted yet; the port stays open."""
        for connection in tuple(self._connections):
            connection.close()
        for listener in self._listeners:
            while (waiting := self._accept_from(listener)) is not None:
                waiting[0].close()
        self._data.clear()
        self._refused_kinds.clear()

    def close(self) -> None:
        """Close the port and all connections; harmless when closed."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stop_pause()
        self._leave_listeners()
        for listener in self._listeners:
            listener.close()
        for connection in tuple(self._connections):
            connection.close()

    # --- connections ---------------------------------------------------------------------------------------------
    def _watch_listeners(self) -> None:
        for listener in self._listeners:
            self._watch(listener)

    def _watch(self, listener: _socket.socket) -> None:
        self._loop.add_reader(listener.fileno(), lambda: self._accept(listener))

    def _leave_listeners(self) -> None:
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())

    def _accept(self, listener: _socket.socket) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            accepted = self._accept_from(listener)
            if accepted is None:
                return
            self.serve(*accepted)

    def _accept_from(self, listener: _socket.socket) -> tuple[_socket.socket, tuple[str, int]] | None:
        try:
            # What socket.accept itself calls; the descriptor is close-on-exec.
            fd, address = listener._accept()  # type: ignore[attr-defined]  # noqa: SLF001
        except OSError as error:
            if error.errno in _OUT_OF_DESCRIPTORS:
                if self._pause is None:
                    self._leave_listeners()
                    self._pause = self._loop.call_later(_ACCEPT_AGAIN, self._resume_accepting)
                if error.errno == errno.EMFILE:
                    self._report_full("the next one")
            # Anything else is that client's: it left the backlog before its turn (ECONNABORTED), or there is none.
            return None
        socket = _socket.socket(listener.family, listener.type, listener.proto, fd)
        socket.setblocking(False)
        try:
            socket.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        except OSError:
            pass  # it is gone already; the first read will say so
        return socket, (str(address[0]), int(address[1]))

    def _resume_accepting(self) -> None:
        if self._pause is not None:
            self._stop_pause()
            self._watch_listeners()

    def _stop_pause(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None

    def serve(self, socket: _socket.socket, peer: tuple[str, int]) -> None:
        """Serve a non-blocking connection that was accepted just now, and from which nothing was read."""
        limit = os.sysconf("SC_OPEN_MAX")  # the soft limit; the module `resource` is not needed for it
        if limit >= FEW_DESCRIPTORS and socket.fileno() >= limit - RESERVED_DESCRIPTORS:
            socket.close()
            self._report_full(f"{peer[0]}:{peer[1]}")
            return
        connection = Connection(
            self._loop, socket, self._holdings, peer=peer, on_message=self._answer, on_close=self._forget
        )
        self._connections.add(connection)
        host = peer[0]
        if host == "::1" or host.removeprefix("::ffff:").startswith("127."):
            host = "loopback"  # one host, though every program of it can come from 16 million addresses
        if host not in self._hosts and len(self._hosts) < COUNTED_HOSTS:
            self._hosts.add(host)
            self._set_limits()

    def _set_limits(self) -> None:
        self._holdings.limit = self._data.limit = measure(len(self._hosts))

    def _report_full(self, peer: str) -> None:
        limit = os.sysconf("SC_OPEN_MAX")
        what = (
            f"{len(self._connections)} other connections leave too few of the {limit} file descriptors of this process"
        )
        self._report("descriptors", f"{peer}: {what}: raise the limit (ulimit -n), a job needs one for each node")

    def _report(self, kind: str, what: str) -> None:
        if self._on_refusal is not None and kind not in self._refused_kinds:
            self._refused_kinds.add(kind)
            self._on_refusal(kind, what)

    def _forget(self, connection: Connection, error: WireError | None) -> None:
        self._connections.discard(connection)
        if connection.waiter is not None:
            self._data.cancel(connection.waiter)
        self._pass_queue_on(connection)
        self._resume_accepting()
        if error is not None:
            self._report(error.kind, f"{connection}: {error}")

    # --- answers -------------------------------------------------------------------------------------------------
    def _answer(self, connection: Connection, operation: int, fields: list[bytes | int]) -> None:
        if connection.woken_by is not None and operation != wire.QUEUE_POP:
            self._pass_queue_on(connection)
        try:
            self._answers[operation](connection, *fields)
        except ValueError as error:
            raise WireError(str(error)) from error

    def _make_answers(self) -> Mapping[int, Callable[..., None]]:
        data = self._data
        return {
            wire.VALIDATE: _validate,
            wire.PING: lambda connection, nonce: connection.reply(wire.U32.pack(nonce)),
            wire.SET: lambda _, key, value: data.set(key, value),
            wire.COMPARE_SET: lambda connection, *fields: _reply_parts(connection, (data.compare_set(*fields),)),
            wire.GET: lambda connection, key: _reply_parts(connection, data.get_parts(key)),
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
        size, limit = self._data.measure(keys), self._data.limit
        if size > limit:
            message = f"a reply of {size} bytes, over the limit of {limit}"
            raise WireError(message, "reply")
        for key in keys:
            _reply_parts(connection, self._data.get_parts(key))

    def _list_keys(self, connection: Connection) -> None:
        keys = self._data.list_keys()
        _reply_number(connection, len(keys))
        for key in keys:
            _reply_parts(connection, (key,))

    def _queue_pop(self, connection: Connection, key: bytes) -> None:
        if connection.woken_by == key:
            connection.woken_by = None
        self._pass_queue_on(connection)
        length, value = self._data.queue_pop(key)
        _reply_number(connection, length)
        if length:
            _reply_parts(connection, (value,))

    def _pass_queue_on(self, connection: Connection) -> None:
        """Let the next client have what this one was woken for and did not take."""
        if connection.woken_by is not None:
            queue, connection.woken_by = connection.woken_by, None
            self._data.pass_on(queue)

    def _wait(self, connection: Connection, *keys: bytes) -> None:
        _refuse_second_wait(connection)
        connection.waiter = self._data.on_key(keys, lambda: _end_wait(connection))
        if connection.waiter is None:
            connection.reply(wire.WAIT_OVER)

    def _barrier(self, connection: Connection, key: bytes, world_size: int) -> None:
        _refuse_second_wait(connection)
        connection.waiter = self._data.barrier(key, world_size, lambda: _end_wait(connection))
        if connection.waiter is None:
            connection.reply(wire.WAIT_OVER)

    def _cancel_wait(self, connection: Connection) -> None:
        if connection.waiter is not None:
            self._data.cancel(connection.waiter)
            connection.waiter = None
        connection.reply(wire.WAIT_CANCELLED)


def _end_wait(connection: Connection) -> None:
    """Answer a client whose wait is over. Another client is served meanwhile, which must not suffer from it."""
    if connection.waiter is None:
        return
    connection.woken_by = connection.waiter.queue
    connection.waiter = None

    def answer() -> None:
        connection.reply(wire.WAIT_OVER)
        connection.flush()
        connection.account()

    connection.serve(answer)


def _validate(_: Connection, magic: int) -> None:
    if magic != wire.MAGIC:
        message = f"magic number {magic:#x}"
        raise WireError(message)


def _refuse_second_wait(connection: Connection) -> None:
    if connection.waiter is not None:
        message = "a wait within a wait"
        raise WireError(message)


def _reply_number(connection: Connection, number: int) -> None:
    connection.reply(wire.I64.pack(number))


def _reply_parts(connection: Connection, parts: Sequence[bytes]) -> None:
    """Reply with a string that is kept in pieces; none are an empty string."""
    connection.reply(wire.U64.pack(sum(map(len, parts))))
    for part in parts:
        connection.reply(part)
