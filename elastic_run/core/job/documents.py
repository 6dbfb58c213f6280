"""What the nodes of a job and their coordinator send each other: two documents, each sent whole.

`NodeState` is what a node is now. `Order` is what the node shall do now. Each side sends its newest document when the
document changes, and after every (re)connection. A newer document replaces an older one that was not sent yet. A reader
of the newest document needs no older one, so documents have no numbers and are never repeated.

Times travel as ages in seconds, since each node has a clock of its own.
"""

from __future__ import annotations

from elastic_run.core.job.config import JobConfig  # noqa: TC001 - ditto
from elastic_run.core.job.node_events import Assignment  # noqa: TC001 - importing it registers it as a field
from elastic_run.core.job.restart_policy import Failure  # noqa: TC001 - ditto
from elastic_run.core.job.state import REMEMBERED, Exclusion, Incident
from elastic_run.core.protocol.codec import Document, MessageError, encode, register, to_message
from elastic_run.core.protocol.facts import End, NodeEnds, NodeInfo, RoleScript, StoreAddress  # noqa: TC001 - ditto
from elastic_run.core.protocol.outcomes import OUTCOMES
from elastic_run.records import dataclass, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.job.state import Job

# --- phases of a node and of an order --------------------------------------------------------------------------------
IDLE = "idle"
RUNS = "runs"
STOPS = "stops"
NODE_PHASES = frozenset((IDLE, RUNS, STOPS))

GATHER = "gather"
PROPOSE = "propose"
START = "start"
WARN = "warn"
HALT = "halt"
END = "end"
REFUSE = "refuse"
SEARCH = "search"
ORDER_PHASES = frozenset((GATHER, PROPOSE, START, WARN, HALT, END, REFUSE, SEARCH))

#: Characters of a node's id by which a proposal names its members.
KEY_LENGTH = 8


def shorten(node: str) -> str:
    """Return the part of a node's id by which a proposal names it: a random text."""
    return node[-KEY_LENGTH:]


@register
@dataclass(frozen=True, slots=True)
class Promise:
    """The highest coordinator whose orders a node follows: it accepts nothing from a lower one.

    Args:
        term: Its term.
        coordinator: Its node; two coordinators may have one term, and the greater id is the higher then.
    """

    term: int = 0
    coordinator: str = ""

    @property
    def rank(self) -> tuple[int, str]:
        """What tells the higher of two."""
        return self.term, self.coordinator


@register
@dataclass(frozen=True, slots=True)
class Round:
    """A round, or the proposal of one, as other nodes know it.

    Args:
        term: The term of its coordinator.
        number: Its number; it only grows.
        coordinator: The node that proposed it.
        root: The founding of its job: jobs that were founded by nodes which could not see each other differ in it.
        size: The number of its members, which is the number of its seats.
        coordinator_rank: The group rank of its coordinator in it, -1 if it is no member.
        restart_count: Restarts of the whole job until it was formed.
    """

    term: int
    number: int
    coordinator: str
    root: str
    size: int
    coordinator_rank: int = -1
    restart_count: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """What tells the newer of two rounds."""
        return self.term, self.number

    @property
    def round_id(self) -> str:
        """Its unique id, as `Assignment.round_id` has it."""
        return f"{self.number}/{self.term}/{self.coordinator}"


@register
@dataclass(frozen=True, slots=True)
class Proposal:
    """A round that a node has accepted, and that may have started.

    Args:
        round: The round.
        rank: The node's group rank in it: its seat.
        parent: The newest round that had surely started when it was proposed, or None.
        members: Its members, `shorten`ed; empty where no other node could decide about it.
    """

    round: Round
    rank: int
    parent: Round | None
    members: tuple[str, ...] = ()


