"""The rounds of a job as the agent remembers them: from when on the OOM killer's kills count."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from elastic_run.agent.history import History
from elastic_run.core.failure.oom_kills import OomKills
from elastic_run.report import memory

if TYPE_CHECKING:
    import pytest

    from elastic_run.agent.driver.context import AgentContext
    from elastic_run.agent.senders import Senders


def test_kills_count_from_the_first_start_of_workers_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later start of workers hides no kill, and each kill is told once."""
    readings = iter([OomKills(3, 7), OomKills(4, 9), OomKills(4, 9)])
    monkeypatch.setattr(memory, "read_oom_kills", lambda: next(readings))
    history = History(cast("AgentContext", None), cast("Senders", None), lambda _: None)
    history.begin()
    history.begin()
    assert history._count_oom_kills() == OomKills(1, 2)
    assert history._count_oom_kills() == OomKills(0, 0)
