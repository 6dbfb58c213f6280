"""How an agent comes into a round of a handler that is not ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_run.agent.driver import joining
from elastic_run.agent.driver.joining import Joining
from elastic_run.core.agent.messages import RoundFailed, RoundFormed
from elastic_run.rendezvous.errors import RendezvousGracefulExitError, RendezvousTimeoutError


class _Agent:
    """An agent with a handler, whose steps are noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_immediate: bool, error: Exception | None = None) -> None:
        self.steps: list[object] = []
        self.fed: list[object] = []

        def take_place() -> None:
            self.steps.append("asks")
            if error is not None:
                raise error

        monkeypatch.setattr(joining, "restore_signals", self.steps.append)
        parts: Any = SimpleNamespace(
            context=SimpleNamespace(mask=frozenset([2])),
            round_join=SimpleNamespace(is_immediate=is_immediate, take_place=take_place),
            job=None,
            loop=SimpleNamespace(call_soon_threadsafe=lambda call: call()),
            feed=self.fed.append,
        )
        self.joining = Joining(parts)
        self.joining._ask_handler(1)


@pytest.mark.parametrize(("is_immediate", "steps"), [(False, [frozenset([2]), "asks"]), (True, ["asks"])])
def test_a_handler_asks_with_the_signals_of_before(
    steps: list[object], monkeypatch: pytest.MonkeyPatch, *, is_immediate: bool
) -> None:
    """In a thread of its own, where a plug-in may start processes; our own handler asks in the agent's thread."""
    agent = _Agent(monkeypatch, is_immediate=is_immediate)
    assert agent.steps == steps
    assert agent.fed == [RoundFormed(1)]


@pytest.mark.parametrize(
    ("error", "verdict", "detail"),
    [
        (RendezvousGracefulExitError("the job is done"), "success", "the job is done"),
        (RendezvousTimeoutError("nobody came"), "rendezvous", "RendezvousTimeoutError: nobody came"),
        (KeyError("host"), "rendezvous", "KeyError: 'host'"),
    ],
)
def test_a_handlers_error_is_the_end_of_the_round(
    error: Exception, verdict: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graceful exit is a success, any other error is told by its class."""
    agent = _Agent(monkeypatch, is_immediate=False, error=error)
    assert agent.fed == [RoundFailed(1, verdict=verdict, detail=detail)]
    assert agent.joining.handler_error is error
