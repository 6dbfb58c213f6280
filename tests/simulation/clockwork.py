"""Virtual time: a queue of events, and threads that are generators.

A thread yields what it waits for and is sent the answer, or `StoreLost` is thrown into it. Nodes have clocks of their
own, which begin anywhere and run too fast or too slow, and stand still while their machine is suspended. Nothing here
knows of jobs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from tests.simulation.properties import ENDS, require

if TYPE_CHECKING:
    from tests.simulation.store import Store

Routine: TypeAlias = Generator[Any, Any, None]


class StoreLost(Exception):  # noqa: N818 - what the drivers see
    """The connection broke; whether the request was carried out is not known."""


#: The answer of a connection that broke.
LOST = object()


#: Seconds that a clock resolves for sure, wherever it began.
_MOMENT = 1e-6
#: A run with more events than this counts as endless.
_MOST_EVENTS = 2_000_000


class Clockwork:
    """The queue of events, in true time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._left = _MOST_EVENTS
        self._count = 0
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []

    def at(self, time: float, action: Callable[..., object], *arguments: Any) -> None:  # noqa: ANN401
        """Do something at a time."""
        self._count += 1
        heapq.heappush(self._queue, (time, self._count, action, arguments))

    def run(self, until: float) -> None:
        """Let time pass."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            self.now, _, action, arguments = heapq.heappop(queue)
            action(*arguments)
            self._left -= 1
            require(self._left > 0, ENDS, f"the run still goes on after {_MOST_EVENTS} events")
        self.now = until


@dataclass(slots=True)
class Clock:
    """A node's monotonic clock."""

    clockwork: Clockwork
    offset: float
    rate: float

    def now(self) -> float:
        """Return what it shows."""
        return self.offset + self.rate * self.clockwork.now

    def true(self, local: float) -> float:
        """Return the true time at which it will show a time."""
        return (local - self.offset) / self.rate

    def freeze(self, seconds: float) -> None:
        """Stop this clock for a number of simulated seconds. Its agent must not read it during that time."""
        self.offset -= self.rate * seconds


class Host:
    """Something that can be killed, or stopped for a while; its threads go with it.

    Attributes:
        restores: How often it saw its store go back to an earlier state.
    """

    def __init__(self, clockwork: Clockwork, clock: Clock, name: str = "") -> None:
        self.clockwork = clockwork
        self.clock = clock
        self.name = name
        self.is_alive = True
        self.stalled_until = 0.0
        self.restores = 0
        self._store: Store | None = None

    @property
    def is_stalled(self) -> bool:
        """Whether this clock is stopped."""
        return self.stalled_until > self.clockwork.now

    def has_met(self, store: Store) -> bool:
        """Whether this store has answered last."""
        return self._store is store

    def meet(self, store: Store) -> None:
        """Take in which store answers: it was restored if it is another one with the id of the last."""
        before, self._store = self._store, store
        self.restores += before is not None and before is not store and before.birth == store.birth

    def after(self, seconds: float, action: Callable[..., object], *arguments: Any) -> None:  # noqa: ANN401
        """Do something when so many seconds have passed on its clock."""
        until = self.clock.now() + max(_MOMENT, seconds)

        def fire() -> None:
            time = self.clock.true(until)
            if time > self.clockwork.now + _MOMENT:  # the clock stood still meanwhile
                self.clockwork.at(time, fire)
            else:
                action(*arguments)

        self.clockwork.at(max(self.clock.true(until), self.clockwork.now), fire)


class Thread:
    """A generator on a host; what it yields is performed by `perform(thread, wish)`."""

    def __init__(self, host: Host, routine: Routine, perform: Callable[[Thread, Any], None]) -> None:
        self.host = host
        self.ticket = 0
        self._routine = routine
        self._perform = perform
        self.is_over = False
        self.is_idle = False
        self._restores = host.restores
        host.clockwork.at(host.clockwork.now, self.resume, 0, None)

    def resume(self, ticket: int, value: object) -> None:
        """Go on, if this is the answer that is waited for; `LOST` is no answer."""
        host = self.host
        if ticket != self.ticket or not host.is_alive or self.is_over:
            return
        if host.is_stalled:
            host.clockwork.at(host.stalled_until, self.resume, ticket, value)
            return
        self.ticket += 1
        try:
            wish = self._routine.throw(StoreLost()) if value is LOST else self._routine.send(value)
        except StopIteration:
            self.is_over = True
            return
        self._perform(self, wish)

    def has_met(self, store: Store) -> bool:
        """Whether it had an answer of a store, and heard that the store was restored."""
        return self._restores == self.host.restores and self.host.has_met(store)

    def notices_restore(self, store: Store) -> bool:
        """Whether a store that answers was restored since this thread had an answer; each connection hears it once."""
        self.host.meet(store)
        before, self._restores = self._restores, self.host.restores
        return before != self._restores
