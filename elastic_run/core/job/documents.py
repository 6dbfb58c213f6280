"""What the nodes of a job and their coordinator send each other: two documents, each sent whole.

`NodeState` is what a node is now. `Order` is what the node shall do now. Each side sends its newest document when the
document changes, and after every (re)connection. A newer document replaces an older one that was not sent yet. A reader
of the newest document needs no older one, so documents have no numbers and are never repeated.

Times travel as ages in seconds, since each node has a clock of its own.
"""

from __future__ import annotations

from elastic_run.core.config import JobConfig, Window
from elastic_run.core.failure.root_cause import EqualErrors
from elastic_run.core.job.codec import Document, MessageError, register
from elastic_run.core.job.restart_policy import OUTCOMES, Failure
from elastic_run.records import dataclass

# These are imported before the first worker starts, when nothing is read or sent yet.
for _kind in (Window, JobConfig, Failure, EqualErrors):
    register(_kind)

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

# --- reasons to halt a round: of the coordinator, and of the node itself ---------------------------------------------
FAILURE = "failure"
LOSS = "loss"
LEAVE = "leave"
JOIN = "join"
REPLACED = "replaced"  # the job went on without the node
FENCED = "fenced"  # the node is cut off from its job

#: Characters of a node's id by which a proposal names its members.
KEY_LENGTH = 8


def shorten(node: str) -> str:
    """Return the part of a node's id by which a proposal names it: a random text."""
    return node[-KEY_LENGTH:]


def _check_word(name: str, word: str, allowed: frozenset[str]) -> None:
    if word not in allowed:
        message = f"{name}: {word!r} is none of {', '.join(sorted(allowed))}"
        raise MessageError(message)


# --- what a node tells of itself -------------------------------------------------------------------------------------
@register
@dataclass(frozen=True, slots=True)
class ScriptFile:
    """The file of a script on a node: its absolute path, and a digest of its content."""

    path: str
    digest: str


@register
@dataclass(frozen=True, slots=True)
class RoleScript:
    """The script of a role."""

    role: str
    script: str  # Its name, "" for unknown
    #: Where the first node of the role has it; None for a module, a function or a file that can't be read
    file: ScriptFile | None = None


@register
@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a node tells of itself."""

    host: str  # Its name, for display
    pid: int  # Its agent's process, for display
    local_world_size: int  # Workers on it
    role: str = "default"  # Their role
    preferred_rank: int | None = None  # The group rank that its user asked for, or None
    serves_store: bool = False  # Whether the job's store lives in its agent: where the store is gone, so is the node
    #: What its workers run, by a name that is the same on all nodes of its role; "" where it isn't told
    script: str = ""
    script_file: ScriptFile | None = None  # The file of that name on this node, or None
    has_fixed_rank: bool = False  # Whether `preferred_rank` is no wish: no other node may have it
    location: str = ""  # Its place in the network; the texts of near nodes sort side by side
    machine: str = ""  # The scheduler's name of the machine, which outlives an agent and a pod; "" where it isn't told
    torch: str = ""  # The version of torch that its workers would import, for display; "" where it isn't told

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
    """Where a node listens already for its workers' store of the next round, should it become rank 0."""

    host: str  # The address that other nodes use
    port: int
    use_agent_store: bool = True  # Whether its agent serves the store; False if its worker of rank 0 does


# --- rounds ----------------------------------------------------------------------------------------------------------
@register
@dataclass(frozen=True, slots=True)
class Promise:
    """The highest coordinator whose orders a node follows: it accepts nothing from a lower one."""

    term: int = 0
    coordinator: str = ""  # Its node; two coordinators may have one term, and the greater id is the higher then

    @property
    def rank(self) -> tuple[int, str]:
        """What tells the higher of two."""
        return self.term, self.coordinator


@register
@dataclass(frozen=True, slots=True)
class Round:
    """A round, or the proposal of one, as other nodes know it."""

    term: int  # The term of its coordinator
    number: int  # It only grows
    coordinator: str  # The node that proposed it
    root: str  # The founding of its job: jobs that were founded by nodes which could not see each other differ in it
    size: int  # The number of its members, which is the number of its seats
    coordinator_rank: int = -1  # The group rank of its coordinator in it, -1 if it is no member
    restart_count: int = 0  # Restarts of the whole job until it was formed

    @property
    def order(self) -> tuple[int, int]:
        """What tells the newer of two rounds."""
        return self.term, self.number

    @property
    def round_id(self) -> str:
        """Its unique id. Its number is not: two coordinators may each form a round of one number."""
        return f"{self.number}/{self.term}/{self.coordinator}"


