"""What the launcher tells its guardian, and how long the second guardian waits for the first; starts no process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_run.multiprocessing.process import guardian_process
from elastic_run.multiprocessing.process.guardian import Guardian

if TYPE_CHECKING:
    import pytest


def test_the_guardian_is_told_of_each_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it begins, when its leader has ended and when it is gone: the number may be another session's later."""
    sent: list[str] = []
    monkeypatch.setattr(Guardian, "_send", lambda _, line: sent.append(line))
    guardian = Guardian(is_exec=False)
    guardian.watch(70, 5)
    guardian.tell_end(70, 9)
    guardian.forget(70)
    guardian.tell_end(70, 9)
    assert sent == ["+70 5 0", "+70 5 9", "-70"]


def test_the_first_guardian_has_time_for_what_it_does() -> None:
    """The second one takes its place if it does not end in that time: none is counted while the launcher lives."""
    orders = guardian_process._Orders()
    assert orders.limit == 0.0
    orders.take(b"cleans")
    assert orders.limit == 0.0
    orders.take(b" up\n")
    assert orders.limit == guardian_process._CLEAN_UP
    orders.take(b"swept\n")
    assert orders.limit == guardian_process._MARGIN
