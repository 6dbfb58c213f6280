"""One node's part in its job: its coordinator's orders and its agent's reports in, its state and commands out. Pure.

- `decide(member, event, now) -> (member, commands)`. The driver sends `make_state` to the coordinator when it differs
  from the document that it sent last on this connection, and in each case after a (re)connection.
- A node obeys the highest coordinator that it has promised to follow, and nothing of a lower one.
- It accepts a proposal only while nothing of a round lives on it, and starts a round only on `start`, once.
- A `halt` of a round that it has accepted, but never started, ends that round here: its `start` was sent all the same.
"""

from __future__ import annotations

from elastic_run.core.job import documents
from elastic_run.core.job.documents import NodeState, Promise, RoundEnd
from elastic_run.core.job.restart_policy import STOPPED
from elastic_run.records import dataclass, fields, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from elastic_run.core.job.documents import Assignment, End, Order, Proposal, Round, StoreAddress


# --- events ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Connected:
    """A coordinator takes this node in: the state is to be sent to it, with the promise to follow it."""

    promise: Promise


@dataclass(frozen=True, slots=True)
class OrderRead:
    """The coordinator has sent an order."""

    order: Order


@dataclass(frozen=True, slots=True)
class WorkersFailing:
    """A worker of the round has failed."""

    round: int
    #: Whether all that failed there so far look as if they had lost a peer. Other workers run on then: one of them may
    #: have the cause. Said again without this when a failure of another kind follows.
    is_secondary: bool = False


@dataclass(frozen=True, slots=True)
class WorkersGone:
    """No process of the round lives any more; the workers' store of the next round listens at `store_address`."""

    round: int
    end: RoundEnd
    store_address: StoreAddress


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
class Warned:
    """Tell the agent: the round's workers will be stopped for a change of membership."""

    round: int


@dataclass(frozen=True, slots=True)
class Halted:
    """Tell the agent: stop the workers of the round. `reason` is one of `documents`."""

    round: int
    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """Tell the agent: this node is not taken in, or is excluded (`verdict`). Nothing follows."""

    detail: str  # Why
    verdict: str = "refused"


@dataclass(frozen=True, slots=True)
class Ended:
    """Tell the agent: the job is over. Nothing follows."""

    end: End


@dataclass(frozen=True, slots=True)
class Search:
    """Close the connection, and look for another coordinator; `to` is where it listens, or ""."""

    to: str


if TYPE_CHECKING:
    Event: TypeAlias = Connected | OrderRead | WorkersFailing | WorkersGone | Leaving | CutOff
    Command: TypeAlias = Formed | Warned | Halted | Refused | Ended | Search
    Decision: TypeAlias = tuple["Member", tuple[Command, ...]]


# --- the node --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Member(NodeState):
    """A node as it knows itself: what it tells its coordinator, and what follows from that for its agent."""

    place: Assignment | None = None  # Its assignment in the round that it has started last, or None
    places: tuple[Assignment, ...] = ()  # Its assignments in the rounds of the proposals that it has accepted
    is_warned: bool = False  # Whether its workers were told that the round will be stopped
    memory_at: float = 0.0  # When the memory of the job came
    is_over: bool = False  # Whether nothing follows


def make_state(member: Member, now: float, *, is_first: bool, dead: str = "") -> NodeState:
    """Return what the node tells its coordinator; only the first document on a connection has the memory of the job."""
    memory = member.memory if is_first else None
    memory = None if memory is None else replace(memory, age=memory.age + now - member.memory_at)
    rounds = [proposal.round for proposal in member.accepted] + ([] if member.started is None else [member.started])
    known_round = max((one.number for one in rounds), default=0)
    state = NodeState(**{field.name: getattr(member, field.name) for field in fields(NodeState)})
    return replace(state, memory=memory, known_round=known_round, dead=dead)


def decide(member: Member, event: Event, now: float) -> Decision:  # noqa: PLR0911 - one for each event
    """Return the node after an event, and the commands for its agent and its driver."""
    if member.is_over:
        return member, ()
    if isinstance(event, Connected):
        is_higher = event.promise.rank > member.promise.rank
        return (_promise(member, event.promise) if is_higher else member), ()
    if isinstance(event, OrderRead):
        return _obey(member, event.order, now)
    if isinstance(event, Leaving):
        return replace(member, leaving=event.reason, leaving_detail=event.detail), ()
    if isinstance(event, CutOff):
        return _halt(member, documents.FENCED, f"no answer for {event.seconds:.0f} s")
    if member.started is None or event.round != member.started.number or member.phase == documents.IDLE:
        return member, ()  # of a round that is over
    if isinstance(event, WorkersFailing):
        is_secondary = event.is_secondary and (member.is_secondary or not member.is_failing)
        return replace(member, is_failing=True, is_secondary=is_secondary), ()
    return replace(member, phase=documents.IDLE, ended=event.end, store_address=event.store_address), ()


