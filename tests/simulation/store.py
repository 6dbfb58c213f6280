"""A job store in memory behind a network that delays, loses replies, and fails for a while."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elastic_run.core.log_start import is_trimmed
from tests.simulation.clockwork import LOST

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from tests.simulation.clockwork import Clockwork, Thread


_WAITS = ("read", "wait_beside")
#: What a stranger writes over documents.
SPOILT = b"garbage"


@dataclass(slots=True)
class Request:
    """An operation and its arguments, as a thread yields it."""

    operation: str
    arguments: tuple[Any, ...] = ()
    timeout: float = 0.0


@dataclass(slots=True)
class Pause:
    """Wait for so many seconds of the node's clock, or until woken."""

    seconds: float


@dataclass(slots=True)
class Network:
    """How bad the network is.

    Args:
        delay: Longest delay of a message in seconds.
        loss: Probability that a connection breaks at an operation.
    """

    delay: float
    loss: float


@dataclass(slots=True)
class Store:
    """What one store holds.

    Attributes:
        facts: Entries of the stream; those up to `trimmed` are gone.
        values: Documents by key.
        slots: All that were ever created in the log: number, node, value.
        times: When they were.
        void: Those that were created below the start of the log.
        outages: Pairs of true times between which nothing answers.
        waits: Threads that wait, each with the ticket of its wait; some have been answered since.
    """

    clockwork: Clockwork
    random: Random
    network: Network
    facts: list[bytes | None] = field(default_factory=list)
    trimmed: int = 0
    values: dict[str, bytes] = field(default_factory=dict)
    beats: dict[str, int] = field(default_factory=dict)
    slots: list[tuple[int, str, bytes]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    void: list[tuple[int, str, bytes]] = field(default_factory=list)
    waits: list[tuple[Thread, int]] = field(default_factory=list)
    outages: list[tuple[float, float]] = field(default_factory=list)
    watchers: dict[str, list[Callable[[], None]]] = field(default_factory=dict)

    def perform(self, thread: Thread, wish: Request | Pause) -> None:
        """Carry out what a thread yielded."""
        clockwork, ticket = self.clockwork, thread.ticket
        if isinstance(wish, Pause):
            time = clockwork.now + max(0.0, wish.seconds) / thread.host.clock.rate
            clockwork.at(time, thread.resume, ticket, None)
            return
        there = clockwork.now + self.random.random() * self.network.delay
        if self._is_down(there):
            clockwork.at(there + 0.5 * self.random.random(), thread.resume, ticket, LOST)
        elif self.network.loss and self.random.random() < self.network.loss:
            if wish.operation not in _WAITS and self.random.random() < 0.5:
                clockwork.at(there, self._execute, thread, wish)
            clockwork.at(there + 0.2 * self.random.random(), thread.resume, ticket, LOST)
        else:
            clockwork.at(there, self._serve, thread, ticket, wish)

    def go_down(self) -> None:
        """Answer nobody from now on, nor those who wait."""
        self.outages.append((self.clockwork.now, float("inf")))
        waits, self.waits = self.waits, []
        for thread, ticket in waits:
            thread.resume(ticket, LOST)

    @property
    def is_lost(self) -> bool:
        """Whether it will never answer again."""
        return any(end == float("inf") for _, end in self.outages)

    def _is_down(self, time: float) -> bool:
        return any(start <= time < end for start, end in self.outages)

    def _serve(self, thread: Thread, ticket: int, wish: Request) -> None:
        if wish.operation in _WAITS:
            self._wait(thread, ticket, wish)
        else:
            self._reply(thread, ticket, self._execute(thread, wish))

    def _reply(self, thread: Thread, ticket: int, value: object) -> None:
        time = self.clockwork.now + self.random.random() * self.network.delay
        self.clockwork.at(time, thread.resume, ticket, value)

    def _wait(self, thread: Thread, ticket: int, wish: Request) -> None:
        """Answer now, or at the next change, or at the timeout; break at an outage."""
        topic = "facts" if wish.operation == "read" else wish.arguments[0]
        found = self._look(wish)
        if found is not None:
            self._reply(thread, ticket, found)
            return

        def look() -> None:
            found = self._look(wish)
            if found is not None:
                self._reply(thread, ticket, found)
                self._forget(topic, look)

        def give_up() -> None:
            self._forget(topic, look)
            empty: object = ([], wish.arguments[0])
            if wish.operation == "wait_beside":
                empty = (None, self.values.get(wish.arguments[1]))
            thread.resume(ticket, empty)

        self.watchers.setdefault(topic, []).append(look)
        self.waits = [(thread, ticket), *(wait for wait in self.waits if wait[0].ticket == wait[1])]
        end = self.clockwork.now + max(0.0, wish.timeout) / thread.host.clock.rate
        for start, _ in self.outages:
            if self.clockwork.now < start < end:
                self.clockwork.at(start, thread.resume, ticket, LOST)
        self.clockwork.at(end, give_up)

    def _look(self, wish: Request) -> object:
        if wish.operation == "wait_beside":
            key, other = wish.arguments
            return (self.values[key], self.values.get(other)) if key in self.values else None
        position = max(wish.arguments[0], self.trimmed)
        entries = [entry for entry in self.facts[position:] if entry is not None]
        return (entries, len(self.facts)) if entries else None

    def _forget(self, topic: str, look: Callable[[], None]) -> None:
        if look in self.watchers.get(topic, ()):
            self.watchers[topic].remove(look)

    def _wake(self, topic: str) -> None:
        for look in list(self.watchers.get(topic, ())):
            look()

    def _execute(self, thread: Thread, wish: Request) -> object:
        return getattr(self, f"_{wish.operation}")(thread, *wish.arguments)

    def _append(self, _: Thread, value: bytes) -> None:
        self.facts.append(value)
        self._wake("facts")

    def _create_beside(self, thread: Thread, key: str, value: bytes, other: str) -> tuple[bytes, bytes | None]:
        if key not in self.values:
            self.values[key] = value
            slot = int(key[2:])
            entry = (slot, getattr(thread.host, "node", ""), value)
            if is_trimmed(slot, self.values.get(other)):
                self.void.append(entry)
            else:
                self.slots.append(entry)
                self.times.append(self.clockwork.now)
            self._wake(key)
        return self.values[key], self.values.get(other)

    def _replace(self, _: Thread, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        if self.values.get(key) == expected:
            self.values[key] = value
        return self.values.get(key)

    def _get(self, _: Thread, keys: list[str]) -> list[bytes | None]:
        return [self.values.get(key) for key in keys]

    def _write(self, _: Thread, documents: dict[str, bytes]) -> None:
        self.values.update(documents)

    def _delete(self, _: Thread, keys: tuple[str, ...]) -> None:
        for key in keys:
            self.values.pop(key, None)

    def _trim(self, _: Thread, position: int) -> None:
        for index in range(self.trimmed, position):
            self.facts[index] = None
        self.trimmed = max(self.trimmed, position)

    def _beat(self, _: Thread, node: str) -> None:
        self.beats[node] = self.beats.get(node, 0) + 1

    def _read_beats(self, _: Thread, nodes: tuple[str, ...]) -> dict[str, int | None]:
        return {node: self.beats.get(node) for node in nodes}
