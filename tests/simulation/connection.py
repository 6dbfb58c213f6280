"""Where one node finds the job's store: at an endpoint that a node serves, at the next one where that is gone.

As the real backend, sender and partition recovery do it:
- Who starts looks at all endpoints, and goes where the job is; else to the first one, which its own host serves.
- A store that refuses for a second, or is silent for a lease, is left for the next endpoint; after the last the first.
- Another store at the same endpoint is another store: its host has come back without what it knew.
- Who waits at a store of its own looks where the job has come further.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.agent import Agent
    from tests.simulation.store import Store
    from tests.simulation.world import World

#: Seconds of refusals after which an endpoint is left, and seconds beyond a lease for which the next one is tried.
_GONE_AFTER = 1.0
_REFUSED_FOR = 5.0
_DARK_FOR = 60.0


@dataclass(slots=True)
class Endpoint:
    """A place for a store.

    Attributes:
        host: The host that serves it, "" for none of the job's.
        store: What is served there, or None.
    """

    host: str
    store: Store | None = None

    @property
    def open_store(self) -> Store | None:
        """The store that somebody serves there now."""
        return None if self.store is None or self.store.is_closed else self.store


class Connection:
    """What one node knows of the endpoints.

    Args:
        world: With its endpoints.
        agent: The node.

    Attributes:
        bound: The store with which its member lives, None before the first.
        opened: The store to which its speaker has a connection.
    """

    def __init__(self, world: World, agent: Agent) -> None:
        self._world = world
        self._agent = agent
        self._at = 0
        self._passed = 0
        self._since: float | None = None
        self._refused_since: float | None = None
        self._has_moved = False
        self.bound: Store | None = None
        self.opened: Store | None = None
        self._prepare()

    @property
    def current(self) -> Store | None:
        """What is served at the endpoint of the moment."""
        return self.endpoint.open_store

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint of the moment."""
        return self._world.endpoints[self._at]

    @property
    def name(self) -> str:
        """Its host."""
        return self.endpoint.host

    @property
    def others(self) -> list[Endpoint]:
        """The other endpoints, those behind this one first."""
        endpoints = self._world.endpoints
        return [*endpoints[self._at + 1 :], *endpoints[: self._at]]

    @property
    def rank(self) -> int:
        """The place of the endpoint in the order of the user."""
        return self._at

    @property
    def serves_store(self) -> bool:
        """Whether this node serves the store that it uses."""
        return self.bound is not None and self.bound.server is self._agent

    @property
    def has_gone_back(self) -> bool:
        """Whether the store that answers now is that of before, restored from a snapshot."""
        before, now = self.bound, self.opened
        return before is not None and now is not None and before is not now and before.birth == now.birth

    def _prepare(self) -> None:
        """Serve the store here, if it is this host's turn."""
        if self.bound is None and self._find_living():
            return
        if self.endpoint.host == self._agent.name and self.current is None:
            self._world.serve(self.endpoint, self._agent)

    def _find_living(self) -> bool:
        """Look where a store is served already, and go there."""
        there = next((one for one in self.others if self._is_reachable(one)), None)
        if there is not None:
            self._at = self._world.endpoints.index(there)
        return there is not None

    def _is_reachable(self, endpoint: Endpoint) -> bool:
        store = endpoint.open_store
        return store is not None and store.answers(self._agent)

    def open(self) -> bool:
        """Connect the speaker; returns whether somebody listens."""
        if self.bound is None and not self._is_reachable(self.endpoint):
            self._find_living()
        self.opened = self.current
        return self.opened is not None

    def reached(self) -> None:
        """Note that the store has answered."""
        self._since = self._refused_since = None
        self._has_moved = False
        self._passed = 0

    def failed(self, *, is_refused: bool) -> bool:
        """Note that it did not, and go on at the next endpoint when that has lasted; returns whether there is one."""
        now, config = self._agent.clock.now(), self._world.config
        self._since = now if self._since is None else self._since
        self._refused_since = (self._refused_since or now) if is_refused else None
        limit = self._since + config.join_timeout
        if self.bound is not None and config.has_successors and self._has_moved:
            limit = min(limit, self._since + config.lease + _DARK_FOR)
            if self._refused_since is not None:
                limit = min(limit, self._refused_since + config.lease + _REFUSED_FOR)
        elif self.bound is not None and config.has_successors:
            limit = min(limit, self._since + config.lease)
            if self._refused_since is not None:
                limit = min(limit, self._refused_since + _GONE_AFTER)
        return now < limit or self.advance()

    def close(self) -> None:
        """Serve nobody any more."""
        if self.current is not None and self.current.server is self._agent:
            self.current.close()

    def advance(self, host: str = "") -> bool:
        """Go to the next endpoint, or to a host's; returns whether there is one that was not tried in vain."""
        endpoints = self._world.endpoints
        following = [one for one in self.others if not host or one.host == host]
        self._passed += 1
        if not following or self._passed >= len(endpoints) or self.bound is None:
            return False
        self.close()
        self.bound.hang_up(self._agent)
        self._at = endpoints.index(following[0])
        self._since = self._agent.clock.now()
        self._refused_since = None
        self._has_moved = True
        self._prepare()
        return True
