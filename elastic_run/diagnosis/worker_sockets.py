"""The abstract Unix sockets on which workers take requests of their agent.

Every user of the machine may connect to such a socket, or take its name first. So nobody can foretell a name, which is
another one in each attempt, and both sides look at the user of the other side.
"""

from __future__ import annotations

import os
import socket
import struct


def make_name(purpose: str) -> str:
    """Return the name of a socket for one worker in one attempt."""
    return f"elastic-run-{purpose}-{os.urandom(8).hex()}"


def listen(name: str) -> socket.socket:
    """Listen in a worker; a fork of it does not.

    Raises:
        OSError: There are no such sockets here, or the name is taken.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
        listener.listen(4)
    except OSError:
        listener.close()
        raise
    os.register_at_fork(after_in_child=listener.close)
    return listener


def send_request(name: str, request: bytes) -> socket.socket | None:
    """Send a request to a worker, without waiting; None if no worker of this user listens."""
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    try:
        connection.connect(f"\0{name}")
        if is_own_user(connection):
            connection.send(request)
            return connection
    except OSError:
        pass
    connection.close()
    return None


def is_own_user(connection: socket.socket) -> bool:
    """Whether the other side is this user or root."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] in (os.getuid(), 0)
