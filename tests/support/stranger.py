"""A stranger on the network: a program without the job's secret that reaches a store's port and does harm there.

Run as a program it fills the stores of some hosts and reads them: ``python -m tests.support.stranger PORT HOST …``.
"""

from __future__ import annotations

import contextlib
import socket
import sys

from elastic_run.store.tcpstore import wire

MIB = 1 << 20
_COPIES = 3000
_FILLINGS = 60
_WAIT_LIMIT = 30.0


def open_store(host: str, port: int) -> socket.socket:
    """Connect as a TCPStore client does."""
    connected = socket.create_connection((host, port), timeout=_WAIT_LIMIT)
    connected.sendall(wire.encode_opening(1))
    return connected


def ask(host: str, port: int, *messages: bytes) -> int:
    """Send messages over one connection and read until the server closes it or has answered a PING behind them.

    Returns:
        The number of bytes that came, at most a few megabytes: a stranger does not read on.
    """
    received = 0
    with open_store(host, port) as connected, contextlib.suppress(OSError):
        for message in messages:
            connected.sendall(message)
        connected.sendall(bytes((wire.PING,)) + wire.U32.pack(7))
        while received < 4 * MIB and (part := connected.recv(MIB)):
            received += len(part)
            if part.endswith(wire.U32.pack(7)):
                break
    return received


def multiply(host: str, port: int, *, key: bytes = b"/stranger") -> None:
    """Ask for one value of 8 MiB three thousand times in one message of 66 KB: 24 GB, where each were a copy."""
    value = bytes(8 * MIB)
    ask(
        host,
        port,
        wire.encode(wire.SET, key, value),
        wire.encode(wire.APPEND, key, b"x"),
        wire.encode(wire.MULTI_GET, _COPIES, *[key] * _COPIES),
    )


def fill(host: str, port: int, *, key: bytes = b"/stranger") -> None:
    """Set sixty values of 8 MiB, each over a connection of its own."""
    value = bytes(8 * MIB)
    for number in range(_FILLINGS):
        ask(host, port, wire.encode(wire.SET, key + b"/%d" % number, value))


def main() -> None:
    """Do all of it, wherever a store answers."""
    port, hosts = int(sys.argv[1]), sys.argv[2:]
    for host in hosts:
        with contextlib.suppress(OSError):
            multiply(host, port)
            fill(host, port)


if __name__ == "__main__":
    main()
