"""What the launcher tells its guardian; no process is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_run.multiprocessing.process.guardian import Guardian

if TYPE_CHECKING:
    import pytest


def test_the_guardian_is_told_of_each_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it begins and when it is gone: the number may be another session's later."""
    sent: list[str] = []
    monkeypatch.setattr(Guardian, "_send", lambda _, line: sent.append(line))
    guardian = Guardian(is_exec=False)
    guardian.watch(70, 5)
    guardian.forget(70)
    assert sent == ["+70 5", "-70"]
