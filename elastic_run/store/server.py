"""A TCPStore server in plain Python, on the agent's loop: torch's own clients can't tell it from torch's.

- It lives in the loop's thread. It never blocks, never looks up a name (torch's server asks the DNS for every peer) and
  starts no thread.
- Nothing that arrives can harm it: what isn't the protocol is closed without a word. What passes a bound of `wire`,
  asks for an unknown operation (silence would leave the worker waiting for ever) or makes the server fail ends its
  connection and is told to the owner, each kind once.
- Its bounds grow with the hosts whose clients have come, as the needs of a job do.
- When descriptors run out it accepts none until a client leaves or a second has passed. Some descriptors are left to
  the rest of the process: a client that would take one of these is closed.
"""

from __future__ import annotations

import _socket  # `socket` builds enums when it is imported: 3 ms, and this is on the launcher's way to its first worker
import errno
import os

from elastic_run.store import wire
from elastic_run.store.accepting import Acceptor
from elastic_run.store.connection import Connection, Holdings
from elastic_run.store.errors import WireError
from elastic_run.store.memory_store import MemoryStore
from elastic_run.store.wire import COUNTED_HOSTS, FEW_DESCRIPTORS, RESERVED_DESCRIPTORS, measure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from elastic_run.loop import Loop


class StoreServer:
    """Serves a store on listening, non-blocking sockets, which it owns; with `is_fed` they come by `serve`.

    `on_refusal` gets the kind of a `WireError`, and the client and what was wrong, once for each kind.
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
        self._data = MemoryStore() if data is None else data
        self._answers = self._make_answers()
        self._on_refusal = on_refusal
        self._refused_kinds: set[str] = set()
        self._connections: set[Connection] = set()
        self._holdings = Holdings(self._connections)
        self._hosts: set[str] = set()
        self._set_limits()
        listeners = () if is_fed else (listener, *further)
        for one in listeners:
            one.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)  # the kernel hands it on to each connection
        self._acceptor = Acceptor(loop, listeners, on_connection=self.serve, on_full=self._pause)

    def reset(self) -> None:
        """Forget all keys and close all connections, those included that were not accepted yet; the port stays open."""
        for connection in tuple(self._connections):
            connection.close()
        self._acceptor.drain()
        self._data.clear()
        self._refused_kinds.clear()

    def close(self) -> None:
        """Close the port and all connections; harmless when closed."""
        self._acceptor.close()
        for connection in tuple(self._connections):
            connection.close()

    # --- connections ---------------------------------------------------------------------------------------------
    def _pause(self, error: OSError) -> None:
        self._acceptor.pause()
        if error.errno == errno.EMFILE:
            self._report_full("the next one")

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
        self._acceptor.resume()
        if error is not None:
            self._report(error.kind, f"{connection}: {error}")

    # --- answers -------------------------------------------------------------------------------------------------
    def _answer(self, connection: Connection, operation: int, fields: list[bytes | int]) -> None:
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
        length, value = self._data.queue_pop(key)
        _reply_number(connection, length)
        if length:
            _reply_parts(connection, (value,))

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
