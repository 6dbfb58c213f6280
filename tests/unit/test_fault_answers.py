"""Faults of a collective: the worker says when it has made them, and the user is told then."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run.agent.driver import fault_injection
from elastic_run.core.agent.faults import ALTERED, ARMED, Fault, PlannedFault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class _Asked:
    """A worker that has been asked to skip a collective."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        own, self.worker = socket.socketpair()
        own.setblocking(False)
        self.lines: list[str] = []
        self.readers: dict[int, Callable[[], None]] = {}
        self.descriptor = own.fileno()
        monkeypatch.setattr(fault_injection, "send_request", lambda *_: own)
        loop: Any = SimpleNamespace(
            now=lambda: 0.0, add_reader=self.readers.__setitem__, remove_reader=self.readers.__delitem__
        )
        workers = SimpleNamespace(alive={0}, pids={0: 70})
        started: Any = SimpleNamespace(workers=workers, fault_sockets={0: "a name"})
        planned = PlannedFault(Fault(0, rank=3, action="skip-collective"), 3, 2.0)
        self.injection = fault_injection._Injection(planned, started, 0, loop=loop, say=self.lines.append)
        self.injection.begin()

    def answer(self, text: bytes) -> None:
        """Let the worker answer."""
        self.worker.send(text)
        self.readers[self.descriptor]()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Asked]:
    """Return a worker that has been asked."""
    made = _Asked(monkeypatch)
    with made.worker:
        yield made


def test_the_user_is_told_when_the_worker_has_altered_the_collective(asked: _Asked) -> None:
    """At once, not at the end of a round that may hang because of the fault."""
    asked.answer(ARMED)
    assert asked.lines == []
    asked.answer(ALTERED)
    assert len(asked.lines) == 1
    assert asked.lines[0].endswith(": rank 3 (pid 70) after 2.0 s (--inject-fault)")
    asked.injection.end()
    assert len(asked.lines) == 1


def test_a_fault_that_came_too_late_is_told_at_the_end(asked: _Asked) -> None:
    """The worker was ready for it, and called no collective any more."""
    asked.answer(ARMED)
    asked.injection.end()
    (line,) = asked.lines
    assert line.startswith("skip-collective came too late: rank 3 (pid 70) called no ")


def test_a_worker_that_has_ended_has_given_no_answer(asked: _Asked) -> None:
    """The fault may not have happened."""
    asked.worker.close()
    asked.readers[asked.descriptor]()
    (line,) = asked.lines
    assert line.startswith("skip-collective may not have happened: rank 3 ended without an answer")
