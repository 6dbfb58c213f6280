"""The facts that agents append for their coordinator: a node joins, its round has ended in some way, it leaves.

Each fact carries its node and a number that grows per node. So a fact that was said twice, since a reply was lost,
counts once.
"""

from __future__ import annotations

from elastic_run.core.job.config import JobConfig, Window
from elastic_run.core.job.role_scripts import RoleScript, ScriptFile
from elastic_run.core.protocol.codec import Document, MessageError, register
from elastic_run.core.protocol.outcomes import OUTCOMES
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import TypeAlias

#: The sequence number of a node's last fact if its guardian writes it: the guardian does not know the number before.
LAST_SEQUENCE = 1 << 53

#: Stuck workers of a node that are named.
MOST_STUCK = 8
#: Errors that a node counts for the others.
MOST_ERRORS = 8

# What the record of a dead agent says that it did last.
SEAT_RUNNING = "running"
SEAT_CONFIRMED = "confirmed"
SEAT_UNTOLD = "untold"
_SEAT_STATUSES = frozenset((SEAT_RUNNING, SEAT_CONFIRMED, SEAT_UNTOLD))

# The configuration is imported before the first worker starts, when nothing is read or sent yet.
register(Window)
register(JobConfig)


@register
@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a node tells of itself.

    Args:
        host: Its name, for display.
        pid: Its agent's process, for display.
        local_world_size: Workers on it.
        role: Their role.
        preferred_rank: The group rank that its user asked for, or None.
        version: Its release of elastic-run, for display.
        serves_store: Whether the job's store lives in its agent: where the store is gone, so is the node.
        script: What its workers run, by a name that is the same on all nodes of its role; "" where it isn't told.
        script_file: The file of that name on this node, or None.
        has_fixed_rank: Whether `preferred_rank` is no wish: no other node may have it.
        location: Its place in the network; see `ranks.Candidate`.
        machine: The scheduler's name of the machine, which outlives an agent and a pod; "" where it isn't told.
        torch: The version of torch that its workers would import, for display; "" where it isn't told.
    """

    host: str
    pid: int
    local_world_size: int
    role: str = "default"
    preferred_rank: int | None = None
    version: str = ""
    serves_store: bool = False
    script: str = ""
    script_file: ScriptFile | None = None
    has_fixed_rank: bool = False
    location: str = ""
    machine: str = ""
    torch: str = ""

    def __post_init__(self) -> None:
        if self.local_world_size < 1:
            message = f"NodeInfo: {self.local_world_size} workers make no sense"
            raise MessageError(message)

    @property
    def role_script(self) -> RoleScript:
        """What its role runs, as this node says."""
        return RoleScript(self.role, self.script, self.script_file)


@register
@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where a node listens already for its workers' store of the next round, should it become rank 0.

    Args:
        host: The address that other nodes use.
        port: The port.
        use_agent_store: Whether its agent serves the store; False if its worker of rank 0 does.
    """

    host: str
    port: int
    use_agent_store: bool = True


@register
@dataclass(frozen=True, slots=True)
class PreviousRound:
    """The round that a node runs, or has run last, when it joins (again).

    Args:
        round_id: Its unique id; see `Assignment.round_id`.
        round: Its number.
        rank: The node's group rank in it.
        nodes: The number of its members.
        restart_count: Restarts of the whole job until then.
        incarnation: Of the job that formed it; see `is_related`.
    """

    round_id: str
    round: int
    rank: int
    nodes: int
    restart_count: int
    incarnation: str = ""


