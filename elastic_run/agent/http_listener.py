"""A port at which an agent answers requests over HTTP: for `--health-port` and `--metrics-port`.

The port is taken before anything is started, so that a port in use is bad input. Each request is
read by a thread of its own, which asks the agent's loop: so a hanging loop is noticed. Only the path of a request is
used. At most `_MOST` connections are open. A new one ends the one that has been silent for longest: otherwise a
stranger that sends a byte now and then would keep the port from the kubelet, which would end the pod.
"""

from __future__ import annotations

import contextlib
import socket
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from elastic_run.loop import Loop

    T = TypeVar("T")

__all__ = ["HttpListener", "ask_loop"]

#: Seconds that the loop may take to answer, and a client to ask.
_WAIT_LIMIT = 5.0
_MOST = 16
#: Seconds after a client that can't be accepted.
_PAUSE = 0.1
#: Seconds for the thread of a connection that was ended to notice it.
_NOTICE = 2.0


class HttpListener:
    """Listens at one port.

    Args:
        port: The port, on all interfaces, since the clients are outside of a pod; 0 takes a free port.
        name: Name of the thread.

    Attributes:
        port: The port at which it listens.

    Raises:
        OSError: The port can't be taken.
    """

    def __init__(self, port: int, name: str) -> None:
        try:
            self._socket = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except ValueError:  # a machine that has no IPv6 at all
            self._socket = socket.create_server(("", port))
        self.port: int = self._socket.getsockname()[1]
        self._name = name
        self._is_closed = threading.Event()
        self._slots = threading.BoundedSemaphore(_MOST)
        #: Connections that have not asked yet, the oldest first.
        self._silent: dict[socket.socket, None] = {}
        self._lock = threading.Lock()  # of `_silent`: no connection is closed while its end is sent

    def serve(self, reply_to: Callable[[str], tuple[int, str, bytes]]) -> None:
        """Begin to answer.

        Args:
            reply_to: Takes the path of a request; returns status, content type and body. Called in any thread.
        """
        threading.Thread(target=self._accept, args=(reply_to,), name=self._name, daemon=True).start()

    def close(self) -> None:
        """Give the port back; the thread that accepts ends."""
        self._is_closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()

    def _accept(self, reply_to: Callable[[str], tuple[int, str, bytes]]) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._is_closed.wait(_PAUSE):
                    return
                continue  # the client has gone already, or there is no descriptor for it
            if not self._has_slot() or not self._start_thread(connection, reply_to):
                connection.close()

    def _has_slot(self) -> bool:
        if self._slots.acquire(blocking=False):
            return True
        with self._lock:
            oldest = next(iter(self._silent), None)
            if oldest is None:
                return False
            with contextlib.suppress(OSError):  # the client has gone meanwhile
                oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread, which gives the slot back
        return self._slots.acquire(timeout=_NOTICE)

    def _start_thread(self, connection: socket.socket, reply_to: Callable[[str], tuple[int, str, bytes]]) -> bool:
        self._silent[connection] = None
        try:
            threading.Thread(target=self._answer, args=(connection, reply_to), daemon=True).start()
        except RuntimeError:  # no thread can be started
            self._note_asked(connection)
            self._slots.release()
            return False
        return True

    def _answer(self, connection: socket.socket, reply_to: Callable[[str], tuple[int, str, bytes]]) -> None:
        def reply(path: str) -> tuple[int, str, bytes]:
            self._note_asked(connection)
            return reply_to(path)

        try:
            from elastic_run.agent.http_requests import answer

            with connection, contextlib.suppress(OSError):
                connection.settimeout(_WAIT_LIMIT)
                try:
                    answer(connection, reply)
                finally:
                    self._note_asked(connection)
        finally:
            self._slots.release()

    def _note_asked(self, connection: socket.socket) -> None:
        with self._lock:
            self._silent.pop(connection, None)


def ask_loop(loop: Loop, find: Callable[[], T]) -> T | None:
    """Call a function in the loop's thread.

    Returns:
        Its value, or None where the loop doesn't answer in time.
    """
    is_answered = threading.Event()
    found: list[T] = []

    def answer() -> None:
        found.append(find())
        is_answered.set()

    loop.call_soon_threadsafe(answer)
    is_answered.wait(_WAIT_LIMIT)
    return found[0] if found else None
