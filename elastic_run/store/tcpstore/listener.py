"""The port: opened before its number is given to anyone, so that no other program can take it in between.

Everything here is close-on-exec and does no name look-up. Where a port is taken, the error says by whom, as far as
that can be seen.
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
    """Another process listens on the port; only the message looks for it, and many of these errors are never shown.

    Args:
        port: The port.
    """

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


def open_listener(host: str = "127.0.0.1", port: int = 0) -> _socket.socket:
    """Listen on a port.

    Args:
        host: A numeric address of this machine.
        port: The port, or 0 for any free one.

    Returns:
        The listening socket, non-blocking.

    Raises:
        PortTakenError: Another process listens there.
        OSError: The system refuses.
    """
    return _listen(bind_port(host, port), port)


def open_public_listener(port: int) -> _socket.socket:
    """Listen on a port of all interfaces, IPv6 and IPv4.

    Args:
        port: The port, or 0 for any free one.

    Returns:
        The listening socket, non-blocking.

    Raises:
        PortTakenError: Another process listens there.
        OSError: The system refuses.
    """
    return _listen(bind_public_port(port), port)


def _listen(bound: _socket.socket, port: int) -> _socket.socket:
    try:
        bound.listen(_BACKLOG)
    except OSError as error:
        host = bound.getsockname()[0]
        bound.close()
        raise _explain(error, host, port) from error
    return bound


def open_listeners(hosts: Sequence[str], port: int = 0) -> list[_socket.socket]:
    """Listen on the same port of several addresses.

    Args:
        hosts: Numeric addresses of this machine; none for all interfaces.
        port: The port, or 0 for one that is free on all of them.

    Returns:
        A listening socket for each address, non-blocking, in their order; one for all interfaces.

    Raises:
        PortTakenError: Another process listens there.
        OSError: The system refuses.
    """
    if not hosts:
        return [open_public_listener(port)]
    for attempts_left in range(_ATTEMPTS if port == 0 else 1, 0, -1):
        try:
            return _open_together(hosts, port)
        except PortTakenError:
            if attempts_left == 1:
                raise
    raise AssertionError


def _open_together(hosts: Sequence[str], port: int) -> list[_socket.socket]:
    listeners: list[_socket.socket] = []
    try:
        for host in hosts:
            listeners.append(open_listener(host, port))
            port = listeners[0].getsockname()[1]
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def bind_port(host: str, port: int, *, is_dual_stack: bool = False) -> _socket.socket:
    """Bind a port without listening on it.

    Args:
        host: A numeric address of this machine.
        port: The port, or 0 for any free one.
        is_dual_stack: Whether an IPv6 wildcard takes the IPv4 port too.

    Returns:
        The bound socket, non-blocking, with SO_REUSEADDR: connections of a past job that are still in TIME_WAIT don't
        count, and another socket with SO_REUSEADDR may listen on the port while this one doesn't.

    Raises:
        PortTakenError: Another process listens there.
        OSError: The system refuses.
    """
    family = _socket.AF_INET6 if ":" in host else _socket.AF_INET
    bound = _socket.socket(family, _socket.SOCK_STREAM)
    try:
        bound.setblocking(False)
        bound.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        if is_dual_stack:
            bound.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 0)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise _explain(error, host, port) from error
    return bound


def bind_public_port(port: int) -> _socket.socket:
    """Bind a port of all interfaces, IPv6 and IPv4, without listening on it; errors as of `bind_port`."""
    try:
        return bind_port("::", port, is_dual_stack=True)
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
        return bind_port("0.0.0.0", port)  # noqa: S104 - other nodes are to reach it


def _explain(error: OSError, host: str, port: int) -> OSError:
    if error.errno == errno.EADDRINUSE and port:
        return PortTakenError(port)
    where = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}") if port else host
    return OSError(error.errno, f"can't listen on {where}: {error.strerror}")


# --- which process has the port ---------------------------------------------------------------------------------------
def find_port_owner(port: int) -> str:
    """Find the process that listens on a TCP port.

    Returns:
        "pid 123 (name)"; "" where it can't be seen, as another user's.
    """
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


# --- descriptors -----------------------------------------------------------------------------------------------------
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
            # macOS reports an unlimited hard limit and refuses it. The soft one then has to do.
            return soft
    return soft
