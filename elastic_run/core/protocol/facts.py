"""What a node tells of itself and of the end of its workers; what the coordinator decides of a round and of the job."""

from __future__ import annotations

from elastic_run.core.protocol.codec import MessageError, register
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.protocol.codec import Document

#: Stuck workers of a node that are named.
MOST_STUCK = 8
#: Errors that a node counts for the others.
MOST_ERRORS = 8


@register
@dataclass(frozen=True, slots=True)
class ScriptFile:
    """The file of a script on a node.

    Args:
        path: Its absolute path.
        digest: Of its content.
    """

    path: str
    digest: str


@register
@dataclass(frozen=True, slots=True)
class RoleScript:
    """The script of a role.

    Args:
        role: The role.
        script: Its name, "" for unknown.
        file: Where the first node of the role has it; None for a module, a function or a file that can't be read.
    """

    role: str
    script: str
    file: ScriptFile | None = None


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
class StuckRank:
    """A worker that did not stop, and whose stacks before SIGKILL show no wait for other ranks.

    Args:
        rank: Its global rank.
        function: What it ran; see `stacks.Place`.
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


# Reasons to halt a round.
FAILURE = "failure"
LOSS = "loss"
LEAVE = "leave"
JOIN = "join"


@dataclass(frozen=True, slots=True)
class Halt:
    """The workers of the round are to be stopped: `failure`, `loss`, `leave` or `join`."""

    term: int
    round: int
    reason: str
    detail: str = ""


@register
@dataclass(frozen=True, slots=True)
class EqualErrors:
    """How many workers of the last round had the same error as the root cause, and on which nodes.

    Args:
        ranks: These workers, with the root cause.
        of_ranks: All workers of these nodes.
        hosts: The names of these nodes; many names are folded.
        nodes: Number of these nodes.
        of_nodes: Nodes in the round.
    """

    ranks: int
    of_ranks: int
    hosts: tuple[str, ...]
    nodes: int
    of_nodes: int


@register
@dataclass(frozen=True, slots=True)
class End:
    """The job is over; nothing is decided after this.

    Args:
        term: The coordinator's.
        verdict: A name of `contract.EXIT_CODES`.
        exit_code: What every agent exits with.
        detail: One sentence for the user, or "".
        root: The report of the root cause, or None.
        attempts: The root causes of the attempts before, oldest first.
        nodes: The number of nodes in the last round; 0 where it isn't told.
        stuck: The ranks that did not stop and waited for no other rank, if the root cause is a lost peer.
        equal_errors: Which workers had the error of the root cause; None in a round of one node, if the root cause is
            a lost peer, or if a node has not told how its workers ended.
    """

    term: int
    verdict: str
    exit_code: int
    detail: str = ""
    root: Document | None = None
    attempts: tuple[Document, ...] = ()
    nodes: int = 0
    stuck: tuple[StuckRank, ...] = ()
    equal_errors: EqualErrors | None = None
