"""One node's view of its job: its agent's events go out as facts, the log's decisions come in.

Pure (law 3): `decide(member, event, now) -> (member, commands)`. The driver feeds every event of one agent into one
`Member`, in order, under one lock, and performs the commands in order.

Rules
- The driver waits for slot `member.log.next_slot` of the log as soon as that is not None, and feeds each entry.
- An entry counts if it is a claim with a higher term, or another decision of the present term; all others are void, for
  every reader alike. A node never claims a term twice, not even in two stores. After an `End` nothing counts. A slot
  below the start of the log is void (see `log_start`): the node asks where the log stands.
- A node whose `head` is missing or unreadable begins at the start of the log. It never founds a job if there was one.
- Facts are appended one at a time in the order of their commands, each again until the store has confirmed it: the
  coordinator ignores a number that is not above the node's last. What was not confirmed is `member.facts.outstanding`.
- A node that finds no log says `Join` after it has read the first claim. So a backup of the store that has the `Join`
  has the claim, too, and a node that comes after the restore waits a lease before it claims: until then the other node
  has said whether a round uses its workers' store.
- A node that sees no coordinator claims: none has claimed yet, the last one resigned, or its heartbeats have stopped
  for a lease.
- A node that may have been dropped says `Join` again: after its last heartbeat was removed, after a gap in its own
  heartbeats, after a jump over trimmed slots, and after each round that was formed without it. A second `Join` changes
  nothing if the coordinator still counts the node in.
- If a round was formed without a node that still runs an older round, the older round ends: its agent is told to halt.
- `TRANSITIONS` is the machine: for each state and event the function that answers, and the states that may follow. An
  event that isn't in it for a state comes too late to matter; a step to a state that isn't in it raises.
  docs/architecture.md draws it from here.
"""

from __future__ import annotations

from elastic_run.core.node.apply_log import MemberUpdate
from elastic_run.core.node.messages import (
    Appended,
    AssignmentRead,
    Command,
    CoordinatorHeartbeatRead,
    CutOff,
    EntryRead,
    EntryTrimmed,
    Event,
    HeadRead,
    HeartbeatWritten,
    Interrupted,
    Leaving,
    ReadHead,
    Reconnected,
    RejoinPrepared,
    StateKept,
    StoreChanged,
    StoreRestored,
    TermEnded,
    WorkersFailing,
    WorkersGone,
)
from elastic_run.core.node.state import (
    BEGINNING,
    HALTING,
    LEAVING,
    OVER,
    READY,
    RUNNING,
    STATES,
    WAITING,
    Coordination,
    Member,
)
from elastic_run.core.protocol.liveness import Leases
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeAlias

    from elastic_run.core.job.config import JobConfig
    from elastic_run.core.protocol.messages import NodeInfo, StoreAddress

Decision: TypeAlias = tuple[Member, tuple[Command, ...]]


class IllegalTransitionError(Exception):
    """An event led to a state that `TRANSITIONS` doesn't name: a defect."""


@dataclass(frozen=True, slots=True)
class Transition:
    """What follows an event in a state.

    Args:
        react: Takes the event in.
        after: The states that may follow.
    """

    react: Callable[[MemberUpdate, Any], None]
    after: tuple[str, ...]


#: Events that change the state in no case, and the functions that answer.
_NEUTRAL: dict[type[Event], Callable[[MemberUpdate, Any], None]] = {
    Appended: MemberUpdate.enter_appended,
    Reconnected: MemberUpdate.enter_reconnected,
    Interrupted: MemberUpdate.enter_interrupted,
    HeartbeatWritten: MemberUpdate.enter_heartbeat_written,
    CoordinatorHeartbeatRead: MemberUpdate.enter_coordinator_heartbeat,
    TermEnded: MemberUpdate.enter_term_ended,
    StoreChanged: MemberUpdate.enter_store_changed,
    StoreRestored: MemberUpdate.enter_store_restored,
    RejoinPrepared: MemberUpdate.enter_rejoin_prepared,
    StateKept: MemberUpdate.enter_state_kept,
    EntryTrimmed: MemberUpdate.enter_trimmed,
}

