"""One client's socket on the server's side: bytes in, messages out, replies back.

Rules
- One recv and, as a rule, one send per readiness event, whatever number of messages came in.
- A client that doesn't read its replies stops being read: once a megabyte is queued for it no further message is
  looked at until the queue is empty. So what a client can make the server hold is bounded by one reply.
- Small replies are gathered, large values queued by reference and sent with sendmsg, so nothing large is copied.
- A client that breaks the protocol or its connection is closed; that harms nobody else and is not worth a word.
"""

from __future__ import annotations

import _socket  # `socket` builds enums when it is imported: 3 ms, and this is on the launcher's way to its first worker

from elastic_run.store.wire import Decoder, UnprovedError, WireError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elastic_run.loop import Loop
    from elastic_run.store.answers import Answers
    from elastic_run.store.groups import Member
    from elastic_run.store.memory import Waiter
    from elastic_run.store.wire import Layout

_RECEIVE = 64 * 1024
_RECEIVE_MOST = 1024 * 1024
#: Queued bytes over which a client isn't read on.
_HIGH_WATER = 1024 * 1024
#: Replies up to this are copied together: that is cheaper than a vector of many small pieces.
_SMALL = 2048
_IOV_MAX = 512
#: The program we run in may have restored the default action of SIGPIPE, which is death.
_NO_SIGPIPE = getattr(_socket, "MSG_NOSIGNAL", 0)


class Connection:
    """A client of the server.

    Args:
        loop: The loop whose thread this lives in.
        socket: The accepted socket, non-blocking.
        space: What the client sees.
        on_message: Called with (connection, operation, fields); may raise `WireError` to close the connection.
        on_close: Called once with the connection, and with the error where the client broke the protocol.

    Attributes:
        on_message: See above; may be exchanged.
        space: What the client sees; whoever exchanges it sees to what the client waits for.
        member: The client's part in its process's groups, where they are kept apart.
        waiter: The wait that the client is in, or None.
        woken_by: The queue that ended the client's wait, until its next message shows whether it takes the value.
        allowance: Bytes that the client may still send before it proves the token; None for any number.
    """

    __slots__ = (
        "_decoder",
        "_fd",
        "_gathered",
        "_is_held",
        "_loop",
        "_on_close",
        "_peer",
        "_queue",
        "_queued",
        "_socket",
        "allowance",
        "is_closed",
        "member",
        "on_message",
        "space",
        "waiter",
        "woken_by",
    )

    def __init__(
        self,
        loop: Loop,
        socket: _socket.socket,
        space: Answers,
        *,
        on_message: Callable[[Connection, int, list[bytes | int]], None],
        on_close: Callable[[Connection, WireError | None], None],
    ) -> None:
        self.member: Member | None = None
        self.waiter: Waiter | None = None
        self.woken_by: bytes | None = None
        self.is_closed = False
        self.allowance: int | None = None
        self._peer = ""
        self._loop = loop
        self._socket = socket
        self._fd = socket.fileno()
        self.on_message = on_message
        self.space = space
        self._on_close = on_close
        self._decoder = Decoder()
        self._gathered = bytearray()
        self._queue: list[bytes | bytearray | memoryview] = []
        self._queued = 0
        self._is_held = False
        loop.add_reader(self._fd, self._receive)

    def reply(self, data: bytes) -> None:
        """Queue a part of a reply; it goes out at the end of the event, or with `flush`."""
        self._queued += len(data)
        if len(data) <= _SMALL:
            self._gathered += data
        else:
            self._enqueue_gathered()
            self._queue.append(data)

    def allow(self, layouts: Mapping[int, Layout], most_bytes: int | None) -> None:
        """Take these messages from now on.

        Args:
            layouts: `wire.LAYOUTS` or `wire.UNPROVED`.
            most_bytes: Bytes that may come in all; None for any number.
        """
        self._decoder.allow(layouts)
        self.allowance = most_bytes

    @property
    def peer(self) -> str:
        """The client's address and port, for messages; also after it was closed for an error."""
        if not self._peer:
            try:
                host, port = self._socket.getpeername()[:2]
            except OSError:
                return "its address is unknown"  # it is gone already
            self._peer = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return self._peer

    def close(self, error: WireError | None = None) -> None:
        """Close the socket; harmless when it is closed."""
        if self.is_closed:
            return
        self.is_closed = True
        if error is not None:
            self._peer = self.peer
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._socket.close()
        self._queue.clear()
        self._on_close(self, error)

    # --- in ------------------------------------------------------------------------------------------------------
    def _receive(self) -> None:
        most = min(max(self._decoder.missing, _RECEIVE), _RECEIVE_MOST) if self.allowance is None else self.allowance
        try:
            data = self._socket.recv(most)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close(None if most else UnprovedError("it has sent too much without a proof of the token"))
            return
        if self.allowance is not None:
            self.allowance -= len(data)
        self._decoder.feed(data)
        self._answer()

    def _answer(self) -> None:
        decoder = self._decoder
        try:
            while self._queued <= _HIGH_WATER and (operation := decoder.next_operation()) >= 0:
                self.on_message(self, operation, decoder.fields)
                if self.is_closed:
                    return
        except WireError as error:
            # What came before the error was in order, and its replies are due.
            self.flush()
            self.close(error)
            return
        if not decoder.is_drained:
            self._hold()
        self.flush()

    def _hold(self) -> None:
        """Read no further until the client has read its replies."""
        self._is_held = True
        self._loop.remove_reader(self._fd)
        self._loop.add_writer(self._fd, self._send_on)

    # --- out -----------------------------------------------------------------------------------------------------
    def flush(self) -> None:
        """Send what is queued, as far as the socket takes it."""
        if not self._queued or self.is_closed:
            return
        self._enqueue_gathered()
        try:
            sent = self._send()
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
            self._queue.clear()

    def _send(self) -> int:
        queue = self._queue
        if len(queue) == 1:
            return self._socket.send(queue[0], _NO_SIGPIPE)
        return self._socket.sendmsg(queue[:_IOV_MAX], (), _NO_SIGPIPE)

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
        self.flush()
        if self.is_closed or self._queued:
            return
        self._loop.remove_writer(self._fd)
        if self._is_held:
            self._is_held = False
            self._loop.add_reader(self._fd, self._receive)
            self._answer()
