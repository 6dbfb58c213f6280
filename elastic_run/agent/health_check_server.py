"""The hook for a site's health checks, with torch's names; like torch's, it serves nothing by itself.

A scheduler may want to ask an agent whether it is alive. A site gives `LocalElasticAgent` a subclass of
`HealthCheckServer` whose `start` answers on the port.
"""

from __future__ import annotations

from elastic_run import lazy_names
from elastic_run.contract import ENV_HEALTH_CHECK_PORT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["HealthCheckServer", "create_healthcheck_server"]

#: Names that torch's module has from others, and that programs take from there.
__getattr__ = lazy_names(__name__, {"get_logger": "elastic_run.utils"}, logger="log")


class HealthCheckServer:
    """Tells whether the agent is alive; this class serves nothing.

    Args:
        alive_callback: Returns when the agent last made progress, in seconds since the epoch.
        port: The port to listen at.
        timeout: Seconds without progress after which the agent counts as dead.
    """

    def __init__(self, alive_callback: Callable[[], int], port: int, timeout: int) -> None:
        self._alive_callback = alive_callback
        self._port = port
        self._timeout = timeout

    def start(self) -> None:
        """Do nothing, and log that."""
        _warn("elastic-run: no health check server is installed; nothing answers on %s", self._port)

    def stop(self) -> None:
        """Do nothing."""

    @property
    def alive_callback(self) -> Callable[[], int]:
        """The function that returns the time of the agent's last progress."""
        return self._alive_callback


def start(port: str, alive_callback: Callable[[], int]) -> HealthCheckServer | None:
    """Start the server of this site at the port of TORCHELASTIC_HEALTH_CHECK_PORT; None if the value is no port."""
    if not port.isdecimal() or len(port) > len("65535") or int(port) >= 1 << 16:
        _warn("elastic-run: %s=%r is not a port, so no health check server starts", ENV_HEALTH_CHECK_PORT, port)
        return None
    server = create_healthcheck_server(alive_callback, int(port), 60)  # torch's timeout
    server.start()
    return server


def create_healthcheck_server(alive_callback: Callable[[], int], port: int, timeout: int) -> HealthCheckServer:
    """Return a server, made with these arguments; a site may replace this function."""
    return HealthCheckServer(alive_callback, port, timeout)


def _warn(text: str, *values: object) -> None:
    import logging

    logging.getLogger(__name__).warning(text, *values)
