"""The reaction to a hang takes seconds, in which the round may end, and dumps may be removed."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run.agent.driver.flight_recorder import FlightRecorder
from elastic_run.agent.driver.hang_detection import HangDetection
from elastic_run.core.agent.messages import RoundFailed, WorkersHung
from elastic_run.core.failure.hang import HangWatch, JobStillness, Owner, Stillness
from elastic_run.core.failure.job_result import RecorderFinding
from elastic_run.core.failure.stacks import Place

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.core.agent.messages import Event

_LOADS = Stillness(Place("load_batch", "/code/data.py", 41), waits=False, same=63.0, idle=63.0)
_HANG = JobStillness(63.0, 60.0, {0: _LOADS}, {0: Owner("gpu7", 4711, 0)})
_ROUND = SimpleNamespace(
    number=3,
    uptime=60.0,
    restart_count=0,
    global_ranks={0: 0},
    output=SimpleNamespace(tail=lambda *_, **__: b"shard 17\n"),
    write_stacks=lambda _: "/logs/stacks.txt",
)


class _Job:
    """A job with one worker, whose recorder answers when the test says so."""

    def __init__(self, explain: Callable[..., RecorderFinding | None], *, action: str = "restart") -> None:
        self.lines: list[str] = []
        self.events: list[Event] = []
        self.is_running = True
        self.calls: queue.Queue[Callable[[], None]] = queue.Queue()
        context = SimpleNamespace(
            flight_recorder=SimpleNamespace(collect=lambda _, on_done: self.calls.put(on_done), explain=explain),
            group=SimpleNamespace(workers=[SimpleNamespace(world_size=1)], spec=SimpleNamespace(role="default")),
            options=SimpleNamespace(agent_config=SimpleNamespace(hang_action=action, hang_timeout=60.0)),
            say=self.lines.append,
            is_running=lambda _: self.is_running,
            feed=self.events.append,
            history=SimpleNamespace(),
            events=SimpleNamespace(hang_found=lambda *_: None),
        )
        self._detection: Any = SimpleNamespace(
            _context=context,
            _loop=SimpleNamespace(call_soon_threadsafe=self.calls.put, now=lambda: 100.0),
            _round=_ROUND,
            _watch=HangWatch(60.0),
            _on_hang=lambda: None,
            _dumps={},
            _began_at=0.0,
            _quiet_for=0.0,
            _act=lambda *found: HangDetection._act(self._detection, *found),
            _make_end=lambda *found: HangDetection._make_end(self._detection, *found),
        )

    def react(self, found: JobStillness, *, is_decided_here: bool = True) -> None:
        """Begin the reaction."""
        self._detection._has_lowest_rank = is_decided_here
        HangDetection._tell(self._detection, found)

    def answer(self) -> None:
        """Perform the next call of the loop."""
        self.calls.get(timeout=60)()


def _find(*, is_whole_job: bool) -> RecorderFinding:
    assert is_whole_job, "the node has all ranks"
    return RecorderFinding("rank 0 did not join", (0,), is_whole_job=True)


@pytest.mark.parametrize(
    ("action", "is_decided_here", "events"),
    [
        ("report", True, []),
        ("restart", True, [WorkersHung(3)]),
        ("restart", False, []),
        ("fail", True, [RoundFailed(3, verdict="hung", detail="--hang-action=fail ends the job")]),
        ("fail", False, []),
    ],
)
def test_one_node_performs_the_action(action: str, events: list[Event], *, is_decided_here: bool) -> None:
    """The other nodes tell the hang as well, and wait for its decision; `report` stops nothing."""
    job = _Job(_find, action=action)
    job.react(_HANG, is_decided_here=is_decided_here)
    job.answer()
    job.answer()
    assert job.events == events
    assert job.lines[-1].startswith("all stacks: /logs/stacks.txt")


def test_a_round_that_has_ended_meanwhile_is_not_told_of() -> None:
    """No line says behind the closing report that the job goes on, or is stopped."""
    job = _Job(_find)
    job.react(_HANG)
    count = len(job.lines)
    job.answer()
    job.is_running = False
    job.answer()
    assert job.lines[count:] == []
    assert job.events == []


def test_a_dump_that_is_removed_while_it_is_read_is_none(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody may clean up a directory that the user has named for dumps."""
    monkeypatch.setattr(FlightRecorder, "_fresh", lambda _: [str(tmp_path_factory.getbasetemp() / "gone_rank_0")])
    assert FlightRecorder().explain(is_whole_job=True) is None