@register
@dataclass(frozen=True, slots=True)
class Proposal:
    """A round that a node has accepted, and that may have started."""

    round: Round
    rank: int  # The node's group rank in it: its seat
    parent: Round | None  # The newest round that had surely started when it was proposed, or None
    members: tuple[str, ...] = ()  # Its members, `shorten`ed; empty where no other node could decide about it


@register
@dataclass(frozen=True, slots=True)
class Assignment:
    """One node's place in a round."""

    round: int  # Number of the round
    group_rank: int  # The node's rank among the nodes
    group_world_size: int  # The number of nodes
    base_rank: int  # Global rank of its first worker
    world_size: int  # The number of workers
    role_rank: int  # Rank of its first worker among those of its role
    role_world_size: int  # The number of workers of its role
    master: StoreAddress  # Where rank 0's node listens
    restart_count: int  # Restarts of the whole job so far
    hosts: int  # The number of different host names in the round
    news: str = ""  # What made the round necessary, for the user; of the first one, which nodes were unhealthy, or ""
    incarnation: str = ""  # The founding of its job; see `Round.root`
    round_id: str = ""  # See `Round.round_id`
    config: JobConfig | None = None  # The job's, for a node that was told others; None for all others
    versions: str = ""  # Which hosts have which version of torch; "" where all have the same


# --- the end of a round, and of the job ------------------------------------------------------------------------------
#: Stuck workers of a node that are named, and errors that a node counts for the others.
MOST_STUCK = 8
MOST_ERRORS = 8


@register
@dataclass(frozen=True, slots=True)
class StuckRank:
    """A worker that did not stop, and whose stacks before SIGKILL show no wait for other ranks; see `stacks.Place`."""

    rank: int  # Its global rank
    function: str = ""
    file: str = ""
    line: int = 0
    problem: str = ""


@register
@dataclass(frozen=True, slots=True)
class ErrorCount:
    """Workers of a node with the same error."""

    number: int  # The error's, of `root_cause.compute_error_number`
    ranks: int  # How many workers had it


@register
@dataclass(frozen=True, slots=True)
class NodeEnds:
    """How the workers of a node ended, as far as the job has to know beside the node's root cause."""

    failed: int = 0  # Workers of the node that failed by themselves
    stuck_count: int = 0  # Workers that did not stop and waited for no other rank
    #: The first `MOST_STUCK` of these; those that had been at their places before the stop come first
    stuck: tuple[StuckRank, ...] = ()
    unmoved: int = 0  # Number of these
    #: The `MOST_ERRORS` most frequent errors of workers that failed, or were stopped while they were going down
    errors: tuple[ErrorCount, ...] = ()


@register
@dataclass(frozen=True, slots=True)
class RoundEnd:
    """How a round has ended on a node: no process of it lives there any more."""

    outcome: str  # One of `OUTCOMES`
    #: The node's root cause where it failed: `exit_code`, `signature`, `is_deterministic`, `uptime` and `severity` are
    #: read, the rest is carried to every node
    report: Document | None = None
    verdict: str = ""  # For `cannot_start`: a name of `contract.EXIT_CODES`
    detail: str = ""  # One sentence for the user, or ""
    ends: NodeEnds | None = None  # How its workers ended, or None if all of them obeyed the stop

    def __post_init__(self) -> None:
        _check_word("RoundEnd.outcome", self.outcome, OUTCOMES)


@register
@dataclass(frozen=True, slots=True)
class End:
    """The job is over; nothing is decided after this."""

    verdict: str  # A name of `contract.EXIT_CODES`
    exit_code: int  # What every agent exits with
    detail: str = ""  # One sentence for the user, or ""
    root: Document | None = None  # The report of the root cause, or None
    attempts: tuple[Document, ...] = ()  # The root causes of the attempts before, oldest first
    nodes: int = 0  # The number of nodes in the last round; 0 where it isn't told
    #: The ranks that did not stop and waited for no other rank, if the root cause is a lost peer
    stuck: tuple[StuckRank, ...] = ()
    #: Which workers had the error of the root cause; None in a round of one node, if the root cause is a lost peer, or
    #: if a node has not told how its workers ended
    equal_errors: EqualErrors | None = None


