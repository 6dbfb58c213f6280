"""A TCPStore client without torch: blocking, over one socket, with the names of torch's Store.

Rules
- It speaks to our server and to torch's alike.
- One client belongs to one thread at a time: `clone` gives another thread its own. A wait occupies the connection.
- Keys get a prefix, as torch's TCPStore puts one before them; keys and values may be str (UTF-8) or bytes, values come
  back as bytes.
- What answers needn't be a store of ours: an answer has a bound, above which the client is closed and says so.
- After a reply that did not come in time the stream is out of step: the client is closed and says so.
"""

from __future__ import annotations

from elastic_run.store.errors import QueueEmptyError, StoreConnectionError, StoreTimeoutError
from elastic_run.store.limits import COUNT_LIMIT, KEY_LIMIT, MESSAGE_LIMIT, VALUE_LIMIT
from elastic_run.store.tcpstore import wire
from elastic_run.store.tcpstore.opening import open_stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from typing_extensions import Self  # for the type checker only: typing has it from Python 3.11 on

_NAMED = 5


class StoreClient:
    """A connection to a TCPStore.

    Args:
        host: The server's name or address.
        port: The server's port.
        timeout: Seconds to wait for the server to listen, for a reply, and for keys.
        prefix: What is put before each key.
        tries_again: Whether to go on trying, within the timeout, where nobody listens or answers yet.

    Raises:
        StoreConnectionError: The server can't be reached within the timeout, or isn't a TCPStore.
        StoreTimeoutError: The server took the connection and did not answer.
    """

    def __init__(
        self,
        host: str,
        port: int,
        timeout: float = 300.0,
        prefix: str = "/",
        *,
        tries_again: bool = True,
    ) -> None:
        self.host = host
        self.port = port
        self.timeout = timeout
        self._room = MESSAGE_LIMIT
        self._prefix = prefix.encode()
        self._stream = open_stream(host, port, timeout, tries_again=tries_again)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; harmless when closed."""
        self._stream.close()

    def clone(self) -> Self:
        """Return another connection to the same store, for another thread."""
        return type(self)(self.host, self.port, self.timeout, self._prefix.decode())

    def set_timeout(self, timeout: float) -> None:
        """Set the timeout in seconds."""
        self.timeout = timeout

    # --- values --------------------------------------------------------------------------------------------------
    def set(self, key: str | bytes, value: str | bytes) -> None:
        """Give a key a value. There is no reply: a refusal shows at the next operation."""
        self._send(wire.encode(wire.SET, self._key(key), encode_value(value)))

    def get(self, key: str | bytes) -> bytes:
        """Wait for a key, up to the timeout, and return its value.

        Raises:
            StoreTimeoutError: The key did not appear.
        """
        self.wait([key])
        self._send(wire.encode(wire.GET, self._key(key)))
        return self._receive_string()

    def add(self, key: str | bytes, amount: int) -> int:
        """Count a key up, from 0 when missing, and return the sum."""
        self._send(wire.encode(wire.ADD, self._key(key), amount))
        return self._receive_number()

    def compare_set(self, key: str | bytes, expected: str | bytes, desired: str | bytes) -> bytes:
        """Replace a value if it is the expected one.

        Args:
            key: The key; when missing it is only set if `expected` is empty.
            expected: The value it must have.
            desired: The value it then gets.

        Returns:
            The value now; for a missing key that stays missing, `expected`.
        """
        self._send(wire.encode(wire.COMPARE_SET, self._key(key), encode_value(expected), encode_value(desired)))
        return self._receive_string()

    def append(self, key: str | bytes, value: str | bytes) -> None:
        """Put bytes behind a key's value."""
        self._send(wire.encode(wire.APPEND, self._key(key), encode_value(value)))

    def multi_get(self, keys: Sequence[str | bytes]) -> list[bytes]:
        """Wait for keys, up to the timeout, and return their values.

        Raises:
            StoreTimeoutError: One did not appear.
        """
        self.wait(keys)
        self._send(wire.encode(wire.MULTI_GET, *self._list(keys)))
        return [self._receive_string() for _ in keys]

    def multi_set(self, keys: Sequence[str | bytes], values: Sequence[str | bytes]) -> None:
        """Give each key its value.

        Raises:
            ValueError: There are not as many values as keys.
        """
        if len(keys) != len(values):
            message = f"{len(keys)} keys, but {len(values)} values"
            raise ValueError(message)
        prefixed = self._list(keys)
        pairs = [part for key, value in zip(prefixed[1:], values, strict=True) for part in (key, encode_value(value))]
        self._send(wire.encode(wire.MULTI_SET, prefixed[0], *pairs))

    def delete_key(self, key: str | bytes) -> bool:
        """Remove a key; returns whether it was there."""
        self._send(wire.encode(wire.DELETE, self._key(key)))
        return self._receive_number() == 1

    def num_keys(self) -> int:
        """Return the number of keys, those of other prefixes too."""
        self._send(wire.encode(wire.NUM_KEYS))
        return self._receive_number()

    def list_keys(self) -> list[str]:
        """Return the keys with this client's prefix, without it."""
        self._send(wire.encode(wire.LIST_KEYS))
        keys = [self._receive_string() for _ in range(self._receive_count())]
        return [key[len(self._prefix) :].decode(errors="replace") for key in keys if key.startswith(self._prefix)]

    # --- queues --------------------------------------------------------------------------------------------------
    def queue_push(self, key: str | bytes, value: str | bytes) -> None:
        """Put a value at a queue's end."""
        self._send(wire.encode(wire.QUEUE_PUSH, self._key(key), encode_value(value)))

    def queue_pop(self, key: str | bytes, *, block: bool = True) -> bytes:
        """Take a queue's first value.

        Args:
            key: The queue.
            block: Whether to wait for one, up to the timeout.

        Returns:
            The value.

        Raises:
            QueueEmptyError: There is none, or another client was faster.
            StoreTimeoutError: None came.
        """
        if block:
            self.wait([key])
        self._send(wire.encode(wire.QUEUE_POP, self._key(key)))
        if self._receive_number() == 0:
            message = f"the queue {key!r} is empty"
            raise QueueEmptyError(message)
        return self._receive_string()

    def queue_len(self, key: str | bytes) -> int:
        """Return a queue's length."""
        self._send(wire.encode(wire.QUEUE_LEN, self._key(key)))
        return self._receive_number()

    # --- waiting -------------------------------------------------------------------------------------------------
    def check(self, keys: Sequence[str | bytes]) -> bool:
        """Whether all these keys are there."""
        self._send(wire.encode(wire.CHECK, *self._list(keys)))
        return self._receive(1) == wire.READY

    def wait(self, keys: Sequence[str | bytes], timeout: float | None = None) -> None:
        """Wait until all keys are there.

        Args:
            keys: The keys.
            timeout: Seconds; the client's timeout if None.

        Raises:
            StoreTimeoutError: One did not appear in time.
        """
        timeout = self.timeout if timeout is None else timeout
        if not self.has_come(keys, timeout):
            message = (
                f"not within {timeout} s: {', '.join(map(repr, keys[:_NAMED]))}{' …' if len(keys) > _NAMED else ''}"
            )
            raise StoreTimeoutError(message)

    def has_come(self, keys: Sequence[str | bytes], timeout: float) -> bool:
        """Wait until all keys are there.

        Args:
            keys: The keys.
            timeout: Seconds.

        Returns:
            Whether they are; False when the time was over first.
        """
        self._send(wire.encode(wire.WAIT, *self._list(keys)))
        return self._wait_over(timeout)

    def barrier(self, key: str | bytes, world_size: int, timeout: float | None = None) -> None:
        """Wait until so many have called this for the key (torch's servers know it from 2.13 on).

        Args:
            key: The barrier's name.
            world_size: The number of callers.
            timeout: Seconds; the client's timeout if None.

        Raises:
            StoreTimeoutError: They did not all come in time.
        """
        self._send(wire.encode(wire.BARRIER, self._key(key), world_size))
        timeout = self.timeout if timeout is None else timeout
        if not self._wait_over(timeout):
            message = f"not {world_size} at barrier {key!r} within {timeout} s"
            raise StoreTimeoutError(message)

    def _wait_over(self, timeout: float) -> bool:
        """Wait for a wait's end, or call it off; returns whether it was over by itself."""
        try:
            self._stream.fill(1, timeout)
        except TimeoutError:
            self._send(wire.encode(wire.CANCEL_WAIT))
            if self._receive(1) == wire.WAIT_CANCELLED:
                return False
            # The end crossed with the cancellation, which has its own reply. What was waited for is there.
            self._receive(1)
            return True
        return self._receive(1) == wire.WAIT_OVER

    # --- messages ------------------------------------------------------------------------------------------------
    def _send(self, data: bytes) -> None:
        self._room = MESSAGE_LIMIT
        self._stream.send(data, self.timeout)

    def _receive(self, size: int) -> bytes:
        return self._stream.receive(size, self.timeout)

    def _receive_number(self) -> int:
        number: int = wire.I64.unpack(self._receive(wire.I64.size))[0]
        return number

    def _receive_string(self) -> bytes:
        return self._receive_sized(wire.U64.unpack(self._receive(wire.U64.size))[0])

    def _receive_sized(self, size: int) -> bytes:
        self._take_room(size + wire.U64.size)
        return self._receive(size)

    def _receive_count(self) -> int:
        """Take the number of strings that follow, each of which has a length at least."""
        count = self._receive_number()
        self._take_room(0 if 0 <= count <= self._room // wire.U64.size else self._room + 1)
        return count

    def _take_room(self, size: int) -> None:
        """Count the bytes of an answer, before they are read."""
        if size > self._room:
            self.close()
            message = f"the store at {self.host}:{self.port} answers with more than {MESSAGE_LIMIT} bytes"
            raise StoreConnectionError(message)
        self._room -= size

    def _key(self, key: str | bytes) -> bytes:
        prefixed = self._prefix + (key.encode() if isinstance(key, str) else key)
        if len(prefixed) > KEY_LIMIT:
            message = f"a key of {len(prefixed)} bytes, over the limit of {KEY_LIMIT}"
            raise ValueError(message)
        return prefixed

    def _list(self, keys: Sequence[str | bytes]) -> list[bytes | int]:
        if len(keys) > COUNT_LIMIT:
            message = f"{len(keys)} keys at once, over the limit of {COUNT_LIMIT}"
            raise ValueError(message)
        return [len(keys), *map(self._key, keys)]


def encode_value(value: str | bytes) -> bytes:
    """Return a value as it is sent.

    Raises:
        ValueError: It is over the limit.
    """
    encoded = value.encode() if isinstance(value, str) else value
    if len(encoded) > VALUE_LIMIT:
        message = f"a value of {len(encoded)} bytes, over the limit of {VALUE_LIMIT}"
        raise ValueError(message)
    return encoded