def _obey(member: Member, order: Order, now: float) -> Decision:  # noqa: PLR0911 - one for each phase of an order
    if order.promise.rank < member.promise.rank:
        return member, ()
    member = _promise(member, order.promise)
    if order.memory is not None:
        member = replace(member, memory=order.memory, memory_at=now)
    if order.phase == documents.REFUSE:
        return replace(member, is_over=True), (Refused(order.detail, order.reason),)
    if order.phase == documents.END and order.end is not None:
        return replace(member, is_over=True), (Ended(order.end),)
    if order.phase == documents.SEARCH and member.leaving:
        return member, (Search(order.to),)  # the next coordinator is to hear of it too
    if member.leaving:
        return member, ()
    if order.phase == documents.SEARCH:
        member, commands = _halt(member, order.reason, order.detail) if order.reason else (member, ())
        return member, (*commands, Search(order.to))
    if order.phase == documents.PROPOSE:
        return _accept(member, order), ()
    if order.phase in (documents.START, documents.WARN, documents.HALT) and order.round is not None:
        return _follow_round(member, order.round, order)
    return _halt(member, order.reason or documents.REPLACED, order.detail)


def _promise(member: Member, promise: Promise) -> Member:
    """Return the node that follows a coordinator; one that leaves goes on to follow the same one only.

    That one may have heard that the node leaves, and count its seat. Two coordinators that both count it would go on
    beside each other.
    """
    last = member.promise.coordinator
    is_kept = bool(member.leaving) and last not in ("", promise.coordinator)
    return member if is_kept else replace(member, promise=promise)


def _accept(member: Member, order: Order) -> Member:
    proposal, place = order.proposal, order.assignment
    if proposal is None or place is None or member.phase != documents.IDLE:
        return member
    if proposal.rank == 0 and place.master != member.store_address:
        return member  # another store listens there by now: the coordinator reads of it in this node's state
    if member.started is not None and proposal.round.order <= member.started.order:
        return member
    if member.has_accepted(proposal.round):
        return member
    # Of one coordinator's older proposals, the parent alone may have started.
    coordinator, parent = proposal.round.coordinator, proposal.parent
    kept = [one for one in member.accepted if one.round.coordinator != coordinator or one.round == parent]
    return _keep(replace(member, places=(*member.places, place)), [*kept, proposal])


def _keep(member: Member, accepted: Sequence[Proposal]) -> Member:
    """Return a node that has accepted these proposals since its last round."""
    rounds = {one.round.round_id for one in accepted}
    places = tuple(place for place in member.places if place.round_id in rounds)
    return replace(member, accepted=tuple(accepted), places=places)


def _follow_round(member: Member, started: Round, order: Order) -> Decision:
    commands: list[Command] = []
    if member.started != started:
        place = next((place for place in member.places if place.round_id == started.round_id), None)
        if place is None or member.phase != documents.IDLE or not member.has_accepted(started):
            return member, ()  # never accepted here: the coordinator has not read this node's state yet
        member = replace(
            _keep(member, [one for one in member.accepted if one.round.order > started.order]),
            started=started,
            rank=place.group_rank,
            place=place,
            is_warned=False,
            is_failing=False,
            is_secondary=False,
        )
        if order.phase == documents.HALT:
            return replace(member, ended=RoundEnd(STOPPED)), ()
        member = replace(member, phase=documents.RUNS, ended=None)
        if place.config is not None:
            member = replace(member, config=place.config)
        commands.append(Formed(place))
    if order.phase == documents.WARN and member.phase == documents.RUNS and not member.is_warned:
        member = replace(member, is_warned=True)
        commands.append(Warned(started.number))
    if order.phase == documents.HALT:
        member, more = _halt(member, order.reason, order.detail)
        commands += more
    return member, tuple(commands)


def _halt(member: Member, reason: str, detail: str) -> Decision:
    if member.phase != documents.RUNS or member.started is None:
        return member, ()
    return replace(member, phase=documents.STOPS), (Halted(member.started.number, reason, detail),)
