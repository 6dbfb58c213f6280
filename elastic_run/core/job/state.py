"""The job as its coordinator's policy sees it: one frozen record.

The record is bounded: it has the last failures, the causes of the last attempts, and the last nodes that are gone and
may come back. Times are monotonic seconds of the coordinator.
"""

from __future__ import annotations

from types import MappingProxyType

from elastic_run.core.job.restart_policy import Failure
from elastic_run.core.protocol.codec import Document, encode, register
from elastic_run.records import dataclass, field, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic_run.core.job.config import JobConfig
    from elastic_run.core.protocol.facts import NodeEnds, NodeInfo, RoleScript, StoreAddress

GATHERING = "gathering"
RUNNING = "running"
WARNED = "warned"
HALTING = "halting"
PAUSING = "pausing"
ENDED = "ended"

# Why a node is gone, beside the reasons for which it leaves (`core.protocol.outcomes`).
SILENT = "silent"
REFUSED = "refused"

#: Failures, restart times and attempts that are remembered.
REMEMBERED = 64
#: Bytes of all remembered attempts together, as JSON.
REMEMBERED_BYTES = 256 * 1024
#: Nodes that are gone and may be heard of again.
REMEMBERED_GONE = 256


@dataclass(frozen=True, slots=True)
class Node:
    """A node that is there.

    Args:
        node: Its id.
        node_info: What it tells of itself.
        store_address: Where its workers' store of the next round listens.
        arrived: Its place in the order of joining.
        arrived_at: When it joined.
        rank: Its group rank in the last round, which is its seat, or None.
        is_member: Whether it belongs to the round that runs or is being stopped.
        is_busy: Whether it still runs workers of an older round.
        is_away: Whether its connection is broken; it may come back within the lease.
        failing: Place of its first sign of failure in the order of facts, or None.
        outcome: How the round ended on it, "" while it runs.
        ends: How its workers of the round ended, or None if all of them obeyed the stop.
        is_suspecting: Whether all that is known to have failed on it look as if they had lost a peer.
        has_other_config: Whether it was told a configuration that is not the job's, and has not taken the job's yet.
        is_excluded: Whether the job goes on without it: it is in no round any more.
    """

    node: str
    node_info: NodeInfo
    store_address: StoreAddress
    arrived: int
    arrived_at: float
    rank: int | None = None
    is_member: bool = False
    is_busy: bool = False
    is_away: bool = False
    failing: int | None = None
    outcome: str = ""
    ends: NodeEnds | None = None
    is_suspecting: bool = False
    has_other_config: bool = False
    is_excluded: bool = False


@dataclass(frozen=True, slots=True)
class Gone:
    """A node that is no longer there.

    Args:
        node: Its id.
        reason: `silent`, `refused`, or that for which it has left.
        detail: A clause for the user.
        was: What it was, or None where it never was one of the job's.
        is_told: Whether nodes that wait need not be told of it any more: a round was formed since then, or a node of
            a refused node's host has joined in its place.
    """

    node: str
    reason: str
    detail: str
    was: Node | None = None
    is_told: bool = False


@dataclass(frozen=True, slots=True)
class Seat:
    """A place in the last round; its index among the seats is the group rank.

    Args:
        node: Its holder, "" while it isn't known by name.
        is_awaited: Whether the holder may still come after a change of the coordinator.
        is_lost: Whether the holder went before it was done, so that the round can't succeed.
    """

    node: str = ""
    is_awaited: bool = True
    is_lost: bool = False


register(Failure)


