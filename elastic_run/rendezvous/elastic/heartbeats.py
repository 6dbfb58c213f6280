"""Beats as `core.protocol.liveness` wants them.

Only a store that lets beats expire may say that a node has none any more. Elsewhere a beat that was there and isn't was
overwritten by a stranger (or a server began anew): that says nothing of the node, which just ages until its next one.

A node that comes back beats first and then says that it is there. So the coordinator hears of it after it has removed
all beats that it was to remove, or the next beat finds the last one gone again.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_run.store.jobstore.api import JobStore

__all__ = ["HeartbeatReader", "HeartbeatWriter"]


class HeartbeatWriter:
    """Writes the beats of one node into one store, over whatever connection.

    Args:
        node: The node.

    Attributes:
        is_first: Whether it has written none yet: whether the node was dropped before it is not known.
    """

    def __init__(self, node: str) -> None:
        self.is_first = True
        self._node = node
        self._last: int | None = None
        self._was_dropped = False

    def write(self, store: JobStore, *, comes_back: bool = True) -> bool:
        """Write a beat in place of the last one.

        Args:
            store: The job's store.
            comes_back: Whether to begin anew where that one is gone.

        Returns:
            Whether it was gone: the coordinator has dropped this node.

        Raises:
            StoreConnectionError: The store can't be reached. What the next call returns makes up for it.
        """
        if self._last is not None:
            self._last = store.beat(self._node, self._last)
            self._was_dropped = self._was_dropped or self._last is None
        if self._was_dropped and not comes_back:
            return True
        if self._last is None:
            self._last = store.beat(self._node)
        self.is_first = False
        was_dropped, self._was_dropped = self._was_dropped, False
        return was_dropped


class HeartbeatReader:
    """Reads beats, and remembers the last of each node."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def read(self, store: JobStore, nodes: Sequence[str]) -> dict[str, int | None]:
        """Return the beats of nodes.

        Args:
            store: The job's store.
            nodes: The nodes.

        Returns:
            For each its counter; None if it never had one, or the store says that it is gone.

        Raises:
            StoreConnectionError: The store can't be reached.
        """
        found = dict(zip(nodes, store.read_beats(nodes), strict=True)) if nodes else {}
        return self._remember(store, nodes, found)

    def read_beside(
        self, store: JobStore, nodes: Sequence[str], other: str
    ) -> tuple[dict[str, int | None], bytes | None]:
        """Do `read`, and read a key with it.

        Args:
            store: The job's store.
            nodes: The nodes.
            other: The key.

        Returns:
            What `read` returns, and the key's value, or None.

        Raises:
            StoreConnectionError: The store can't be reached.
        """
        beats, beside = store.read_beats_beside(nodes, other)
        return self._remember(store, nodes, dict(zip(nodes, beats, strict=True))), beside

    def _remember(self, store: JobStore, nodes: Sequence[str], found: dict[str, int | None]) -> dict[str, int | None]:
        if store.expires_beats:
            return found
        self._known = {node: known for node in nodes if (known := found[node] or self._known.get(node)) is not None}
        return {node: self._known.get(node) for node in nodes}
