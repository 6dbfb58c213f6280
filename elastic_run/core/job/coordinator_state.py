"""The coordinator's record of its term, and what it asks its driver to write."""

from __future__ import annotations

from types import MappingProxyType

from elastic_run.core.job import machine as coordination
from elastic_run.records import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeAlias

    from elastic_run.core.job.apply_facts import Event
    from elastic_run.core.job.machine import Job
    from elastic_run.core.job.snapshot import Formation
    from elastic_run.core.protocol.liveness import Leases
    from elastic_run.core.protocol.messages import (
        Copy,
        End,
        Failover,
        Form,
        Halt,
        LogStart,
        Prepare,
        Recovered,
        Refuse,
        Resign,
        Resync,
        Warn,
    )

    Pending: TypeAlias = Prepare | Form | Warn | Halt | Refuse | End | Resign | Failover | Resync | Recovered

#: Slots of the log that are kept for those who read slowly.
KEPT_SLOTS = 64


@dataclass(frozen=True, slots=True)
class Proposal:
    """A decision to write.

    Args:
        slot: The slot to create.
        documents: Key to value: to be written before the slot is created.
        entry: What to create.
    """

    slot: int
    documents: Mapping[str, bytes]
    entry: bytes


@dataclass(frozen=True, slots=True)
class Cleanup:
    """What follows a slot that was created; none of it is needed for the job to go on at once.

    Args:
        documents: Key to value: to be written.
        log_start: Where the log begins from now on, or None for where it does already: to be raised before `deleted`.
        deleted: Keys that nobody needs any more.
        expected: Key to value: where a key has another value the store was restored from a backup, and `deleted` stays.
            So it does where the log does not begin where it did after `log_start` was raised.
        trimmed: Facts up to this position of the stream are no longer needed, or None.
    """

    documents: Mapping[str, bytes]
    deleted: tuple[str, ...]
    expected: Mapping[str, bytes]
    trimmed: int | None
    log_start: LogStart | None = None


@dataclass(frozen=True, slots=True)
class Coordinator:
    """What the coordinator knows.

    Attributes:
        node: This node.
        term: Its term.
        slot: The next free slot, as far as it knows.
        job: The state as of the facts that were read and the decision that is pending.
        leases: When it last heard of each node.
        kept_slots: Slots of the log that it keeps.
        began: Monotonic seconds from which on it waits for nodes that know of a round: its beginning, or its `Resync`.
        wait_limit: Leases for which nodes that know of a round may come before a job is founded.
        first: Position in the stream of facts from which a successor reads as long as the log has no round.
        events: The events since that position, and before them `kept`, as long as the log has no round.
        kept: The events before that position that count on, since nobody tells them again.
        former: The state of this log before it asked all nodes anew, or None.
        copies: The copies of the state that were read, None for garbage.
        wants: The copy to read, or None.
        view: The state that it would go on from, while the majority is missing, or None.
        due: Monotonic seconds at which it looks again while the log tells of no round, or None.
        has_halted: Whether those who wait for a majority were told to stop their workers.
        position: Of the stream of facts: all up to here was folded.
        oldest: The oldest slot that may still be there.
        raised: The start of the log, as far as this term has raised it.
        formations: Rounds whose assignments are kept, the latest last.
        state_slot: The slot of the newest state document, -1 for none.
        state_term: Its term.
        garbage_keys: Keys to delete, as far as it knows: nobody needs them any more.
        former_garbage_keys: Keys to delete after the next decision: those that the coordinator before was to delete,
            since a node may know of an older state than this one until then, and copies that came late.
        written: Key to value: its newest entry. Another coordinator may use its keys where that is not there.
        known_restarts: The restarts that its node had heard of when its term began.
        pending: The decision that is being written, or None.
        last: The last decision, to be written after the pending one, or None.
        complaint: The reason why the last unreadable fact was refused, for one line of the log; "" for none.
        is_over: Whether its term is over.
        is_superseded: Whether it is over because another term decides, which this node's member may not know yet.
    """

    node: str
    term: int
    slot: int
    job: Job
    leases: Leases
    kept_slots: int = KEPT_SLOTS
    began: float = 0.0
    wait_limit: int = 0
    first: int = 0
    events: tuple[Event, ...] = ()
    kept: tuple[Event, ...] = ()
    former: Job | None = None
    copies: Mapping[Copy, Job | None] = field(default_factory=lambda: MappingProxyType({}))
    wants: Copy | None = None
    view: Job | None = None
    due: float | None = None
    has_halted: bool = False
    position: int = 0
    oldest: int = 0
    raised: int = 0
    formations: tuple[Formation, ...] = ()
    state_slot: int = -1
    state_term: int = 0
    garbage_keys: tuple[str, ...] = ()
    former_garbage_keys: tuple[str, ...] = ()
    written: Mapping[str, bytes] = field(default_factory=lambda: MappingProxyType({}))
    known_restarts: int = 0
    pending: Pending | None = None
    last: Resign | Failover | None = None
    complaint: str = ""
    is_over: bool = False
    is_superseded: bool = False

    @property
    def watched(self) -> tuple[str, ...]:
        """The nodes whose heartbeats are to be read."""
        return tuple(self.job.nodes)

    @property
    def wait_until(self) -> float | None:
        """Monotonic seconds until which to wait for facts at most, None for any time."""
        return coordination.next_at(self.job) if self.due is None else self.due

    @property
    def settled_position(self) -> int:
        """Of the stream of facts: nobody reads those before it again."""
        return self.position if self.job.round else self.first
