"""Asks agents through their control sockets, several at once, and never waits longer than a deadline.

A request is one of HTTP, and so is its answer. The path has the version of the protocol; a new request, or a new field,
is no new version. Any other client can ask as well: `curl --unix-socket PATH --data '{}' http://agent/v1/status`.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time

from elastic_run.control.socket_directory import find_sockets, pid_in_name, remove_stale
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

__all__ = ["VERSION", "Answer", "Call", "ControlError", "ask", "ask_agents", "ask_all"]

VERSION = 1
#: Bytes of an answer: the stacks of a node with 1,000 workers.
ANSWER_LIMIT = 1 << 24
#: Seconds that an agent may take to answer, unless the caller says otherwise.
WAIT_LIMIT = 5.0
_CHUNK = 1 << 18
#: struct ucred of unix(7): pid, uid, gid.
_CREDENTIALS = struct.Struct("3i")


class ControlError(Exception):
    """A request can't be answered; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request: a key of `agent.control_requests.REQUESTS`, and its arguments by name."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of one agent, or the reason why there is none.

    Args:
        path: The agent's socket.
        pid: The agent's pid in this process's pid namespace; 0 if it has none there.
        document: The answer, or None if there is an error.
        error: Why there is no answer, or an empty string.
    """

    path: str
    pid: int
    document: dict[str, Any] | None = None
    error: str = ""


def ask(path: str, call: Call, *, wait_limit: float = WAIT_LIMIT) -> dict[str, Any]:
    """Ask one agent, and wait some seconds for the whole answer.

    Raises:
        ControlError: It refuses, or doesn't answer.
    """
    answers = ask_all([path], call, wait_limit=wait_limit)
    if not answers:
        message = f"the agent at {path} has ended"
        raise ControlError(message)
    answer = answers[0]
    if answer.document is None:
        raise ControlError(answer.error)
    return answer.document


def ask_agents(environment: Mapping[str, str], call: Call, *, wait_limit: float) -> list[Answer]:
    """Ask every agent of this user on this machine; an answer comes for each agent that runs.

    Raises:
        ControlError: The directory of the sockets belongs to another user.
    """
    paths, problem = find_sockets(environment)
    if problem:
        raise ControlError(problem)
    return ask_all(paths, call, wait_limit=wait_limit)


def ask_all(paths: Sequence[str], call: Call, *, wait_limit: float = WAIT_LIMIT) -> list[Answer]:
    """Ask several agents at once, and wait some seconds for all answers together; a stale socket is removed.

    Returns:
        An answer for each agent that runs, in the order of the paths.
    """
    asked = [conversation for path in paths if (conversation := _begin(path)) is not None]
    try:
        body = json.dumps(call.arguments).encode()
        head = f"POST /v{VERSION}/{call.name} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
        for conversation in asked:
            conversation.send(head.encode() + body)
        _collect([each for each in asked if not each.error], time.monotonic() + wait_limit)
        return [each.conclude(wait_limit) for each in asked]
    finally:
        for conversation in asked:
            conversation.socket.close()


class _Conversation:
    """One connection; the queue of clients has no room for it if the agent has accepted no client for long."""

    def __init__(self, path: str, connection: socket.socket, *, is_queued: bool = True) -> None:
        self.path = path
        self.socket = connection
        self.error = ""
        self._received = bytearray()
        self.is_over = False
        self._pid = pid_in_name(path)
        if not is_queued:
            self.error = f"the agent with pid {self._pid} accepts no client (is it stopped?)"
            return
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self._pid, owner, _ = _CREDENTIALS.unpack(credentials)
        if owner != os.geteuid():
            self.error = f"{path} belongs to another user ({owner})"

    def send(self, request: bytes) -> None:
        """Send the request, which a new connection takes at once."""
        if self.error:
            return
        try:
            self.socket.sendall(request)
        except OSError as error:
            self.error = f"the agent with pid {self._pid} takes no request: {error.strerror or error}"

    def receive(self) -> None:
        """Read the bytes that have come."""
        try:
            data = self.socket.recv(_CHUNK)
        except OSError:
            data = b""
        self._received += data
        self.is_over = not data or len(self._received) > ANSWER_LIMIT

    def conclude(self, wait_limit: float) -> Answer:
        """Return the answer, or the reason why there is none."""
        if not self.error and not self.is_over:
            self.error = f"the agent with pid {self._pid} does not answer within {wait_limit:g} s (is it stopped?)"
        elif not self.error and not self._received:
            self.error = f"the agent with pid {self._pid} has ended, or has too many clients"
        if self.error:
            return Answer(self.path, self._pid, error=self.error)
        try:
            return Answer(self.path, self._pid, _read_answer(bytes(self._received)))
        except ControlError as error:
            return Answer(self.path, self._pid, error=str(error))


def _read_answer(data: bytes) -> dict[str, Any]:
    """Read an answer.

    Raises:
        ControlError: The agent refuses the request, or this is no answer.
    """
    head, _, body = data.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if words[1:2] != [b"200"]:
        raise ControlError(body.decode(errors="replace").strip() or "the agent's answer can't be read")
    if len(data) > ANSWER_LIMIT:
        message = f"the agent's answer is larger than {ANSWER_LIMIT} bytes"
        raise ControlError(message)
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        message = "the agent's answer is not a JSON object"
        raise ControlError(message)
    return answer


def _begin(path: str) -> _Conversation | None:
    """Connect; None where the agent has ended."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(0)
    try:
        connection.connect(path)
        return _Conversation(path, connection)
    except BlockingIOError:
        return _Conversation(path, connection, is_queued=False)
    except ConnectionRefusedError:
        remove_stale(path)
    except OSError:
        pass  # gone
    connection.close()
    return None


def _collect(asked: Iterable[_Conversation], deadline: float) -> None:
    waiting = {each.socket.fileno(): each for each in asked}
    poll = select.poll()
    for fd in waiting:
        poll.register(fd, select.POLLIN)
    while waiting:
        left = deadline - time.monotonic()
        ready = poll.poll(max(0.0, left) * 1000)
        for fd, _ in ready:
            waiting[fd].receive()
            if waiting[fd].is_over:
                poll.unregister(fd)
                del waiting[fd]
        if not ready and left <= 0:
            return
