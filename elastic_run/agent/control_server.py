"""The agent's control socket: serves requests of the user's own commands, such as ``elastic-run status``.

Rules
- Everything runs in the agent's loop, without a thread, and without a timer while there is no request.
- The socket is opened when the workers are started, or when the node has waited for others for a while: no worker
  waits for it. If the socket can't be opened, the job goes on, and commands don't find it.
- A client has `_WAIT_LIMIT` seconds to send its request, and as many to take the answer. A client that is slower than
  that, or sends more than a request, loses its connection. `_MOST` connections are served at a time.
- An error in a request's function is told to the client; it never ends the job.
- If another program removes the socket's file, such as a cleaner of old files in /tmp, another socket is opened. The
  clients that are connected get their answers.
- Only the user's processes come here: the directory is the user's (`control.socket_directory`).
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from elastic_run.agent.removal_watch import RemovalWatch
from elastic_run.control import wire
from elastic_run.control.socket_directory import SUFFIX, is_stale, make_directory, remove_stale
from elastic_run.utils.exceptions import describe_exception

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from elastic_run.agent.agent_view import AgentView
    from elastic_run.loop import Loop, Timer

__all__ = ["ControlServer"]

#: Seconds for a client to ask, and to take the answer.
_WAIT_LIMIT = 10.0
#: Seconds after which the answer to a request is given up, whatever it waits for.
_ANSWER_WAIT = 120.0
_MOST = 16
#: Seconds without accepting, when there is no descriptor for a client.
_PAUSE = 1.0
_CHUNK = 1 << 16
#: Sockets of other agents that are checked when this agent opens its own.
_LOOKED_AT = 64


class ControlServer:
    """Serves the control socket of one agent.

    Args:
        loop: The agent's loop.
        view: The parts of the agent that requests may read.

    Attributes:
        path: Path of the socket, or an empty string.
    """

    def __init__(self, loop: Loop, view: AgentView) -> None:
        self._loop = loop
        self._view = view
        self._socket: socket.socket | None = None
        self._clients: set[_Client] = set()
        self._removal: RemovalWatch | None = None
        self.path = ""

    def open(self, environment: Mapping[str, str]) -> None:
        """Open the socket, if it is not open yet.

        Args:
            environment: This process's environment.

        Raises:
            OSError: There is no directory for it.
        """
        if self._socket is not None:
            return
        directory = make_directory(environment)
        _remove_stale_sockets(directory)
        path = os.path.join(directory, f"{os.getpid()}-{os.urandom(2).hex()}")
        self._socket = listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(path)
            os.chmod(path, 0o600)
            listener.listen(_MOST)
            listener.settimeout(0)
            # Only now under a name that clients look for: before, it would look stale.
            self.path = path + SUFFIX
            os.rename(path, self.path)
        except OSError:
            self._close_socket()
            remove_stale(path)
            raise
        self._loop.add_reader(listener.fileno(), self._accept)
        self._removal = RemovalWatch(self._loop, self.path, lambda: self._open_again(environment))

    def _open_again(self, environment: Mapping[str, str]) -> None:
        self._close_socket()
        with suppress(OSError):  # commands do not find the job any more
            self.open(environment)

    def close(self) -> None:
        """Remove the socket and end all connections; harmless when it was never opened."""
        self._close_socket()
        for client in [*self._clients]:
            client.close()

    def _close_socket(self) -> None:
        listener, self._socket = self._socket, None
        if listener is None:
            return
        if self._removal is not None:
            self._removal.close()
        self._loop.remove_reader(listener.fileno())
        listener.close()
        if self.path:
            remove_stale(self.path)

    def _accept(self) -> None:
        if self._socket is None:
            return
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError:
            self._pause_accepting()
            self._loop.call_later(_PAUSE, self._resume_accepting)
            return
        connection.settimeout(0)
        self._clients.add(_Client(self._loop, connection, self._view, self._forget))
        if len(self._clients) >= _MOST:
            self._pause_accepting()

    def _forget(self, client: _Client) -> None:
        self._clients.discard(client)
        self._resume_accepting()

    def _pause_accepting(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())

    def _resume_accepting(self) -> None:
        if self._socket is not None and len(self._clients) < _MOST:
            self._loop.add_reader(self._socket.fileno(), self._accept)


class _Client:
    """One connection: reads a request, has it answered, writes the answer, ends."""

    def __init__(
        self, loop: Loop, connection: socket.socket, view: AgentView, on_closed: Callable[[_Client], None]
    ) -> None:
        self._loop = loop
        self._socket = connection
        self._view = view
        self._on_closed = on_closed
        self._is_open = True
        self._received = bytearray()
        self._unsent = memoryview(b"")
        self._timer: Timer = loop.call_later(_WAIT_LIMIT, self.close)
        loop.add_reader(connection.fileno(), self._read)

    def close(self) -> None:
        """End the connection; harmless when it has ended."""
        if not self._is_open:
            return
        self._is_open = False
        self._timer.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._on_closed(self)

    def _read(self) -> None:
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or self._has_asked() or len(self._received) + len(data) > wire.REQUEST_LIMIT:
            self.close()  # gone, or more than one request
            return
        self._received += data
        if self._has_asked():
            self._answer()

    def _has_asked(self) -> bool:
        return self._received.endswith(b"\n")

    def _answer(self) -> None:
        from elastic_run.agent.agent_view import Request  # noqa: PLC0415 - ditto
        from elastic_run.agent.control_requests import perform  # noqa: PLC0415 - only when somebody asks

        self._wait(_ANSWER_WAIT)
        request = Request(self._view, self._reply)
        try:
            perform(request, wire.decode_call(bytes(self._received)))
        except wire.ControlError as error:
            self._send(wire.encode_error(str(error)))
        except Exception as error:  # noqa: BLE001 - a defect in one request must not end the job
            self._send(wire.encode_error(f"internal error: {describe_exception(error)} (please report it)"))

    def _reply(self, answer: dict[str, Any]) -> None:
        self._send(wire.encode_answer(answer))

    def _send(self, line: bytes) -> None:
        if not self._is_open or self._unsent:
            return
        self._wait(_WAIT_LIMIT)
        self._unsent = memoryview(line)
        self._write()

    def _write(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.close()
            return
        self._unsent = self._unsent[sent:]
        if not self._unsent:
            self.close()
        else:
            self._loop.add_writer(self._socket.fileno(), self._write)

    def _wait(self, seconds: float) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self.close)


def _remove_stale_sockets(directory: str) -> None:
    """Remove the sockets that killed agents have left."""
    names = [name for name in os.listdir(directory) if name.endswith(SUFFIX)]
    for name in names[:_LOOKED_AT]:
        path = os.path.join(directory, name)
        if is_stale(path):
            remove_stale(path)
