"""Free ports on this machine.

On the loopback address itself, not on "localhost": that name would be looked up, and a resolver may be slow or wrong.
"""

from __future__ import annotations

import socket

__all__ = ["get_free_port", "get_hostname", "get_socket_with_port"]

_LOOPBACK = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


def get_free_port() -> int:
    """Find a port that nobody uses at the moment.

    Nothing keeps it free: another process may take it before you do. Prefer to hand on a socket that is bound.

    Returns:
        The port.

    Raises:
        RuntimeError: There is none.
    """
    with get_socket_with_port() as reserved:
        port: int = reserved.getsockname()[1]
        return port


def get_socket_with_port() -> socket.socket:
    """Open a listening socket on a free port of the loopback address.

    Returns:
        The socket; the port is its own as long as it is open. The caller closes it.

    Raises:
        RuntimeError: No address family of this machine gives one.
    """
    failures = []
    for family, address in _LOOPBACK:
        try:
            return _open_listener(family, address)
        except OSError as error:
            failures.append(f"{address}: {error.strerror or error}")
    message = f"no free port on the loopback address ({'; '.join(failures)})"
    raise RuntimeError(message)


def _open_listener(family: int, address: str) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(0)
    except OSError:
        listener.close()
        raise
    return listener


def get_hostname() -> str:
    """Return this machine's own name for it, as the kernel has it; no name server is asked.

    Returns:
        The name, or "localhost" where it has none.
    """
    return socket.gethostname() or "localhost"
