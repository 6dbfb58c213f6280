"""Beats as `core.liveness` wants them.

Only a store that lets beats expire may say that a node has none any more. Elsewhere a beat that was there and isn't was
overwritten by a stranger (or a server began anew): that says nothing of the node, which just ages until its next one.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_run.store.job_store import JobStore

__all__ = ["BeatReader"]


class BeatReader:
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
        if store.expires_beats:
            return found
        self._known = {node: known for node in nodes if (known := found[node] or self._known.get(node)) is not None}
        return {node: self._known.get(node) for node in nodes}
