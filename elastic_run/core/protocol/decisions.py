"""What the coordinator decides: the entries of the job's log, each with its writer's term."""

from __future__ import annotations

from elastic_run.core.protocol.codec import register
from elastic_run.core.protocol.facts import Copy, StuckRank  # noqa: TC001 - importing them registers them as fields
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    from elastic_run.core.protocol.codec import Document

# Reasons to halt a round.
FAILURE = "failure"
LOSS = "loss"
LEAVE = "leave"
JOIN = "join"


@dataclass(frozen=True, slots=True)
class Claim:
    """The node is the coordinator of this term."""

    term: int
    node: str


@dataclass(frozen=True, slots=True)
class Resign:
    """The coordinator of this term ends its work in order; any node may claim the next term."""

    term: int
    node: str


@dataclass(frozen=True, slots=True)
class Prepare:
    """The next round is to have other nodes than the last: more than half of the last one must have read this first.

    Until then the round may not form: the others would be a majority of the last round that knows nothing of it. The
    state beside this slot names the nodes of the next round.

    Args:
        term: The coordinator's.
        round: The last round that was formed.
        round_id: Its unique id.
        incarnation: Of the job; see `facts.is_related`.
        store_id: The id of the store of this log.
        known: The newest state of each log of another store that this log has taken in. A node that has confirmed a
            `Prepare` which is newer than these does not confirm this one.
    """

    term: int
    round: int
    round_id: str
    incarnation: str
    store_id: str = ""
    known: tuple[Copy, ...] = ()


@dataclass(frozen=True, slots=True)
class Form:
    """A round begins; each of its members finds its assignment beside this slot.

    Args:
        term: The coordinator's.
        round: Number of the round; it only grows.
        restart_count: Restarts of the whole job so far.
        nodes: The number of members.
        world_size: The number of workers.
        incarnation: Of the job; see `facts.is_related`.
    """

    term: int
    round: int
    restart_count: int
    nodes: int
    world_size: int
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class Warn:
    """The workers of the round will be stopped for a change of membership."""

    term: int
    round: int


@dataclass(frozen=True, slots=True)
class Halt:
    """The workers of the round are to be stopped: `failure`, `loss`, `leave` or `join`."""

    term: int
    round: int
    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Refuse:
    """A node is not taken in, or is excluded; the job goes on without it.

    Args:
        term: The coordinator's.
        node: The node.
        detail: Why, a clause for its user.
        verdict: `refused` or `excluded`.
    """

    term: int
    node: str
    detail: str
    verdict: str = "refused"


@dataclass(frozen=True, slots=True)
class Resync:
    """The state of the job is lost: every node is to say again where it stands.

    Args:
        term: The coordinator's.
        node: The coordinator: in a store that was restored another node may have claimed this term, and asked, too.
        detail: What was wrong with the state.
    """

    term: int
    node: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Recovered:
    """The log of this store goes on from what a majority of the last round knew; see `job.view_change`.

    Args:
        term: From now on; above that of any decision from which the log goes on.
        node: The coordinator.
        round: The last round that was formed.
        round_id: Its unique id; a node that runs another round is no member.
        restart_count: Restarts of the whole job so far.
        incarnation: Of the job; see `facts.is_related`.
    """

    term: int
    node: str
    round: int
    round_id: str
    restart_count: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class Failover:
    """The store moves to another host; the log goes on there."""

    term: int
    endpoint: str
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


Decision: TypeAlias = Claim | Resign | Prepare | Form | Warn | Halt | Refuse | Resync | Recovered | Failover | End
