"""Which agent coordinates: what an agent asks, which coordinator it follows, and when it coordinates itself. Pure.

The driver gives each fact to `decide(discovery, fact, now, standing=)`, performs the actions that come back, in order,
and gives what came of them as the next fact. The first fact is None, as at the time of `WaitUntil` and whenever the
standing of its coordinator changes. `MayFound` and `StepDown` are given to this agent's own job as they are.

- One endpoint (static too): the agent that serves it coordinates, and the others ask it until it does.
- Several endpoints: an agent asks one after another, and follows the first that coordinates or that it is redirected
  to. A host coordinates itself where no endpoint before its own does. Until its coordinator runs a round, it goes on
  asking the others, and leaves for a coordinator of higher standing, or of the same at an endpoint before its own.
- Lease: its store redirects to its holder. Nobody holds it: acquire it. Its holder is dead: acquire it instead.
- Founding: at the first endpoint when each other one refuses or knows of no round; with one out of reach, or at another
  endpoint, after two leases. As long as an agent that answers knows of a round, never: that job is to be joined. With a
  lease at once, if nobody has held it before; else after two leases, in which the nodes of that coordinator may come.
- A coordinator knows what its own node knows before it answers others: else the first of two candidates that search at
  once would found beside the job that the node of the other one knows.
- A coordinator is surely dead if its connection ended, and its port then refuses or another node answers there. The end
  alone proves nothing: a living agent may have closed the connection.
"""

from __future__ import annotations

from types import MappingProxyType

from elastic_run.core.job.round_forming import PATIENCE
from elastic_run.core.job.state import BROKEN, ENDED, SILENT, MayFound, StepDown
from elastic_run.records import dataclass, field, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeAlias

    from elastic_run.core.job.membership import Member
    from elastic_run.core.job.state import Job

# What an agent is to others that ask it; the store of the lease answers as its holder would be found.
COORDINATES = "coordinates"
FOLLOWS = "follows"
SEARCHES = "searches"
# Without an answer: nobody listens there; or nothing came in time, or nothing that an agent says. Beside `SILENT`.
REFUSES = "refuses"

# How much a coordinator has: the one with less leaves for the one with more.
KNOWS_NOTHING = 0
KNOWS_ROUND = 1
RUNS_ROUND = 2

#: The store of the lease, where an endpoint may stand.
LEASE_STORE = "lease"
#: Ends of a connection after which a refused port proves that the coordinator is dead. A kill may reset the connection,
#: where something was unread; so may a proxy that dies beside a living agent. Where seats decide, that agent has no
#: majority then; a lease would be taken from it.
_ENDS = {False: (ENDED, BROKEN), True: (ENDED,)}
#: Seconds from the last answer to the next question when all have been asked: the first time, as the agents of a job
#: start together; each time twice as long, and at most.
FIRST_RETRY = 0.02
RETRY = 0.5


@dataclass(frozen=True, slots=True)
class Answer:
    """What a question came to."""

    endpoint: str  # What was asked
    #: `coordinates`, `follows`, `searches`, `refuses` or `silent`. If the lease store was asked, `follows` means that
    #: another node holds the lease, `searches` that no node holds it, and `coordinates` that this agent has just
    #: acquired it.
    role: str
    node: str = ""  # The node that answers, or the node that holds the lease
    to: str = ""  # With `follows`: the endpoint at which the coordinator listens
    #: How much the agent knows of the job, a number above. With an acquired lease: `KNOWS_ROUND` if another agent held
    #: it before.
    standing: int = KNOWS_NOTHING


@dataclass(frozen=True, slots=True)
class CoordinatorLost:
    """The connection to the coordinator, or this agent's own coordination, is over."""

    how: str  # `ended`, `silent` or `broken`, as in `state`; after an order to search, `broken`
    to: str = ""  # Where a higher coordinator listens, if the order to search says so


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the agent at an endpoint for its role, or the lease store for the holder; an `Answer` follows."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class Follow:
    """Follow the agent that has answered at this endpoint, until `CoordinatorLost`: it coordinates."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class AcquireLease:
    """Acquire the lease if nobody holds it, or `instead_of`, a dead node or this one; an `Answer` follows."""

    instead_of: str


@dataclass(frozen=True, slots=True)
class BecomeCoordinator:
    """Begin a `Job`, until `CoordinatorLost`; told if the coordinator before is `dead` or `silent`."""

    dead: str
    silent: str = ""


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Wait for the time, or for the next fact."""

    at: float


if TYPE_CHECKING:
    Fact: TypeAlias = Answer | CoordinatorLost | None
    Action: TypeAlias = Ask | Follow | AcquireLease | BecomeCoordinator | MayFound | StepDown | WaitUntil
    Decision: TypeAlias = tuple["Discovery", tuple[Action, ...]]


