"""What the launcher tells its guardian, and how long the second guardian waits for the first; starts no process."""

from __future__ import annotations

import os
import select
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from elastic_run.multiprocessing.process import guardian_process
from elastic_run.multiprocessing.process.guardian import Guardian
from elastic_run.multiprocessing.process.process_title import ProcessTitle

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
    orders.death_notice = ("module", 30.0, b"")
    assert orders.limit == guardian_process._MARGIN + 30.0


def test_the_second_guardian_shows_that_the_first_one_tells_of_the_death_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to guard then; it ends with the first one."""
    titles: list[str] = []
    monkeypatch.setattr(ProcessTitle, "show", lambda _, words, __: titles.append(words))
    launcher: Any = SimpleNamespace(orders=guardian_process._Orders(), pid=70, make_poll=lambda _: select.poll())
    pipe, writing = os.pipe()
    os.write(writing, b"cleans up\nswept\nbye\n")
    assert not guardian_process._outlasts_first(None, pipe, launcher)
    assert titles == ["node-death notice of 70, second"]
    os.close(pipe)
    os.close(writing)
