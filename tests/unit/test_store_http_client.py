"""In which order and at which pauses the servers of an etcd cluster are asked."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from elastic_run.store.errors import REFUSED, SILENT, UNREADY, StoreConnectionError, StoreTimeoutError
from elastic_run.store.jobstore import http_client
from elastic_run.store.jobstore.http_client import Endpoint, HttpClient


class Cluster:
    """Servers that all refuse; asking takes no time, and the clock goes on while the client pauses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, servers: int) -> None:
        self.now = 0.0
        self.asked: list[str] = []
        self.pauses: list[float] = []
        monkeypatch.setattr(http_client, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))
        self.client = HttpClient([Endpoint("h", port) for port in range(1, servers + 1)], 10.0, draw=lambda: 1.0)

    def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def ask(self, *, until: int | None = None) -> str:
        """Ask until the given attempt works, or the client gives up."""

        def once(_: float) -> str:
            self.asked.append(str(self.client.endpoint))
            if len(self.asked) == until:
                return "answer"
            message = "it refuses"
            raise StoreConnectionError(message, REFUSED)

        return self.client._try(once)


def test_all_servers_are_asked_before_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that fails is left for the next one at once; a round of failures is followed by a pause."""
    cluster = Cluster(monkeypatch, 3)
    assert cluster.ask(until=5) == "answer"
    assert cluster.asked == ["h:1", "h:2", "h:3", "h:1", "h:2"]
    assert len(cluster.pauses) == 1


def test_one_server_is_asked_a_second_time_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection may have broken while it was idle; from the second failure on there are pauses."""
    cluster = Cluster(monkeypatch, 1)
    assert cluster.ask(until=3) == "answer"
    assert len(cluster.pauses) == 1


def test_pauses_grow_and_the_client_gives_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pause is as long as the last one or longer, up to half a second, and all attempts end within the timeout."""
    cluster = Cluster(monkeypatch, 2)
    with pytest.raises(StoreConnectionError, match="it refuses"):
        cluster.ask()
    assert cluster.pauses == sorted(cluster.pauses)
    assert cluster.pauses[0] < cluster.pauses[-1] <= 0.5
    assert 9.0 < cluster.now <= 10.0


def test_the_last_answer_of_a_busy_server_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the time cuts the last attempt, whose failure says no more than that."""
    cluster = Cluster(monkeypatch, 1)
    asked = []

    def once(timeout: float) -> None:
        asked.append(timeout)
        took = min(timeout, 3.0)
        cluster.now += took
        if took < 3.0:
            message = "no answer in time"
            raise StoreTimeoutError(message)
        message = f"h:1: busy {len(asked)}"
        raise StoreConnectionError(message, UNREADY)

    with pytest.raises(StoreConnectionError, match="no answer in time") as caught:
        cluster.client._try(once)
    assert (caught.value.reason, caught.value.answer) == (SILENT, "h:1: busy 3")
