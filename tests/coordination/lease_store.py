"""The store of a simulated job's lease: one key with a time to live, and beside it the coordinators that may live."""

# ruff: noqa: D102 - what a method of the simulation does, its name says
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tests.coordination.world import World

#: Seconds after which a lease that nobody renews is free.
TIME_TO_LIVE = 6.0


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
