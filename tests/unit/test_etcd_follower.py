"""What a follower of a directory in etcd does when its watch breaks or is silent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from elastic_run.store.backoff import Backoff
from elastic_run.store.errors import StoreConnectionError
from elastic_run.store.jobstore import etcd
from elastic_run.store.jobstore.etcd import Directory, Follower, Item

if TYPE_CHECKING:
    import pytest

    from elastic_run.store.jobstore.etcd import Watch

_ITEM = Item("d/a", b"1", 7, 7)


class Cluster:
    """A cluster whose watches break, or tell nothing; the clock goes on while the follower waits.

    Args:
        breaks: Whether they break.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, breaks: bool) -> None:
        self.now = 0.0
        self.breaks = breaks
        self.pauses: list[float] = []
        self.there: list[Item] = []
        self.http = SimpleNamespace(prefer_next=lambda: None)
        monkeypatch.setattr(etcd, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))
        reader: Any = self
        self.follower = Follower(reader, "d/", quiet=6.0)
        self.follower.read()

    def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def clone(self) -> Cluster:
        """Return this same cluster."""
        return self

    def make_backoff(self) -> Backoff:
        """Return pauses that are not drawn."""
        return Backoff(0.1, 0.8, lambda: 1.0)

    def read_directory(self, _: str, *, created_after: int = 0, changed_after: int = 0) -> Directory:
        """Return what is there."""
        return Directory([item for item in self.there if item.changed > max(created_after, changed_after)], 5)

    def watch(self, _directory: str, _number: int) -> Watch:
        """Open a watch."""
        watch: Any = self
        return watch  # type: ignore[no-any-return] # a fake

    def next_items(self, timeout: float) -> list[Item]:
        """Break, or let the time pass."""
        if self.breaks:
            message = "the watch is over"
            raise StoreConnectionError(message)
        self.now += timeout
        return []


def test_watches_that_break_are_followed_by_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is read each time, and the pauses grow: a follower without news does not spin."""
    cluster = Cluster(monkeypatch, breaks=True)
    for _ in range(6):
        assert cluster.follower.next_items(5.0) == []
    assert cluster.pauses == sorted(cluster.pauses)
    assert 0.0 < cluster.pauses[0] < cluster.pauses[-1] <= 0.8
    cluster.there = [_ITEM]
    assert cluster.follower.next_items(5.0) == [_ITEM]
    assert len(cluster.pauses) == 6


def test_a_silent_watch_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that hangs tells nothing: what is new is read after so many seconds, and not before."""
    cluster = Cluster(monkeypatch, breaks=False)
    cluster.there = [_ITEM]
    assert cluster.follower.next_items(5.0) == []
    assert cluster.follower.next_items(5.0) == []
    assert cluster.now == 6.0
    assert cluster.follower.next_items(5.0) == [_ITEM]
