"""A job as its coordinator knows it, one frozen record, and what can happen to it. Pure.

The record is bounded: it has the last failures, the causes of the last attempts, and the last nodes that are gone and
may come back. Times are monotonic seconds of the coordinator.
"""

from __future__ import annotations

import math
from types import MappingProxyType

from elastic_run.records import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, TypeAlias

    from elastic_run.core.config import JobConfig
    from elastic_run.core.job.codec import Document
    from elastic_run.core.job.documents import (
        Assignment,
        End,
        Exclusion,
        Incident,
        JobMemory,
        NodeEnds,
        NodeInfo,
        NodeState,
        Promise,
        Proposal,
        RoleScript,
        Round,
        StoreAddress,
    )
    from elastic_run.core.job.restart_policy import Failure

# Phases of a job.
GATHERING = "gathering"
RUNNING = "running"
WARNED = "warned"
HALTING = "halting"
PAUSING = "pausing"
OVER = "ended"

# How a connection has ended. `SILENT` is also why a node is gone, beside the reasons for which it leaves.
ENDED = "ended"
SILENT = "silent"
BROKEN = "broken"
REFUSED = "refused"

#: Failures, restart times and attempts that are remembered.
REMEMBERED = 64
#: Nodes that are gone and may be heard of again.
REMEMBERED_GONE = 256
#: The part of the lease's time to live in which its holder acts: two clocks may drift apart by a tenth each.
LEASE_SHARE = 0.8


# --- events ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Said:
    """A node says what it is; the first time on a connection, and whenever that changes."""

    state: NodeState


@dataclass(frozen=True, slots=True)
class Closed:
    """A node's connection is closed: the one on which its newest state came, and not an older one."""

    node: str
    #: `ended` by the guardian, which proves that nothing of the node lives (so a living agent closes its connections by
    #: a reset); `silent` for longer than the lease; `broken` otherwise
    how: str
    detail: str = ""  # For the user: why the agent died, or how long it was silent, a clause; or ""


@dataclass(frozen=True, slots=True)
class MayFound:
    """No other coordinator can have this job, so that nodes without a round may found it."""


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """This coordinator holds the lease on, or again: nobody else has held it since."""

    #: Until when by this node's clock: `LEASE_SHARE` of its time to live from when it was asked for. A later time would
    #: be too late by the store's clock, which may run faster.
    until: float
    term: int  # The lease's term; a lease that was over, and that this node got again, has a higher one


@dataclass(frozen=True, slots=True)
class StepDown:
    """Another agent coordinates in this one's place: it holds the lease, or its standing is higher."""

    to: str = ""  # Where it listens, or "" if that is unknown


if TYPE_CHECKING:
    Event: TypeAlias = Said | Closed | MayFound | LeaseRenewed | StepDown


# --- nodes -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Node:
    """A node that is there."""

    node: str  # Its id
    node_info: NodeInfo
    store_address: StoreAddress  # Where its workers' store of the next round listens
    arrived: int  # Its place in the order of joining
    arrived_at: float
    rank: int | None = None  # Its group rank in the last round, which is its seat, or None
    is_member: bool = False  # Whether it belongs to the round that runs or is being stopped
    is_busy: bool = False  # Whether it still runs workers of an older round
    is_away: bool = False  # Whether its connection is broken; it may come back within the lease
    failing: int | None = None  # Place of its first sign of failure in the order of facts, or None
    outcome: str = ""  # How the round ended on it, "" while it runs
    ends: NodeEnds | None = None  # How its workers of the round ended, or None if all of them obeyed the stop
    is_suspecting: bool = False  # Whether all that is known to have failed on it look as if they had lost a peer
    #: Whether it was told a configuration that is not the job's, and has not taken the job's yet
    has_other_config: bool = False
    is_excluded: bool = False  # Whether the job goes on without it: it is in no round any more


@dataclass(frozen=True, slots=True)
class Gone:
    """A node that is no longer there."""

    node: str  # Its id
    reason: str  # `silent`, `refused`, or that for which it has left
    detail: str  # A clause for the user
    was: Node | None = None  # What it was, or None where it never was one of the job's
    is_told: bool = False  # Whether nodes that wait need not be told of it: a round was formed since then


@dataclass(frozen=True, slots=True)
class Seat:
    """A place in the last round; its index among the seats is the group rank."""

    node: str = ""  # Its holder, "" while it isn't known by name
    is_awaited: bool = True  # Whether the holder may still come after a change of the coordinator
    is_lost: bool = False  # Whether the holder went before it was done, so that the round can't succeed


@dataclass(frozen=True, slots=True)
class Root:
    """The likeliest cause of a round's failure so far, as the node that had it reported it."""

    node: str  # That node
    severity: int  # See `core.failure.root_cause`; the smaller, the likelier
    order: int  # Place of the node's first sign of failure in the order of facts
    failure: Failure
    verdict: str = ""  # What the job ends with if it isn't tried again; "" for the restart policy's
    detail: str = ""  # One sentence for the user, or ""
    report: Document | None = None  # The whole report, or None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A node that is to be told that it is not taken in, or is excluded."""

    node: str
    detail: str  # Why, a clause for its user
    verdict: str = "refused"  # `refused` or `excluded`


