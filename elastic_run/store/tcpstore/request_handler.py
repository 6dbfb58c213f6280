"""What a server answers: every operation of the protocol, and the waits it may end in."""

from __future__ import annotations

from elastic_run.store.errors import LimitError, WireError
from elastic_run.store.tcpstore import wire
from elastic_run.store.tcpstore.memory_store import MemoryStore

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from elastic_run.store.tcpstore.connection import Connection


class RequestHandler:
    """Answers clients from a store.

    Args:
        data: The store; a new, empty one if None.

    Attributes:
        data: The store.
    """

    def __init__(self, data: MemoryStore | None = None) -> None:
        self.data = MemoryStore() if data is None else data
        self._by_operation = self._make_answers()

    def answer(self, connection: Connection, operation: int, fields: list[bytes | int]) -> None:
        """Do what a client asks for, and queue the reply.

        Raises:
            WireError: The client asks for what can't be.
        """
        if connection.woken_by is not None and operation != wire.QUEUE_POP:
            self._settle_queue(connection)
        try:
            self._by_operation[operation](connection, *fields)
        except ValueError as error:
            raise WireError(str(error)) from error

    def forget(self, connection: Connection) -> None:
        """Drop what a client was waiting for."""
        if connection.waiter is not None:
            self.data.cancel(connection.waiter)
        self._settle_queue(connection)

    def _make_answers(self) -> Mapping[int, Callable[..., None]]:
        data = self.data
        return {
            wire.VALIDATE: _validate,
            wire.PING: lambda connection, nonce: connection.reply(wire.U32.pack(nonce)),
            wire.SET: lambda _, key, value: data.set(key, value),
            wire.COMPARE_SET: lambda connection, *fields: _reply_string(connection, data.compare_set(*fields)),
            wire.GET: self._get,
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

    def _get(self, connection: Connection, key: bytes) -> None:
        _reply_parts(connection, self.data.get_parts(key))

    def _multi_get(self, connection: Connection, *keys: bytes) -> None:
        self._check_reply(keys)
        for key in keys:
            _reply_parts(connection, self.data.get_parts(key))

    def _check_reply(self, keys: Sequence[bytes]) -> None:
        size, limit = self.data.measure(keys), self.data.limit
        if size > limit:
            message = f"a reply of {size} bytes, over the limit of {limit}"
            raise LimitError(message, "reply")

    def _list_keys(self, connection: Connection) -> None:
        keys = self.data.list_keys()
        _reply_number(connection, len(keys))
        for key in keys:
            _reply_string(connection, key)

    def _queue_pop(self, connection: Connection, key: bytes) -> None:
        if connection.woken_by == key:
            connection.woken_by = None
        self._settle_queue(connection)
        length, value = self.data.queue_pop(key)
        _reply_number(connection, length)
        if length:
            _reply_string(connection, value)

    # --- waits ---------------------------------------------------------------------------------------------------
    def _wait(self, connection: Connection, *keys: bytes) -> None:
        _refuse_second_wait(connection)
        connection.waiter = self.data.on_key(keys, lambda: _end_wait(connection))
        if connection.waiter is None:
            connection.reply(wire.WAIT_OVER)

    def _barrier(self, connection: Connection, key: bytes, world_size: int) -> None:
        _refuse_second_wait(connection)
        connection.waiter = self.data.barrier(key, world_size, lambda: _end_wait(connection))
        if connection.waiter is None:
            connection.reply(wire.WAIT_OVER)

    def _cancel_wait(self, connection: Connection) -> None:
        if connection.waiter is not None:
            self.data.cancel(connection.waiter)
            connection.waiter = None
        connection.reply(wire.WAIT_CANCELLED)

    def _settle_queue(self, connection: Connection) -> None:
        """Let the next have what this one was woken for and did not take."""
        if connection.woken_by is not None:
            queue, connection.woken_by = connection.woken_by, None
            self.data.pass_on(queue)


def _end_wait(connection: Connection) -> None:
    """Tell a client that its wait is over."""
    if connection.waiter is None:
        return
    connection.woken_by = connection.waiter.queue
    connection.waiter = None
    try:
        connection.reply(wire.WAIT_OVER)
        connection.flush()
        connection.account()
    except WireError as error:
        connection.close(error)
    except Exception as error:  # noqa: BLE001 - called while another client is served, which must not suffer from it
        connection.abort(error)


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


def _reply_string(connection: Connection, value: bytes) -> None:
    connection.reply(wire.U64.pack(len(value)))
    connection.reply(value)


def _reply_parts(connection: Connection, parts: Sequence[bytes]) -> None:
    """Reply with a value that is kept in pieces; none are an empty value."""
    connection.reply(wire.U64.pack(sum(map(len, parts))))
    for part in parts:
        connection.reply(part)