#: The machine: (state, event) -> the function that answers, and the states that may follow.
TRANSITIONS: dict[tuple[str, type[Event]], Transition] = {
    (BEGINNING, HeadRead): Transition(MemberUpdate.enter_head, (BEGINNING, WAITING)),
    (BEGINNING, Leaving): Transition(MemberUpdate.enter_leaving, (LEAVING,)),
    (WAITING, HeadRead): Transition(MemberUpdate.enter_head, (WAITING,)),
    (WAITING, EntryRead): Transition(MemberUpdate.enter_entry, (WAITING, LEAVING, OVER)),
    (WAITING, AssignmentRead): Transition(MemberUpdate.enter_assignment, (WAITING, RUNNING, HALTING)),
    (WAITING, Leaving): Transition(MemberUpdate.enter_leaving, (LEAVING,)),
    (RUNNING, HeadRead): Transition(MemberUpdate.enter_head, (RUNNING, HALTING)),
    (RUNNING, EntryRead): Transition(MemberUpdate.enter_entry, (RUNNING, HALTING, LEAVING, OVER)),
    (RUNNING, WorkersFailing): Transition(MemberUpdate.enter_failing, (RUNNING,)),
    (RUNNING, WorkersGone): Transition(MemberUpdate.enter_gone, (RUNNING, READY, WAITING)),
    (RUNNING, CutOff): Transition(MemberUpdate.enter_cut_off, (HALTING,)),
    (RUNNING, Leaving): Transition(MemberUpdate.enter_leaving, (LEAVING,)),
    (HALTING, HeadRead): Transition(MemberUpdate.enter_head, (HALTING,)),
    (HALTING, EntryRead): Transition(MemberUpdate.enter_entry, (HALTING, LEAVING, OVER)),
    (HALTING, WorkersFailing): Transition(MemberUpdate.enter_failing, (HALTING,)),
    (HALTING, WorkersGone): Transition(MemberUpdate.enter_gone, (HALTING, READY, WAITING)),
    (HALTING, Leaving): Transition(MemberUpdate.enter_leaving, (LEAVING,)),
    (READY, HeadRead): Transition(MemberUpdate.enter_head, (READY, WAITING)),
    (READY, EntryRead): Transition(MemberUpdate.enter_entry, (READY, WAITING, LEAVING, OVER)),
    (READY, AssignmentRead): Transition(MemberUpdate.enter_assignment, (READY, WAITING, RUNNING, HALTING)),
    (READY, Leaving): Transition(MemberUpdate.enter_leaving, (LEAVING,)),
    (LEAVING, HeadRead): Transition(MemberUpdate.enter_head, (LEAVING,)),
    (LEAVING, EntryRead): Transition(MemberUpdate.enter_entry, (LEAVING, OVER)),
    **{(state, event): Transition(react, (state,)) for event, react in _NEUTRAL.items() for state in STATES[:-1]},
}


def begin(node: str, *, node_info: NodeInfo, config: JobConfig, store_address: StoreAddress, now: float) -> Decision:
    """Return the first decision: find out where the log stands.

    Args:
        node: Its id, unique per agent run.
        node_info: Its description for the other nodes.
        config: The job's configuration as its user gave it.
        store_address: Where its workers' store of the first round listens.
        now: Monotonic seconds.

    Returns:
        The member, and the commands.
    """
    member = Member(node, node_info, config, store_address, now, Coordination(Leases(config.lease)))
    return member, (ReadHead(),)


def decide(member: Member, event: Event, now: float) -> Decision:
    """Decide what follows an event.

    Args:
        member: The member.
        event: The event.
        now: Monotonic seconds.

    Returns:
        The member after the event, and the commands to perform, in order.

    Raises:
        IllegalTransitionError: A defect.
    """
    if member.state == OVER:
        return member, ()
    update = MemberUpdate(member, now)
    transition = TRANSITIONS.get((member.state, type(event)))
    if transition is not None:
        transition.react(update, event)
        if update.member.state not in transition.after:
            message = f"{type(event).__name__} led from {member.state} to {update.member.state}"
            raise IllegalTransitionError(message)
    update.claim()
    return update.member, tuple(update.commands)
