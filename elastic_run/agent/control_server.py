"""The agent's control socket, on which commands such as `elastic-run status` ask; see `control_requests`.

- The socket is opened right after the first workers are started, or when the node begins to wait for others, so that
  commands find a job from its beginning. What answers a request is imported with the first client, or when the workers
  are past their own start: before, these imports would take a processor from the workers.
- If the socket can't be opened, the job goes on, and commands don't find it. The same holds after another program has
  removed the socket, such as a cleaner of old files in /tmp.
- Only the user's processes come here: the directory is the user's (`control.socket_directory`).
"""

from __future__ import annotations

import _socket  # `socket` builds enums when it is imported: 3 ms, while the workers start
import os

from elastic_run.agent.http_server import HttpServer
from elastic_run.control.socket_directory import SUFFIX, is_stale, make_directory, remove_stale

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from elastic_run.agent.control_requests import AgentView
    from elastic_run.agent.driver.parts import AgentParts
    from elastic_run.agent.http_server import HttpRequest

__all__ = ["ControlServer"]

#: Clients that the system lets wait.
_QUEUE = 16
#: Sockets of other agents that are checked when this agent has settled.
_LOOKED_AT = 64


class ControlServer:
    """Serves the control socket of one agent.

    Args:
        parts: The parts of the agent.
        describe_hang: Returns what other nodes need to know of this node's ranks to judge whether the job hangs.

    Attributes:
        path: Path of the socket, or an empty string.
    """

    def __init__(self, parts: AgentParts, describe_hang: Callable[[], dict[str, Any]] = dict) -> None:
        self._parts = parts
        self._describe_hang = describe_hang
        self._view: AgentView | None = None
        self._server: HttpServer | None = None
        self.path = ""

    def open(self, environment: Mapping[str, str]) -> None:
        """Open the socket, if there is a place for it."""
        path, listener = "", None
        try:
            listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
            path = os.path.join(make_directory(environment), f"{os.getpid()}-{os.urandom(2).hex()}")
            listener.bind(path)
            os.chmod(path, 0o600)
            listener.listen(_QUEUE)
            # Only now under a name that clients look for: before, it would look stale.
            os.rename(path, path + SUFFIX)
        except OSError:
            if listener is not None:
                listener.close()
            remove_stale(path)
            return
        self.path = path + SUFFIX
        self._server = HttpServer(listener, self._answer)
        self._server.serve(self._parts.loop)

    def settle(self) -> None:
        """Import what answers, answer the other nodes, and remove the sockets that killed agents have left."""
        from elastic_run.agent.control_requests import answer_question

        job = self._parts.job
        if job is not None:
            job.answer = lambda question, deliver: answer_question(self.view, question, deliver)
            for question, deliver in job.unanswered:
                job.answer(question, deliver)
        if self.path:
            directory, own = os.path.split(self.path)
            try:
                names = os.listdir(directory)
            except OSError:
                names = []  # removed
            others = [name for name in names if name.endswith(SUFFIX) and name != own]
            for name in others[:_LOOKED_AT]:
                path = os.path.join(directory, name)
                if is_stale(path):
                    remove_stale(path)

    @property
    def view(self) -> AgentView:
        """The parts of the agent that requests may read."""
        if self._view is None:
            from elastic_run.agent.control_requests import AgentView

            self._view = AgentView(self._parts, self._describe_hang)
        return self._view

    def close(self) -> None:
        """Remove the socket and end all connections; harmless when it was never opened."""
        if self._server is not None:
            self._server.close()
            self._server = None
            remove_stale(self.path)

    def _answer(self, request: HttpRequest) -> None:
        from elastic_run.agent.control_requests import answer_request

        answer_request(self.view, request)
