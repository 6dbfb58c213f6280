"""Listening sockets on a loop: each connection is accepted and handed on, and none while descriptors run out.

Clients that come meanwhile wait in the kernel's backlog.
"""

from __future__ import annotations

import _socket  # `socket` builds enums when it is imported: 3 ms, and this is on the launcher's way to its first worker
import errno

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elastic_run.loop import Loop, Timer

_ACCEPTS_PER_TURN = 64
_ACCEPT_AGAIN = 1.0
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Accepts connections on listening, non-blocking sockets, which it owns.

    `on_connection` gets each one, which is non-blocking, and its peer. `on_full` gets the error if descriptors run out.
    """

    def __init__(
        self,
        loop: Loop,
        listeners: Sequence[_socket.socket],
        *,
        on_connection: Callable[[_socket.socket, tuple[str, int]], None],
        on_full: Callable[[OSError], None],
    ) -> None:
        self._loop = loop
        self._listeners = tuple(listeners)
        self._on_connection = on_connection
        self._on_full = on_full
        self._pause: Timer | None = None
        self._watch_all()

    def pause(self) -> None:
        """Accept nothing for a second, or until `resume`."""
        if self._pause is None:
            self._leave_all()
            self._pause = self._loop.call_later(_ACCEPT_AGAIN, self.resume)

    def resume(self) -> None:
        """Accept again; harmless without a pause."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
            self._watch_all()

    def drain(self) -> None:
        """Close the connections that were not accepted yet."""
        for listener in self._listeners:
            while (waiting := self._accept_from(listener)) is not None:
                waiting[0].close()

    def close(self) -> None:
        """Close the sockets; harmless when closed."""
        if self._pause is not None:
            self._pause.cancel()
        self._leave_all()
        for listener in self._listeners:
            listener.close()
        self._listeners = ()

    def _watch_all(self) -> None:
        for listener in self._listeners:
            self._watch(listener)

    def _watch(self, listener: _socket.socket) -> None:
        self._loop.add_reader(listener.fileno(), lambda: self._accept(listener))

    def _leave_all(self) -> None:
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())

    def _accept(self, listener: _socket.socket) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            accepted = None if self._pause is not None else self._accept_from(listener)
            if accepted is None:
                return
            self._on_connection(*accepted)

    def _accept_from(self, listener: _socket.socket) -> tuple[_socket.socket, tuple[str, int]] | None:
        try:
            # What socket.accept itself calls; the descriptor is close-on-exec.
            fd, address = listener._accept()  # type: ignore[attr-defined]  # noqa: SLF001
        except OSError as error:
            if error.errno in _OUT_OF_DESCRIPTORS:
                self._on_full(error)
            # Anything else is that client's: it left the backlog before its turn (ECONNABORTED), or there is none.
            return None
        connected = _socket.socket(listener.family, listener.type, listener.proto, fd)
        connected.setblocking(False)
        return connected, (str(address[0]), int(address[1]))
