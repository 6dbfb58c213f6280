"""The agent's control socket, on which commands such as `elastic-run status` ask; see `control_requests`.

- The socket is opened right after the first workers are started, or when the node begins to wait for others. The module
  that answers is imported with the first client, or when the workers are past their own start: before, its imports
  would take a processor from the workers.
- If the socket can't be opened, or another program removes it, the job goes on, and commands don't find it.
- Only the user's processes come here: the directory is the user's (`control.socket_directory`).
"""

from __future__ import annotations

import _socket  # `socket` builds enums when it is imported: 3 ms, while the workers start
import os

from elastic_run.agent.http_server import HttpServer
from elastic_run.control.socket_directory import SUFFIX, make_directory, remove_stale

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic_run.agent.control_requests import ControlRequests
    from elastic_run.agent.driver import AgentParts
    from elastic_run.agent.driver.watches import Watches
    from elastic_run.agent.http_server import HttpRequest


class ControlServer:
    """Serves the control socket of one agent; `watches` tell whether its ranks hang, or are slow."""

    def __init__(self, context: AgentParts, watches: Watches | None = None) -> None:
        self._context = context
        self._watches = watches
        self._requests: ControlRequests | None = None
        self.server: HttpServer | None = None
        self.path = ""

    def open(self, environment: Mapping[str, str]) -> None:
        """Open the socket, if there is a place for it."""
        path, listener = "", None
        try:
            listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
            path = os.path.join(make_directory(environment), f"{os.getpid()}-{os.urandom(2).hex()}")
            listener.bind(path)
            os.chmod(path, 0o600)
            listener.listen(16)
            # Only now under a name that clients look for: before, it would look stale.
            os.rename(path, path + SUFFIX)
        except OSError:
            if listener is not None:
                listener.close()
            remove_stale(path)
            return
        self.path = path + SUFFIX
        self.server = HttpServer(listener)
        self.server.serve(self._context.loop, self._answer)

    def settle(self) -> None:
        """Import what answers, and answer the other nodes."""
        job, requests = self._context.job, self.requests
        if job is not None:
            job.answer = requests.answer_question
            for question, deliver in job.unanswered:
                job.answer(question, deliver)

    @property
    def requests(self) -> ControlRequests:
        """The object that answers, imported when it is first needed."""
        if self._requests is None:
            from elastic_run.agent.control_requests import ControlRequests

            self._requests = ControlRequests(self._context, self._watches)
        return self._requests

    def _answer(self, request: HttpRequest) -> None:
        self.requests.answer(request)

    def close(self) -> None:
        """Remove the socket and end all connections; harmless when it was never opened."""
        if self.server is not None:
            self.server.close()
            self.server = None
            remove_stale(self.path)
