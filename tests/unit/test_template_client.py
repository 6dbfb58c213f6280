"""The launcher's side of a template: the forks that it has, has lost, and waits for; no process is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run.multiprocessing.process import process_table
from elastic_run.multiprocessing.warm.template_client import TemplateClient

if TYPE_CHECKING:
    from collections.abc import Callable


class _Template:
    """A template that has been told to make forks of these pids."""

    def __init__(self, *pids: int) -> None:
        self.news: list[tuple[str, str]] = []
        self.closed: list[int] = []
        subreaper: Any = SimpleNamespace(begin=lambda _: None, end=lambda _: None)
        guardian: Any = None
        self.client = TemplateClient(subreaper, guardian, on_news=lambda *news: self.news.append(news))
        self.client.is_there = True
        self.order(*pids)

    def order(self, *pids: int) -> None:
        """Let forks be born that were ordered."""
        channels: list[Any] = [SimpleNamespace(close=lambda pid=pid: self.closed.append(pid)) for pid in pids]
        self.client._ordered, self.client._born = channels, list(pids)

    def tell(self, kind: str, text: str = "") -> None:
        """Take a message of the template."""
        channel: Any = None
        self.client._answer(channel, {"kind": kind, "text": text})


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Return the pids that are children of this process; the test adds to them."""
    found: set[int] = set()
    monkeypatch.setattr(process_table, "is_child", found.__contains__)
    return found


def test_forks_that_have_come_wait(children: set[int]) -> None:
    """Nothing is told but that all are there."""
    children |= {70, 71}
    template = _Template(70, 71)
    template.tell("done")
    assert [fork.pid for fork in template.client.forks] == [70, 71]
    assert template.news == [("done", "")]
    assert not template.client.is_busy


def test_a_fork_that_was_killed_is_told(children: set[int]) -> None:
    """The others have to suffice."""
    children.add(70)
    template = _Template(70, 71)
    template.client._wanted = 5
    template.tell("done")
    assert [fork.pid for fork in template.client.forks] == [70]
    assert template.closed == [71]
    assert template.news == [("lost", "1"), ("done", "")]
    assert not template.client.is_busy


def test_forks_that_were_refused_are_told_once(children: set[int]) -> None:
    """With the template's reason; a loss later on is told again."""
    template = _Template(70, 71)
    template.tell("refused", "no memory")
    template.tell("done")
    assert template.news == [("refused", "no memory"), ("done", "")]
    template.order(72)
    template.tell("done")
    assert template.news[2:] == [("lost", "1"), ("done", "")]
    assert children == set()


def test_a_template_that_has_ended_owes_nothing() -> None:
    """The forks that it was to make are waited for no more."""
    template = _Template(70)
    template.client._wanted = 5
    found = [template.client.is_busy]
    template.client._drop_ordered()
    assert [*found, template.client.is_busy] == [True, False]
    assert template.closed == [70]


def test_a_template_is_gone_when_its_forks_have_ended() -> None:
    """The end of the job waits for nothing else."""
    ends: dict[int, Callable[[int], None]] = {}
    nothing: Any = None
    client = TemplateClient(nothing, nothing, on_news=lambda *_: None)
    loop: Any = SimpleNamespace(watch_exit=ends.__setitem__)
    client._loop = loop
    found = [client.is_gone]
    for pid in (70, 71):
        fork: Any = SimpleNamespace(pid=pid, kill=lambda: None)
        client.discard(fork)
    for pid in (70, 71):
        found.append(client.is_gone)
        ends[pid](-9)
    assert [*found, client.is_gone] == [True, False, False, True]
