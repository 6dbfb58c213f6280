"""The driver of an agent's rounds: what it tells and joins, and in which order; no worker is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_run.agent.driver.job import MultiNodeJob
from elastic_run.agent.driver.round_driver import RoundDriver
from elastic_run.core.agent import machine, messages
from elastic_run.core.job.documents import End
from elastic_run.core.job.membership import Ended
from elastic_run.core.job.restart_policy import Failure
from elastic_run.report import waiting
from tests.support.stream_bench import Clockwork


class _Driver:
    """A driver, and what it has told."""

    def __init__(self, *, stop_reason: str = "", failure: Failure | None = None) -> None:
        loop: Any = Clockwork()
        loop.reap_strangers = lambda **options: self.calls.append(("reap", options))
        self.loop = loop
        self.calls: list[tuple[Any, ...]] = []
        self.fed: list[object] = []
        context: Any = SimpleNamespace(
            options=SimpleNamespace(is_whole_process=False),
            worker_pool=None,
            adopt_orphans=lambda: True,
            loop=loop,
            feed=self.fed.append,
            agent=SimpleNamespace(state=machine.RUNNING, stop_reason=stop_reason),
            events=SimpleNamespace(round_gone=lambda *_: None),
            current=SimpleNamespace(number=3),
            history=SimpleNamespace(add_round=lambda *_: failure, ends=(), root=None),
            on_step=lambda step, duration: self.calls.append((step, duration)),
        )
        nothing: Any = None
        self.driver = RoundDriver(context, nothing, None, on_background_ended=nothing)


@pytest.mark.parametrize(
    ("stop_reason", "failure", "told"),
    [(machine.AFTER_FAILURE, Failure(7), [("FAILED", 0.0), ("STOP", 0.0)]), (machine.AFTER_SUCCESS, None, [])],
)
def test_the_end_of_a_round_is_told(stop_reason: str, failure: Failure | None, told: list[tuple[str, float]]) -> None:
    """A failure is a step of torch's, and so is the stop of workers that have not succeeded."""
    made = _Driver(stop_reason=stop_reason, failure=failure)
    made.driver._on_gone([])
    assert made.calls == told
    assert made.fed == [messages.GroupGone(3, failure=failure, is_unkillable=False)]
    assert made.driver._failure is failure


# --- this node's part in a job of several nodes -----------------------------------------------------------------------
class _Node:
    """A node that has joined no job yet."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.fed: list[object] = []
        nothing: Any = None
        context: Any = SimpleNamespace(
            group=None, options=None, loop=None, console=None, feed=self.fed.append, say=self.lines.append
        )
        self.job = MultiNodeJob(context, nothing)


@pytest.mark.parametrize(
    ("last_round", "end", "lines"),
    [
        (3, End("success", 0), []),
        (3, End("success", 0, "all have finished"), ["all have finished"]),
        (
            -1,
            End("success", 0, nodes=2),
            ["the job has ended with success; this node was a spare, the script never ran here: 2 nodes were enough"],
        ),
        (-1, End("worker_failed", 7, "a worker failed"), []),
    ],
)
def test_the_end_of_the_job_is_the_agents(last_round: int, end: End, lines: list[str]) -> None:
    """With the job's verdict and exit code; a success is told here, since the report tells failures only."""
    node = _Node()
    node.job._round = last_round
    node.job._take(Ended(end))
    assert node.lines == lines
    finish = messages.Finish(end.verdict, detail=end.detail, exit_code=end.exit_code)
    assert node.fed == [messages.JobOver(finish)]
    assert node.job.ended is end


def test_one_line_shows_the_wait_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the workers' progress bars it is not rewritten; the end of the job ends it."""
    shown: list[tuple[Any, ...]] = []

    def make(*_: object) -> Any:
        shown.append(("made",))
        return SimpleNamespace(
            show=lambda texts, *, is_live: shown.append((texts, is_live)), end=lambda last: shown.append(("end", last))
        )

    monkeypatch.setattr(waiting, "WaitLine", make)
    node, texts = _Node(), ("waiting",)
    event: Any = SimpleNamespace(texts=texts, is_for_nodes=False)
    for _ in range(2):
        node.job._show_wait(event)
    node.job._is_running = True
    node.job._show_wait(event)
    node.job._take(Ended(End("success", 0)))
    assert shown == [("made",), (texts, True), (texts, True), (texts, False), ("end", None)]
