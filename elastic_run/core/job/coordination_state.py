"""What a coordinator knows of its job and has decided, and what can happen to it. Pure."""

from __future__ import annotations

import math
from types import MappingProxyType

from elastic_run.core.job.state import Job
from elastic_run.core.job.succession import LEASE, Knowledge
from elastic_run.records import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any, TypeAlias

    from elastic_run.core.job.documents import JobMemory, NodeState, Promise, Proposal, Round
    from elastic_run.core.job.node_events import Assignment
    from elastic_run.core.protocol.facts import End, Halt

# How a connection has ended.
ENDED = "ended"
SILENT = "silent"
BROKEN = "broken"

#: The part of the lease's time to live in which its holder acts: two clocks may drift apart by a tenth each.
LEASE_SHARE = 0.8


# --- events ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Said:
    """A node says what it is; the first time on a connection, and whenever that changes."""

    state: NodeState


@dataclass(frozen=True, slots=True)
class Closed:
    """A node's connection is closed: the one on which its newest state came, and not an older one.

    Args:
        node: The node.
        how: `ended` by the guardian, which proves that nothing of the node lives (so a living agent closes its
            connections by a reset); `silent` for longer than the lease; `broken` otherwise.
        detail: For the user: why the agent died, or how long it was silent, a clause; or "".
    """

    node: str
    how: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class MayFound:
    """No other coordinator can have this job, so that nodes without a round may found it."""


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """This coordinator holds the lease on, or again: nobody else has held it since.

    Args:
        until: Until when by this node's clock: `LEASE_SHARE` of its time to live from when it was asked for. A later
            time would be too late by the store's clock, which may run faster.
        term: The lease's term; a lease that was over, and that this node got again, has a higher one.
    """

    until: float
    term: int


@dataclass(frozen=True, slots=True)
class StepDown:
    """Another agent coordinates in this one's place: it holds the lease, or its standing is higher.

    Args:
        to: Where it listens, or "" if that is unknown.
    """

    to: str = ""


if TYPE_CHECKING:
    Event: TypeAlias = Said | Closed | MayFound | LeaseRenewed | StepDown


# --- state -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Proposed:
    """A proposal that is not accepted by all yet.

    Args:
        round: The round.
        members: Its members, in order of joining.
        proposals: What each member is to accept.
        assignments: The place of each.
    """

    round: Round
    members: tuple[str, ...]
    proposals: Mapping[str, Proposal]
    assignments: Mapping[str, Assignment]


def _empty() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Coordination:
    """What a coordinator knows of its job, and has decided.

    Args:
        promise: Its own term and node.
        choice: How a coordinator is chosen, a word of `succession`.
        since: When it began to coordinate.
        job: The job, as its policy sees it.
        here: The newest states of the nodes that are connected.
        ended: The last states of the nodes that have ended in its hands.
        away: When the connections of nodes broke that may come back.
        round: The last round that has started, or None.
        proposed: The proposal that waits for its members, or None.
        started_by: The rounds whose `start` this agent has sent, as a coordinator in whatever term.
        dead: See `Knowledge`.
        silent: The coordinator before, if it was silent for a lease: its node is not waited for.
        number: The highest number of a round that it has proposed.
        may_found: Whether nodes without a round may found the job.
        short_since: Since when the nodes that are here are no majority, or None.
        halt: Why the round is being stopped, or None.
        end: The verdict, or None.
        is_over: Whether it coordinates no longer: its nodes look for another coordinator.
        successor: Where that one listens, or "" if that is unknown.
        lease_until: Until when it may start rounds: others may hold the lease then.
        memory: The memory that travels with the orders, or None.
        memory_facts: What is in it; another memory is written when this changes.
    """

    promise: Promise
    choice: str
    since: float
    job: Job
    here: Mapping[str, NodeState] = field(default_factory=_empty)
    ended: Mapping[str, NodeState] = field(default_factory=_empty)
    away: Mapping[str, float] = field(default_factory=_empty)
    round: Round | None = None
    proposed: Proposed | None = None
    started_by: tuple[Round, ...] = ()
    dead: str = ""
    silent: str = ""
    number: int = 0
    may_found: bool = False
    short_since: float | None = None
    halt: Halt | None = None
    end: End | None = None
    is_over: bool = False
    successor: str = ""
    lease_until: float = math.inf
    memory: JobMemory | None = None
    memory_facts: tuple[object, ...] = ()

    @property
    def knowledge(self) -> Knowledge:
        """What it knows of the rounds of the job."""
        dead = frozenset((self.dead, *(state.dead for state in self.here.values()))) - {""}
        # Nobody that is here now need know of the last round.
        known = self.started_by if self.round is None else (*self.started_by, self.round)
        if self.choice == LEASE:
            known = (*known, *self._list_possible())
        return Knowledge(self.promise, self.here, self.ended, known, dead)

    def _list_possible(self) -> Iterator[Round]:
        """Return the rounds that may run on nodes which are not here, where a lease names the coordinator.

        No seats are counted with a lease. The memory names the last round to spares, and a proposal of another
        coordinator counts as started. Without these, a spare or a member that has not read the `start` yet takes the
        lease over and forms a round beside the running one.
        """
        if self.memory is not None and self.memory.round is not None:
            yield self.memory.round
        for state in (*self.ended.values(), *self.here.values()):
            yield from (one.round for one in state.accepted if one.round.coordinator != self.promise.coordinator)


def begin(
    promise: Promise,
    choice: str,
    now: float,
    *,
    dead: str = "",
    silent: str = "",
    started_by: tuple[Round, ...] = (),
    lease_until: float = math.inf,
) -> Coordination:
    """Return the state of a coordinator that knows nothing yet; see `Coordination` for the values.

    Its term is above each that its node has promised to follow.
    """
    job = Job(term=promise.term, coordinator=promise.coordinator, since=now)
    return Coordination(
        promise, choice, now, job, started_by=started_by, dead=dead, silent=silent, lease_until=lease_until
    )