@register
@dataclass(frozen=True, slots=True)
class Copy:
    """Which copy of the job's state a node keeps: the one beside the newest decision that it has followed.

    Args:
        incarnation: Of the job.
        round: The last round that was formed.
        term: The term of the decision.
        slot: The slot of the decision.
        formed_term: The term in which that round was formed.
        store_id: The id of the store of the log.
    """

    incarnation: str
    round: int
    term: int
    slot: int
    formed_term: int = 0
    store_id: str = ""

    @property
    def order(self) -> tuple[int, int, int, int]:
        """What tells the newer of two copies of one job, whatever stores their logs were in.

        Of two rounds of one number the later term's is the newer: the log that formed it went on from the other's.
        """
        return self.round, self.formed_term, self.term, self.slot

    def is_older_than(self, other: Copy | None) -> bool:
        """Whether another copy of the same job is newer."""
        return other is not None and other.incarnation == self.incarnation and self.order < other.order

    def is_prepared_after(self, round_index: int, formed_term: int) -> bool:
        """Whether the `Prepare` beside this state may lead to a newer round than a round of the same job."""
        return (self.round + 1, self.term) > (round_index, formed_term)

    def knows(self, prepared: Copy, others: Iterable[Copy]) -> bool:
        """Tell whether the log of this state has taken in a `Prepare`, or formed a newer round since then.

        Args:
            prepared: The state beside the `Prepare`, which a node has confirmed in whatever store.
            others: The newest states of the logs of other stores that this log has taken in.
        """
        is_other = prepared.incarnation == self.incarnation and prepared.store_id != self.store_id
        if not is_other or not prepared.is_prepared_after(self.round, self.formed_term):
            return True
        return any(one.store_id == prepared.store_id and one.order >= prepared.order for one in others)


@dataclass(frozen=True, slots=True)
class Join:
    """A node joins the job; it says so again whenever the coordinator may not count it in.

    Args:
        node: The node.
        sequence: Number of this fact among the node's.
        node_info: What it tells of itself.
        config: The job's configuration as it was told.
        store_address: Where its workers' store of the next round listens.
        seen: The newest slot of the log that the node has followed, -1 for none.
        last: The round that it runs, or that it has run last and reports in a `Ready` after this, or None.
        highest_round: The newest round that it has heard of, in whatever store: the next one has a higher number.
        copy: The copy of the state that it has put into this store, or None; see `job.view_change`.
        prepared: The state beside the newest `Prepare` that it has read, or None where a round was formed since then.
        known_restarts: The restarts of the whole job of which it has heard.
        has_left: Whether it has left the round `last`: its workers are gone, and it may be in any other round.
    """

    node: str
    sequence: int
    node_info: NodeInfo
    config: JobConfig
    store_address: StoreAddress
    seen: int = -1
    last: PreviousRound | None = None
    highest_round: int = 0
    copy: Copy | None = None
    prepared: Copy | None = None
    known_restarts: int = 0
    has_left: bool = False


@dataclass(frozen=True, slots=True)
class Failing:
    """A worker of the node ended with a failure.

    Args:
        node: The node.
        sequence: Number of this fact among the node's.
        round: The round.
        round_id: Its unique id: another log may have formed a round of this number.
        is_secondary: Whether all that failed there so far look as if they had lost a peer: its others run on then,
            for the cause may be theirs. Said again without this when a failure of another kind follows.
    """

    node: str
    sequence: int
    round: int
    round_id: str
    is_secondary: bool = False


@register
@dataclass(frozen=True, slots=True)
class StuckRank:
    """A worker that did not stop, and whose stacks before SIGKILL show no wait for other ranks.

    Args:
        rank: Its global rank.
        function: What it ran; see `stack_groups.Place`.
        file: Path of the user's file, or "".
        line: The line in there.
        problem: The reason why the rank's stacks are not known, such as `has ended`; or "".
    """

    rank: int
    function: str = ""
    file: str = ""
    line: int = 0
    problem: str = ""


@register
@dataclass(frozen=True, slots=True)
class ErrorCount:
    """Workers of a node with the same error.

    Args:
        number: The error's, of `root_cause.compute_error_number`.
        ranks: How many workers had it.
    """

    number: int
    ranks: int


@register
@dataclass(frozen=True, slots=True)
class NodeEnds:
    """How the workers of a node ended, as far as the job has to know beside the node's root cause.

    Args:
        failed: Workers of the node that failed by themselves.
        stuck_count: Workers that did not stop and waited for no other rank.
        stuck: The first `MOST_STUCK` of these; those that had been at their places before the stop come first.
        unmoved: Number of these.
        errors: The errors of workers that failed, or were stopped while they were going down: the `MOST_ERRORS`
            most frequent ones.
    """

    failed: int = 0
    stuck_count: int = 0
    stuck: tuple[StuckRank, ...] = ()
    unmoved: int = 0
    errors: tuple[ErrorCount, ...] = ()


