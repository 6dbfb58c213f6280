"""The agent's control socket: serves requests of the user's own commands, such as ``elastic-run status``.

Rules
- Everything runs in the agent's loop, without a thread, and without a timer while there is no request.
- The socket is opened right after the first workers are started, or when the node begins to wait for others, so that
  commands find a job from its beginning. What answers a request is imported with the first client, or when the workers
  are past their own start: before, these imports would take a processor from the workers.
- If the socket can't be opened, the job goes on, and commands don't find it.
- `_MOST` connections are served at a time.
- If another program removes the socket's file, such as a cleaner of old files in /tmp, another socket is opened. The
  clients that are connected get their answers.
- Only the user's processes come here: the directory is the user's (`control.socket_directory`).
"""

from __future__ import annotations

import _socket  # `socket` builds enums when it is imported: 3 ms, while the workers start
import os

from elastic_run.control.socket_directory import SUFFIX, is_stale, make_directory, remove_stale

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elastic_run.agent.agent_view import AgentView
    from elastic_run.agent.control_connection import ControlConnection
    from elastic_run.agent.removal_watch import RemovalWatch
    from elastic_run.loop import Loop

__all__ = ["ControlServer"]

_MOST = 16
#: Seconds without accepting, when there is no descriptor for a client.
_PAUSE = 1.0
#: Sockets of other agents that are checked when this agent opens its own.
_LOOKED_AT = 64


class ControlServer:
    """Serves the control socket of one agent.

    Args:
        loop: The agent's loop.
        make_view: Returns the parts of the agent that requests may read; called once, by the first request.

    Attributes:
        path: Path of the socket, or an empty string.
    """

    def __init__(self, loop: Loop, make_view: Callable[[], AgentView]) -> None:
        self._loop = loop
        self._make_view = make_view
        self._view: AgentView | None = None
        self._socket: _socket.socket | None = None
        self._clients: set[ControlConnection] = set()
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
        path = os.path.join(make_directory(environment), f"{os.getpid()}-{os.urandom(2).hex()}")
        self._socket = listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
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

    def watch(self, environment: Mapping[str, str]) -> None:
        """Open another socket if a program removes this one, and remove the sockets that killed agents have left."""
        from elastic_run.agent.removal_watch import RemovalWatch

        if self._socket is not None:
            _remove_stale_sockets(self.path)
            self._removal = RemovalWatch(self._loop, self.path, lambda: self._open_again(environment))

    def _open_again(self, environment: Mapping[str, str]) -> None:
        self._close_socket()
        try:
            self.open(environment)
        except OSError:
            return  # commands do not find the job any more
        self.watch(environment)

    @property
    def view(self) -> AgentView:
        """The parts of the agent that requests may read."""
        if self._view is None:
            self._view = self._make_view()
        return self._view

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
            fd, _ = self._socket._accept()  # type: ignore[attr-defined] # noqa: SLF001 - `socket.accept` calls it
        except BlockingIOError:
            return
        except OSError:
            self._pause_accepting()
            self._loop.call_later(_PAUSE, self._resume_accepting)
            return
        from elastic_run.agent.control_connection import ControlConnection

        self._clients.add(ControlConnection(self._loop, fd, self.view, self._forget))
        if len(self._clients) >= _MOST:
            self._pause_accepting()

    def _forget(self, client: ControlConnection) -> None:
        self._clients.discard(client)
        self._resume_accepting()

    def _pause_accepting(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())

    def _resume_accepting(self) -> None:
        if self._socket is not None and len(self._clients) < _MOST:
            self._loop.add_reader(self._socket.fileno(), self._accept)


def _remove_stale_sockets(own: str) -> None:
    """Remove the sockets that killed agents have left beside this agent's own one."""
    directory, own_name = os.path.split(own)
    names = [name for name in os.listdir(directory) if name.endswith(SUFFIX) and name != own_name]
    for name in names[:_LOOKED_AT]:
        path = os.path.join(directory, name)
        if is_stale(path):
            remove_stale(path)
