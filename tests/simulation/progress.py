"""That a job that can form a round forms it, within two leases of the last thing that went wrong.

So long, too, a node may wait for a slot that the log goes on without.

Where the store can move it takes a lease for each endpoint more: nodes that wait in several stores, none of which tells
of a round, look for the others after a lease in which the job there came no further, and may find some at an endpoint
from which those leave.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_run.core.protocol.job_keys import HEAD, LOG_START, decision_key
from elastic_run.core.protocol.log_start import is_trimmed
from elastic_run.core.protocol.messages import read_head
from tests.simulation.agent import Lost
from tests.simulation.properties import PROGRESS, require
from tests.simulation.store import SPOILT

if TYPE_CHECKING:
    from tests.simulation.agent import Agent
    from tests.simulation.rounds import Round
    from tests.simulation.world import World

_LEASES = 2
#: Seconds for workers to stop, for pauses of those who try again, and for clocks that are slow.
_SLACK = 6.0
#: Messages one after another from a join to the start of a round.
_MESSAGES = 40


class Progress:
    """Watches whether a job gets on.

    Args:
        world: The run.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._well_at = 0.0
        self._waits_since: dict[Agent, float] = {}
        self.failed_at = 0.0

    @property
    def _limit(self) -> float:
        """Seconds until a round must be there."""
        config, network = self._world.config, self._world.network
        pauses = config.last_call_timeout + config.scale_up_delay + config.scale_up_grace + config.max_backoff
        leases = _LEASES + (len(self._world.endpoints) if config.has_successors else 0)
        return leases * config.lease + pauses + _SLACK + _MESSAGES * network.delay

    def look(self) -> None:
        """Look whether the job is where it should be."""
        world = self._world
        now = world.clockwork.now
        if self._is_well or not self._can_form:
            self._well_at = now
        since = max(self._well_at, world.faults.ended_at, self.failed_at, world.character.horizon)
        able = ", ".join(agent.node for agent in world.able)
        require(now - since <= self._limit, PROGRESS, f"no round for {now - since:.0f} s though there are {able}")
        self._look_for_gaps(max(world.faults.ended_at, world.character.horizon))

    def _look_for_gaps(self, calm_since: float) -> None:
        """Look whether a node waits for a slot that is missing, though `head` names a later one that is there."""
        now = self._world.clockwork.now
        waiting = [agent for agent in self._world.able if _waits_at_gap(agent)]
        self._waits_since = {agent: self._waits_since.get(agent, now) for agent in waiting}
        for agent, since in self._waits_since.items():
            seconds = now - max(since, calm_since)
            require(seconds <= self._limit, PROGRESS, f"{agent.node} waits at a gap of the log for {seconds:.0f} s")

    @property
    def _is_well(self) -> bool:
        """Whether a round runs on live nodes, or the job has ended."""
        world = self._world
        if any(agent.end is not None and not isinstance(agent.end, Lost) for agent in world.agents):
            return True
        return any(round_.is_alive and self._is_newest(round_) for round_ in world.oracle.rounds.newest.values())

    @staticmethod
    def _is_newest(round_: Round) -> bool:
        """Whether no member waits for another round."""
        return all(
            agent.formed[-1] is place and agent.stopping != place.round for agent, place in round_.places.items()
        )

    @property
    def _can_form(self) -> bool:
        """Whether enough nodes are there to form a round, as everybody must see it."""
        world, config = self._world, self._world.config
        if world.faults.has_strangers or world.faults.is_spoilt or config.membership_window is not None:
            return False
        if world.network.loss or world.network.late or len(world.able) < config.min_nodes:
            return False
        return not config.has_successors or (self._has_store and all(map(self._has_majority, self._last_members)))

    @property
    def _has_store(self) -> bool:
        """Whether somebody serves a store."""
        stores = [endpoint.open_store for endpoint in self._world.endpoints]
        return any(store.server in self._world.able for store in stores if store is not None)

    @property
    def _last_members(self) -> list[set[str]]:
        """The members of the last round of each incarnation, as a log has it and as all of them were told."""
        rounds = self._world.oracle.rounds
        told = [{agent.node for agent in round_.places} for round_ in rounds.newest.values()]
        return [*told, *(members for _, members in rounds.last_formed.values())]

    def _has_majority(self, members: set[str]) -> bool:
        """Whether more than half of the members of a round could be in another."""
        there = {agent.node for agent in self._world.able} & members
        return 2 * len(there) > len(members)


def _waits_at_gap(agent: Agent) -> bool:
    store, slot = agent.store, agent.member.log.next_slot
    raw = None if store is None else store.values.get(HEAD)
    if store is None or slot is None or raw in (None, SPOILT) or decision_key(slot) in store.values:
        return False
    head = read_head(raw)
    return (
        head.slot > slot
        and decision_key(head.slot) in store.values
        and not is_trimmed(slot, store.values.get(LOG_START))
    )
