"""How a thread's connection is opened again: not too often, never in step, with more patience for who is slow."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from elastic_run.rendezvous.elastic.backend.base import Backend
from elastic_run.rendezvous.elastic.store_connection import StoreConnection
from elastic_run.store.errors import FULL, REFUSED, SILENT, UNREADY, StoreConnectionError, StoreTimeoutError
from elastic_run.store.jobstore.memory import JobSpace, MemoryJobStore

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


class NotingEvent(threading.Event):
    """Notes how long it was to be waited for, and doesn't wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        """Note the time."""
        self.waits.append(timeout)
        return False


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


def test_what_was_given_to_another_thread_stays_open() -> None:
    """The thread that gives its connection opens another one; the thread that takes it opens none."""
    giving, backend, closing = make_link()
    opened = giving.store
    taking = StoreConnection(backend, _FIRST, closing)
    given = giving.give()
    assert given is opened
    assert not giving.is_open
    assert giving.give() is None
    taking.take(opened, b"store 1")
    giving.drop()
    giving.interrupt()
    assert taking.store is opened
    assert taking.store_id == b"store 1"
    assert opened.get(["key"]) == [None]
    assert giving.store is not opened
    assert len(backend.timeouts) == 2


def test_what_was_taken_has_the_time_for_each_answer_that_its_thread_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that was opened in haste, shortly before the store is given up, is not used so for ever."""
    timeouts: list[float] = []
    monkeypatch.setattr(MemoryJobStore, "set_timeout", lambda _, timeout: timeouts.append(timeout))
    giving, backend, closing = make_link()
    giving.time_left = lambda: 0.0
    taking = StoreConnection(backend, _FIRST, closing)
    opened = giving.store
    giving.give()
    taking.take(opened, b"store 1")
    assert taking.store is taking.store is opened
    assert timeouts == [_FIRST]


def test_what_was_taken_while_the_session_closes_is_closed() -> None:
    """Nobody could interrupt it in between, so its thread looks before it waits in it."""
    giving, backend, closing = make_link()
    opened = giving.store
    giving.give()
    closing.set()
    taking = StoreConnection(backend, _FIRST, closing)
    taking.take(opened, b"store 1")
    with pytest.raises(StoreConnectionError, match="session is closed"):
        _ = taking.store
    with pytest.raises(StoreConnectionError):
        opened.get(["key"])
