"""The history of a job from its event logs: launchers, rounds, members, workers.

Times are wall clocks of the nodes, in seconds since the epoch, corrected where they are known to differ: for display.
"""

from __future__ import annotations

from elastic_run.records import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeAlias

    #: A line of an event log that fits the schema.
    Event: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reading:
    """The resources that a worker had used at one moment.

    Args:
        at: Wall clock.
        cpu: Seconds of processor time since its start.
        memory: Resident MiB.
    """

    at: float
    cpu: float
    memory: float


@dataclass(slots=True)
class Worker:
    """One worker in one round.

    Args:
        rank: Its global rank.
        pid: Its pid.
        is_output_seen: Whether its stdout passed through the launcher.
        started_at: Wall clock, or None if the line is missing.
        first_output_s: Seconds from the start to its first output, or None.
        ended_at: Wall clock; None while it runs, or if its launcher was killed before.
        exit_code: Its exit code, or None.
        signal: Name of the signal that ended it, or None.
        was_stopped: Whether the launcher had told it to stop.
        silences: Wall clock at the end of each silence, and its seconds; the last ends with the worker.
        readings: The resources that it had used, at several moments.
        failure: Its event `worker_failed`, or None.
    """

    rank: int
    pid: int
    is_output_seen: bool = False
    started_at: float | None = None
    first_output_s: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    signal: str | None = None
    was_stopped: bool = False
    silences: list[tuple[float, float]] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    failure: Event | None = None


@dataclass(slots=True)
class Member:
    """One node's part in one round; times are the node's wall clock, None if the line is missing.

    Args:
        agent: Id of the node's launcher.
        node: Name of the node.
        node_rank: Rank of the node in the round.
        formed_at: Time at which the node had its place.
        rendezvous_s: Seconds that the node waited for its place.
        started_at: Time at which its workers ran.
        recovery_s: Seconds since the failure of the round before.
        stopping_at: Time at which the node began to stop its workers.
        stop_reason: Reason of the stop: `failure`, `halt`, `signal`, `success`, or "".
        detail: The reason in words, or "".
        detected_s: Seconds from the failure to the begin of the stop.
        stopped_at: Time at which no worker was left.
        last_at: Time of the node's last line about the round.
        workers: The workers by global rank.
        hang: Its event `hang_found`, or None.
    """

    agent: str
    node: str
    node_rank: int
    formed_at: float
    rendezvous_s: float
    started_at: float | None = None
    recovery_s: float | None = None
    stopping_at: float | None = None
    stop_reason: str = ""
    detail: str = ""
    detected_s: float | None = None
    stopped_at: float | None = None
    last_at: float = 0.0
    workers: dict[int, Worker] = field(default_factory=dict)
    hang: Event | None = None


@dataclass(slots=True)
class Round:
    """One round of a job.

    Args:
        number: Its number.
        round_id: The unique id of the round, "" for a job of one node.
        restart: Restarts of the job when it was formed.
        nodes: Nodes in it.
        workers: Workers in it.
        reason: Why the round was formed, or "".
        members: The nodes whose logs were read, by node rank.
    """

    number: int
    round_id: str
    restart: int
    nodes: int
    workers: int
    reason: str
    members: dict[int, Member] = field(default_factory=dict)


@dataclass(slots=True)
class Agent:
    """One launcher.

    Args:
        name: Its id.
        node: Its host.
        run_id: The job's id.
        first_at: Wall clock of its first line.
        last_at: Wall clock of its last line.
        started: Its event `agent_started`, or None.
        ended: Its event `agent_ended`; None if it runs, was killed, or the end of its log is missing.
        lost_lines: Lines that it could not write.
        job: Unique id of its job, since jobs may share a run id; "" before its first round.
        clock_offset: Seconds by which its clock was ahead of the other nodes', about; its times are corrected by them.
    """

    name: str
    node: str
    run_id: str
    first_at: float
    last_at: float
    started: Event | None = None
    ended: Event | None = None
    lost_lines: int = 0
    job: str = ""
    clock_offset: float = 0.0


@dataclass(slots=True)
class Job:
    """One job as its event logs tell it.

    Args:
        run_id: Its id.
        agents: Its launchers, the first to start first.
        rounds: In their order.
    """

    run_id: str
    agents: list[Agent]
    rounds: list[Round]

    @property
    def restarts(self) -> int:
        """Restarts that the job has made."""
        return max((each.restart for each in self.rounds), default=0)

    @property
    def verdict(self) -> str:
        """How the job ended, as most launchers of its last round say; "" where no log tells."""
        last = {member.agent for member in self.rounds[-1].members.values()} if self.rounds else set()
        told = [agent for agent in self.agents if agent.ended is not None]
        of_last = [agent for agent in told if agent.name in last] or told
        verdicts = [agent.ended["verdict"] for agent in of_last if agent.ended is not None]
        return max(verdicts, key=verdicts.count, default="")
