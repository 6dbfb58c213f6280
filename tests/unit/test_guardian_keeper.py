"""The guardian is started again when it dies, and gone at the end; no process is started."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from elastic_run.multiprocessing.process import guardian, process_table
from elastic_run.multiprocessing.process.guardian import GuardianKeeper
from tests.support.stream_bench import Clockwork

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.loop import Loop
    from elastic_run.multiprocessing.process.guardian import Guardian


class _Loop(Clockwork):
    """A loop whose children end when the test says so."""

    def watch_exit(self, _: int, callback: Callable[[int], None]) -> None:
        """Call when the guardian ends."""
        self.end = callback

    def run_until(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Let the guardian go that was told to, or wait in vain."""
        if not condition() and self.is_leaving:
            self.end(0)
        if not condition():
            self.time = deadline
        return condition()

    is_leaving = True


class _Guardian:
    """A guardian that does what it is told."""

    def __init__(self) -> None:
        self.pid = 0
        self.calls: list[str] = []

    def attach(self, _: object) -> None:
        """Take the loop."""

    def start(self) -> int:
        """Start another one."""
        self.pid += 1
        self.calls.append("start")
        return self.pid

    def dismiss(self) -> None:
        """Let it go."""
        self.calls.append("dismiss")

    def alarm(self) -> None:
        """Let it clean up."""
        self.calls.append("alarm")

    def close(self) -> None:
        """Close the pipe."""
        self.calls.append("close")


class _Kept:
    """A guardian that runs."""

    def __init__(self) -> None:
        self.loop, self.guardian, self.lines = _Loop(), _Guardian(), list[str]()
        self.keeper = GuardianKeeper(cast("Loop", self.loop), cast("Guardian", self.guardian), say=self.lines.append)
        self.keeper.start()


def test_a_killed_guardian_is_replaced_and_told() -> None:
    """At once the first time, then after longer and longer pauses; in the end a line says what that means."""
    kept = _Kept()
    kept.loop.end(-9)
    assert kept.guardian.calls == ["start"] * 2
    assert kept.lines == ["the guardian process was killed; starting another"]
    for losses in range(2, guardian._TRIES + 1):
        kept.loop.end(-9)
        assert kept.guardian.calls == ["start"] * losses
        kept.loop.advance(60.0)
        assert kept.guardian.calls == ["start"] * (losses + 1)
    kept.loop.end(-9)
    kept.loop.advance(60.0)
    assert kept.guardian.calls == ["start"] * (guardian._TRIES + 1)
    assert kept.lines[1:] == [
        "each guardian process was killed: if the launcher is killed as well, its workers keep running"
    ]


@pytest.mark.parametrize(("is_clean", "told"), [(True, "dismiss"), (False, "alarm")])
def test_a_guardian_that_leaves_is_not_waited_for(
    is_clean: bool,
    told: str,
) -> None:
    """Its end is no loss, and its pipe is closed."""
    kept = _Kept()
    kept.keeper.close(is_clean=is_clean)
    assert kept.guardian.calls == ["start", told, "close"]
    assert kept.loop.time == 0.0
    assert kept.lines == []


def test_a_stopped_guardian_is_killed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would do harm if it went on one day."""
    killed: list[int] = []
    monkeypatch.setattr(process_table, "signal_children", lambda pids, _: killed.extend(pids))
    kept = _Kept()
    kept.loop.is_leaving = False
    kept.keeper.close(is_clean=True)
    assert killed == [1]
    assert kept.guardian.calls == ["start", "dismiss", "close"]
