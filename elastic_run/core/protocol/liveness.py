"""Who still beats, as one observer sees it.

A node is silent when its counter has not changed for a lease on the observer's monotonic clock: no clock of another
node is read, and time in which the observer itself could not read doesn't count (law 4). A store with leases of its own
says None for a node that is gone; that is believed at once where the node had been seen before. Not after such a time:
a store that was out for all has let the beats of the living expire, too.

The first beat of a node may be given more than one lease (`JobConfig.first_leases`).
"""

from __future__ import annotations

from types import MappingProxyType

from elastic_run.records import dataclass, field, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A node's last beat.

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
        beats: The last beat of each node that is watched.
        first: Leases within which the first beat of a node is expected.
    """

    lease: float
    beats: Mapping[str, Heartbeat] = field(default_factory=lambda: MappingProxyType({}))
    first: int = 1

    def age(self, node: str, now: float) -> float:
        """Return for how many seconds nothing was heard of a node, 0 for a stranger."""
        beat = self.beats.get(node)
        return 0.0 if beat is None else max(0.0, now - beat.since)


def watch(leases: Leases, nodes: Iterable[str], now: float) -> Leases:
    """Watch exactly these nodes; those that are new to it get a whole lease."""
    nodes = tuple(nodes)
    if nodes == tuple(leases.beats):
        return leases
    beats = {node: leases.beats.get(node) or Heartbeat(None, now) for node in nodes}
    return replace(leases, beats=MappingProxyType(beats))


def expect_first(leases: Leases, first: int, now: float) -> Leases:
    """Give nodes so many leases for their first beat; where that is less than before, these begin now."""
    if first >= leases.first:
        return leases if first == leases.first else replace(leases, first=first)
    beats = {node: replace(beat, since=now) if beat.value is None else beat for node, beat in leases.beats.items()}
    return replace(leases, beats=MappingProxyType(beats), first=first)


def observe(leases: Leases, beats: Mapping[str, int | None], now: float) -> tuple[Leases, tuple[str, ...]]:
    """Take in what was read of the store.

    Args:
        leases: What the observer knows.
        beats: Per node its counter; None where the store says that the node is gone, or knows none yet.
        now: Monotonic seconds.

    Returns:
        What it knows now, and the nodes that are silent, each reported at every observation until it is no longer
        watched.
    """
    after: dict[str, Heartbeat] = {}
    silent: list[str] = []
    for node, beat in leases.beats.items():
        value = beats.get(node)
        was_seen = beat.value is not None and beat.is_news
        after[node] = Heartbeat(value, now) if value is not None and value != beat.value else beat
        is_expired = value is None and was_seen and node in beats
        limit = leases.lease * (leases.first if after[node].value is None else 1)
        if is_expired or now - after[node].since >= limit:
            silent.append(node)
    return replace(leases, beats=MappingProxyType(after)), tuple(silent)


def interrupted(leases: Leases, now: float) -> Leases:
    """Start all leases anew: the observer itself could not read."""
    beats = {node: replace(beat, since=now, is_news=False) for node, beat in leases.beats.items()}
    return replace(leases, beats=MappingProxyType(beats))