@dataclass(frozen=True, slots=True)
class Ready:
    """No process of the round lives on the node any more.

    Args:
        node: The node.
        sequence: Number of this fact among the node's.
        round: The round.
        round_id: Its unique id: another log may have formed a round of this number.
        outcome: One of `OUTCOMES`.
        store_address: Where its workers' store of the next round listens.
        report: The node's root cause where it failed: `exit_code`, `signature`, `is_deterministic`, `uptime` and
            `severity` are read, the rest is carried to every node.
        verdict: For `cannot_start`: a name of `contract.EXIT_CODES`.
        detail: One sentence for the user, or "".
        ends: How its workers ended, or None if all of them obeyed the stop.
    """

    node: str
    sequence: int
    round: int
    round_id: str
    outcome: str
    store_address: StoreAddress
    report: Document | None = None
    verdict: str = ""
    detail: str = ""
    ends: NodeEnds | None = None

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            message = f"Ready.outcome: {self.outcome!r} is none of {', '.join(sorted(OUTCOMES))}"
            raise MessageError(message)


@dataclass(frozen=True, slots=True)
class Leave:
    """The node goes, and never comes back under this id.

    Args:
        node: The node.
        sequence: Number of this fact among the node's; `LAST_SEQUENCE` where its guardian says it.
        reason: `signal`, `died`, `unkillable`, `unhealthy` or `excluded`.
        detail: One sentence for the user, or "".
        prepared: See `Join.prepared`: the log of another store may have formed a round on this.
    """

    node: str
    sequence: int
    reason: str
    detail: str = ""
    prepared: Copy | None = None


@dataclass(frozen=True, slots=True)
class SeatDead:
    """An agent that had or may have a seat in a round is dead: proved by its guardian, or by a newcomer on its host.

    The round is the last that the agent was told of. If it has confirmed a `Prepare`, the log of the store where it did
    may have formed the next round on its word, and no other log can have. See `job.apply_facts` for what becomes of its
    seat. It may be said any number of times, and has no sequence number.

    Args:
        node: The agent's id.
        round_id: The round's unique id, as the record has it; see `Assignment.round_id`. "" with `untold`.
        incarnation: Of the round's job.
        round_index: The round's number.
        rank: The agent's group rank in the round: its seat.
        status: `running` from before the agent is told of the round; `confirmed` from before it says that it has read
            a `Prepare` for another one; `untold` if it was never told of a round, which may have been formed with it.
        store_id: The id of the store in which it has confirmed a `Prepare`, as text; "" if it has not.
        detail: One sentence for the user, or "".
    """

    node: str
    round_id: str
    incarnation: str
    round_index: int
    rank: int
    status: str
    store_id: str = ""
    detail: str = ""

    def __post_init__(self) -> None:
        if self.status not in _SEAT_STATUSES:
            message = f"SeatDead.status: {self.status!r} is none of {', '.join(sorted(_SEAT_STATUSES))}"
            raise MessageError(message)


@dataclass(frozen=True, slots=True)
class Foreign:
    """A fact in a protocol that this release doesn't speak; never sent, only read.

    Args:
        node: The node that said it.
        sequence: Number of this fact among the node's.
        protocol: What that node speaks.
    """

    node: str
    sequence: int
    protocol: int


@dataclass(frozen=True, slots=True)
class FailoverRequest:
    """The host of the store goes, and the store with it. This fact has no sequence number: the host says it only once.

    Args:
        endpoint: Where the store goes on, "" for nowhere.
        detail: One sentence for the user.
    """

    endpoint: str
    detail: str


def read_term(round_id: str) -> int:
    """Return the term in which a round was formed, which its unique id tells; 0 where it doesn't.

    Args:
        round_id: See `Assignment.round_id`.
    """
    term = round_id.split("/")[1:2]
    return int(term[0]) if term and term[0].isdecimal() else 0


def is_related(one: str, other: str) -> bool:
    """Tell whether two rounds may be of the same job, whatever stores it went through.

    If a store is lost, and its nodes are out of reach, others may begin the job anew in the next one. The
    numbers of its rounds begin anew, too, so that a round needs more than its number to be known by.

    Args:
        one: The incarnation: the first coordinator of a job names it, and the name goes with the job's state; "" where
            a release wrote it that knows none.
        other: Another.
    """
    return one == other or not one or not other


Fact: TypeAlias = Join | Failing | Ready | Leave | Foreign
