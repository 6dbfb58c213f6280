"""The recorder of the event log: each duration begins and ends at the moments that the schema names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from elastic_run.agent.driver.event_recorder import EventRecorder
from elastic_run.agent.driver.worker_readings import Usage
from elastic_run.core.agent import machine, messages
from elastic_run.core.config import JobConfig
from elastic_run.report.event_log import find_mistake

if TYPE_CHECKING:
    from elastic_run.agent.driver.round import Round


class _Recording:
    """A recorder of two workers, and what it has told.

    Args:
        started: When the workers are started, on the monotonic clock.
        nodes: Number of nodes.
    """

    def __init__(self, started: float, nodes: int = 3) -> None:
        spec = SimpleNamespace(entrypoint="train.py", args=(), role="trainer", local_world_size=2)
        workers = [SimpleNamespace(local_rank=rank, global_rank=4 + rank, world_size=6) for rank in (0, 1)]
        group = SimpleNamespace(spec=spec, workers=workers, group_rank=nodes - 1, group_world_size=nodes)
        config = SimpleNamespace(min_nodes=3, max_nodes=3, max_restarts=1)
        self._now = 0.0
        context: Any = SimpleNamespace(
            hostname="node7",
            run_id="job",
            group=group,
            options=SimpleNamespace(job_config=config, agent_config=SimpleNamespace(events_file="")),
            loop=SimpleNamespace(now=lambda: self._now),
            has_temporary_logs=False,
            metrics_port=None,
            kept_label=lambda: None,
        )
        self.recorder = EventRecorder(context)
        self.events: list[dict[str, Any]] = cast("list[dict[str, Any]]", self.recorder._waiting)
        self._activities: dict[int, Any] = {}
        self.round = cast(
            "Round",
            SimpleNamespace(
                workers=SimpleNamespace(pids={0: 70, 1: 71}),
                output=SimpleNamespace(with_stdout={1}, activities=self._activities),
                started=started,
                global_ranks={0: 4, 1: 5},
                was_stopped=lambda local_rank: local_rank == 1,
            ),
        )

    def at(self, now: float) -> EventRecorder:
        """Set the clock."""
        self._now = now
        return self.recorder

    def write(self, now: float, local_rank: int, silence: float | None) -> None:
        """Let a worker write."""
        self._activities[local_rank] = SimpleNamespace(last=now)
        self.at(now).output_came(self.round, local_rank, silence)

    def exit(self, now: float, local_rank: int, exitcode: int) -> None:
        """Let a worker end."""
        self.at(now).worker_exited(self.round, local_rank, exitcode)

    def step(self, now: float, before: str, after: str, reason: str = "") -> None:
        """Let the agent's machine take a step."""
        agent = machine.Agent(JobConfig(), 2, state=before)
        taken = agent.replace(state=after, stop_reason=reason)
        self.at(now).stepped(messages.RoundHalted(1), agent, taken, (), None)

    def find(self, name: str, field: str) -> list[Any]:
        """Return one field of each event that has this name."""
        return [event[field] for event in self.events if event["event"] == name]


def test_each_duration_begins_where_the_schema_says() -> None:
    """A round in which a worker fails has the right durations; the test sets the clock."""
    told = _Recording(started=103.5)
    told.at(100.0).agent_started()
    told.step(103.0, machine.JOINING, machine.RUNNING)
    told.at(104.0).workers_started(told.round)
    told.write(105.0, 0, None)
    told.write(125.0, 0, 20.0)
    told.exit(130.0, 0, 1)
    told.step(130.25, machine.RUNNING, machine.STOPPING, machine.AFTER_FAILURE)
    told.exit(131.0, 1, -15)
    told.at(132.0).round_gone([], None, 0)
    told.step(132.0, machine.STOPPING, machine.JOINING)
    told.step(134.0, machine.JOINING, machine.RUNNING)
    told.at(135.0).workers_started(told.round)
    result: Any = SimpleNamespace(verdict="success", root=None, exit_code=0, detail="")
    told.at(145.0).agent_ended(result)
    assert told.find("round_formed", "rendezvous_s") == [3.0, 2.0]
    assert told.find("worker_started", "is_output_seen") == [False, True] * 2
    assert told.find("workers_started", "recovery_s") == [None, 5.0], "since the failure, not since the stop"
    assert told.find("first_output", "after_s") == [1.5]
    assert told.find("silence", "silence_s") == [20.0]
    assert told.find("worker_exited", "uptime_s") == [26.5, 27.5]
    assert told.find("worker_exited", "silence_s") == [5.0, 27.5], "a worker without output is silent since its start"
    assert told.find("worker_exited", "was_stopped") == [False, True]
    assert told.find("workers_stopping", "detected_s") == [0.25]
    assert told.find("workers_stopped", "stop_s") == [1.75]
    assert told.find("agent_ended", "wall_s") == [45.0]
    assert told.find("agent_ended", "running_s") == [26.0 + 10.0], "until the failure, and from the restart to the end"
    assert {find_mistake(event) for event in told.events} == {""}
    assert {event["rank"] for event in told.events if "rank" in event} == {4, 5}


def test_a_stop_without_a_failure_here_has_no_time_of_detection() -> None:
    """If another node has failed, the recovery begins at the stop. A worker killed by the stop is no failure."""
    told = _Recording(started=10.0)
    told.step(10.0, machine.JOINING, machine.RUNNING)
    told.at(11.0).workers_started(told.round)
    told.step(20.0, machine.RUNNING, machine.STOPPING, machine.AFTER_HALT)
    told.exit(21.0, 1, -15)
    told.step(22.0, machine.STOPPING, machine.JOINING)
    told.step(23.0, machine.JOINING, machine.RUNNING)
    told.at(24.0).workers_started(told.round)
    assert told.find("workers_stopping", "detected_s") == [None]
    assert told.find("workers_started", "start_s") == [1.0, 14.0]
    assert told.find("workers_started", "recovery_s") == [None, 4.0]


def test_of_equal_silences_twenty_are_written_and_then_longer_ones() -> None:
    """So that a worker that writes every ten seconds for a month does not fill the disk; each round counts anew."""
    told = _Recording(started=0.0)
    told.step(0.0, machine.JOINING, machine.RUNNING)
    for silence in [10.0] * 25 + [14.5, 15.0, 22.0, 22.5]:
        told.write(50.0, 0, silence)
    told.write(50.0, 1, 11.0)
    assert told.find("silence", "silence_s") == [10.0] * 20 + [15.0, 22.5, 11.0]
    told.step(60.0, machine.STOPPING, machine.RUNNING)
    told.write(70.0, 0, 10.0)
    assert told.find("silence", "silence_s")[-1] == 10.0
    assert len(told.find("silence", "silence_s")) == 24


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_a_job_of_one_node_is_named_by_its_agent(nodes: int) -> None:
    """The name tells it from another job of the same id; several nodes name their job together."""
    told = _Recording(started=0.0, nodes=nodes)
    told.step(0.0, machine.JOINING, machine.RUNNING)
    assert told.find("round_formed", "job") == (told.find("round_formed", "agent") if nodes == 1 else [""])


def test_resources_are_in_seconds_and_in_mib() -> None:
    """Of the workers that run; without one there is no event."""
    told = _Recording(started=0.0)
    told.at(1.0).resources_read(told.round, {})
    told.at(2.0).resources_read(told.round, {1: Usage(1.234, (5 << 20) + 7, "running")})
    assert told.find("resources", "ranks") == [[5]]
    assert told.find("resources", "cpu_s") == [[1.23]]
    assert told.find("resources", "memory_mib") == [[5]]
