"""One client's connection to the agent's control socket.

Rules
- A client has `_WAIT_LIMIT` seconds to send its request, and as many to take the answer. A client that is slower than
  that, or sends more than a request, loses its connection.
- An error in a request's function is told to the client; it never ends the job.
"""

from __future__ import annotations

import socket

from elastic_run.agent.agent_view import Request
from elastic_run.agent.control_requests import perform
from elastic_run.control import wire
from elastic_run.utils.exceptions import describe_exception

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.agent.agent_view import AgentView
    from elastic_run.loop import Loop, Timer

__all__ = ["ControlConnection"]

#: Seconds for a client to ask, and to take the answer.
_WAIT_LIMIT = 10.0
#: Seconds after which the answer to a request is given up, whatever it waits for.
_ANSWER_WAIT = 120.0
_CHUNK = 1 << 16


class ControlConnection:
    """One connection: reads a request, has it answered, writes the answer, ends.

    Args:
        loop: The agent's loop.
        fd: The connection's descriptor, which this object closes.
        view: The parts of the agent that the request may read.
        on_closed: Called when the connection has ended.
    """

    def __init__(self, loop: Loop, fd: int, view: AgentView, on_closed: Callable[[ControlConnection], None]) -> None:
        self._loop = loop
        self._socket = connection = socket.socket(fileno=fd)
        connection.settimeout(0)
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
