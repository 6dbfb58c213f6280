"""The watches over a round: what they feed to the agent's machine, and when they read the workers' resources."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from elastic_run.agent.driver import worker_readings
from elastic_run.agent.driver.watches import Watches
from elastic_run.agent.driver.worker_readings import Activity, is_quiet
from elastic_run.core.agent.messages import RoundHalted, WorkerStuck
from elastic_run.core.config import AgentConfig
from elastic_run.core.failure.hang import NO_DETECTION, NOT_YET
from elastic_run.core.job.node_status import HANG, is_sound
from tests.support.stream_bench import Clockwork

if TYPE_CHECKING:
    from collections.abc import Callable


class _Agent:
    """An agent with one worker, this process, whose time stands still until the test moves it."""

    def __init__(self, *, has_log: bool = False, handler: Any = None, **options: Any) -> None:
        loop: Any = Clockwork()
        loop.call_soon_threadsafe = lambda call: call()
        self.loop = loop
        self.fed: list[object] = []
        self.lines: list[str] = []
        self.readings: list[float] = []
        self.is_running = True
        chosen = SimpleNamespace(
            **{"stuck_timeout": 0.0, "shutdown_timeout": 30.0, "agent_config": AgentConfig(), **options}
        )
        spec = SimpleNamespace(rdzv_handler=handler or SimpleNamespace(is_immediate=True), monitor_interval=0.5)
        context: Any = SimpleNamespace(
            loop=loop,
            options=chosen,
            timer_file=None,
            flight_recorder=None,
            plugin_calls=SimpleNamespace(post=lambda _, call: call()),
            group=SimpleNamespace(spec=spec, workers=[]),
            say=self.lines.append,
            feed=self.fed.append,
            is_running=lambda _: self.is_running,
            job=None,
            events=SimpleNamespace(is_written=has_log, resources_read=lambda *_: self.readings.append(self.loop.time)),
        )
        self.watches = Watches(context)
        output = SimpleNamespace(activities={})
        workers = SimpleNamespace(alive={0}, pids={0: os.getpid()})
        self.round: Any = SimpleNamespace(number=4, started=0.0, workers=workers, output=output)

    def run(self, seconds: float) -> None:
        """Begin to watch, and let time pass."""
        self.watches.begin(self.round)
        while self.loop.time < seconds:
            self.loop.advance(0.125)
        self.watches.end_round()


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that lets a process have one state after another, and the last one from then on."""

    def set_states(*states: str) -> None:
        left = [*states]
        monkeypatch.setattr(psutil.Process, "status", lambda _: left.pop(0) if len(left) > 1 else left[0])

    return set_states


def test_a_worker_that_stays_in_the_kernel_is_told_once(states: Callable[..., None]) -> None:
    """After the whole timeout, which has several looks; normal disk traffic is many short sleeps."""
    states(psutil.STATUS_DISK_SLEEP)
    agent = _Agent(stuck_timeout=1.0)
    agent.run(3)
    assert agent.fed == [WorkerStuck(4)]
    states(*[psutil.STATUS_DISK_SLEEP, psutil.STATUS_RUNNING] * 4, psutil.STATUS_SLEEPING)
    agent = _Agent(stuck_timeout=1.0)
    agent.run(3)
    assert agent.fed == []


@pytest.mark.parametrize(("timeout", "told"), [(None, NO_DETECTION), (60.0, NOT_YET)])
def test_a_node_that_does_not_look_for_hangs_yet_says_so(timeout: float | None, told: float) -> None:
    """Other nodes tell a node without --hang-timeout from one that has not looked yet, or whose workers have ended."""
    agent = _Agent(agent_config=AgentConfig(hang_timeout=timeout))
    assert agent.watches.describe_hang() == {"round": -1, "timeout": told, "age": 0.0, "workers": []}
    agent.watches.begin(agent.round)
    answer = agent.watches.describe_hang()
    assert answer == {"round": 4, "timeout": told, "age": 0.0, "workers": []}
    assert is_sound({"host": "node8", "pid": 1, "round_id": "4/1/a", "round_nodes": 2, **answer}, HANG)
    agent.round.workers.alive.clear()
    assert agent.watches.describe_hang()["timeout"] == (NO_DETECTION if timeout is None else timeout)


@pytest.mark.parametrize("is_running", [True, False])
def test_nodes_that_wait_halt_the_round(*, is_running: bool) -> None:
    """As a foreign rendezvous tells it, when it can be reached again; a round that is being stopped is left alone."""
    answers: list[int | Exception] = [OSError(), 0, 2, 2]

    def count() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    agent = _Agent(handler=SimpleNamespace(num_nodes_waiting=count))
    agent.is_running = is_running
    agent.run(3)
    assert agent.fed == [RoundHalted(4)] * is_running
    assert agent.lines == ["stopping the workers: nodes wait to join"] * is_running


def test_readings_become_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another flag wakes the launcher: every 10 s for ten minutes, once a minute after an hour."""
    monkeypatch.setattr(worker_readings, "is_quiet", lambda *_: False)
    agent = _Agent(has_log=True, agent_config=AgentConfig(events_file="events.jsonl"))
    agent.run(7200)
    assert [round(moment) for moment in agent.readings[:4]] == [1, 11, 21, 31]
    assert 59 <= agent.readings[-1] - agent.readings[-2] <= 61
    assert len(agent.readings) < 260


def test_a_job_whose_launcher_sleeps_is_read_every_five_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a log directory alone the watch over quiet rounds reads."""
    monkeypatch.setattr(worker_readings, "is_quiet", lambda *_: False)
    agent = _Agent(has_log=True)
    agent.run(610)
    assert agent.readings == [1.0, 301.0, 601.0]


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (Activity(10.0, 100, 2), True),
        (Activity(12.9, 100, 2), True),
        (Activity(13.1, 100, 2), False),
        (Activity(6.0, 100, 2), False),
        (Activity(10.0, 101, 2), False),
        (Activity(10.0, 100, 1), False),
    ],
)
def test_what_is_quiet(after: Activity, expected: bool) -> None:
    """A byte, half a percent of a processor for each worker, or another number of workers is a sign of life."""
    assert is_quiet(Activity(10.0, 100, 2), after, 300.0) is expected
    assert not is_quiet(Activity(0.0, 0, 0), Activity(0.0, 0, 0), 300.0)
