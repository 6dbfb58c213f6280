"""Faults that restore a store from an older snapshot, alone or together with another fault."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.agent import Agent
    from tests.simulation.faults import Faults
    from tests.simulation.store import Store
    from tests.simulation.world import World

#: The kind of faults that can be switched off: all but a single restore.
RESTORES = "stores that are restored twice, to their beginning, or while something else goes wrong"

#: Decisions at which a store is restored, and longest seconds until it is restored once more.
_RESTORED_AT = ("claim", "resync", "recovered", "form", "halt")
_RESTORED_AGAIN = 9.0
#: Probability that a coordinator that stood still before it deleted keys is killed after that, and in how many seconds.
_DIES = 0.5
_SOON = 2.0


class Restores:
    """The restores of one run.

    Args:
        world: The run.
        faults: Its other faults.
        least: How many of these faults there are at least.
    """

    def __init__(self, world: World, faults: Faults, least: int) -> None:
        self.least = least
        self._world = world
        self._faults = faults
        self._random = world.random
        self._restored_at: tuple[str, int, Store] | None = None
        self._cleanup: tuple[int, Store] | None = None

    def plan(self, horizon: float) -> list[Callable[[], None]]:
        """Plan restores.

        Args:
            horizon: True seconds of the last fault.

        Returns:
            The faults among which the run's others are drawn.
        """
        kinds = [self._roll_back]
        if self._faults.has(RESTORES):
            kinds += 2 * [self._roll_back_twice, self._roll_back_under_pause, self._arm_restore]
            kinds += 2 * [self._roll_back_and_kill, self._arm_restore, self._arm_cleanup]
            self._plan_restore_to_beginning(horizon)
        for _ in range(self.least):
            self._world.clockwork.at(self._random.random() * horizon, self._random.choice(kinds))
        return kinds

    def note_decision(self, kind: str) -> None:
        """Restore the store at a decision, if armed: before any node reads it."""
        if self._restored_at is None or self._restored_at[0] != kind:
            return
        _, count, snapshot = self._restored_at
        self._restored_at = (kind, count - 1, snapshot) if count else None
        if not count:
            self._plan_restore(snapshot, self._world.clockwork.now)

    def _roll_back(self) -> None:
        """Take a snapshot of the store, and restore it some time later."""
        time = self._world.clockwork.now + self._random.uniform(1.0, 15.0)
        self._plan_restore(self._world.take_snapshot(), time)

    def _roll_back_twice(self) -> None:
        """Restore the store from one snapshot two times, the second time while nodes tell where they stand."""
        world = self._world
        first, second = world.take_snapshot(), world.take_snapshot()
        time = world.clockwork.now + self._random.uniform(1.0, 10.0)
        self._plan_restore(first, time)
        self._plan_restore(second, time + self._random.random() * _RESTORED_AGAIN)

    def _plan_restore_to_beginning(self, horizon: float) -> None:
        """Now and then, restore the store from a snapshot of the time in which the first nodes came."""
        world, random = self._world, self._random
        if random.random() < 0.3:
            taken, time = random.choice((0.0, random.uniform(0.0, 5.0))), random.uniform(5.0, max(6.0, horizon))
            world.clockwork.at(taken, lambda: self._plan_restore(world.take_snapshot(), time))

    def _plan_restore(self, snapshot: Store, time: float) -> None:
        self._world.expected += 1
        self._faults.note(time)
        self._world.clockwork.at(time, self._world.restore, snapshot)

    def _roll_back_under_pause(self) -> None:
        """Restore the store while the coordinator, or another node, stands still."""
        world, faults = self._world, self._faults
        self._plan_restore(world.take_snapshot(), world.clockwork.now + self._random.uniform(2.0, 10.0))
        stop = self._random.choice((faults.stall_coordinator, faults.suspend_coordinator, faults.stall))
        world.clockwork.at(world.clockwork.now + self._random.uniform(0.0, 10.0), stop)

    def _roll_back_and_kill(self) -> None:
        """Restore the store, and kill the node that has read more of the log than any other."""
        world = self._world
        time = world.clockwork.now + self._random.uniform(1.0, 10.0)
        self._plan_restore(world.take_snapshot(), time)
        world.clockwork.at(time + self._random.choice((0.0, 1.0, 5.0)) * self._random.random(), self._kill_furthest)

    def _kill_furthest(self) -> None:
        living = [agent for agent in self._world.living if agent.member.log.next_slot is not None]
        self._faults.kill(max(living, key=lambda agent: (agent.member.log.next_slot or 0, agent.node), default=None))

    def _arm_restore(self) -> None:
        """Take a snapshot, and restore it as soon as a decision of some kind was made."""
        if self._restored_at is None:
            kind, count = self._random.choice(_RESTORED_AT), self._random.choice((0, 0, 0, 1, 2))
            self._restored_at = kind, count, self._world.take_snapshot()

    def _arm_cleanup(self) -> None:
        """Take a snapshot, and restore it while a coordinator that is about to delete keys stands still."""
        self._cleanup = self._random.choice((0, 0, 0, 1, 2)), self._world.take_snapshot()

    def note_cleanup(self, agent: Agent) -> float:
        """Count a clean-up of a coordinator; returns for how many true seconds it stands still before it deletes."""
        if self._cleanup is None:
            return 0.0
        count, snapshot = self._cleanup
        self._cleanup = (count - 1, snapshot) if count else None
        pause = 0.0 if count else self._faults.stop(agent)
        if pause:
            now = self._world.clockwork.now
            self._plan_restore(snapshot, now + self._random.random() * pause)
            if self._random.random() < _DIES:
                self._world.clockwork.at(now + pause + _SOON * self._random.random(), self._faults.kill, agent)
        return pause
