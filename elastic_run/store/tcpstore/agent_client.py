"""What an agent asks of a TCPStore: several values in one exchange, of our own server in one operation.

Rules
- A server of ours says so when the connection is opened, and has operations of its own (`wire`). Torch's server is
  asked the same by torch's operations, one for each key, which are sent together.
- Two threads may share the connection: while one of them waits in `wait_look`, the other asks. What it asks goes out
  between a CANCEL_WAIT and the same wait again, in one piece: a server may answer a wait at any moment, and a client
  could not tell which answer it reads. The store has as many requests to read as over two connections.
- The thread that waits is woken by what lies in the socket, not by the other thread. So the other thread reads its own
  answer and no byte behind that: the end of the wait stays where it wakes. An end that comes before the answer is
  dropped, since the store answers the second wait with it once more.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, suppress

from elastic_run.store.errors import StoreError
from elastic_run.store.limits import MESSAGE_LIMIT
from elastic_run.store.tcpstore import wire
from elastic_run.store.tcpstore.client import StoreClient, encode_value
from elastic_run.store.tcpstore.stream_keys import count_key, floor_key, slot_key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any, TypeVar

    _T = TypeVar("_T")

__all__ = ["NOTHING", "AgentClient"]

#: Expected and desired of a `compare_set` that only looks: a value that no key has, and the answer for a missing key.
NOTHING = b"\0nothing\0"
#: Bytes of questions that go out before answers are read: with more, both sides could wait for the other to read.
_AT_ONCE = 32 * 1024
#: Seconds between looks at a key that is waited for: torch's older server (USE_LIBUV=0) wakes no client for a
#: compare-and-set.
_WAIT_AGAIN = 5.0
_CANCEL = wire.encode(wire.CANCEL_WAIT)


class AgentClient(StoreClient):
    """A connection to a TCPStore whose questions are put together, and which two threads may share.

    All methods but `wait_look`, `set_timeout` and `close` are called within `turn`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 - those of StoreClient
        super().__init__(*args, **options)
        self._lock = threading.Lock()
        self._wait = b""  # the wait that another thread is in, as it is sent
        self._wait_values = 0  # how many values come with its end
        self._cancelled = 0  # answers to CANCEL_WAIT that are to come

    def set_timeout(self, timeout: float) -> None:
        """Set the timeout in seconds, also that after which the kernel takes the server's host for dark."""
        super().set_timeout(timeout)
        self._stream.notice_darkness(timeout)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Have the connection for this thread, which must not wait if another thread does."""
        with self._lock:
            try:
                yield
            finally:
                # What has no answer of its own has called the wait off, too. Where this fails the connection is
                # closed: the other thread learns it, and what comes next here. What was asked until now has its answer.
                with suppress(StoreError):
                    self._receive(0)

    def compare_sets(self, changes: Sequence[tuple[str | bytes, str | bytes, str | bytes]]) -> list[bytes]:
        """Do several `compare_set`, given as (key, expected, desired), in this order; returns the values now."""
        messages = [
            wire.encode(wire.COMPARE_SET, self._key(key), encode_value(expected), encode_value(desired))
            for key, expected, desired in changes
        ]
        return self._ask_all(messages, self._receive_string)

    def look(self, keys: Sequence[str | bytes]) -> list[bytes | None]:
        """Return the keys' values, None for those missing, without waiting for any."""
        if self._is_extended and keys:
            self._send(wire.encode(wire.LOOK, *self._list(keys)))
            return [self._receive_present() for _ in keys]
        # GET of a missing key breaks the connection on torch's older servers; this changes nothing on any of them.
        values = self.compare_sets([(key, NOTHING, NOTHING) for key in keys])
        return [None if value == NOTHING else value for value in values]

    def get_all(self, keys: Sequence[str | bytes]) -> list[bytes | None]:
        """Return the keys' values, None for those missing, where mostly all are there: two operations at most then."""
        if not self._is_extended and keys and self.check(keys):
            self._send(wire.encode(wire.MULTI_GET, *self._list(keys)))
            return [self._receive_string() for _ in keys]
        return self.look(keys)

    def wait_look(self, keys: Sequence[str | bytes], timeout: float) -> list[bytes | None]:
        """Wait for the first of some keys.

        Args:
            keys: The keys.
            timeout: Seconds; 0 to look without waiting.

        Returns:
            The values of all of them, None for those missing: the first is missing where the time was over.
        """
        deadline = time.monotonic() + timeout
        if timeout > 0 and self._is_extended:
            wait = wire.encode(wire.WAIT_LOOK, *self._list(keys))
            values = self._await(wait, len(keys), deadline)
            return self._look_once(keys) if values is None else values
        wait = wire.encode(wire.WAIT, *self._list(keys[:1]))
        while True:
            left = deadline - time.monotonic()
            if left > 0:
                self._await(wait, 0, min(deadline, time.monotonic() + _WAIT_AGAIN))
            values = self._look_once(keys)
            if values[0] is not None or left <= 0:
                return values

    def _look_once(self, keys: Sequence[str | bytes]) -> list[bytes | None]:
        with self.turn():
            return self.look(keys)

    def _await(self, wait: bytes, values: int, deadline: float) -> list[bytes | None] | None:
        """Wait in the server, while other threads may ask it; returns the values, None where the time was over."""
        with self.turn():
            self._send(wait)
            self._wait, self._wait_values = wait, values
            self._stream.reads_ahead = False
        while True:
            left = deadline - time.monotonic()
            self._stream.wait_input(left)
            with self._lock:
                if left <= 0 or self._stream.has_data(0.0):
                    return self._end_wait(is_over=left <= 0)

    def _end_wait(self, *, is_over: bool) -> list[bytes | None] | None:
        """Take the values behind the end of a wait, or call the wait off, if its time is over, and return None."""
        self._wait = b""
        self._stream.reads_ahead = True
        if not is_over:
            self._receive(1)
            return self._receive_values()
        self._send(_CANCEL)
        return self._receive_cancelled()

    def _receive_cancelled(self) -> list[bytes | None] | None:
        """Take the answer to CANCEL_WAIT; returns the values if the wait was over just then."""
        if self._receive(1) == wire.WAIT_CANCELLED:
            return None
        values = self._receive_values()
        self._receive(1)  # the cancellation has its own answer
        return values

    def _receive_values(self) -> list[bytes | None]:
        self._room = MESSAGE_LIMIT  # the other thread's answers have taken of it
        return [self._receive_present() for _ in range(self._wait_values)]

    def append_entry(self, stream: bytes, entry: bytes) -> bool:
        """Take the next number of a stream and fill the slot of that number (`stream_keys`).

        Args:
            stream: The stream's key.
            entry: What is put into the slot.

        Returns:
            Whether the entry is in the stream; False if another node was faster, or the slot was trimmed.
        """
        if self._is_extended:
            self._send(wire.encode(wire.STREAM_APPEND, self._key(stream), encode_value(entry)))
            return self._receive_number() > 0
        number = self.add(count_key(stream), 1)
        slot = slot_key(stream, number)
        there, floor = self.compare_sets([(slot, b"", entry), (floor_key(stream), NOTHING, NOTHING)])
        if there != entry:
            return False  # it was voided: we were too slow
        if floor.isdigit() and int(floor) >= number:
            self.delete_key(slot)
            return False
        return True

    def write(self, keys: Sequence[str | bytes], values: Sequence[str | bytes]) -> None:
        """Give each key its value, and wait until the server has them.

        Raises:
            ValueError: There are not as many values as keys.
        """
        if keys:
            self.multi_set(keys, values)
            self.check(keys[:1])

    def delete_keys(self, keys: Sequence[str | bytes]) -> None:
        """Remove keys."""
        self._ask_all([wire.encode(wire.DELETE, self._key(key)) for key in keys], self._receive_number)

    def _ask_all(self, messages: Sequence[bytes], receive: Callable[[], _T]) -> list[_T]:
        answers: list[_T] = []
        batch: list[bytes] = []
        self._room = MESSAGE_LIMIT
        for message in messages:
            batch.append(message)
            if len(batch) * len(message) >= _AT_ONCE:
                answers += self._ask_batch(batch, receive)
                batch.clear()
        return answers + self._ask_batch(batch, receive)

    def _ask_batch(self, batch: Sequence[bytes], receive: Callable[[], _T]) -> list[_T]:
        if batch:
            self._send_more(b"".join(batch))
        return [receive() for _ in batch]

    def _send_more(self, data: bytes) -> None:
        if self._wait:
            self._cancelled += 1
            data = _CANCEL + data + self._wait
        super()._send_more(data)

    def _receive(self, size: int) -> bytes:
        while self._cancelled:
            self._cancelled -= 1
            self._receive_cancelled()
        return super()._receive(size)

    def _receive_present(self) -> bytes | None:
        size = wire.U64.unpack(self._receive(wire.U64.size))[0]
        return None if size == wire.MISSING else self._receive_sized(size)
