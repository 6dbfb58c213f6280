"""The events and commands of a member of a job, which its driver brings and performs; see `machine`."""

from __future__ import annotations

from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    from elastic_run.core.protocol.codec import Document
    from elastic_run.core.protocol.liveness import Heartbeat
    from elastic_run.core.protocol.messages import Assignment, Claim, Copy, End, Fact, LogStart, NodeEnds, StoreAddress


# --- events ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class HeadRead:
    """The answer to `ReadHead`.

    Args:
        head: The raw value, or None.
        log_start: The raw value at `job_keys.LOG_START`, or None; read with it.
    """

    head: bytes | None
    log_start: bytes | None = None


@dataclass(frozen=True, slots=True)
class EntryRead:
    """A slot of the log holds this; also the answer to `CreateEntry`. Slots behind `next_slot` are ignored.

    Args:
        slot: Its number.
        value: The raw entry.
        log_start: What lay at `job_keys.LOG_START` then, or None.
    """

    slot: int
    value: bytes
    log_start: bytes | None = None


@dataclass(frozen=True, slots=True)
class EntryTrimmed:
    """A slot that was read or created is below the start of the log, so its entry is void (see `log_start`)."""

    slot: int


@dataclass(frozen=True, slots=True)
class AssignmentRead:
    """The answer to `FetchAssignment`: the raw value, or None."""

    slot: int
    term: int
    value: bytes | None


@dataclass(frozen=True, slots=True)
class WorkersFailing:
    """A worker of the round has failed; the fields are `messages.Failing`'s."""

    round: int
    is_secondary: bool = False


@dataclass(frozen=True, slots=True)
class WorkersGone:
    """No process of the round lives any more; the fields are `messages.Ready`'s."""

    round: int
    outcome: str
    store_address: StoreAddress
    report: Document | None = None
    verdict: str = ""
    detail: str = ""
    ends: NodeEnds | None = None


@dataclass(frozen=True, slots=True)
class Leaving:
    """The agent goes: `signal` or `unkillable`."""

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class StateKept:
    """The answer to `KeepState`: there is a copy, where this node keeps copies.

    Args:
        prepared: The state that was asked for.
    """

    prepared: Copy


@dataclass(frozen=True, slots=True)
class Appended:
    """The store has confirmed the fact with this number."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Reconnected:
    """A connection to the same store was opened again: outstanding facts are appended again."""


@dataclass(frozen=True, slots=True)
class HeartbeatWritten:
    """The store has taken a heartbeat of this node.

    Args:
        was_dropped: Whether the heartbeat before it was not there any more: the job may have gone on without this node.
        is_unknown: Whether there was none before it, so that a node which was dropped meanwhile can't know that.
    """

    was_dropped: bool = False
    is_unknown: bool = False


@dataclass(frozen=True, slots=True)
class CoordinatorHeartbeatRead:
    """The driver read the heartbeat of `member.watched`.

    Args:
        node: Whose heartbeat.
        value: Its counter, or None (see `liveness.observe`).
    """

    node: str
    value: int | None


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The store could not be reached for a while; reads work again from now on."""


@dataclass(frozen=True, slots=True)
class TermEnded:
    """The coordinator of this node has found that a later term decides, or that its next slot was trimmed."""

    term: int


@dataclass(frozen=True, slots=True)
class StoreChanged:
    """The driver speaks to another store from now on (a successor); all that matters is said again.

    Args:
        serves_store: Whether this node serves it.
    """

    serves_store: bool = False


@dataclass(frozen=True, slots=True)
class StoreRestored:
    """The store was restored from a backup.

    Args:
        start: Where the log begins from now on, if entries that this node has followed are lost (see
            `log_start.find_restart`); else None.
    """

    start: LogStart | None = None


@dataclass(frozen=True, slots=True)
class CutOff:
    """The node has not reached its job for this many seconds, and its workers must not run on."""

    seconds: float


@dataclass(frozen=True, slots=True)
class RejoinPrepared:
    """The answer to `PrepareRejoin`.

    Args:
        copy: Which copy of the state this node has put into the store, or None for none.
        store_address: Where a new workers' store of the next round listens; None if the last one may still be used.
    """

    copy: Copy | None = None
    store_address: StoreAddress | None = None


