"""Asks agents through their control sockets, several at once, and never waits longer than a deadline."""

from __future__ import annotations

import os
import select
import socket
import struct
import time

from elastic_run.control.socket_directory import find_sockets, pid_in_name, remove_stale
from elastic_run.control.wire import ANSWER_LIMIT, Call, ControlError, decode_answer, encode_call
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

__all__ = ["Answer", "ask", "ask_agents", "ask_all"]

#: Seconds that an agent may take to answer, unless the caller says otherwise.
WAIT_LIMIT = 5.0
_CHUNK = 1 << 18
#: struct ucred of unix(7): pid, uid, gid.
_CREDENTIALS = struct.Struct("3i")


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
    """Ask one agent.

    Args:
        path: Its socket.
        call: The request.
        wait_limit: Seconds for the whole answer.

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
    """Ask every agent of this user on this machine.

    Args:
        environment: The process's.
        call: The request.
        wait_limit: Seconds for all answers together.

    Returns:
        An answer for each agent that runs.

    Raises:
        ControlError: The directory of the sockets belongs to another user.
    """
    paths, problems = find_sockets(environment)
    if problems and not paths:
        raise ControlError(problems[0])
    return ask_all(paths, call, wait_limit=wait_limit)


def ask_all(paths: Sequence[str], call: Call, *, wait_limit: float = WAIT_LIMIT) -> list[Answer]:
    """Ask several agents at once.

    Args:
        paths: Their sockets; a stale one is removed.
        call: The request.
        wait_limit: Seconds for all answers together.

    Returns:
        An answer for each agent that runs, in the order of the paths.
    """
    asked = [conversation for path in paths if (conversation := _begin(path)) is not None]
    try:
        line = encode_call(call)
        for conversation in asked:
            conversation.send(line)
        _collect([each for each in asked if not each.error], time.monotonic() + wait_limit)
        return [each.conclude(wait_limit) for each in asked]
    finally:
        for conversation in asked:
            conversation.socket.close()


class _Conversation:
    """One connection: sends the request and keeps the answer.

    Args:
        path: The agent's socket.
        connection: The connection to it, unless the queue is full.
        is_queued: Whether the queue of clients had room; it is full if the agent has accepted no client for long.
    """

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

    def send(self, line: bytes) -> None:
        """Send the request, which a new connection takes at once."""
        if self.error:
            return
        try:
            self.socket.sendall(line)
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
            return Answer(self.path, self._pid, decode_answer(bytes(self._received)))
        except ControlError as error:
            return Answer(self.path, self._pid, error=str(error))


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