@register
@dataclass(frozen=True, slots=True)
class JobMemory:
    """What the next coordinator has to know of the job beyond what its nodes are; times are ages in seconds.

    Args:
        term: Of the coordinator that wrote it.
        edition: Counts the changes of it within a term.
        age: Seconds since it was written.
        round: The last round that has started. A node that had no place in it knows it from here.
        settled_round: The unique id of the last round whose end is in this memory; "" for none.
        restart_count: Restarts so far.
        restart_times: When the last restarts were decided.
        changes: When the membership changed, as far as the configuration still asks for it.
        failures: The last failed rounds, oldest first.
        attempts: The causes of the attempts before, oldest first, as far as they fit.
        scripts: What each role runs.
        incidents: Failures and the machines on which they began.
        exclusions: Machines that the job goes on without.
    """

    term: int = 0
    edition: int = 0
    age: float = 0.0
    round: Round | None = None
    settled_round: str = ""
    restart_count: int = 0
    restart_times: tuple[float, ...] = ()
    changes: tuple[float, ...] = ()
    failures: tuple[Failure, ...] = ()
    attempts: tuple[Document, ...] = ()
    scripts: tuple[RoleScript, ...] = ()
    incidents: tuple[Incident, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()


@register
@dataclass(frozen=True, slots=True)
class RoundEnd:
    """How a round has ended on a node: no process of it lives there any more.

    Args:
        outcome: One of `OUTCOMES`.
        report: The node's root cause where it failed: `exit_code`, `signature`, `is_deterministic`, `uptime` and
            `severity` are read, the rest is carried to every node.
        verdict: For `cannot_start`: a name of `contract.EXIT_CODES`.
        detail: One sentence for the user, or "".
        ends: How its workers ended, or None if all of them obeyed the stop.
    """

    outcome: str
    report: Document | None = None
    verdict: str = ""
    detail: str = ""
    ends: NodeEnds | None = None

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            message = f"RoundEnd.outcome: {self.outcome!r} is none of {', '.join(sorted(OUTCOMES))}"
            raise MessageError(message)


@register
@dataclass(frozen=True, slots=True)
class NodeState:
    """What a node is now.

    Args:
        node: Its id, unique per run of an agent.
        node_info: What it tells of itself.
        config: The job's configuration as the node was told it.
        store_address: Where its workers' store of the next round listens already.
        promise: The highest coordinator whose orders it follows.
        started: The last round that it has started, or None.
        rank: Its group rank in that round.
        accepted: The proposals that it has accepted since, oldest first.
        phase: Whether processes of the round `started` live: `idle`, `runs` or `stops`.
        is_failing: Whether a worker of that round has failed.
        is_secondary: Whether all that failed there so far look as if they had lost a peer.
        ended: How that round has ended on this node, or None.
        leaving: Why the node goes, a word of `core.protocol.outcomes`; "" while it stays.
        leaving_detail: One sentence for the user, or "".
        memory: The newest memory of the job that it was given, in its first document after a connection; else None.
        known_round: The highest number of a round of which it has heard.
        dead: A coordinator that is surely dead, as the node has seen; "" for none.
    """

    node: str
    node_info: NodeInfo
    config: JobConfig
    store_address: StoreAddress
    promise: Promise = Promise()
    started: Round | None = None
    rank: int = -1
    accepted: tuple[Proposal, ...] = ()
    phase: str = IDLE
    is_failing: bool = False
    is_secondary: bool = False
    ended: RoundEnd | None = None
    leaving: str = ""
    leaving_detail: str = ""
    memory: JobMemory | None = None
    known_round: int = 0
    dead: str = ""

    def __post_init__(self) -> None:
        if self.phase not in NODE_PHASES:
            message = f"NodeState.phase: {self.phase!r} is none of {', '.join(sorted(NODE_PHASES))}"
            raise MessageError(message)

    def has_seat(self, round: Round) -> bool:  # noqa: A002 - the project's word
        """Whether the node is a member of a round, as far as it knows."""
        return self.started == round or self.has_accepted(round)

    def has_accepted(self, round: Round) -> bool:  # noqa: A002 - ditto
        """Whether the node has accepted the proposal of a round, and has started no newer one."""
        return any(proposal.round == round for proposal in self.accepted)


@register
@dataclass(frozen=True, slots=True)
class Order:
    """What a node shall do now.

    Args:
        promise: Whose order it is: a node ignores an order of a lower coordinator than it has promised to follow.
        phase: `gather` (wait for a round), `propose` (accept the proposal), `start` (run the round), `warn` (the round
            will be stopped for new nodes), `halt` (stop the workers), `end` (the job is over), `refuse` (this node
            is not taken in) or `search` (look for another coordinator).
        round: The round of `start`, `warn` and `halt`; None for `halt` of whatever else the node runs.
        assignment: With `propose`: the node's place in the round.
        proposal: With `propose`: what to accept.
        reason: Of `halt`, see `core.protocol.facts`; of `refuse`: `refused` or `excluded`; of `search`: why the
            node stops its workers, or "" if its round runs on.
        detail: One clause for the user, or "".
        end: With `end`: the verdict.
        memory: The memory of the job, where another coordinator may follow; else None.
        to: With `search`: the endpoint at which a higher coordinator listens, "" if the endpoint is unknown.
    """

    promise: Promise
    phase: str
    round: Round | None = None
    assignment: Assignment | None = None
    proposal: Proposal | None = None
    reason: str = ""
    detail: str = ""
    end: End | None = None
    memory: JobMemory | None = None
    to: str = ""

    def __post_init__(self) -> None:
        if self.phase not in ORDER_PHASES:
            message = f"Order.phase: {self.phase!r} is none of {', '.join(sorted(ORDER_PHASES))}"
            raise MessageError(message)


#: Bytes of a memory as JSON: each of its nodes gets it with each order.
LARGEST_MEMORY = 16 * 1024


def write_memory(job: Job, started: Round, *, edition: int, settled_round: str, now: float) -> JobMemory:
    """Return the memory of a job whose last round has started.

    Where it is too long, the oldest causes of attempts are left out, then incidents and failures.
    """
    memory = JobMemory(
        term=job.term,
        edition=edition,
        round=started,
        settled_round=settled_round,
        restart_count=job.restart_count,
        restart_times=tuple(now - at for at in job.restart_times),
        changes=tuple(now - at for at in job.changes),
        failures=job.failures[-REMEMBERED:],
        attempts=job.attempts,
        scripts=job.scripts,
        incidents=tuple(replace(one, at=now - one.at) for one in job.incidents),
        exclusions=tuple(replace(one, at=now - one.at) for one in job.exclusions),
    )
    for name in ("attempts", "incidents", "failures"):
        while getattr(memory, name) and len(encode(to_message(memory))) > LARGEST_MEMORY:
            memory = replace(memory, **{name: getattr(memory, name)[1 + len(getattr(memory, name)) // 2 :]})
    return memory


def take_memory(job: Job, memory: JobMemory, now: float) -> Job:
    """Return the state of a job that goes on with the memory of an earlier coordinator."""
    return replace(
        job,
        restart_count=max(job.restart_count, memory.restart_count),
        restart_times=tuple(now - age - memory.age for age in memory.restart_times),
        changes=tuple(now - age - memory.age for age in memory.changes),
        failures=memory.failures,
        attempts=memory.attempts,
        scripts=memory.scripts,
        incidents=tuple(replace(one, at=now - one.at - memory.age) for one in memory.incidents),
        exclusions=tuple(replace(one, at=now - one.at - memory.age) for one in memory.exclusions),
    )
