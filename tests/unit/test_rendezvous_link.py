"""How a thread's connection is opened again: not too often, never in step, with more wait_limit for who is slow."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from elastic_run.rendezvous.elastic.backend.base import Backend
from elastic_run.rendezvous.elastic.store_connection import STORE_ID, StoreConnection
from elastic_run.store.errors import FULL, REFUSED, SILENT, UNREADY, StoreConnectionError, StoreTimeoutError
from elastic_run.store.jobstore.memory import JobSpace, MemoryJobStore
from tests.support.wait import DEADLINE, NotingEvent

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.store.errors import StoreError
    from elastic_run.store.jobstore.api import JobStore

_FIRST, _LONGEST = 2.0, 6.0


class FakeBackend(Backend):
    """Opens a store in memory, and notes how long it was given for that; or fails as it is told."""

    def __init__(self) -> None:
        self.name = "memory"
        self.timeouts: list[float] = []
        self.failure: StoreError | None = None

    def prepare(self) -> None:
        """Nothing is served."""

    def open(self, timeout: float) -> JobStore:
        """Open a store, or fail."""
        self.timeouts.append(timeout)
        if self.failure is not None:
            raise self.failure
        return MemoryJobStore(JobSpace(), "job")

    def find_local_address(self) -> str:
        """Return loopback."""
        return "127.0.0.1"

    def describe(self) -> dict[str, Any]:
        """Return nothing."""
        return {}


class RestoredStore(MemoryJobStore):
    """A store that went back once."""

    @property
    def restores(self) -> int:
        """Return how often."""
        return 1


class RestoredBackend(FakeBackend):
    """Opens a store that was restored."""

    def open(self, timeout: float) -> JobStore:
        """Open it."""
        del timeout
        store = RestoredStore(JobSpace(), "job")
        store.create(STORE_ID, b"store 1")
        return store


def make_link(draw: Callable[[], float] = lambda: 1.0) -> tuple[StoreConnection, FakeBackend, NotingEvent]:
    """Return a link, its backend, and what notes its pauses."""
    backend, closing = FakeBackend(), NotingEvent()
    return StoreConnection(backend, _FIRST, closing, longest_timeout=_LONGEST, draw=draw), backend, closing


def fail(link: StoreConnection, backend: FakeBackend, failure: StoreError, times: int) -> None:
    """Let so many attempts fail."""
    backend.failure = failure
    for _ in range(times):
        with pytest.raises(type(failure)) as caught:
            _ = link.store
        link.pause(caught.value)
    backend.failure = None


@pytest.mark.parametrize("failure", [StoreConnectionError("", SILENT), StoreTimeoutError("")], ids=["silent", "late"])
def test_a_silent_store_gets_twice_the_time_up_to_a_lease(failure: StoreError) -> None:
    """Where no answer came in time the next attempt waits twice as long: who is slow isn't asked more for that."""
    link, backend, _ = make_link()
    fail(link, backend, failure, 4)
    assert backend.timeouts == [_FIRST, 2 * _FIRST, _LONGEST, _LONGEST]


@pytest.mark.parametrize("reason", [REFUSED, UNREADY])
def test_a_store_that_answers_no_gets_no_more_time(reason: str) -> None:
    """An attempt that fails for another reason than silence leaves the time for the next as it is."""
    link, backend, _ = make_link()
    fail(link, backend, StoreConnectionError("", reason), 3)
    assert backend.timeouts == [_FIRST] * 3


def test_pauses_grow_and_are_drawn() -> None:
    """The pauses between attempts double, each is a random part of that, and there is an end to it."""
    link, backend, closing = make_link(lambda: 0.5)
    fail(link, backend, StoreConnectionError("", UNREADY), 7)
    assert closing.waits == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 0.8, 0.8])


def test_who_waits_for_a_listener_looks_often() -> None:
    """Where nobody listens yet pauses stay short: the host may begin at any moment."""
    link, backend, closing = make_link()
    fail(link, backend, StoreConnectionError("", REFUSED), 5)
    assert closing.waits == pytest.approx([0.1, 0.2, 0.4, 0.4, 0.4])


def test_a_store_that_answers_again_is_treated_as_before() -> None:
    """Once a connection has outlived a use, the next failure is the first again; to be opened alone is not enough."""
    link, backend, closing = make_link()
    fail(link, backend, StoreConnectionError("", SILENT), 2)
    assert link.store is not None
    link.drop()
    assert link.store is link.store
    link.drop()
    assert link.store is not None
    assert backend.timeouts == [_FIRST, 2 * _FIRST, _LONGEST, _LONGEST, _FIRST]
    link.drop()
    fail(link, backend, StoreConnectionError("", SILENT), 1)
    assert closing.waits[-1] == pytest.approx(0.1)


def test_a_store_without_room_is_told() -> None:
    """Each attempt that meets a full store gives its line to the session, and no other failure does."""
    told: list[str] = []
    backend = FakeBackend()
    link = StoreConnection(backend, _FIRST, NotingEvent(), on_full=told.append)
    fail(link, backend, StoreConnectionError("", REFUSED), 2)
    assert told == []
    fail(link, backend, StoreConnectionError("takes no more", FULL), 2)
    assert told == ["takes no more"] * 2