@dataclass(frozen=True, slots=True)
class Discovery:
    """What an agent knows of the coordinators of its job."""

    node: str  # The agent's node
    endpoints: tuple[str, ...]  # Where a coordinator may be, in order; `(LEASE_STORE,)` where a lease says it
    own: str  # Its own endpoint, or "" if it serves none; always "" with a lease
    lease: float  # Seconds of a lease
    to_ask: tuple[str, ...]  # The endpoints that are to be asked before the next pause, in order
    role: str = SEARCHES  # `coordinates`, `follows` or `searches`
    #: The endpoint and the node of the coordinator that it follows, or has followed last
    coordinator: tuple[str, str] = ("", "")
    has_ended: bool = False  # Whether its connection to that one has ended by itself, and not in silence
    dead: str = ""  # The last coordinator that is surely dead, or ""
    silent: str = ""  # The last coordinator, if it was silent for a lease, or ""
    asking: str = ""  # The endpoint whose answer is awaited, or ""
    #: The newest answers since it began to coordinate
    heard: Mapping[str, Answer] = field(default_factory=lambda: MappingProxyType({}))
    since: float = 0.0  # When it began to coordinate
    pauses_until: float = 0.0  # When it asks again
    pause: float = FIRST_RETRY  # How long it pauses the next time


def begin(node: str, endpoints: tuple[str, ...], own: str, lease: float) -> Discovery:
    """Return what an agent knows at its start; see `Discovery`."""
    return Discovery(node, endpoints, own, lease, _list_before(endpoints, own))


def compute_node_standing(member: Member) -> int:
    """Return how much an agent knows that does not coordinate."""
    # A proposal that the node has accepted forbids nothing: its coordinator may have abandoned it.
    knows = member.started is not None or any(one.parent is not None for one in member.accepted)
    return KNOWS_ROUND if knows else KNOWS_NOTHING


def compute_standing(job: Job) -> int:
    """Return how much a coordinator has."""
    if job.round is None:
        return KNOWS_NOTHING
    return KNOWS_ROUND if job.is_awaiting or job.short_since is not None else RUNS_ROUND


def make_answer(discovery: Discovery, standing: int) -> Answer:
    """Return what an agent answers others, with the standing of its own coordinator, or else of its node."""
    to = discovery.coordinator[0] if discovery.role == FOLLOWS else ""
    return Answer(discovery.own, discovery.role, discovery.node, to, standing)


def decide(discovery: Discovery, fact: Fact, now: float, *, standing: int = KNOWS_NOTHING) -> Decision:
    """Decide what follows a fact, or the time alone; `standing` is that of this agent's own coordinator."""
    if isinstance(fact, CoordinatorLost):
        discovery = _search_again(discovery, fact)
    elif fact is not None and fact.endpoint == discovery.asking:  # an answer to an earlier question has no effect
        return _read(replace(discovery, asking=""), fact, now, standing)
    return _go_on(discovery, now, standing)


def _go_on(discovery: Discovery, now: float, standing: int) -> Decision:
    """Ask the next endpoint, or pause after the last one."""
    is_coordinator, others = discovery.role == COORDINATES, _list_others(discovery)
    is_settled = standing == RUNS_ROUND if is_coordinator else discovery.role == FOLLOWS
    if is_settled or discovery.asking:
        return discovery, ()
    if now < discovery.pauses_until:
        return discovery, (WaitUntil(discovery.pauses_until),)
    if discovery.to_ask:
        endpoint = discovery.to_ask[0]
        discovery = replace(discovery, to_ask=discovery.to_ask[1:])
        if endpoint == discovery.own:
            return _coordinate(discovery, now)
        return replace(discovery, asking=endpoint), (Ask(endpoint),)
    is_new = is_coordinator and standing == KNOWS_NOTHING
    found = (MayFound(),) if is_new and _may_found(discovery, now) else ()
    if is_coordinator and not others:
        is_waiting = is_new and not found
        return discovery, (WaitUntil(discovery.since + PATIENCE * discovery.lease),) if is_waiting else found
    to_ask = others if is_coordinator else _list_before(discovery.endpoints, discovery.own)
    until, pause = now + discovery.pause, min(2 * discovery.pause, RETRY)
    discovery = replace(discovery, to_ask=to_ask, pauses_until=until, pause=pause)
    return discovery, (*found, WaitUntil(discovery.pauses_until))


def _may_found(discovery: Discovery, now: float) -> bool:
    """Whether no other agent can have the job, after all other endpoints have been asked."""
    answers = discovery.heard.values()
    knows = [one.endpoint for one in answers if one.standing != KNOWS_NOTHING]
    if knows not in ([], [LEASE_STORE]):
        return False
    is_first = discovery.endpoints[0] in (discovery.own, LEASE_STORE)
    is_sure = is_first and not knows and all(answer.role != SILENT for answer in answers)
    return is_sure or now >= discovery.since + PATIENCE * discovery.lease


