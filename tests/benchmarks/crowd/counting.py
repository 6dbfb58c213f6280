"""What the programs of a crowd count and say: what a coordinator is told, and who has come how far."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from elastic_run.rendezvous.coordination.link import Link

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
    """What has come to this process's connections between agents, and gone from there.

    Attributes:
        frames: Frames, both ways.
        size: Bytes, both ways.
    """

    def __init__(self) -> None:
        self.frames = 0
        self.size = 0

    def document(self) -> dict[str, Any]:
        """Return it as JSON's types."""
        return {"operations": self.frames, "bytes": self.size}


def count_traffic() -> Traffic:
    """Count what all connections between agents of this process carry from now on."""
    traffic = Traffic()
    take, take_frame, write = Link._take, Link._take_frame, Link._write

    def count_bytes(self: Link, data: bytes) -> None:
        traffic.size += len(data)
        take(self, data)

    def count_frame(self: Link, kind: bytes, content: dict[str, Any]) -> None:
        traffic.frames += 1
        take_frame(self, kind, content)

    def count_sent(self: Link, data: bytes) -> None:
        traffic.frames += 1
        traffic.size += len(data)
        write(self, data)

    # In a process of our own.
    for name, function in (("_take", count_bytes), ("_take_frame", count_frame), ("_write", count_sent)):
        setattr(Link, name, function)
    return traffic