def identify(link: StoreConnection, store_id: bytes) -> JobStore:
    """Open a connection, as the sender does that founds the store."""
    opened = link.store
    opened.create(STORE_ID, store_id)
    link.identify(store_id)
    return opened


def test_a_shared_connection_is_the_one_that_the_other_thread_has_identified() -> None:
    """Before its owner knows which store it leads to, the other thread waits; it never opens one itself."""
    owner, backend, closing = make_link()
    shared = StoreConnection(backend, _FIRST, closing, source=owner)
    found: list[JobStore] = []
    thread = threading.Thread(target=lambda: found.append(shared.store))
    thread.start()
    _ = owner.store
    assert found == []
    opened = identify(owner, b"store 1")
    thread.join(DEADLINE)
    assert [space_of(store) for store in found] == [space_of(opened)]
    assert shared.store_id == b"store 1"
    assert (owner.is_open, shared.is_open) == (True, False)
    assert len(backend.timeouts) == 1


def test_an_interrupted_connection_is_closed() -> None:
    """It does not count as open until its thread notices: the store has closed it already."""
    owner, _, _ = make_link()
    identify(owner, b"store 1")
    owner.interrupt()
    assert not owner.is_open
    owner.drop()
    identify(owner, b"store 1")
    assert owner.is_open


def test_no_other_thread_uses_a_restored_store_before_the_sender() -> None:
    """The sender sees to the log of a store that was restored from a backup; until then other threads are refused."""
    link = StoreConnection(RestoredBackend(), _FIRST, NotingEvent(), lambda: b"store 1")
    with pytest.raises(StoreConnectionError, match="was replaced by another store"):
        _ = link.store
    link.expected_restores = lambda: 1
    assert link.store.restores == 1


def test_a_connection_that_is_opened_again_is_shared_once_it_is_identified() -> None:
    """What lies behind the new one may be another store."""
    owner, backend, closing = make_link()
    shared = StoreConnection(backend, _FIRST, closing, source=owner)
    identify(owner, b"store 1")
    _ = shared.store
    shared.drop()
    owner.drop()
    _ = owner.store
    assert owner.store_id is None
    opened = identify(owner, b"store 2")
    assert space_of(shared.store) is space_of(opened)
    assert shared.store_id == b"store 2"


def test_what_is_no_shared_connection_leads_to_the_same_store() -> None:
    """Where two threads can't use one connection the other one is opened later, and may meet another store."""
    owner, backend, closing = make_link()
    shared = StoreConnection(backend, _FIRST, closing, source=owner)
    opened = identify(owner, b"store 1")
    opened.write({STORE_ID: b"store 2"})
    with pytest.raises(StoreConnectionError, match="was replaced by another store"):
        _ = shared.store


class TimedStore(MemoryJobStore):
    """Notes the time for each answer."""

    timeout = 0.0

    def clone(self) -> TimedStore:
        """Return another one."""
        return TimedStore(self.space)

    def set_timeout(self, timeout: float) -> None:
        """Note it."""
        self.timeout = timeout


def test_what_is_no_shared_connection_gets_the_time_of_its_own_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner's may have been opened in a hurry; after a silence it is twice the time."""
    owner, backend, closing = make_link()
    monkeypatch.setattr(backend, "open", lambda timeout: TimedStore(JobSpace(), f"{timeout}"))
    shared = StoreConnection(backend, _FIRST, closing, source=owner, longest_timeout=_LONGEST)
    identify(owner, b"store 1")
    for seconds in (_FIRST, 2 * _FIRST):
        opened = shared.store
        assert isinstance(opened, TimedStore)
        assert opened.timeout == seconds
        shared.drop()
        shared.pause(StoreConnectionError("", SILENT))


def test_a_connection_that_is_identified_gives_each_answer_its_full_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store has answered, so the hurry to reach it is over, for the thread that shares the connection as well."""
    owner, backend, closing = make_link()
    monkeypatch.setattr(backend, "open", lambda _: TimedStore(JobSpace()))
    owner.time_left = lambda: 1.0
    opened = identify(owner, b"store 1")
    assert isinstance(opened, TimedStore)
    assert opened.timeout == _FIRST
    assert closing.waits == []


def space_of(store: JobStore) -> JobSpace:
    """Return what a connection leads to."""
    assert isinstance(store, MemoryJobStore)
    return store.space


def test_a_thread_that_waits_for_a_shared_connection_is_woken_when_the_session_closes() -> None:
    """Its owner may never open it again."""
    owner, backend, _ = make_link()
    closing = threading.Event()
    shared = StoreConnection(backend, _FIRST, closing, source=owner)
    errors: list[BaseException] = []

    def use() -> None:
        try:
            _ = shared.store
        except StoreConnectionError as error:
            errors.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    closing.set()
    owner.interrupt()
    thread.join(DEADLINE)
    assert "session is closed" in str(errors[0])