@dataclass(frozen=True, slots=True)
class Halt:
    """Why a round is being stopped: `failure`, `loss`, `leave` or `join`, and a clause for the user."""

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Proposed:
    """A proposal that is not accepted by all yet."""

    round: Round
    proposals: Mapping[str, Proposal]  # What each member is to accept
    assignments: Mapping[str, Assignment]  # The place of each, in order of rank


def _empty() -> Mapping[str, Any]:
    return MappingProxyType({})


# --- the job ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Job:
    """What a coordinator knows of its job, and has decided."""

    promise: Promise  # Its own term and node
    choice: str  # How a coordinator is chosen, a word of `founding`
    since: float  # When the phase began
    phase: str = GATHERING
    config: JobConfig | None = None  # The first joiner's, None before
    #: Since when coordinators of this node, one after the other, have had too few nodes, or None
    few_since: float | None = None

    # Connections.
    here: Mapping[str, NodeState] = field(default_factory=_empty)  # The newest states of the nodes that are connected
    ended: Mapping[str, NodeState] = field(default_factory=_empty)  # The last states of those that ended in its hands
    away: Mapping[str, float] = field(default_factory=_empty)  # When connections of nodes broke that may come back

    # Who may go on; see `founding`.
    #: The rounds whose `start` this agent has sent, as a coordinator in whatever term
    started_by: tuple[Round, ...] = ()
    dead: str = ""  # The coordinator before, if it is surely dead
    silent: str = ""  # The coordinator before, if it was silent for a lease: its node is not waited for
    may_found: bool = False  # Whether nodes without a round may found the job
    short_since: float | None = None  # Since when the nodes that are here are no majority, or None
    lease_until: float = math.inf  # Until when it may start rounds: others may hold the lease then
    is_over: bool = False  # Whether it coordinates no longer: its nodes look for another coordinator
    successor: str = ""  # Where that one listens, or "" if that is unknown

    # Nodes.
    nodes: Mapping[str, Node] = field(default_factory=_empty)  # The nodes that are there
    gone: Mapping[str, Gone] = field(default_factory=_empty)  # The nodes that have gone, the latest last
    order: int = 0  # The number of facts that needed a place in an order
    refusals: tuple[Refusal, ...] = ()  # Nodes that are still to be told
    scripts: tuple[RoleScript, ...] = ()  # What each role runs, as the first of its nodes said

    # The round.
    round: Round | None = None  # The last round that has started, or None
    proposed: Proposed | None = None  # The proposal that waits for its members, or None
    highest_round: int = 0  # The highest number of a round that any node here has heard of, of whatever job
    seats: tuple[Seat, ...] = ()  # The seats of the last round, by group rank
    min_reached_at: float | None = None  # When enough nodes for the first round were there, or None
    until: float | None = None  # When the pause, the grace or the wait for the cause of a failure ends, or None
    news: str = ""  # What made the next round necessary, or, once it was formed, this one; for the user

    # Its end, and the job's.
    root: Root | None = None  # The likeliest cause of this round's failure so far, or None
    #: What a node reports that was already going down when it was told to stop, or None; the cause where all else is a
    #: consequence
    hidden: Root | None = None
    ending: Root | None = None  # What a node reported that ends the job at once, or None
    halt: Halt | None = None  # Why the round is being stopped, or None
    end: End | None = None  # The verdict, or None

    # What the next coordinator has to know, too.
    restart_count: int = 0  # Restarts so far
    restart_times: tuple[float, ...] = ()  # When the last restarts were decided
    changes: tuple[float, ...] = ()  # When the membership changed, as far as the configuration still asks for it
    failures: tuple[Failure, ...] = ()  # The last failed rounds, oldest first
    attempts: tuple[Document, ...] = ()  # The causes of the attempts before, oldest first
    incidents: tuple[Incident, ...] = ()  # Failures and the machines on which they began, oldest first
    exclusions: tuple[Exclusion, ...] = ()  # Machines that the job goes on without
    memory: JobMemory | None = None  # The memory that travels with the orders, or None

    @property
    def node(self) -> str:
        """The coordinator's node."""
        return self.promise.coordinator

    @property
    def number(self) -> int:
        """The number of the last round, 0 for none."""
        return 0 if self.round is None else self.round.number

    @property
    def waits_since(self) -> float:
        """Since when too few nodes wait, while the next round is not formed."""
        return self.since if self.few_since is None else min(self.since, self.few_since)

    @property
    def is_awaiting(self) -> bool:
        """Whether a seat's holder may still come after a change of the coordinator."""
        return any(seat.is_awaited for seat in self.seats)

    @property
    def has_lost(self) -> bool:
        """Whether the round has lost a holder that was not done."""
        return any(seat.is_lost for seat in self.seats)

    @property
    def members(self) -> tuple[Node, ...]:
        """The nodes of the round that runs or is being stopped, as far as they are there."""
        return tuple(node for node in self.nodes.values() if node.is_member)

    @property
    def gone_members(self) -> tuple[Gone, ...]:
        """The nodes of that round that are gone."""
        return tuple(gone for gone in self.gone.values() if gone.was is not None and gone.was.is_member)

    @property
    def waiting(self) -> tuple[Node, ...]:
        """The nodes that could be in the next round and are not in this one."""
        return tuple(
            node
            for node in self.nodes.values()
            if not (node.is_member or node.is_busy or node.is_away or node.is_excluded)
        )


#: The phases in which a round runs or is being stopped.
ACTIVE = frozenset((RUNNING, WARNED, HALTING))