@dataclass(frozen=True, slots=True)
class Root:
    """The likeliest cause of a round's failure so far, as the node that had it reported it.

    Args:
        node: That node.
        severity: See `core.failure.root_cause`; the smaller, the likelier.
        order: Place of the node's first sign of failure in the order of facts.
        failure: The failure.
        verdict: What the job ends with if it isn't tried again; "" for the restart policy's.
        detail: One sentence for the user, or "".
        report: The whole report, or None.
    """

    node: str
    severity: int
    order: int
    failure: Failure
    verdict: str = ""
    detail: str = ""
    report: Document | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A node that is to be told that it is not taken in, or is excluded.

    Args:
        node: The node.
        detail: Why, a clause for its user.
        verdict: `refused` or `excluded`.
    """

    node: str
    detail: str
    verdict: str = "refused"


@register
@dataclass(frozen=True, slots=True)
class Incident:
    """A failure that began on a machine; see `exclusion`.

    Args:
        machine: What the machine is known by.
        at: When.
        likeness: Equal for failures that look alike.
        summary: A line for the user, or "".
    """

    machine: str
    at: float
    likeness: str
    summary: str = ""


@register
@dataclass(frozen=True, slots=True)
class Exclusion:
    """A machine that the job goes on without.

    Args:
        machine: What the machine is known by.
        host: The name of its host.
        at: Since when.
        reason: The evidence, a clause for the user.
        is_named: Whether an exit code has named it.
    """

    machine: str
    host: str
    at: float
    reason: str
    is_named: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """The state of a job.

    Args:
        term: The coordinator's term.
        coordinator: The coordinator's node.
        phase: One of the phases above.
        config: The first joiner's, None before.
        nodes: The nodes that are there, by id.
        gone: The nodes that have gone, by id, the latest last.
        order: The number of facts that needed a place in an order.
        round: The last round that was formed, 0 for none.
        round_id: Its unique id: number, term and coordinator.
        highest_round: The highest number of a round of which any node here has heard, of whatever job.
        seats: Its configuration: one seat for each group rank.
        restart_count: Restarts so far.
        round_restarts: Restarts until the last round was formed. Its failure counts once, also where two coordinators
            have decided the restart that follows it.
        since: When the phase began.
        short_since: Since when coordinators of this node, one after the other, have had too few nodes, or None.
        min_reached_at: When enough nodes for the first round were there, or None.
        until: When the pause, the grace or the wait for the cause of a failure ends, or None.
        news: What made the next round necessary, or, once it was formed, this one; for the user.
        root: The likeliest cause of this round's failure so far, or None.
        hidden: What a node reports that was already going down when it was told to stop, or None; the cause where all
            else is a consequence.
        ending: What a node reported that ends the job at once, or None.
        refusals: Nodes that are still to be told.
        failures: The last failed rounds, oldest first.
        restart_times: When the last restarts were decided.
        changes: When the membership changed, as far as the configuration still asks for it.
        attempts: The causes of the attempts before, oldest first.
        incarnation: The founding of the job; see `documents.Round.root`.
        scripts: What each role runs, as the first of its nodes said.
        rank_claims: Nodes that came with a fixed rank which another node had; see `ranks`.
        incidents: Failures and the machines on which they began, oldest first.
        exclusions: Machines that the job goes on without.
    """

    term: int = 0
    coordinator: str = ""
    phase: str = GATHERING
    config: JobConfig | None = None
    nodes: Mapping[str, Node] = field(default_factory=lambda: MappingProxyType({}))
    gone: Mapping[str, Gone] = field(default_factory=lambda: MappingProxyType({}))
    order: int = 0
    round: int = 0
    round_id: str = ""
    highest_round: int = 0
    seats: tuple[Seat, ...] = ()
    restart_count: int = 0
    round_restarts: int = 0
    since: float = 0.0
    short_since: float | None = None
    min_reached_at: float | None = None
    until: float | None = None
    news: str = ""
    root: Root | None = None
    hidden: Root | None = None
    ending: Root | None = None
    refusals: tuple[Refusal, ...] = ()
    failures: tuple[Failure, ...] = ()
    restart_times: tuple[float, ...] = ()
    changes: tuple[float, ...] = ()
    attempts: tuple[Document, ...] = ()
    incarnation: str = ""
    scripts: tuple[RoleScript, ...] = ()
    rank_claims: tuple[str, ...] = ()
    incidents: tuple[Incident, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()

    @property
    def waits_since(self) -> float:
        """Since when too few nodes wait, while the next round is not formed."""
        return self.since if self.short_since is None else min(self.since, self.short_since)

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


def name_host(gone: Gone) -> str:
    """Return the host name of a node that is gone. A node that never joined has it at the beginning of its id."""
    return gone.node.rsplit("_", 2)[0] if gone.was is None else gone.was.node_info.host


def forget_place(gone: Gone) -> Gone:
    """Return a node that is gone without its place in the last round: another round is there now."""
    was = gone.was and replace(gone.was, is_member=False, rank=None)
    return replace(gone, was=was, is_told=True)


def remember(attempts: tuple[Document, ...], report: Document | None) -> tuple[Document, ...]:
    """Add the cause of an attempt, and forget the oldest where they are too many or too long."""
    kept = [*attempts, report] if report is not None else list(attempts)
    sizes = [len(encode(attempt)) for attempt in kept]
    while len(kept) > REMEMBERED or sum(sizes) > REMEMBERED_BYTES:
        del kept[0], sizes[0]
    return tuple(kept)
