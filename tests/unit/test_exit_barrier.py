"""The wait of a store's host at the end of a job: for which nodes, how long, and what the user hears of it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run.rendezvous.elastic import exit_barrier
from elastic_run.store.jobstore.memory import MemoryJobStore

if TYPE_CHECKING:
    from collections.abc import Mapping

_LEASE, _INTERVAL = 6.0, 2.0


class Store(MemoryJobStore):
    """A store on a clock that only its waits move.

    Args:
        nodes: The nodes that lived at the end of the job.
        passes_at: When other nodes say that they know the verdict.
        heartbeats_end_at: When a node writes its last heartbeat; those that are left out never do.
    """

    def __init__(
        self, nodes: list[str], passes_at: Mapping[str, float], heartbeats_end_at: Mapping[str, float]
    ) -> None:
        super().__init__()
        self.now = 0.0
        self._passes_at, self._heartbeats_end_at = dict(passes_at), dict(heartbeats_end_at)
        self.write({exit_barrier.EXIT_BARRIER_NODES: json.dumps(nodes).encode()})

    def read(self, stream: str, position: int, timeout: float) -> tuple[list[bytes], int]:
        """Wait for the next node, or for the whole time."""
        assert timeout > 0, "it must not spin"
        end = self.now + timeout
        self.now = min([end, *(max(at, self.now) for at in self._passes_at.values())])
        for node in [node for node, at in self._passes_at.items() if at <= self.now]:
            exit_barrier.pass_exit_barrier(self, node)
            del self._passes_at[node]
        return super().read(stream, position, 0.0)

    def fetch_heartbeats(self, nodes: list[str]) -> list[bytes | None]:  # type: ignore[override] # a list is what comes
        """Return a counter that stands still when a node has died."""
        ends = (self._heartbeats_end_at.get(node, 1e9) for node in nodes)
        return [str(1 + int(min(self.now, end) / _INTERVAL)).encode() for end in ends]


class Host:
    """The node `host_1_a` at the end of a job, and how long it waits for the others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
        self._store = store
        config = SimpleNamespace(lease=_LEASE, keep_alive_interval=_INTERVAL)
        backend = SimpleNamespace(open=lambda _: store)
        self.context: Any = SimpleNamespace(node="host_1_a", config=config, backend=backend, answer_timeout=1.0)
        monkeypatch.setattr(exit_barrier, "time", SimpleNamespace(monotonic=lambda: store.now))

    def wait(self, deadline: float, *, removes_job: bool = False) -> float:
        """Wait; return how long that took."""
        exit_barrier.wait_exit_barrier(self.context, deadline, removes_job=removes_job)
        return self._store.now


@pytest.mark.parametrize("deadline", [0.5, 1.5, 5.0])
def test_the_wait_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch, deadline: float) -> None:
    """Not an interval later, however long the interval is."""
    store = Store(["host_1_a", "other_1_b"], {}, {})
    assert Host(monkeypatch, store).wait(deadline) == deadline


def test_the_wait_ends_with_the_last_node_that_lived_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that was not in the job then is not waited for."""
    store = Store(["host_1_a", "b_1_b", "c_1_c"], {"b_1_b": 0.25, "c_1_c": 3.5, "late_1_d": 20.0}, {})
    assert Host(monkeypatch, store).wait(60.0) == 3.5


def test_a_node_whose_heartbeats_stop_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a lease from its last heartbeat."""
    store = Store(["host_1_a", "dead_1_b"], {}, {"dead_1_b": 3.0})
    assert _LEASE + 2.0 <= Host(monkeypatch, store).wait(60.0) <= _LEASE + 2.0 + 2 * _INTERVAL


@pytest.mark.parametrize(
    ("hosts", "named"),
    [("abcde", "a_1, b_1, c_1, d_1, e_1"), ("abcdefghi", "a_1, b_1, c_1, d_1, e_1, f_1, g_1, h_1, …")],
)
def test_the_user_is_told_once_for_whom_the_node_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hosts: str, named: str
) -> None:
    """After a second a line names the hosts, as many as it has room for, and the time that is left."""
    names = [f"{name}_1_4711_x" for name in hosts]
    assert Host(monkeypatch, Store(["host_1_a", *names], {}, {})).wait(30.0) == 30.0
    (line,) = caplog.messages
    assert line.endswith(f"waiting up to 29 s for nodes that do not know it yet: {named}")


def test_a_short_wait_says_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As a rule the other nodes know the verdict in a moment."""
    assert Host(monkeypatch, Store(["host_1_a", "b_1_b"], {"b_1_b": 0.5}, {})).wait(30.0) == 0.5
    assert caplog.messages == []


@pytest.mark.parametrize("removes_job", [False, True])
def test_a_job_is_removed_from_a_store_of_others_after_the_wait(
    monkeypatch: pytest.MonkeyPatch, *, removes_job: bool
) -> None:
    """Only where the store is another program's: ours ends with the node."""
    store = Store(["host_1_a"], {}, {})
    assert Host(monkeypatch, store).wait(30.0, removes_job=removes_job) == 0.0
    assert (exit_barrier.EXIT_BARRIER_NODES in store.space.values) == (not removes_job)


@pytest.mark.parametrize("garbage", [b"{", b"7", b"[7, {}]"])
def test_garbage_in_place_of_the_nodes_is_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch, garbage: bytes) -> None:
    """A stranger that writes to the store holds up no end."""
    store = Store([], {}, {})
    store.write({exit_barrier.EXIT_BARRIER_NODES: garbage})
    assert Host(monkeypatch, store).wait(30.0) == 0.0
