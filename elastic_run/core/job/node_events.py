"""What an agent tells of its node's workers, and what the agent is told, with its node's place in a round.

These are events and commands of `membership`.
"""

from __future__ import annotations

from elastic_run.core.job.config import JobConfig, Window
from elastic_run.core.protocol.codec import register
from elastic_run.core.protocol.facts import StoreAddress  # noqa: TC001 - importing it registers it as a field
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.protocol.codec import Document
    from elastic_run.core.protocol.facts import End, NodeEnds

# The configuration is imported before the first worker starts, when nothing is read or sent yet.
register(Window)
register(JobConfig)


@register
@dataclass(frozen=True, slots=True)
class Assignment:
    """One node's place in a round; the fields are `rendezvous.session.Formed`'s.

    Args:
        round: Number of the round.
        group_rank: The node's rank among the nodes.
        group_world_size: The number of nodes.
        base_rank: Global rank of its first worker.
        world_size: The number of workers.
        role_rank: Rank of its first worker among those of its role.
        role_world_size: The number of workers of its role.
        master: Where rank 0's node listens.
        restart_count: Restarts of the whole job so far.
        hosts: The number of different host names in the round.
        news: What made the round necessary, for the user; of the first one, which nodes were unhealthy, or "".
        incarnation: The founding of its job; see `documents.Round.root`.
        round_id: The round's unique id. Its number is not: two coordinators may each form a round of one number.
        config: The job's, for a node that was told others; None for all others.
        versions: Which hosts have which version of torch; "" where all have the same.
    """

    round: int
    group_rank: int
    group_world_size: int
    base_rank: int
    world_size: int
    role_rank: int
    role_world_size: int
    master: StoreAddress
    restart_count: int
    hosts: int
    news: str = ""
    incarnation: str = ""
    round_id: str = ""
    config: JobConfig | None = None
    versions: str = ""


#: Why a round ends on a node that the job went on without.
REPLACED = "replaced"
#: Why a round ends on a node that is cut off from its job.
FENCED = "fenced"


# --- events ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class WorkersFailing:
    """A worker of the round has failed.

    Args:
        round: The round.
        is_secondary: Whether all that failed there so far look as if they had lost a peer. Other workers run on then:
            one of them may have the cause. Said again without this when a failure of another kind follows.
    """

    round: int
    is_secondary: bool = False


@dataclass(frozen=True, slots=True)
class WorkersGone:
    """No process of the round lives any more; the fields are those of `documents.RoundEnd`.

    The workers' store of the next round listens at `store_address`.
    """

    round: int
    outcome: str
    store_address: StoreAddress
    report: Document | None = None
    verdict: str = ""
    detail: str = ""
    ends: NodeEnds | None = None


@dataclass(frozen=True, slots=True)
class Leaving:
    """The agent goes: `signal`, `unkillable` or `unhealthy`."""

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class CutOff:
    """The node has not reached its job for this many seconds, and its workers must not run on."""

    seconds: float


# --- commands --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Formed:
    """Tell the agent: a round with this node in it."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Settled:
    """Tell the user: these values of the node have no effect, since the job's first node has settled them."""

    detail: str


@dataclass(frozen=True, slots=True)
class Warned:
    """Tell the agent: the round's workers will be stopped for a change of membership."""

    round: int


@dataclass(frozen=True, slots=True)
class Halted:
    """Tell the agent: stop the workers of the round. `reason` is a `Halt`'s, `replaced` or `fenced`."""

    round: int
    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """Tell the agent: this node is not taken in, or is excluded. Nothing follows.

    Args:
        detail: Why.
        verdict: `refused` or `excluded`.
    """

    detail: str
    verdict: str = "refused"


@dataclass(frozen=True, slots=True)
class Ended:
    """Tell the agent: the job is over. Nothing follows."""

    end: End
