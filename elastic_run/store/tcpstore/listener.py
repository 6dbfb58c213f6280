"""The port: opened before its number is given to anyone, so that no other program can take it in between.

Everything here is close-on-exec and looks up no name. If a port is taken, the error says by whom, as far as that can be
seen.
"""

from __future__ import annotations

import _socket  # `socket` builds enums when it is imported: 3 ms, and this is on the launcher's way to its first worker
import errno

from elastic_run.store.errors import StoreError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_BACKLOG = 4096
#: How often a free port of one address may turn out to be taken on another.
_ATTEMPTS = 16


class PortTakenError(StoreError, OSError):
    """Another process listens on the port; only the message looks for it, and many of these errors are never shown."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._fact = ""
        super().__init__(errno.EADDRINUSE, f"port {port} is taken")

    def __str__(self) -> str:
        return f"{self.fact}; choose another one or 0 for any"

    @property
    def fact(self) -> str:
        """The message without its advice, which is for a job of one node."""
        if not self._fact:
            owner = find_port_owner(self.port)
            self._fact = f"port {self.port} is taken{f' by {owner}' if owner else ''}"
        return self._fact


def open_listeners(hosts: Sequence[str], port: int = 0) -> list[_socket.socket]:
    """Listen on the same port of several addresses.

    Args:
        hosts: Numeric addresses of this machine; none for all interfaces, IPv6 and IPv4.
        port: The port, or 0 for one that is free on all of them.

    Returns:
        A listening socket for each address, non-blocking, in their order; one for all interfaces.

    Raises:
        PortTakenError: Another process listens there.
        OSError: The system refuses.
    """
    for _ in range(_ATTEMPTS - 1 if port == 0 and len(hosts) > 1 else 0):
        try:
            return _open_together(hosts, port)
        except PortTakenError:
            pass
    return _open_together(hosts, port)


def _open_together(hosts: Sequence[str], port: int) -> list[_socket.socket]:
    listeners: list[_socket.socket] = []
    try:
        for host in hosts or [""]:
            bound = bind_port(host, port)
            listeners.append(bound)
            try:
                bound.listen(_BACKLOG)
            except OSError as error:
                raise _explain(error, bound.getsockname()[0], port) from error
            port = listeners[0].getsockname()[1]
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def open_listener(host: str = "127.0.0.1", port: int = 0) -> _socket.socket:
    """Listen on a port of one address; as `open_listeners`."""
    return open_listeners([host], port)[0]


def bind_port(host: str, port: int) -> _socket.socket:
    """Bind a port without listening on it.

    Args:
        host: A numeric address of this machine; empty for all interfaces, IPv6 and IPv4.
        port: The port, or 0 for any free one.

    Returns:
        The bound socket, non-blocking, with SO_REUSEADDR: connections of a past job that are still in TIME_WAIT don't
        count, and another socket with SO_REUSEADDR may listen on the port while this one doesn't.

    Raises:
        PortTakenError: Another process listens there.
        OSError: The system refuses.
    """
    if not host:
        try:
            return _bind("::", port)
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                raise
            host = "0.0.0.0"  # noqa: S104 - a machine without IPv6, and other nodes are to reach it
    return _bind(host, port)


def _bind(host: str, port: int) -> _socket.socket:
    bound = None
    try:
        bound = _socket.socket(_socket.AF_INET6 if ":" in host else _socket.AF_INET, _socket.SOCK_STREAM)
        bound.setblocking(False)
        bound.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        if host == "::":
            bound.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 0)
        bound.bind((host, port))
    except OSError as error:
        if bound is not None:
            bound.close()
        raise _explain(error, host, port) from error
    return bound


def _explain(error: OSError, host: str, port: int) -> OSError:
    if error.errno == errno.EADDRINUSE and port:
        return PortTakenError(port)
    where = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}") if port else host
    return OSError(error.errno, f"can't listen on {where}: {error.strerror}")


def find_port_owner(port: int) -> str:
    """Return the process that listens on a TCP port as "pid 123 (name)"; "" if it can't be seen, as another user's."""
    try:
        import psutil

        listening = (each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN)
        pid = next((each.pid for each in listening if each.pid and each.laddr and each.laddr.port == port), None)
        if pid is None:
            return ""
        process = psutil.Process(pid)
        # For a long name psutil reads the command line, which may have to wait for a process in uninterruptible sleep.
        is_stuck = process.status() == psutil.STATUS_DISK_SLEEP
        return f"pid {pid}" if is_stuck else f"pid {pid} ({process.name()})"
    except Exception:  # noqa: BLE001 - psutil may not know what a kernel writes there, and this is for a message only
        return ""


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit of descriptors to the hard one: every client of a server takes one.

    Returns:
        The soft limit before, which workers should get back: select() breaks above 1024.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            pass  # macOS reports an unlimited hard limit and refuses it. The soft one then has to do.
    return soft
