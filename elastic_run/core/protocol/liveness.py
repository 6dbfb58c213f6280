"""Which nodes still send heartbeats, as one observer sees it.

A node is silent when its counter has not changed for a lease on the observer's monotonic clock: no clock of another
node is read, and time in which the observer itself could not read doesn't count (law 4). A store with leases of its own
says None for a node that is gone; that is believed at once where the node had been seen before. Not after such a time:
a store that was out for all has let the heartbeats of the living expire, too.

The first heartbeat of a node may be given more than one lease (`JobConfig.first_leases`).
"""

from __future__ import annotations

from types import MappingProxyType

from elastic_run.records import dataclass, field, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A node's last heartbeat.

    Args:
        value: The counter, or None while it was never seen.
        since: Monotonic seconds at which the observer first saw it, or first looked for it.
        is_news: Whether that was after the observer's last interruption.
    """

    value: int | None
    since: float
    is_news: bool = True


@dataclass(frozen=True, slots=True)
class Leases:
    """What one observer knows.

    Args:
        lease: Seconds without a change after which a node is silent.
        heartbeats: The last heartbeat of each node that is watched.
        first: Leases within which the first heartbeat of a node is expected.
    """

    lease: float
    heartbeats: Mapping[str, Heartbeat] = field(default_factory=lambda: MappingProxyType({}))
    first: int = 1

    def age(self, node: str, now: float) -> float:
        """Return for how many seconds nothing was heard of a node, 0 for a stranger."""
        heartbeat = self.heartbeats.get(node)
        return 0.0 if heartbeat is None else max(0.0, now - heartbeat.since)


def watch(leases: Leases, nodes: Iterable[str], now: float) -> Leases:
    """Watch exactly these nodes; those that are new to it get a whole lease."""
    nodes = tuple(nodes)
    if nodes == tuple(leases.heartbeats):
        return leases
    heartbeats = {node: leases.heartbeats.get(node) or Heartbeat(None, now) for node in nodes}
    return replace(leases, heartbeats=MappingProxyType(heartbeats))


def expect_first(leases: Leases, first: int, now: float) -> Leases:
    """Give nodes so many leases for their first heartbeat; where that is less than before, these begin now."""
    if first >= leases.first:
        return leases if first == leases.first else replace(leases, first=first)
    heartbeats = {
        node: replace(heartbeat, since=now) if heartbeat.value is None else heartbeat
        for node, heartbeat in leases.heartbeats.items()
    }
    return replace(leases, heartbeats=MappingProxyType(heartbeats), first=first)


def observe(leases: Leases, heartbeats: Mapping[str, int | None], now: float) -> tuple[Leases, tuple[str, ...]]:
    """Take in what was read of the store.

    Args:
        leases: What the observer knows.
        heartbeats: Per node its counter; None where the store says that the node is gone, or knows none yet.
        now: Monotonic seconds.

    Returns:
        What it knows now, and the nodes that are silent, each reported at every observation until it is no longer
        watched.
    """
    after: dict[str, Heartbeat] = {}
    silent: list[str] = []
    for node, heartbeat in leases.heartbeats.items():
        value = heartbeats.get(node)
        was_seen = heartbeat.value is not None and heartbeat.is_news
        after[node] = Heartbeat(value, now) if value is not None and value != heartbeat.value else heartbeat
        is_expired = value is None and was_seen and node in heartbeats
        limit = leases.lease * (leases.first if after[node].value is None else 1)
        if is_expired or now - after[node].since >= limit:
            silent.append(node)
    return replace(leases, heartbeats=MappingProxyType(after)), tuple(silent)


def interrupted(leases: Leases, now: float) -> Leases:
    """Start all leases anew: the observer itself could not read."""
    heartbeats = {node: replace(heartbeat, since=now, is_news=False) for node, heartbeat in leases.heartbeats.items()}
    return replace(leases, heartbeats=MappingProxyType(heartbeats))
