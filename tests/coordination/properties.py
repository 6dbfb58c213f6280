"""What must hold in every simulated job."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from elastic_run.core.job import membership
from elastic_run.core.job.documents import IDLE
from elastic_run.core.job.founding import LEASE, MAJORITY, ONLY_ONE
from elastic_run.core.job.state import HALTING, RUNNING, WARNED
from tests.coordination.lease_store import TIME_TO_LIVE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic_run.core.job.documents import NodeState, Round
    from elastic_run.core.job.state import Job, Proposed
    from tests.coordination.agent import Agent
    from tests.coordination.world import World


ACTIVE = frozenset((RUNNING, WARNED, HALTING))


class BrokenPropertyError(AssertionError):
    """Something that must hold in every job does not."""


class Started(NamedTuple):
    """A round that a coordinator has started, and when.

    Args:
        round: The round.
        members: Its members.
        ended: The nodes that had ended in its coordinator's hands.
        dead: All agents that were dead when it started.
        at: When it started.
    """

    round: Round
    members: frozenset[str]
    ended: frozenset[str]
    dead: frozenset[str]
    at: float


# --- a coordinator starts a round ------------------------------------------------------------------------------------
def check_started(world: World, agent: Agent, coordination: Job, proposed: Proposed) -> None:
    """Check what must hold when the first `start` of a round is sent."""
    started = coordination.round
    assert started is not None
    world.say("START", agent.name, started.round_id, sorted(proposed.proposals))
    last = next((one for one in reversed(world.started) if one.round.root == started.root), None)
    parents = {one.parent for one in proposed.proposals.values()}
    if parents == {None} and any(one.round.coordinator == agent.name for one in world.started):
        message = f"fork: {agent.name} founds the job again with {started.round_id}"
        raise BrokenPropertyError(message)
    if parents == {None} and world.choice != ONLY_ONE:
        _check_founding(world, agent, started)
    if last is not None and parents == {last.round} and started.restart_count < last.round.restart_count:
        message = f"budget: {started.round_id} has {started.restart_count} restarts, {last.round} more"
        raise BrokenPropertyError(message)
    if started.restart_count > world.config.max_restarts:
        message = f"budget: {started.restart_count} restarts, {world.config.max_restarts} are allowed"
        raise BrokenPropertyError(message)
    if world.choice == LEASE:
        _check_lease(world, agent, started)
    note_started(world.started, world.agents, coordination, proposed, world.now)


def note_started(
    rounds: list[Started],
    agents: Mapping[str, Agent],
    coordination: Job,
    proposed: Proposed,
    at: float = 0.0,
) -> None:
    """Note a round that has started, and check that no two rounds of a job go on beside each other.

    In the order of rounds, each has more than half of the seats of the one before among its members and the nodes that
    had ended in its coordinator's hands; the seat of a dead coordinator need not be counted. A round may start after a
    newer one: where its coordinator was stopped, or what its members said was late. They don't obey it any more then,
    and the newer one has more than half of them.
    """
    one = proposed.round
    dead = frozenset(name for name, agent in agents.items() if not agent.is_alive)
    new = Started(one, frozenset(proposed.proposals), frozenset(coordination.ended), dead, at)
    others = [other for other in rounds if other.round.root == one.root and coordination.choice == MAJORITY]
    before = max((other for other in others if other.round.order <= one.order), key=_get_order, default=None)
    after = min((other for other in others if other.round.order > one.order), key=_get_order, default=None)
    for older, newer in ((before, new), (new, after)):
        if older is not None and newer is not None and not _follows(older, newer):
            names = [(each.round.round_id, sorted(each.members)) for each in (newer, older)]
            message = f"fork: {names[0]} does not follow {names[1]}"
            raise BrokenPropertyError(message)
    rounds.append(new)


def _follows(older: Started, newer: Started) -> bool:
    counted = newer.members | newer.ended
    without_dead = older.members - (newer.dead & {older.round.coordinator})
    return any(2 * len(seats & counted) > len(seats) for seats in (older.members, without_dead))


def _get_order(one: Started) -> tuple[int, int]:
    return one.round.order


def _check_founding(world: World, agent: Agent, started: Round) -> None:
    """No agent at another endpoint that can be asked knows of a round; with a lease no agent that could have come."""
    old = {one.round for one in world.started if one.at < world.now - 5.0}
    for other in world.living.values():
        ways = [world.way(agent.host, other.host), ("stands", agent.name), ("stands", other.name)]
        is_asked, since = bool(other.discovery.own), world.now - 15.0
        if world.choice == LEASE:
            ways += [("store", agent.host), ("store", other.host)]
            # A coordinator that lives keeps its nodes where it does not hear of the lease's new holder.
            older = [] if other.member.started is None else [other.member.started.coordinator]
            older += [] if other.link is None else [other.link.host.name]
            is_asked = all(not world.agents[name].is_alive or name == agent.name for name in older)
            since = world.now - 2 * TIME_TO_LIVE / 0.9 - 8.0
        is_asked = is_asked and other.verdict is None and all(world.was_well(way, since) for way in ways)
        if is_asked and other.member.started in old:
            message = f"fork: {agent.name} founds {started.round_id}, {other.name} knows {other.member.started}"
            raise BrokenPropertyError(message)


def check_ends(agents: Mapping[str, Agent], before: Job, after: Job) -> None:
    """Check that a round has ended on the members of which its coordinator thinks so, when it halts or settles it."""
    for member in before.members:
        name = member.node
        is_lost = member.rank is not None and after.seats[member.rank].is_lost  # it was silent before it came again
        if name not in after.nodes or name not in after.here or is_lost:
            continue
        node = agents[name]
        is_behind = after.phase not in ACTIVE or after.nodes[name].outcome
        started = node.member.started
        has_ended = started is not None and before.round is not None and started.order >= before.round.order
        is_idle = node.member.phase == IDLE or started != before.round
        if is_behind and node.is_alive and not (has_ended and is_idle) and not node.member.is_over:
            message = f"ends: {before.promise} believes that {name} has ended {before.round}"
            raise BrokenPropertyError(message)


def _check_lease(world: World, agent: Agent, started: Round) -> None:
    """A coordinator starts a round only in its lease, and while the last round of an older coordinator runs nowhere.

    The limit is an older coordinator's node that is cut off from this coordinator. Within the two leases in which such
    nodes are awaited, one of these was the case: the node could not reach this coordinator, or one of the two stood
    still; or the node could not hear of this coordinator: it could not reach the store, or its own coordinator was cut
    off from it or, alive, from this coordinator, or stood still, or went dark with its machine.
    """
    store = world.lease
    if store.holder != agent.name or store.term != started.term:
        message = f"lease: {agent.name} starts {started.round_id}, {store.holder} has term {store.term}"
        raise BrokenPropertyError(message)
    last = world.started[-1].round if world.started else None
    for node in world.living.values():
        runs = node.runs
        if runs is None or runs != last or runs.coordinator == agent.name:
            continue
        ways: list[tuple[object, ...]] = [("stands", node.name), ("stands", agent.name), ("store", node.host)]
        ways.append(world.way(node.host, agent.host))
        # A connection that has just ended has kept the node until now.
        followed = node.discovery.coordinator[1] if node.link is None else node.link.host.name
        coordinators = {runs.coordinator, followed or runs.coordinator}
        for older in [world.agents[name] for name in sorted(coordinators - {agent.name})]:
            ways += [world.way(node.host, older.host), ("stands", older.name)]
            if older.is_alive:
                ways.append(world.way(older.host, agent.host))
        since = world.now - 2 * TIME_TO_LIVE / 0.9 - 8.0
        if all(world.was_well(one, since) for one in ways):
            message = f"lease: {agent.name} starts {started.round_id} while {node.name} runs {runs.round_id}"
            raise BrokenPropertyError(message)


# --- a node starts its workers ---------------------------------------------------------------------------------------
def check_formed(world: World, agent: Agent, started: Round, assignment: object) -> None:
    """Check what must hold when a node starts the workers of a round."""
    if agent.runs is not None:
        message = f"two rounds: {agent.name} starts {started.round_id} beside {agent.runs.round_id}"
        raise BrokenPropertyError(message)
    if started in agent.ran:
        message = f"twice: {agent.name} starts {started.round_id} again"
        raise BrokenPropertyError(message)
    rank = getattr(assignment, "group_rank", -1)
    if world.seats.setdefault((started, rank), agent.name) != agent.name:
        message = f"ranks: {agent.name} and {world.seats[started, rank]} are both {rank} of {started.round_id}"
        raise BrokenPropertyError(message)


# --- the job forms a round again -------------------------------------------------------------------------------------
def is_settled(world: World) -> bool:
    """Whether a round runs on all its members, or the job has ended for all that live."""
    living = [one for one in world.agents.values() if one.is_alive]
    if living and all(one.verdict is not None for one in living):
        return True
    for agent in living:
        coordination = agent.coordination
        if coordination is None or coordination.round is None or coordination.phase != RUNNING:
            continue
        everyone = world.agents.values()
        members = [one for one in everyone if one.runs == coordination.round or one.has_done(coordination.round)]
        if len(members) == coordination.round.size and not coordination.has_lost:
            return True
    return False


def can_form(world: World) -> bool:
    """Whether the nodes that live could form a round by the rules, if all of them met."""
    living = [one for one in world.agents.values() if one.is_alive and one.verdict is None]
    if len(living) < world.config.min_nodes:
        return False
    if any(one.verdict is not None for one in world.agents.values()):
        return False  # the job has ended, for some; nobody can tell the others
    if world.choice != LEASE and not any(one.discovery.own for one in living):
        return False
    if world.choice in (LEASE, ONLY_ONE):
        return True
    states = [membership.make_state(one.member, 0.0, is_first=False, dead=one.discovery.dead) for one in living]
    sure = [one.started for one in states if one.started is not None]
    sure += [proposal.parent for one in states for proposal in one.accepted if proposal.parent is not None]
    sure += [one for agent in living for one in agent.started_by]
    base = max(sure, key=lambda one: (one.order, one.coordinator), default=None)
    needed = [*([] if base is None else [base]), *_list_possible(states, base)]
    dead = {one.dead for one in states}
    return all(
        2 * sum(state.has_seat(one) for state in states)
        > one.size - (one.coordinator in dead and one.coordinator_rank >= 0)
        for one in needed
    )


def _list_possible(states: list[NodeState], base: Round | None) -> list[Round]:
    """Return the proposals that all their members that live have accepted."""
    later = {
        proposal.round: proposal
        for one in states
        for proposal in one.accepted
        if base is None or (proposal.round.order > base.order and proposal.round.root == base.root)
    }
    return [
        one
        for one, proposal in later.items()
        if all(state.has_seat(one) for state in states if state.node[-8:] in proposal.members)
    ]