# --- the memory of the job -------------------------------------------------------------------------------------------
@register
@dataclass(frozen=True, slots=True)
class Incident:
    """A failure that began on a machine; see `exclusion`."""

    machine: str  # What the machine is known by
    at: float
    likeness: str  # Equal for failures that look alike
    summary: str = ""  # A line for the user, or ""


@register
@dataclass(frozen=True, slots=True)
class Exclusion:
    """A machine that the job goes on without."""

    machine: str  # What the machine is known by
    host: str  # The name of its host
    at: float  # Since when
    reason: str  # The evidence, a clause for the user
    is_named: bool = False  # Whether an exit code has named it


@register
@dataclass(frozen=True, slots=True)
class JobMemory:
    """What the next coordinator has to know of the job beyond what its nodes are; times are ages in seconds.

    Fields that `Job` has as well mean the same here.
    """

    term: int = 0  # Of the coordinator that wrote it
    edition: int = 0  # Counts the changes of it within a term
    age: float = 0.0  # Seconds since it was written
    round: Round | None = None  # The last round that has started: a node that had no place in it knows it from here
    settled_round: str = ""  # The unique id of the last round whose end is in this memory; "" for none
    restart_count: int = 0
    restart_times: tuple[float, ...] = ()
    changes: tuple[float, ...] = ()
    failures: tuple[Failure, ...] = ()
    attempts: tuple[Document, ...] = ()  # As far as they fit
    scripts: tuple[RoleScript, ...] = ()
    incidents: tuple[Incident, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()


# --- the two documents -----------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class NodeState:
    """What a node is now."""

    node: str  # Its id, unique per run of an agent
    node_info: NodeInfo
    config: JobConfig  # The job's configuration as the node was told it
    store_address: StoreAddress  # Where its workers' store of the next round listens already
    promise: Promise = Promise()  # The highest coordinator whose orders it follows
    started: Round | None = None  # The last round that it has started, or None
    rank: int = -1  # Its group rank in that round
    accepted: tuple[Proposal, ...] = ()  # The proposals that it has accepted since, oldest first
    phase: str = IDLE  # Whether processes of the round `started` live: `idle`, `runs` or `stops`
    is_failing: bool = False  # Whether a worker of that round has failed
    is_secondary: bool = False  # Whether all that failed there so far look as if they had lost a peer
    ended: RoundEnd | None = None  # How that round has ended on this node, or None
    leaving: str = ""  # Why the node goes, a word of `restart_policy`; "" while it stays
    leaving_detail: str = ""  # One sentence for the user, or ""
    #: The newest memory of the job that a coordinator gave to this node; only in the first document of a connection
    memory: JobMemory | None = None
    known_round: int = 0  # The highest round number that this node knows
    dead: str = ""  # The id of a coordinator whose death this node has seen, or ""

    def __post_init__(self) -> None:
        _check_word("NodeState.phase", self.phase, NODE_PHASES)

    def has_seat(self, one: Round) -> bool:
        """Whether the node is a member of a round, as far as it knows."""
        return self.started == one or self.has_accepted(one)

    def has_accepted(self, one: Round) -> bool:
        """Whether the node has accepted the proposal of a round, and has started no newer one."""
        return any(proposal.round == one for proposal in self.accepted)


@dataclass(frozen=True, slots=True)
class Order:
    """What a node shall do now."""

    promise: Promise  # Whose order it is: a node ignores an order of a lower coordinator than it has promised to follow
    #: `gather` (wait for a round), `propose` (accept the proposal), `start` (run the round), `warn` (the round will be
    #: stopped for new nodes), `halt` (stop the workers), `end` (the job is over), `refuse` (this node is not taken in)
    #: or `search` (look for another coordinator)
    phase: str
    #: The round of `start`, `warn` and `halt`; None for `halt` of whatever else the node runs
    round: Round | None = None
    assignment: Assignment | None = None  # With `propose`: the node's place in the round
    proposal: Proposal | None = None  # With `propose`: what to accept
    #: Of `halt`: a reason above; of `refuse`: `refused` or `excluded`; of `search`: why the node stops its workers, or
    #: "" if its round runs on
    reason: str = ""
    detail: str = ""  # One clause for the user, or ""
    end: End | None = None  # With `end`: the verdict
    memory: JobMemory | None = None  # The memory of the job, where another coordinator may follow; else None
    to: str = ""  # With `search`: the endpoint at which a higher coordinator listens, "" if the endpoint is unknown

    def __post_init__(self) -> None:
        _check_word("Order.phase", self.phase, ORDER_PHASES)
