"""One client's socket on the server's side: bytes in, messages out, replies back.

- One recv and, as a rule, one send per readiness event, whatever number of messages came in.
- A client that doesn't read its replies stops being read: once a megabyte is queued for it no further message is
  looked at until the queue is empty. So what a client can make the server hold is bounded by one reply.
- Small replies are gathered, large values queued by reference and sent with sendmsg, so nothing large is copied.
- A client that breaks the protocol or its connection is closed, and so is one whose service fails, be it that memory
  runs out. That harms no other client.
"""

from __future__ import annotations

import _socket  # `socket` builds enums when it is imported: 3 ms, and this is on the launcher's way to its first worker

from elastic_run.store.errors import DEFECT, WireError
from elastic_run.store.wire import PIECE_COST, Decoder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.loop import Loop
    from elastic_run.store.memory_store import Waiter

_RECEIVE = 64 * 1024
_RECEIVE_MOST = 1024 * 1024
#: Queued bytes over which a client isn't read on.
_HIGH_WATER = 1024 * 1024
#: Replies up to this are copied together: that is cheaper than a vector of many small pieces.
_SMALL = 2048
_IOV_MAX = 512
#: The program we run in may have restored the default action of SIGPIPE, which is death.
_NO_SIGPIPE = getattr(_socket, "MSG_NOSIGNAL", 0)


class Holdings:
    """Bytes that all connections of a server hold: unfinished messages, waits, and replies that were copied."""

    def __init__(self, connections: set[Connection]) -> None:
        self.connections = connections
        self.limit = 0
        self.total = 0


class Connection:
    """A client of the server, on an accepted, non-blocking socket; `peer` is its address and port.

    `on_message` is called with each operation and its fields, and may raise `WireError` to close the connection;
    `on_close` once, with the error that ended it.
    """

    def __init__(
        self,
        loop: Loop,
        socket: _socket.socket,
        holdings: Holdings,
        *,
        peer: tuple[str, int],
        on_message: Callable[[Connection, int, list[bytes | int]], None],
        on_close: Callable[[Connection, WireError | None], None],
    ) -> None:
        self.waiter: Waiter | None = None  # the wait that the client is in
        self.is_closed = False
        self.held = 0  # bytes that it holds, as its holdings have them
        self._peer = peer
        self._holdings = holdings
        self._loop = loop
        self._socket = socket
        self._fd = socket.fileno()
        self._on_message = on_message
        self._on_close = on_close
        self._decoder = Decoder()
        self._gathered = bytearray()
        self._queue: list[bytes | bytearray | memoryview] = []
        self._queued = 0
        self._copied = 0
        self._is_held = False
        loop.add_reader(self._fd, self._receive)

    def __str__(self) -> str:
        """Return the client's address and port, for messages."""
        host = self._peer[0].removeprefix("::ffff:")  # an IPv4 client on a socket for both
        return f"[{host}]:{self._peer[1]}" if ":" in host else f"{host}:{self._peer[1]}"

    def close(self, error: WireError | None = None) -> None:
        """Close the socket; harmless when it is closed."""
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._socket.close()
        self._queue.clear()
        self._holdings.total -= self.held
        self.held = 0
        self._on_close(self, error)

    # --- in ------------------------------------------------------------------------------------------------------
    def _receive(self) -> None:
        self.serve(self._receive_messages)

    def serve(self, step: Callable[[], None]) -> None:
        """Do something for the client. Whatever goes wrong in it ends this connection, and no other is harmed."""
        try:
            step()
        except WireError as error:
            self.close(error)
        except Exception as error:  # noqa: BLE001 - a defect, or no memory: the other clients are served on
            defect = WireError(f"serving it failed: {type(error).__name__}: {error}", DEFECT)
            defect.__cause__ = error
            try:
                self.close(defect)
            except MemoryError:
                pass  # there is no room to say so; the socket is closed, or the kernel closes it with the client

    def _receive_messages(self) -> None:
        try:
            data = self._socket.recv(min(max(self._decoder.missing, _RECEIVE), _RECEIVE_MOST))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._decoder.feed(data)
        self._answer()

    def _answer(self) -> None:
        decoder = self._decoder
        try:
            while self._queued <= _HIGH_WATER and (operation := decoder.next_operation()) >= 0:
                self._on_message(self, operation, decoder.fields)
                if self.is_closed:
                    return
        except WireError:
            self.flush()  # what came before the error was in order, and its replies are due
            raise
        if decoder.unread:
            # No further message is read until the client has read its replies.
            self._is_held = True
            self._loop.remove_reader(self._fd)
            self._loop.add_writer(self._fd, self._send_on)
        self.flush()
        self.account()

    def account(self) -> None:
        """Count what the connection holds now. If all together hold too much, the one that holds most is closed.

        Raises `WireError` if this is that one.
        """
        if self.is_closed or not (self._decoder.held or self._queued or self.held or self.waiter):
            return
        held = self._decoder.held + self._decoder.unread
        if self._queued:
            held += self._copied + PIECE_COST * len(self._queue)
        if self.waiter is not None:
            held += self.waiter.cost
        holdings, more = self._holdings, held - self.held
        holdings.total += more
        self.held = held
        if more > 0 and holdings.total > holdings.limit:
            total = f"unfinished messages, waits and unread replies of all clients pass {holdings.limit} bytes"
            largest = max(holdings.connections, key=lambda one: one.held)
            error = WireError(f"{total}; this client has {largest.held}", "connections")
            if largest is self:
                raise error
            largest.close(error)

    # --- out -----------------------------------------------------------------------------------------------------
    def reply(self, data: bytes) -> None:
        """Queue a part of a reply; it goes out at the end of the event, or with `flush`."""
        self._queued += len(data)
        if len(data) <= _SMALL:
            self._copied += len(data)
            self._gathered += data
        else:
            self._enqueue_gathered()
            self._queue.append(data)

    def flush(self) -> None:
        """Send what is queued, as far as the socket takes it."""
        if not self._queued or self.is_closed:
            return
        self._enqueue_gathered()
        queue = self._queue
        try:
            if len(queue) == 1:
                sent = self._socket.send(queue[0], _NO_SIGPIPE)
            else:
                sent = self._socket.sendmsg(queue[:_IOV_MAX], (), _NO_SIGPIPE)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.close()
            return
        self._queued -= sent
        if self._queued:
            self._drop(sent)
            self._loop.add_writer(self._fd, self._send_on)
        else:
            queue.clear()
            self._copied = 0

    def _enqueue_gathered(self) -> None:
        if self._gathered:
            self._queue.append(self._gathered)
            self._gathered = bytearray()

    def _drop(self, sent: int) -> None:
        """Forget the first bytes of the queue."""
        whole = 0
        for part in self._queue:
            if sent < len(part):
                break
            sent -= len(part)
            whole += 1
        del self._queue[:whole]
        if sent:
            self._queue[0] = memoryview(self._queue[0])[sent:]

    def _send_on(self) -> None:
        self.serve(self._send_queue)

    def _send_queue(self) -> None:
        self.flush()
        if self.is_closed or self._queued:
            return
        self.account()
        self._loop.remove_writer(self._fd)
        if self._is_held:
            self._is_held = False
            self._loop.add_reader(self._fd, self._receive)
            self._answer()
