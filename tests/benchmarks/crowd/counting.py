"""What the programs of a crowd count and say: what a server is asked, and who has come how far."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from elastic_run.store.tcpstore import connection, server
from elastic_run.store.tcpstore.wire import Decoder

if TYPE_CHECKING:
    from typing import Any


def say(text: str) -> None:
    """Write a line at once, from whichever thread."""
    os.write(1, f"{text}\n".encode())


class Tally:
    """Says when everyone of a crowd has come so far.

    Args:
        count: How many they are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._seen: Counter[str] = Counter()
        self._spent = time.process_time()
        self._lock = threading.Lock()

    def note(self, what: str) -> None:
        """Note that one more has come so far."""
        with self._lock:
            self._seen[what] += 1
            if self._seen[what] == self._count:
                say(f"{what} {time.monotonic_ns()} {time.process_time() - self._spent:.2f}")


class Traffic:
    """What has come and gone.

    Attributes:
        operations: Messages, by operation.
        received: Bytes.
        sent: Bytes.
        connections: So many were opened.
    """

    def __init__(self) -> None:
        self.operations: Counter[int] = Counter()
        self.received = 0
        self.sent = 0
        self.connections = 0

    def document(self) -> dict[str, Any]:
        """Return it as JSON's types."""
        return {
            "operations": self.operations.total(),
            "bytes": self.received + self.sent,
            "connections": self.connections,
            "by_operation": dict(sorted(self.operations.items())),
        }


def count_traffic() -> Traffic:
    """Count what all servers of this process are asked from now on."""
    traffic = Traffic()

    class CountingDecoder(Decoder):
        def __init__(self) -> None:
            traffic.connections += 1
            super().__init__()

        def feed(self, data: bytes) -> None:
            traffic.received += len(data)
            super().feed(data)

        def next_operation(self) -> int:
            operation = super().next_operation()
            if operation >= 0:
                traffic.operations[operation] += 1
            return operation

    class CountingConnection(connection.Connection):
        def _send(self) -> int:
            sent = super()._send()
            traffic.sent += sent
            return sent

    # In a process of our own.
    vars(connection)["Decoder"] = CountingDecoder
    vars(server)["Connection"] = CountingConnection
    return traffic
