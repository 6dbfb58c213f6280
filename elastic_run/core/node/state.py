"""The state of a member of a job: one frozen record of five groups; see `machine`."""

from __future__ import annotations

from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.job.config import JobConfig
    from elastic_run.core.node.messages import (
        WorkersGone,
    )
    from elastic_run.core.protocol.liveness import Leases
    from elastic_run.core.protocol.messages import Assignment, Copy, Fact, Halt, NodeInfo, StoreAddress

BEGINNING = "beginning"
WAITING = "waiting"
RUNNING = "running"
HALTING = "halting"
READY = "ready"
LEAVING = "leaving"
OVER = "over"
STATES = (BEGINNING, WAITING, RUNNING, HALTING, READY, LEAVING, OVER)

#: Why a round ends on a node that the job went on without.
REPLACED = "replaced"
#: Why a round ends on a node that is cut off from its job.
FENCED = "fenced"
#: A value that no slot has.
LOST = b"lost"
#: Slots that a reader may be behind before it jumps to the newest; fewer than the coordinator keeps.
JUMP = 32


@dataclass(frozen=True, slots=True)
class LogPosition:
    """How far the node has followed the log of the store.

    Attributes:
        next_slot: The slot to wait for, or None while it isn't known.
        last_entry: The entry in the slot before, b"" if the node has read none; `LOST` if the log was begun again.
        former_entry: The entry in the slot before that one, in the same way.
        needs_head: Whether it follows the log without having read a fitting `head`: it asks again at every heartbeat.
        trusted_slot: The slot that counts whatever its term: the one that `head` named; -1 for none.
        term: The present term, 0 for none.
        min_term: The highest term of a log that the node left, or that was begun again; the next claim is above it.
        restart: The slot at which the log was last begun again, 0 for none.
        state_slot: The slot of the newest state document, -1 for none.
        state_term: Its term; 0 if it is lost: then the next coordinator asks all nodes where they stand.
    """

    next_slot: int | None = None
    last_entry: bytes = b""
    former_entry: bytes = b""
    needs_head: bool = False
    trusted_slot: int = -1
    term: int = 0
    min_term: int = 0
    restart: int = 0
    state_slot: int = -1
    state_term: int = 0


@dataclass(frozen=True, slots=True)
class Coordination:
    """Which node coordinates, as this node sees it.

    Attributes:
        leases: When it last heard of the coordinator.
        coordinator: The present coordinator, "" for none.
        is_vacant: Whether there is none, or it seems to be gone.
        is_coordinator: Whether this node is the coordinator.
        claimed: The slot in which it last tried to claim, -1 for none.
        claims_from: Monotonic seconds from which on it may claim.
    """

    leases: Leases
    coordinator: str = ""
    is_vacant: bool = True
    is_coordinator: bool = False
    claimed: int = -1
    claims_from: float = 0.0


@dataclass(frozen=True, slots=True)
class KnownJob:
    """The job whose log the node follows, and its stores, as the node knows them.

    Attributes:
        incarnation: The job's incarnation, "" before its first round; see `facts.is_related`.
        known_round: The newest round that it has heard of.
        highest_round: The newest round that it had heard of in a store that it left.
        known_restarts: The restarts of the whole job that it has heard of; should the state be lost, they still count.
        has_view: Whether the log tells of a round, so that its state documents are worth a copy.
        copy: Which copy of the state it has put into this store, or None.
        prepared: The state beside the newest `Prepare` that it has read, or None where a round was formed since then.
        has_confirmed_elsewhere: Whether it has read that one in a store that it left. Until the log of this store knows
            of that, its state documents are worth no copy.
    """

    incarnation: str = ""
    known_round: int = 0
    highest_round: int = 0
    known_restarts: int = 0
    has_view: bool = False
    copy: Copy | None = None
    prepared: Copy | None = None
    has_confirmed_elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class OwnRound:
    """The round that the node runs, has just run, or waits for.

    Attributes:
        place: Its assignment in the round that it runs or has just run, or None.
        told: The last assignment that it was told, or None: it runs none of this number or below.
        fetching: Slot and term of the round whose assignment it waits for, or None.
        warned: The newest round that was warned.
        halt: The newest halt, or None.
        is_replaced: Whether the log goes on without the round that it runs or has just run.
        is_failing: Whether it has said that its round fails.
        is_suspecting: Whether it has said so only of workers that may have lost a peer.
        gone: Its report of the end of the round that it has run last, None where it tells the job of no such round.
    """

    place: Assignment | None = None
    told: Assignment | None = None
    fetching: tuple[int, int] | None = None
    warned: int = 0
    halt: Halt | None = None
    is_replaced: bool = False
    is_failing: bool = False
    is_suspecting: bool = False
    gone: WorkersGone | None = None


@dataclass(frozen=True, slots=True)
class OwnFacts:
    """The facts that the node has sent, or has to send.

    Attributes:
        sequence: Number of its last fact.
        outstanding: Facts that the store has not confirmed, in order.
        is_preparing: Whether it waits for `RejoinPrepared`, and tells no store where it stands until then.
        is_due: Whether it has to say where it stands, as soon as it has the assignment or the claim that it waits for.
    """

    sequence: int = 0
    outstanding: tuple[Fact, ...] = ()
    is_preparing: bool = False
    is_due: bool = False


@dataclass(frozen=True, slots=True)
class Member:
    """The state of one member.

    Attributes:
        node: Its id.
        node_info: Its description for the other nodes.
        config: The job's configuration as its user gave it.
        store_address: Where its workers' store of the next round listens.
        beaten_at: Monotonic seconds at which the store last took a heartbeat of it.
        coordination: Which node coordinates.
        state: One of the states above.
        log: How far it has followed the log.
        job: The job as it knows it.
        round: The round that it runs or waits for.
        facts: The facts that it has sent, or has to send.
    """

    node: str
    node_info: NodeInfo
    config: JobConfig
    store_address: StoreAddress
    beaten_at: float
    coordination: Coordination
    state: str = BEGINNING
    log: LogPosition = LogPosition()
    job: KnownJob = KnownJob()
    round: OwnRound = OwnRound()
    facts: OwnFacts = OwnFacts()

    @property
    def watched(self) -> str:
        """The node whose heartbeat is read at every keep-alive interval, "" for none."""
        return "" if self.coordination.is_coordinator or self.state == OVER else self.coordination.coordinator

    @property
    def has_left(self) -> bool:
        """Whether its last word was heard: nothing keeps the agent any longer."""
        return self.state == OVER or (self.state == LEAVING and not self.facts.outstanding)
