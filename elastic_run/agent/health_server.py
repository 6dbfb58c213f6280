"""Answers to health checks of a cluster over HTTP (`--health-port`): is the agent alive, do the workers run.

| path | 200 | 503 |
|---|---|---|
| ``/healthz`` | the agent's loop answers | it has not answered for `_PATIENCE` seconds |
| ``/readyz`` | the workers of this node run | they don't: the nodes meet, or workers are being stopped or have ended |

The body is the agent's state. The port is taken before anything is started, so that a port in use is bad input. Threads
of their own read the requests and ask the loop; a loop that hangs is what ``/healthz`` is for. A request chooses one of
two paths, and nothing else of it is used. A stranger can hold `_MOST` connections, each for `_PATIENCE` seconds.
"""

from __future__ import annotations

import contextlib
import socket
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.loop import Loop

__all__ = ["HealthServer"]

#: Seconds that the loop may take to answer, and a client to ask.
_PATIENCE = 5.0
_MOST = 16
#: Seconds after a client that can't be accepted.
_PAUSE = 0.1


class HealthServer:
    """Serves the health checks of one agent.

    Args:
        port: Where to listen, on all interfaces, for the kubelet asks from outside of the pod. 0 takes a free port.

    Attributes:
        port: Where it listens.

    Raises:
        OSError: The port can't be taken.
    """

    def __init__(self, port: int) -> None:
        try:
            self._socket = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except ValueError:  # a machine that has no IPv6 at all
            self._socket = socket.create_server(("", port))
        self.port: int = self._socket.getsockname()[1]
        self._is_closed = threading.Event()
        self._slots = threading.BoundedSemaphore(_MOST)

    def serve(self, loop: Loop, find_state: Callable[[], str]) -> None:
        """Begin to answer.

        Args:
            loop: The agent's.
            find_state: Returns the agent's state, such as ``running``; called in the loop's thread.
        """

        def ask() -> str | None:
            return _ask(loop, find_state)

        threading.Thread(target=self._accept, args=(ask,), name="health checks", daemon=True).start()

    def close(self) -> None:
        """Give the port back; the thread that accepts ends."""
        self._is_closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()

    def _accept(self, ask: Callable[[], str | None]) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._is_closed.wait(_PAUSE):
                    return
                continue  # the client has gone already, or there is no descriptor for it
            with contextlib.suppress(RuntimeError):  # no thread can be started
                if self._slots.acquire(blocking=False):
                    threading.Thread(target=self._answer, args=(connection, ask), daemon=True).start()
                    continue
            connection.close()

    def _answer(self, connection: socket.socket, ask: Callable[[], str | None]) -> None:
        try:
            from elastic_run.agent.health_requests import answer  # noqa: PLC0415 - its imports come after the workers

            with connection, contextlib.suppress(OSError):
                connection.settimeout(_PATIENCE)
                answer(connection, ask)
        finally:
            self._slots.release()


def _ask(loop: Loop, find_state: Callable[[], str]) -> str | None:
    """Return the agent's state, or None where its loop doesn't answer in time."""
    is_answered = threading.Event()
    found: list[str] = []

    def answer() -> None:
        found.append(find_state())
        is_answered.set()

    loop.call_soon_threadsafe(answer)
    is_answered.wait(_PATIENCE)
    return found[0] if found else None
