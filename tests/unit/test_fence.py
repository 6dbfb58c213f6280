"""A node that is cut off stops its workers, where the user asks for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from elastic_run.core.job.config import JobConfig
from elastic_run.core.node import machine as member
from elastic_run.core.node import messages as node_messages
from elastic_run.core.node.state import READY, RUNNING
from elastic_run.core.protocol.messages import STOPPED, Assignment, NodeInfo, Ready, StoreAddress
from elastic_run.records import replace
from elastic_run.rendezvous.elastic import partition

if TYPE_CHECKING:
    import pytest

_STORE_ADDRESS = StoreAddress("a", 1)
_PLACE = Assignment(
    round=3,
    group_rank=0,
    group_world_size=2,
    base_rank=0,
    world_size=2,
    role_rank=0,
    role_world_size=2,
    master=_STORE_ADDRESS,
    restart_count=0,
    hosts=2,
)


def test_a_member_that_is_cut_off_ends_its_round() -> None:
    """The agent is told to stop its workers, once; what became of them is said when the store answers again."""
    begun, _ = member.begin(
        "a", node_info=NodeInfo("a", 1, 1), config=JobConfig(1, 2), store_address=_STORE_ADDRESS, now=0.0
    )
    running = replace(
        begun,
        state=RUNNING,
        log=replace(begun.log, next_slot=5, term=1),
        job=replace(begun.job, known_round=3),
        round=replace(begun.round, place=_PLACE),
    )
    halting, commands = member.decide(running, node_messages.CutOff(6.2), 10.0)
    assert node_messages.Halted(3, "fenced", "no answer for 6 s") in commands
    again, commands = member.decide(halting, node_messages.CutOff(7.0), 10.8)
    assert not [command for command in commands if isinstance(command, node_messages.Halted)]
    ready, _ = member.decide(again, node_messages.WorkersGone(3, STOPPED, _STORE_ADDRESS), 11.0)
    assert ready.state == READY
    (fact,) = ready.facts.outstanding
    assert isinstance(fact, Ready)
    assert (fact.outcome, fact.sequence) == (STOPPED, 1)


def test_a_node_without_workers_has_nothing_to_stop() -> None:
    """Where no round runs nothing follows."""
    begun, _ = member.begin(
        "a", node_info=NodeInfo("a", 1, 1), config=JobConfig(1, 2), store_address=_STORE_ADDRESS, now=0.0
    )
    assert member.decide(begun, node_messages.CutOff(6.0), 10.0) == (begun, ())


class _Session:
    """A session with a lease of 6 s and an interval of 2 s, on a clock that only waits move.

    Args:
        monkeypatch: Sets the clock.
        heartbeats: When the store took a heartbeat, in ascending order.
        ends_at: When the session ends.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, heartbeats: list[float], ends_at: float) -> None:
        self.now = 0.0
        self.cut_off: list[tuple[float, float]] = []
        self._heartbeats, self._ends_at = heartbeats, ends_at
        monkeypatch.setattr(partition, "time", SimpleNamespace(monotonic=lambda: self.now))
        closing = SimpleNamespace(is_set=lambda: self.now >= ends_at, wait=self._wait)
        self.signals = SimpleNamespace(closing=closing, fenced_at=0.0)
        self.sender = SimpleNamespace(last_heartbeat_at=heartbeats[0])

    def _wait(self, seconds: float) -> None:
        assert seconds > 0, "it must not spin"
        self.now = min(self.now + seconds, self._ends_at)
        self.sender.last_heartbeat_at = max(at for at in self._heartbeats if at <= self.now)

    def run(self, state: str) -> None:
        """Watch a member in this state until the session ends."""
        context: Any = SimpleNamespace(
            config=SimpleNamespace(lease=6.0, keep_alive_interval=2.0),
            signals=self.signals,
            sender=self.sender,
            events=SimpleNamespace(is_over=SimpleNamespace(is_set=lambda: False)),
        )
        driver: Any = SimpleNamespace(
            member=SimpleNamespace(state=state), feed=lambda event: self.cut_off.append((self.now, event.seconds))
        )
        partition.Fence(context, driver).run()


def test_a_node_is_cut_off_when_its_last_heartbeat_is_a_lease_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before, and no interval later: from then on the others may form a round without it."""
    session = _Session(monkeypatch, [0.0, 2.0, 4.5], ends_at=10.75)
    session.run(RUNNING)
    assert session.cut_off == [(10.5, 6.0)]
    assert session.signals.fenced_at == 10.5


def test_a_node_that_stays_cut_off_is_told_once_in_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later round may run by then; after the next heartbeat a whole lease counts again."""
    session = _Session(monkeypatch, [0.0, 11.0], ends_at=17.5)
    session.run(RUNNING)
    assert session.cut_off == [(6.0, 6.0), (8.0, 8.0), (10.0, 10.0), (17.0, 6.0)]


def test_a_node_without_a_round_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the store is silent, it has no workers that could disturb the others."""
    session = _Session(monkeypatch, [0.0], ends_at=30.0)
    session.run(READY)
    assert session.cut_off == []
    assert session.signals.fenced_at == 0.0
