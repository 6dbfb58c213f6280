"""The coordinator's thread: how it reads facts and heartbeats, and that it deletes nothing in a restored store."""

from __future__ import annotations

from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.job.coordinator import start_term
from elastic_run.core.job.coordinator_state import Cleanup
from elastic_run.core.job.state import REFUSED, SILENT, Gone, Refusal
from elastic_run.core.node.messages import Coordinate
from elastic_run.core.protocol import job_keys, messages
from elastic_run.records import replace
from elastic_run.rendezvous.backend_table import read_settings
from elastic_run.rendezvous.elastic import coordinator_thread, handler
from elastic_run.rendezvous.elastic.backend.base import SharedBackend
from elastic_run.rendezvous.elastic.coordinator_thread import CoordinatorThread
from elastic_run.rendezvous.elastic.job_session import JobSession
from elastic_run.rendezvous.elastic.store_connection import StoreConnection
from elastic_run.store import errors
from elastic_run.store.jobstore.memory import JobSpace, MemoryJobStore
from tests.support.configs import plain_setup
from tests.support.wait import NotingEvent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elastic_run.rendezvous.elastic.context import SessionContext

_MOST = 5000


def make_context(space: JobSpace) -> tuple[SessionContext, NotingEvent]:
    """Return what the threads of a session share, and what notes the pauses."""
    settings = read_settings("c10d", {"keep_alive_interval": "300", "last_call_timeout": "300"})
    backend = SharedBackend("memory", "job", "memory", conf={}, host=None, open_store=lambda _: MemoryJobStore(space))
    setup = plain_setup(min_nodes=_MOST, max_nodes=_MOST)
    session = handler.open_session(backend, settings, setup, local_addr="127.0.0.1")
    assert isinstance(session, JobSession)
    session._context.signals.closing = closing = NotingEvent()
    return session._context, closing


def join(store: MemoryJobStore, context: SessionContext, numbers: range) -> None:
    """Let nodes say that they join."""
    for number in numbers:
        node, info = f"n{number}_1_0", messages.NodeInfo(f"n{number}", 1, 1)
        store_address = messages.StoreAddress("127.0.0.1", 1)
        fact = messages.Join(node=node, sequence=1, node_info=info, config=context.config, store_address=store_address)
        store.append(job_keys.FACTS, messages.to_json(fact))


class FailingStore(MemoryJobStore):
    """A store whose first read of facts fails, which takes a while."""

    def __init__(self, clock: SimpleNamespace) -> None:
        super().__init__()
        self.reader: CoordinatorThread | None = None
        self._clock = clock

    def read(self, stream: str, position: int, timeout: float) -> tuple[list[bytes], int]:
        """Fail once; the second time the thread is stopped."""
        if self._clock.now > 0.0:
            assert self.reader is not None
            self.reader.stop()
            return super().read(stream, position, min(timeout, 0.0))
        self._clock.now = 9.0
        message = "nothing answers"
        raise errors.StoreConnectionError(message, errors.SILENT)


class RestoredStore(MemoryJobStore):
    """A store that loses a key right before a coordinator deletes others."""

    def __init__(self, space: JobSpace, lost: str) -> None:
        super().__init__(space)
        self.is_restored = False
        self._lost = lost

    def delete_where(self, keys: Sequence[str], expected: Mapping[str, bytes]) -> None:
        """Lose the key, then delete."""
        if self.is_restored:
            self.delete([self._lost])
        super().delete_where(keys, expected)


@pytest.mark.parametrize(("nodes", "pauses"), [(1, []), (15, []), (16, [0.005]), (1000, [0.005]), (4000, [0.02])])
def test_a_crowd_is_read_in_batches(nodes: int, pauses: list[float]) -> None:
    """From 16 nodes on some more come before the next facts are read; a small job never waits for that."""
    space = JobSpace()
    store = MemoryJobStore(space)
    context, closing = make_context(space)
    thread = CoordinatorThread(context, Coordinate(term=1, slot=0, state_slot=-1, state_term=0))

    def turn_until(count: int) -> None:
        while thread._coordinator is None or len(thread._coordinator.job.nodes) < count:
            thread._turn(store)

    join(store, context, range(nodes))
    turn_until(nodes)
    assert closing.waits[len(range(0, nodes - 1, 1024)) :] == []
    closing.waits.clear()
    join(store, context, range(nodes, nodes + 1))
    turn_until(nodes + 1)
    assert closing.waits == pytest.approx(pauses)


def test_after_an_outage_all_leases_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats that could not be read are no sign of a death."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(coordinator_thread, "time", SimpleNamespace(monotonic=lambda: clock.now))
    store = FailingStore(clock)
    context, _ = make_context(store.space)
    store.reader = thread = CoordinatorThread(context, Coordinate(term=1, slot=0, state_slot=-1, state_term=0))
    monkeypatch.setattr(StoreConnection, "store", store)
    thread._run()
    assert thread._last_look == 9.0


def test_a_thread_that_is_stopped_before_it_begins_ends() -> None:
    """Another node may have begun the next term at once."""
    context, _ = make_context(JobSpace())
    thread = CoordinatorThread(context, Coordinate(term=1, slot=0, state_slot=-1, state_term=0))
    thread.stop()
    thread._run()
    assert thread._coordinator is None


@pytest.mark.parametrize("lost", ["d/1", job_keys.LOG_START])
def test_nothing_is_deleted_in_a_store_that_has_lost_what_was_written(lost: str) -> None:
    """A coordinator that was stopped before it deleted keys finds the store restored: the job may need them there."""
    space = JobSpace()
    store = RestoredStore(space, lost)
    context, _ = make_context(space)
    thread = CoordinatorThread(context, Coordinate(term=1, slot=0, state_slot=-1, state_term=0))
    store.write({"d/0": b"claim", "d/1": b"entry", "s/0.1": b"state"})
    known = start_term("a", term=1, slot=0, state=None, now=0.0)
    cleanup = Cleanup({}, ("d/0", "s/0.1"), {"d/1": b"entry"}, None, messages.LogStart(1, 1))
    store.is_restored = True
    thread._clean_up(store, known, cleanup)
    assert store.get(["d/0", "s/0.1"]) == [b"claim", b"state"]
    store.is_restored = False
    store.write({"d/1": b"entry"})
    thread._clean_up(store, known, cleanup)
    assert store.get(["d/0", "s/0.1"]) == [None, None]


def test_a_new_term_tells_a_dropped_node_so_where_no_node_is_left() -> None:
    """The coordinator before has dropped the last node, and ended before it removed the heartbeat of that node.

    A node that is about to be refused keeps its heartbeat until it is told: it may be the coordinator.
    """
    store = MemoryJobStore(space := JobSpace())
    context, _ = make_context(space)
    thread = CoordinatorThread(context, Coordinate(term=2, slot=1, state_slot=-1, state_term=0))
    known = start_term("a", term=2, slot=1, state=None, now=0.0)
    gone = {name: Gone(name, 1, reason, "") for name, reason in (("a", REFUSED), ("n", SILENT))}
    job = replace(known.job, gone=MappingProxyType(gone), refusals=(Refusal("a", "another script"),))
    for name in gone:
        store.heartbeat(name)
    thread._look(store, replace(known, job=job), 0.0)
    own, dropped = store.read_heartbeats(["a", "n"])
    assert own is not None
    assert dropped is None
    thread._look(store, replace(known, job=replace(job, refusals=())), 1.0)
    assert store.read_heartbeats(["a"]) == [None]
