"""What the coordinator decides of a round that runs, or of the whole job, each with the coordinator's term."""

from __future__ import annotations

from elastic_run.core.protocol.codec import register
from elastic_run.core.protocol.facts import StuckRank  # noqa: TC001 - importing it registers it as a field
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.protocol.codec import Document

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
