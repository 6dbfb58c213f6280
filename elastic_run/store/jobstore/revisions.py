"""The number of the last change in an etcd cluster, which only grows: a smaller one means that etcd was restored.

Positions in streams and watches are such numbers. In a cluster that was restored from a backup they lie in the future,
and a reader would wait there for what has come long ago.
"""

from __future__ import annotations

import threading

from elastic_run.store.errors import RESTORED, StoreConnectionError


class Revisions:
    """What all connections of one agent have seen of a cluster.

    Attributes:
        highest: The highest number that an answer had since the cluster was restored, 0 before the first answer.
        restores: How often the cluster went back.
    """

    def __init__(self) -> None:
        self.highest = 0
        self.restores = 0
        self._lock = threading.Lock()

    def check(self, name: str, before: int, found: int, restores: int) -> None:
        """Take in the number of an answer.

        Args:
            name: The cluster, for the message.
            before: `highest` when the request was sent.
            found: The number in the answer.
            restores: `restores` when the connection began.

        Raises:
            StoreConnectionError: The answer is older than one that came before the request, or another connection had
                such an answer since this one began.
        """
        with self._lock:
            if found >= before:
                self.highest = max(self.highest, found)
            elif self.highest >= before:  # else another connection has seen it already
                self.highest = found
                self.restores += 1
            if self.restores == restores:
                return
        message = f"{name} went back to revision {found}: it was restored from a backup"
        raise StoreConnectionError(message, RESTORED)