def _list_others(discovery: Discovery) -> tuple[str, ...]:
    """Return the endpoints of other agents; the coordinator that was silent is the last: its answer takes its time."""
    slow = discovery.coordinator[0] if discovery.silent else ""
    others = (one for one in discovery.endpoints if one not in (discovery.own, LEASE_STORE))
    return tuple(sorted(others, key=lambda one: one == slow))


def _list_before(endpoints: tuple[str, ...], own: str) -> tuple[str, ...]:
    """Return the endpoints that an agent asks, its own the last: there it coordinates itself."""
    return endpoints[: endpoints.index(own) + 1] if own else endpoints


def _search_again(discovery: Discovery, lost: CoordinatorLost) -> Discovery:
    endpoints, own, before = discovery.endpoints, discovery.own, discovery.coordinator[0]
    if discovery.role == COORDINATES:
        # It has had its turn: it asks all others before it coordinates again.
        slow = before if discovery.silent else ""
        to_ask = [one for one in endpoints if one not in (own, slow)] + ([own] if own else [])
    else:
        to_ask = [one for one in _list_before(endpoints, own) if one != before]
        # It may be back, or its port may say that it is dead. A silent one would only cost time.
        to_ask = to_ask if lost.how == SILENT else [before, *to_ask]
    to_ask = [lost.to, *to_ask] if lost.to else to_ask
    silent = discovery.silent  # a coordinator has not heard of it since
    if discovery.role != COORDINATES:
        silent = discovery.coordinator[1] if lost.how == SILENT and discovery.role == FOLLOWS else ""
    return replace(
        discovery,
        role=SEARCHES,
        has_ended=lost.how in _ENDS[LEASE_STORE in endpoints] and discovery.role == FOLLOWS,
        silent=silent,
        to_ask=tuple(to_ask),
        asking="",
        pauses_until=0.0,
        pause=FIRST_RETRY,
    )


def _read(discovery: Discovery, answer: Answer, now: float, standing: int) -> Decision:
    """Take in an answer, and return what follows at once, if anything does."""
    endpoint, node = discovery.coordinator
    is_gone = answer.role == REFUSES or answer.node not in ("", node)
    if discovery.has_ended and answer.endpoint == endpoint and is_gone:
        discovery = replace(discovery, dead=node)
    if discovery.role == COORDINATES:
        discovery = replace(discovery, heard=MappingProxyType({**discovery.heard, answer.endpoint: answer}))
        rank, own = discovery.endpoints.index, discovery.own
        is_higher = (answer.standing, rank(own)) > (standing, rank(answer.endpoint))
        if answer.role == COORDINATES and is_higher and standing != RUNS_ROUND:
            return _follow(discovery, answer, StepDown(answer.endpoint))
        return _go_on(discovery, now, standing)
    if answer.endpoint == LEASE_STORE and answer.role == COORDINATES:
        return _coordinate(discovery, now, answer)
    if answer.role == COORDINATES:
        return _follow(discovery, answer)
    is_free = answer.role == SEARCHES or (answer.role == FOLLOWS and answer.node in (discovery.dead, discovery.node))
    if answer.endpoint == LEASE_STORE and is_free:
        # An agent that holds the lease without knowing has never read the answer when it acquired it.
        return replace(discovery, asking=LEASE_STORE), (AcquireLease(answer.node),)
    # Only an endpoint redirects: an agent to which it has redirected either coordinates, or the news is old.
    is_redirect = answer.role == FOLLOWS and answer.endpoint in discovery.endpoints and answer.to != discovery.own
    # One that still follows the coordinator which says nothing would only cost time; this agent asks it again later.
    is_silent = answer.endpoint != LEASE_STORE and bool(discovery.silent) and answer.to == endpoint
    if is_redirect and not is_silent:
        discovery = replace(discovery, to_ask=(answer.to, *(one for one in discovery.to_ask if one != answer.to)))
    return _go_on(discovery, now, standing)


def _follow(discovery: Discovery, answer: Answer, *actions: Action) -> Decision:
    coordinator = (answer.endpoint, answer.node)
    discovery = replace(discovery, role=FOLLOWS, coordinator=coordinator, has_ended=False, silent="", to_ask=())
    return discovery, (*actions, Follow(answer.endpoint))


def _coordinate(discovery: Discovery, now: float, *lease: Answer) -> Decision:
    heard = MappingProxyType({answer.endpoint: answer for answer in lease})
    if discovery.has_ended and discovery.own and discovery.coordinator[0] == discovery.own:
        # This agent could listen at the port of the one before, so nobody else does.
        discovery = replace(discovery, dead=discovery.coordinator[1])
    discovery = replace(discovery, role=COORDINATES, heard=heard, since=now, to_ask=_list_others(discovery))
    after, actions = _go_on(discovery, now, KNOWS_NOTHING)
    return after, (BecomeCoordinator(discovery.dead, discovery.silent), *actions)
