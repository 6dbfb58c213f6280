"""How long an agent goes on without an answer of its store, to the second, on a clock of the test's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.job.config import JobConfig
from elastic_run.rendezvous.backend_table import read_settings
from elastic_run.rendezvous.elastic import retry_deadline
from elastic_run.rendezvous.elastic.context import SessionContext
from elastic_run.rendezvous.elastic.retry_deadline import RetryDeadline
from elastic_run.rendezvous.session import Lost, Notice, Waiting
from elastic_run.store.errors import REFUSED, SILENT, UNREADY, StoreConnectionError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Seconds of the lease, and what the clock shows at the first failure.
_LEASE = 6.0
_BEGIN = 1000.0


class Trial:
    """A wait_limit, and failures of its store at times of a clock that stands where the test sets it.

    Args:
        monkeypatch: Sets the clock.
        dies_with_host: Whether the store is gone with the process that serves it.
        successors: Whether another node may serve it then.
        shows_waiting: Whether the agent has a line that it rewrites.
        conf: Settings beside the lease.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        dies_with_host: bool = True,
        successors: bool = False,
        shows_waiting: bool = False,
        conf: Mapping[str, object] | None = None,
    ) -> None:
        self.now = _BEGIN
        monkeypatch.setattr(retry_deadline, "time", SimpleNamespace(monotonic=lambda: self.now))
        given = {"keep_alive_interval": _LEASE / 3, "keep_alive_max_attempt": 3, "join_timeout": 600, **(conf or {})}
        affairs = SimpleNamespace(
            config=read_settings("c10d", given).complete(JobConfig()),
            backend=SimpleNamespace(
                kind="c10d",
                name="n:1",
                dies_with_host=dies_with_host,
                successors=[("m", 1)] * successors,
                describe_listener=lambda _: "",
            ),
            answer_timeout=3.0,
            shows_waiting=shows_waiting,
            signals=SimpleNamespace(fenced_at=0.0),
            sender=SimpleNamespace(last_heartbeat_at=0.0),
        )
        self.wait_limit = RetryDeadline(affairs)  # type: ignore[arg-type] # what it reads of them

    def reach(self) -> None:
        """Let the store answer."""
        self.wait_limit.recovered()

    def fail(
        self, reason: str, at: float, *, text: str = "it fails", answer: str = ""
    ) -> Notice | Waiting | Lost | None:
        """Let an attempt fail so many seconds after the first one."""
        self.now = _BEGIN + at
        return self.wait_limit.failed(StoreConnectionError(text, reason, answer=answer), self.now)

    def find_loss(self, reason: str) -> int:
        """Return the second at which the store is given up, if an attempt fails each second from 0 on."""
        return next(at for at in range(1000) if isinstance(self.fail(reason, float(at)), Lost))

    def find_lines(self, reason: str, until: int) -> list[int]:
        """Return the seconds at which the user is told."""
        return [at for at in range(until) if isinstance(self.fail(reason, float(at)), Notice | Waiting)]


@pytest.mark.parametrize(
    ("reason", "successors", "lost_at"),
    [
        (SILENT, False, _LEASE + 60),  # a dark host may come back
        (REFUSED, False, _LEASE + 5),  # its process is gone
        (SILENT, True, _LEASE),
        (REFUSED, True, 1),  # another node serves the store then
    ],
)
def test_a_store_that_dies_with_its_host_is_given_up(
    monkeypatch: pytest.MonkeyPatch, reason: str, *, successors: bool, lost_at: float
) -> None:
    """A lease and a minute of silence, a lease and 5 s of refusals; with a successor a lease, and 1 s of refusals."""
    trial = Trial(monkeypatch, successors=successors)
    trial.reach()
    assert trial.find_loss(reason) == lost_at


def test_a_store_that_comes_back_by_itself_is_tried_for_the_join_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """etcd, or a directory, is waited for as long as other nodes are; so is a store that was never reached."""
    for dies_with_host, was_reached in ((False, True), (True, False)):
        trial = Trial(monkeypatch, dies_with_host=dies_with_host, conf={"join_timeout": 90})
        if was_reached:
            trial.reach()
        assert trial.find_loss(REFUSED) == 90


def test_an_attempt_takes_no_longer_than_the_store_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempts end in time for the first line to the user; once the store answers the wait begins anew."""
    trial = Trial(monkeypatch, conf={"join_timeout": 90})
    trial.wait_limit.begin()
    assert (trial.wait_limit.time_left, trial.wait_limit.attempt_limit) == (90.0, 2.0)
    trial.now = _BEGIN + 30.0
    assert (trial.wait_limit.time_left, trial.wait_limit.attempt_limit) == (60.0, 60.0)
    trial.reach()
    assert (trial.wait_limit.time_left, trial.wait_limit.attempt_limit) == (90.0, 90.0)


def test_the_user_is_told_more_and_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first line comes after 2 s, after a lease where the store answered before; the next pauses grow to 60 s."""
    assert Trial(monkeypatch).find_lines(SILENT, 300) == [2, 12, 32, 72, 132, 192, 252]
    reached = Trial(monkeypatch)
    reached.reach()
    assert reached.find_lines(SILENT, 40) == [6, 16, 36]
    assert Trial(monkeypatch, shows_waiting=True).find_lines(SILENT, 6) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("is_within", [False, True], ids=["an attempt before", "the same attempt"])
def test_what_a_busy_store_said_last_is_told(monkeypatch: pytest.MonkeyPatch, *, is_within: bool) -> None:
    """The end of the time cuts the last attempt: a store that has said why it can't serve has not kept silent."""
    trial = Trial(monkeypatch, dies_with_host=False, conf={"join_timeout": 90})
    if is_within:
        trial.fail(SILENT, 0.0, text="no answer in time", answer="etcd: busy")
    else:
        trial.fail(UNREADY, 0.0, text="etcd: busy")
    lost = trial.fail(SILENT, 90.0, text="no answer in time")
    assert isinstance(lost, Lost)
    assert lost.detail.endswith(" for 90 s: no answer in time; its last answer: etcd: busy")
    trial.reach()
    trial.fail(SILENT, 100.0, text="no answer in time")
    lost = trial.fail(SILENT, 300.0, text="no answer in time")
    assert isinstance(lost, Lost)
    assert lost.detail.endswith(" s: no answer in time")


@pytest.mark.parametrize(
    ("conf", "timeout"),
    [({}, 3.0), ({"heartbeat_timeout": 1.5}, 1.5), ({"read_timeout": 2}, 2.0), ({"heartbeat_timeout": 0.1}, 1.0)],
)
def test_an_answer_may_take_as_long_as_a_heartbeat(conf: dict[str, object], timeout: float) -> None:
    """An answer takes `heartbeat_timeout` and `read_timeout` at most, half a lease, and may take a second."""
    given = {"keep_alive_interval": _LEASE / 3, "keep_alive_max_attempt": 3, **conf}
    settings = read_settings("c10d", given)
    affairs = SimpleNamespace(settings=settings, config=settings.complete(JobConfig()))
    assert SessionContext.answer_timeout.fget(affairs) == timeout  # type: ignore[attr-defined] # a property of the class
