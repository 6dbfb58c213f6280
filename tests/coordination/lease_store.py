"""The store of a simulated job's lease: one key with a time to live, and beside it the coordinators that may live."""

# ruff: noqa: D102 - what a method of the simulation does, its name says
from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from elastic_run.core.job.coordinator_search import COORDINATES
from elastic_run.core.job.state import StepDown

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.coordination.agent import Agent
    from tests.coordination.world import World

#: Seconds after which a lease that nobody renews is free.
TIME_TO_LIVE = 6.0
#: Seconds until an agent gives up a request.
LATE = 2.0


class Reading(NamedTuple):
    """What the store says: the term of the lease, its holder or "", and the coordinators that may still live."""

    term: int
    holder: str
    coordinators: tuple[str, ...]


class LeaseStore:
    """A lease; its clock is the world's."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.term = 0
        self.holder = ""
        self.until = 0.0
        self.coordinators: tuple[str, ...] = ()
        #: The hosts that reach the store.
        self.reach: set[int] = set(range(world.hosts))

    def read(self) -> Reading:
        is_held = self.world.now < self.until
        return Reading(self.term, self.holder if is_held else "", self.coordinators)

    def acquire(self, name: str, instead_of: str) -> Reading:
        """Acquire the lease if nobody holds it, or a node that is dead, or this one that does not know."""
        if self.read().holder in ("", instead_of):
            self.term += 1
            self.holder = name
            self._grant()
            self.coordinators = (*(one for one in self.coordinators if one != name), name)
        return self.read()

    def renew(self, name: str, term: int) -> Reading:
        """Hold the lease on; acquire one that is over if nobody else has held it since."""
        if self.holder == name and self.term == term:
            if not self.read().holder:
                self.term += 1
            self._grant()
        return self.read()

    def forget(self, name: str, told: str) -> Reading:
        """The holder knows that an older coordinator has stepped down, or is dead."""
        if self.holder == name:
            self.coordinators = tuple(one for one in self.coordinators if one != told)
        return self.read()

    def _grant(self) -> None:
        # A store may delete a key late.
        self.until = self.world.now + TIME_TO_LIVE + self.world.random.choice((0.0, 0.0, 0.5, 3.0))

    # --- over the network --------------------------------------------------------------------------------------------
    def call(self, agent: Agent, act: Callable[[LeaseStore], Reading], then: Callable[[Reading | None], None]) -> None:
        """Let an agent ask the store; request or answer may be late, or be lost."""
        pick = self.world.random
        delay, late = pick.choice((0.002, 0.01, 0.01, 0.5)), pick.choice((0.002, 0.01, 0.01, 1.5))

        def arrive() -> None:
            reading = act(self) if agent.host in self.reach else None
            self.world.after(LATE if reading is None else late, answer, reading)

        def answer(reading: Reading | None) -> None:
            is_heard = agent.host in self.reach
            self.world.wake(agent, lambda: then(reading if is_heard else None))

        self.world.after(delay, arrive)

    def tell_others(self, agent: Agent, term: int, names: list[str]) -> None:
        """A new holder of the lease dials the coordinators before it until each knows of it, or is dead."""
        if not agent.is_alive or agent.discovery.role != COORDINATES or not names:
            return
        left = []
        for name in names:
            other = self.world.agents[name]
            is_known = agent.acts and self.world.meet(agent.host, other.host) and (other.acts or not other.is_alive)
            if not is_known:
                left.append(name)
                continue
            if other.is_alive and other.coordination is not None and other.coordination.promise.term < term:
                other.coordinate([StepDown(agent.name)])
            forget = functools.partial(LeaseStore.forget, name=agent.name, told=name)
            self.call(agent, forget, lambda _: None)
        self.world.after(0.5, self.tell_others, agent, term, left)
