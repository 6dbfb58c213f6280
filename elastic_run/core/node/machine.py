"""One node's view of its job: what its agent says goes out as facts, the log's decisions come in.

Pure (law 3): `decide(member, event, now) -> (member, commands)`. The driver feeds every event of one agent into one
`Member`, in order, under one lock, and performs the commands in order.

Rules
- The driver waits for slot `member.next_slot` of the log as soon as that is not None, and feeds each entry.
- An entry counts if it is a claim with a higher term, or another decision of the present term; all others are void, for
  every reader alike. A node never claims a term twice, in whatever store. After an `End` nothing counts. A slot below
  the start of the log is void (see `log_start`): the node asks where the log stands.
- A node whose `head` is missing or unreadable begins at the start of the log. It never founds a job where one was.
- Facts are appended one at a time in the order of their commands, each again until the store has confirmed it: the
  coordinator ignores a number that is not above the node's last. What was not confirmed is `member.outstanding`.
- Whoever sees no coordinator claims: none has claimed yet, it resigned, or its beats have stopped for a lease.
- A node that may have been dropped says `Join` again: where its last beat was removed, after a gap in its own beats, a
  jump over trimmed slots, and each round that was formed without it. That is harmless where the coordinator counts it
  in.
- A round that was formed without a node that still runs one ends that one: its agent is told to halt.
"""

from __future__ import annotations

from elastic_run.core.node.apply_log import MemberUpdate
from elastic_run.core.node.messages import (
    Append,
    Appended,
    AssignmentRead,
    Command,
    Coordinate,
    CoordinatorHeartbeatRead,
    CreateEntry,
    CutOff,
    Ended,
    EndTerm,
    EntryRead,
    EntryTrimmed,
    Event,
    FetchAssignment,
    Formed,
    Halted,
    HeadRead,
    HeartbeatWritten,
    Interrupted,
    KeepState,
    Leaving,
    PrepareRejoin,
    ReadHead,
    Reconnected,
    Refused,
    RejoinPrepared,
    Settled,
    StateKept,
    StopCoordinating,
    StoreChanged,
    TermEnded,
    Unreadable,
    UseStore,
    Warned,
    WorkersFailing,
    WorkersGone,
)
from elastic_run.core.node.state import BEGINNING, HALTING, LEAVING, OVER, READY, REPLACED, RUNNING, WAITING, Member
from elastic_run.core.protocol.liveness import Leases

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    from elastic_run.core.protocol.messages import (
        JobConfig,
        NodeInfo,
        Offer,
    )

__all__ = [
    "BEGINNING",
    "HALTING",
    "LEAVING",
    "OVER",
    "READY",
    "REPLACED",
    "RUNNING",
    "WAITING",
    "Append",
    "Appended",
    "AssignmentRead",
    "Command",
    "Coordinate",
    "CoordinatorHeartbeatRead",
    "CreateEntry",
    "CutOff",
    "Decision",
    "EndTerm",
    "Ended",
    "EntryRead",
    "EntryTrimmed",
    "Event",
    "FetchAssignment",
    "Formed",
    "Halted",
    "HeadRead",
    "HeartbeatWritten",
    "Interrupted",
    "KeepState",
    "Leaving",
    "Member",
    "PrepareRejoin",
    "ReadHead",
    "Reconnected",
    "Refused",
    "RejoinPrepared",
    "Settled",
    "StateKept",
    "StopCoordinating",
    "StoreChanged",
    "TermEnded",
    "Unreadable",
    "UseStore",
    "Warned",
    "WorkersFailing",
    "WorkersGone",
    "begin",
    "decide",
]

Decision: TypeAlias = tuple[Member, tuple[Command, ...]]


def begin(node: str, *, node_info: NodeInfo, config: JobConfig, offer: Offer, now: float) -> Decision:
    """Return the first decision: find out where the log stands.

    Args:
        node: Its id, unique per agent run.
        node_info: Who it is.
        config: The job's configuration as it was told.
        offer: Where its workers' store of the first round listens.
        now: Monotonic seconds.

    Returns:
        The member, and the commands.
    """
    member = Member(node, node_info, config, offer, Leases(config.lease), beaten_at=now)
    return member, (ReadHead(),)


def decide(member: Member, event: Event, now: float) -> Decision:
    """Decide what follows an event.

    Args:
        member: What the node knows.
        event: What has happened.
        now: Monotonic seconds.

    Returns:
        What it knows now, and the commands to perform, in order.
    """
    if member.state == OVER:
        return member, ()
    book = MemberUpdate(member, now)
    book.enter(event)
    book.claim()
    return book.member, tuple(book.commands)
