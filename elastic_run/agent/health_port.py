"""Answers to health checks of a cluster over HTTP (`--health-port`): is the agent alive, do the workers run.

| path | 200 | 503 |
|---|---|---|
| ``/healthz`` | the agent's loop answers | it has not answered for some seconds |
| ``/readyz`` | the workers of this node run | they don't: the nodes meet, or workers are being stopped or have ended |

The body is the agent's state.
"""

from __future__ import annotations

from elastic_run.agent.http_listener import HttpListener, ask_loop
from elastic_run.core.agent.machine import RUNNING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.loop import Loop

__all__ = ["HealthPort"]

_TEXT = "text/plain; charset=utf-8"


class HealthPort:
    """Serves the health checks of one agent.

    Args:
        port: See `HttpListener`.

    Attributes:
        port: The port at which it listens.

    Raises:
        OSError: The port can't be taken.
    """

    def __init__(self, port: int) -> None:
        self._listener = HttpListener(port, "health checks")
        self.port = self._listener.port

    def serve(self, loop: Loop, find_state: Callable[[], str]) -> None:
        """Begin to answer.

        Args:
            loop: The agent's.
            find_state: Returns the agent's state, such as ``running``; called in the loop's thread.
        """

        def reply_to(path: str) -> tuple[int, str, bytes]:
            if path not in {"/healthz", "/readyz"}:
                return 404, _TEXT, b"there are /healthz and /readyz\n"
            state = ask_loop(loop, find_state)
            is_well = state is not None if path == "/healthz" else state == RUNNING
            text = "the agent does not answer" if state is None else state
            return 200 if is_well else 503, _TEXT, f"{text}\n".encode()

        self._listener.serve(reply_to)

    def close(self) -> None:
        """Give the port back."""
        self._listener.close()
