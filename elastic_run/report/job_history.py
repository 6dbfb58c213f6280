"""What became of a job, as its event logs tell it: launchers, rounds, members, workers.

Times are wall clocks of the nodes, in seconds since the epoch: for display, and not to compare two nodes.
"""

from __future__ import annotations

from elastic_run.records import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeAlias

    #: A line of an event log that fits the schema.
    Event: TypeAlias = dict[str, Any]


@dataclass(slots=True)
class Worker:
    """One worker in one round.

    Args:
        rank: Its global rank.
        local_rank: On its node.
        pid: Its process.
        is_output_seen: Whether its stdout passed through the launcher.
        started_at: Wall clock, or None where that line is missing.
        first_output_s: Seconds from the start to its first output, or None.
        ended_at: Wall clock, or None while it runs or where nobody saw its end.
        exit_code: Or None.
        signal: Name of the signal that ended it, or None.
        was_stopped: Whether the launcher had told it to stop.
        silences: Wall clock at the end of each silence, and its seconds; the last ends with the worker.
        failure: Its `worker_failed`, or None.
    """

    rank: int
    local_rank: int
    pid: int
    is_output_seen: bool = False
    started_at: float | None = None
    first_output_s: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    signal: str | None = None
    was_stopped: bool = False
    silences: list[tuple[float, float]] = field(default_factory=list)
    failure: Event | None = None


@dataclass(slots=True)
class Member:
    """One node's part in one round; times are its wall clock, None where the line is missing.

    Args:
        agent: Id of its launcher.
        node: Its name.
        node_rank: In the round.
        formed_at: When it had its place.
        rendezvous_s: Seconds that it waited for that.
        started_at: When its workers ran.
        start_s: Seconds that their start took.
        recovery_s: Seconds since the failure before.
        stopping_at: When it began to stop them.
        stop_reason: Why: `failure`, `halt`, `signal`, `success`, or "".
        detail: In words, or "".
        detected_s: Seconds from the failure to that.
        stopped_at: When none was left.
        stop_s: Seconds that stopping took.
        last_at: Of its last line about the round.
        workers: By global rank.
    """

    agent: str
    node: str
    node_rank: int
    formed_at: float
    rendezvous_s: float
    started_at: float | None = None
    start_s: float | None = None
    recovery_s: float | None = None
    stopping_at: float | None = None
    stop_reason: str = ""
    detail: str = ""
    detected_s: float | None = None
    stopped_at: float | None = None
    stop_s: float | None = None
    last_at: float = 0.0
    workers: dict[int, Worker] = field(default_factory=dict)


@dataclass(slots=True)
class Round:
    """One round of a job.

    Args:
        number: Its number.
        round_id: Its unique id, "" for one node.
        restart: Restarts of the job when it was formed.
        nodes: Nodes in it.
        workers: Workers in it.
        reason: What made it necessary, or "".
        members: By node rank; those whose logs are there.
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
        started: Its `agent_started`, or None.
        ended: Its `agent_ended`, or None: it runs, or was killed, or the end of its log is missing.
        lost_lines: Lines that it could not write.
        job: What tells its job from others of the id, "" before its first round.
        signals: Each signal that it got: wall clock and name.
        pauses: Each pause before a restart: wall clock and seconds.
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
    signals: list[tuple[float, str]] = field(default_factory=list)
    pauses: list[tuple[float, float]] = field(default_factory=list)


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