Event: TypeAlias = (
    HeadRead
    | EntryRead
    | EntryTrimmed
    | AssignmentRead
    | WorkersFailing
    | WorkersGone
    | Leaving
    | Appended
    | Reconnected
    | HeartbeatWritten
    | CoordinatorHeartbeatRead
    | Interrupted
    | CutOff
    | TermEnded
    | StoreChanged
    | StoreRestored
    | RejoinPrepared
    | StateKept
)


# --- commands --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Append:
    """Append a fact, after those before it, until it is confirmed by `Appended`."""

    fact: Fact


@dataclass(frozen=True, slots=True)
class ReadHead:
    """Get `head` and where the log begins; they come back as `HeadRead`."""


@dataclass(frozen=True, slots=True)
class CreateEntry:
    """Create a slot of the log (compare-and-set on an empty one).

    The value that is there comes back as `EntryRead`, or the news that the slot was trimmed as `EntryTrimmed`.
    """

    slot: int
    claim: Claim


@dataclass(frozen=True, slots=True)
class FetchAssignment:
    """Get this node's assignment of the round that was formed in a slot; it comes back as `AssignmentRead`."""

    slot: int
    term: int


@dataclass(frozen=True, slots=True)
class PrepareRejoin:
    """The node is about to say where it stands, in a log that may not know it; the answer is `RejoinPrepared`.

    Where no workers run, the driver opens a new workers' store: a round may have been formed with the old one.

    Args:
        needs_copy: Whether the log may tell of no round. Then, where the node keeps a copy of the state and another
            value, or none, lies at that `copy_key`, the driver puts it there.
    """

    needs_copy: bool = True


@dataclass(frozen=True, slots=True)
class KeepState:
    """Keep a copy of the newest state before this node says that it has read a `Prepare`; the answer is `StateKept`.

    Args:
        prepared: The state beside the `Prepare`.
    """

    prepared: Copy


@dataclass(frozen=True, slots=True)
class Coordinate:
    """This node is the coordinator: begin `coordinator.start_term` with these, on its own thread.

    Args:
        term: The term.
        slot: The slot of the claim; the coordinator's first decision goes into the next.
        state_slot: Whose state document it goes on from, -1 for none.
        state_term: Its term.
        known_round: The newest round that this node has heard of.
        newest_round: The newest of this log's job that it runs, has run last, or keeps a copy of.
        known_restarts: The restarts of the whole job that it has heard of.
        silent: The coordinator before, where its lease has run out on this node, else "".
        last_heartbeat: The last heartbeat of that one: it was missed for a lease already, and gets no other.
    """

    term: int
    slot: int
    state_slot: int
    state_term: int
    known_round: int = 0
    newest_round: int = 0
    known_restarts: int = 0
    silent: str = ""
    last_heartbeat: Heartbeat | None = None


@dataclass(frozen=True, slots=True)
class EndTerm:
    """This node goes: let its coordinator `resign`, after the facts before this command."""


@dataclass(frozen=True, slots=True)
class StopCoordinating:
    """Another node is the coordinator now, or the job is over."""


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
    """Tell the agent: stop the workers of the round. `reason` is a `Halt`'s, or `replaced`."""

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
class Unreadable:
    """Tell the user: the document at a key is garbage, so this node does not know where the log stands.

    Args:
        key: The key in the job's store.
        detail: What is wrong with it.
    """

    key: str
    detail: str


@dataclass(frozen=True, slots=True)
class UseStore:
    """The driver opens the store at this endpoint, and feeds `StoreChanged`."""

    endpoint: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """Tell the agent: the job is over. Nothing follows."""

    end: End


Command: TypeAlias = (
    Append
    | ReadHead
    | CreateEntry
    | FetchAssignment
    | PrepareRejoin
    | KeepState
    | Coordinate
    | EndTerm
    | StopCoordinating
    | Formed
    | Settled
    | Warned
    | Halted
    | Refused
    | Unreadable
    | UseStore
    | Ended
)
