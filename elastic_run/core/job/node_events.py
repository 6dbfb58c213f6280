"""What an agent tells of its node's workers, and what the agent is told: the events and commands of `membership`."""

from __future__ import annotations

from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.job.assignment import Assignment
    from elastic_run.core.protocol.codec import Document
    from elastic_run.core.protocol.decisions import End
    from elastic_run.core.protocol.facts import NodeEnds, StoreAddress

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

    Args:
        round: The round.
        outcome: One of `core.protocol.outcomes.OUTCOMES`.
        store_address: Where the workers' store of the next round listens.
        report: The node's root cause where it failed.
        verdict: For `cannot_start`: a name of `contract.EXIT_CODES`.
        detail: One sentence for the user, or "".
        ends: How its workers ended, or None if all of them obeyed the stop.
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
