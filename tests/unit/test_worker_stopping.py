"""The signals by which a worker learns that it will be stopped."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

import pytest

from elastic_run.contract import ENV_SCALE_UP_SIGNAL, ENV_STOP_TIME
from elastic_run.worker import stopping
from elastic_run.worker.place import WorkerError

if TYPE_CHECKING:
    from collections.abc import Iterator

_NUMBERS = (signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture
def earlier(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Give the signals that the program's own handlers have got; nothing was asked so far."""
    got: list[int] = []
    handlers = {number: signal.signal(number, lambda received, _: got.append(received)) for number in _NUMBERS}
    monkeypatch.setattr(stopping, "_watch", stopping._Watch())
    monkeypatch.setenv(ENV_SCALE_UP_SIGNAL, "SIGUSR1")
    monkeypatch.delenv(ENV_STOP_TIME, raising=False)
    yield got
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", _NUMBERS)
def test_a_signal_of_the_launcher_is_a_request_to_stop(earlier: list[int], number: int) -> None:
    """SIGTERM and --scale-up-signal, from the first question on; the program's own handler still gets it."""
    assert not stopping.stop_requested()
    signal.raise_signal(number)
    assert stopping.stop_requested()
    assert earlier == [number]


@pytest.mark.parametrize("name", ["", "SIGNOTHING"])
def test_without_a_signal_for_new_nodes_only_sigterm_counts(
    earlier: list[int], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As where the launcher is torchrun."""
    monkeypatch.setenv(ENV_SCALE_UP_SIGNAL, name)
    assert not stopping.stop_requested()
    signal.raise_signal(signal.SIGUSR1)
    assert not stopping.stop_requested()
    assert earlier == [signal.SIGUSR1]


@pytest.mark.usefixtures("earlier")
def test_the_first_question_is_asked_in_the_main_thread() -> None:
    """Python allows handlers there only; later any thread may ask."""
    found: list[object] = []

    def ask() -> None:
        try:
            found.append(stopping.stop_requested())
        except WorkerError as error:
            found.append(str(error).partition(" once")[0])

    for _ in range(2):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        stopping.stop_requested()
    assert found == ["call stop_requested()", False]
