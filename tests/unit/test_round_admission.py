"""Between the coordinator's decision and the agent: what the agent hears of a round that it can't have."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.node.messages import Formed, Warned, WorkersGone
from elastic_run.core.protocol.messages import STOPPED, UNREACHABLE, Assignment, StoreAddress
from elastic_run.rendezvous.backend_table import read_settings
from elastic_run.rendezvous.elastic import handler, round_admission
from elastic_run.rendezvous.elastic.backend.base import SharedBackend
from elastic_run.rendezvous.elastic.job_session import JobSession
from elastic_run.rendezvous.elastic.round_admission import RoundAdmission
from elastic_run.rendezvous.elastic.store_connection import STORE_ID
from elastic_run.store.jobstore.memory import JobSpace, MemoryJobStore
from tests.support.configs import plain_setup
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.core.node.messages import Event
    from elastic_run.rendezvous.elastic.context import SessionContext

_STORE_ADDRESS = StoreAddress("127.0.0.1", 1, use_agent_store=True)
_WITHIN = 10.0


def make_context() -> SessionContext:
    """Return what the threads of a session share."""
    space = JobSpace()
    backend = SharedBackend("memory", "job", "memory", conf={}, host=None, open_store=lambda _: MemoryJobStore(space))
    session = handler.open_session(backend, read_settings("c10d", {}), plain_setup(), local_addr="127.0.0.1")
    assert isinstance(session, JobSession)
    return session._context


def form(number: int, rank: int = 1) -> Formed:
    """Return a round of two nodes."""
    return Formed(Assignment(number, rank, 2, rank, 2, rank, 2, _STORE_ADDRESS, 0, 2))


class Admission:
    """A node's way into its rounds, and what it says of them."""

    def __init__(self, *, shares_server: bool = False) -> None:
        self.context = make_context()
        self.told: list[object] = []
        self.context.events.deliver_to_agent = self.told.append
        self.said: list[WorkersGone] = []
        self.has_said = threading.Event()
        self.before_feed: Callable[[], None] = lambda: None
        self.admission = RoundAdmission(
            self.context, feed=self._feed, store_address=lambda: _STORE_ADDRESS, shares_server=shares_server
        )

    def _feed(self, event: Event) -> None:
        assert isinstance(event, WorkersGone)
        self.before_feed()
        self.said.append(event)
        self.has_said.set()


def test_a_halt_of_a_round_that_was_refused_is_not_for_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's node dies: the way is closed, and the halt is read before the node has said so."""
    monkeypatch.setattr(round_admission, "find_trouble", lambda *_: "connection refused")
    node = Admission()
    found: list[bool] = []
    node.before_feed = lambda: found.append(node.admission.has_withdrawn(7))
    node.admission.announce(form(7))
    assert node.has_said.wait(_WITHIN)
    assert found == [True]
    assert [(gone.round, gone.outcome) for gone in node.said] == [(7, UNREACHABLE)]
    assert node.told == []


def test_a_halt_of_a_round_that_the_agent_has_is_told() -> None:
    """Only the agent knows what became of its workers."""
    node = Admission()
    node.admission.announce(form(7, rank=0))
    assert node.told == [form(7, rank=0)]
    assert not node.admission.has_withdrawn(7)
    assert node.said == []


@pytest.mark.parametrize("is_second", [False, True])
def test_a_round_that_is_halted_on_the_way_is_withdrawn(monkeypatch: pytest.MonkeyPatch, *, is_second: bool) -> None:
    """Nothing ran, and that is said once; also in a second round of one number, which another log has formed."""
    monkeypatch.setattr(threading.Thread, "start", lambda _: None)
    node = Admission()
    if is_second:
        node.admission.announce(form(7, rank=0))
    node.admission.announce(form(7))
    assert node.admission.has_withdrawn(7)
    assert node.admission.has_withdrawn(7)
    assert [(gone.round, gone.outcome) for gone in node.said] == [(7, STOPPED)]


def test_a_warning_waits_for_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """New nodes come while the way to rank 0 is looked at: the agent hears of the round first."""
    looked = threading.Event()
    monkeypatch.setattr(round_admission, "find_trouble", lambda *_: None if looked.wait(_WITHIN) else "not in time")
    node = Admission()
    node.admission.announce(form(7))
    node.admission.warn(Warned(7))
    assert node.told == []
    looked.set()
    wait_until(lambda: node.told == [form(7), Warned(7)])


def test_a_warning_of_a_round_that_the_agent_does_not_have_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way was closed, so there are no workers to tell."""
    monkeypatch.setattr(round_admission, "find_trouble", lambda *_: "connection refused")
    node = Admission()
    node.admission.announce(form(7))
    assert node.has_said.wait(_WITHIN)
    node.admission.warn(Warned(7))
    assert node.told == []


def test_rank_0_opens_a_round_where_agents_and_workers_share_a_server() -> None:
    """The agent hears of it then; in a job of many rounds no connections pile up."""
    node = Admission(shares_server=True)
    before = [*node.context.connections]
    node.context.sender.store_id = node.context.backend.open(1.0).create(STORE_ID, b"store 1")
    formed = [form(number, rank=0) for number in (1, 2, 3)]
    for each in formed:
        node.admission.announce(each)
        wait_until(lambda: node.told and node.told[-1] is each)  # noqa: B023 - called in this turn only
    assert node.told == formed
    assert node.context.connections == before
