"""A job store in memory behind a network that delays, loses and repeats, and fails for a while.

A store that a node serves answers as long as that node does: what reaches it while the node stands still is carried out
later, when the one who sent it has given the connection up.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from elastic_run.core.protocol.job_keys import state_key
from elastic_run.core.protocol.log_start import is_trimmed
from tests.simulation.clockwork import LOST

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from tests.simulation.clockwork import Clockwork, Host, Thread


_WAITS = ("read", "wait_beside")
_READS = (*_WAITS, "get", "read_heartbeats")
#: Longest true seconds after which a write that was on its way is still carried out.
_LATE = 20.0
#: Longest seconds for which a client waits for the answer of a store that is silent.
_SILENCE = 3.0
#: What a stranger writes over documents.
SPOILT = b"garbage"


@dataclass(slots=True)
class Request:
    """An operation and its arguments, as a thread yields it; at another store than the thread's own if one is given."""

    operation: str
    arguments: tuple[Any, ...] = ()
    timeout: float = 0.0
    store: Store | None = None


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
        late: Probability that a write whose connection broke is carried out up to `_LATE` seconds later.
        again: Probability that a write is carried out once more, up to `_LATE` seconds later.
        cuts: Pairs of names between which nothing goes, from the first to the second.
    """

    delay: float
    loss: float
    late: float = 0.0
    again: float = 0.0
    cuts: set[tuple[str, str]] = field(default_factory=set)

    def is_cut(self, source: str, target: str) -> bool:
        """Whether nothing goes from one host to another."""
        return bool(self.cuts) and source != target and (source, target) in self.cuts


@dataclass(slots=True)
class Store:
    """What one store holds.

    Attributes:
        birth: Its id; a copy has the same.
        server: The node that serves it, or None where none of the job's does.
        facts: Entries of the stream; those up to `trimmed` are gone.
        values: Documents by key.
        slots: All that were ever created in the log: number, node, value.
        times: When they were.
        void: Those that were created below the start of the log.
        outages: Pairs of true times between which nothing answers.
        waits: Threads that wait, each with the ticket of its wait; some have been answered since.
        is_closed: Whether its process has ended.
        kept_slots: Slots that were in the snapshot from which it was restored.
        expires_heartbeats: Whether it says that a node has no heartbeat any more, as etcd does.
        note_slot: Called with this store and each slot that was created: number, node, value.
        note_delete: Called with this store and each key that a clean-up has deleted.
        authors: The node that has written each document last.
    """

    clockwork: Clockwork
    random: Random
    network: Network
    note_slot: Callable[[Store, int, str, bytes], None] = lambda *_: None
    note_delete: Callable[[Store, str], None] = lambda *_: None
    birth: str = ""
    server: Host | None = None
    is_closed: bool = False
    expires_heartbeats: bool = False
    facts: list[bytes | None] = field(default_factory=list)
    trimmed: int = 0
    values: dict[str, bytes] = field(default_factory=dict)
    authors: dict[str, str] = field(default_factory=dict)
    heartbeats: dict[str, int] = field(default_factory=dict)
    _beaten: int = 0
    _seen: dict[Thread, dict[str, int | None]] = field(default_factory=dict)
    slots: list[tuple[int, str, bytes]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    void: list[tuple[int, str, bytes]] = field(default_factory=list)
    kept_slots: int = 0
    waits: list[tuple[Thread, int]] = field(default_factory=list)
    outages: list[tuple[float, float]] = field(default_factory=list)
    watchers: dict[str, list[Callable[[], None]]] = field(default_factory=dict)

    def perform(self, thread: Thread, wish: Request | Pause) -> None:
        """Carry out what a thread yielded."""
        clockwork, ticket = self.clockwork, thread.ticket
        if isinstance(wish, Pause):
            thread.host.after(wish.seconds, thread.resume, ticket, None)
            return
        there = clockwork.now + self.random.random() * self.network.delay
        if self._is_down(there):
            clockwork.at(there + 0.5 * self.random.random(), thread.resume, ticket, LOST)
        elif self.network.loss and self.random.random() < self.network.loss:
            self._lose(thread, wish, there)
            clockwork.at(there + 0.2 * self.random.random(), thread.resume, ticket, LOST)
        elif self._is_cut(thread.host, self.server):
            self._lose(thread, wish, float("inf"))
            self._be_silent(thread, ticket)
        else:
            clockwork.at(there, self._arrive, thread, ticket, wish)

    def _lose(self, thread: Thread, wish: Request, there: float) -> None:
        """Break the connection at a request, which may arrive all the same."""
        if wish.operation in _WAITS or (wish.operation == "trim" and not thread.has_met(self)):
            return
        if there < float("inf") and self.random.random() < 0.5:
            self.clockwork.at(there, self._execute, thread, wish)
        elif self.network.late and self.random.random() < self.network.late:
            self.clockwork.at(self.clockwork.now + _LATE * self.random.random(), self._execute, thread, wish)

    def _be_silent(self, thread: Thread, ticket: int) -> None:
        thread.host.after(_SILENCE * self.random.random(), thread.resume, ticket, LOST)

    @staticmethod
    def _name(host: Host | None) -> str:
        return "" if host is None else host.name

    def _is_cut(self, source: Host | None, target: Host | None) -> bool:
        return self.network.is_cut(self._name(source), self._name(target))

    def close(self) -> None:
        """End, with the process that serves it: answer nobody from now on, nor those who wait."""
        self.is_closed = True
        self._break_waits(lambda _: True)

    def has_state(self, slot: int, term: int) -> bool:
        """Whether the state of a decision was written by the node that has created its slot, and by no other since."""
        writer = next((node for number, node, _ in reversed(self.slots) if number == slot), "")
        return self.authors.get(state_key(slot, term)) == writer

    def has_state_of(self, round_id: str) -> bool:
        """Whether the state of a job whose last round is this one lies beside the log."""
        states = [value for key, value in self.values.items() if key.startswith("s/") and value != SPOILT]
        return any(json.loads(state)["job"]["round_id"] == round_id for state in states)

    def fall_silent(self) -> None:
        """Break the waits of those who can't be answered: the server stands still, or a cable was pulled."""
        is_stalled = self.server is not None and self.server.is_stalled
        self._break_waits(lambda thread: is_stalled or self._is_cut(self.server, thread.host))

    def _break_waits(self, is_hit: Callable[[Thread], bool]) -> None:
        waits, self.waits = self.waits, []
        for thread, ticket in waits:
            if not is_hit(thread):
                self.waits.append((thread, ticket))
            elif self.is_closed or self.is_lost:
                self.clockwork.at(self.clockwork.now, thread.resume, ticket, LOST)
            else:
                self._be_silent(thread, ticket)

    def hang_up(self, host: Host) -> None:
        """Break what a host waits for: it goes to another store."""
        waits, self.waits = self.waits, []
        for thread, ticket in waits:
            if thread.host is host:
                self.clockwork.at(self.clockwork.now, thread.resume, ticket, LOST)
            else:
                self.waits.append((thread, ticket))

    def answers(self, host: Host) -> bool:
        """Whether a host that looks here now gets an answer."""
        is_stalled = self.server is not None and self.server.is_stalled
        is_cut = self._is_cut(host, self.server) or self._is_cut(self.server, host)
        return not (is_stalled or is_cut or self._is_down(self.clockwork.now))

    @property
    def is_lost(self) -> bool:
        """Whether it will never answer again."""
        return self.is_closed or any(end == float("inf") for _, end in self.outages)

    def _is_down(self, time: float) -> bool:
        return self.is_closed or any(start <= time < end for start, end in self.outages)

    def _arrive(self, thread: Thread, ticket: int, wish: Request) -> None:
        if self.is_closed:
            thread.resume(ticket, LOST)
        elif thread.notices_restore(self):
            # The answer is older than one before it: the connection is closed. A trim begins with a read.
            if wish.operation not in (*_WAITS, "trim"):
                self._execute(thread, wish)
            self._reply(thread, ticket, LOST)
        elif self.server is not None and self.server.is_stalled and self.server is not thread.host:
            if wish.operation not in _WAITS:
                self.clockwork.at(self.server.stalled_until, self._execute, thread, wish)
            self._be_silent(thread, ticket)
        elif wish.operation in _WAITS:
            self._wait(thread, ticket, wish)
        else:
            self._reply(thread, ticket, self._execute(thread, wish))
            if self.network.again and wish.operation not in _READS and self.random.random() < self.network.again:
                self.clockwork.at(self.clockwork.now + _LATE * self.random.random(), self._execute, thread, wish)

    def _reply(self, thread: Thread, ticket: int, value: object) -> None:
        if self._is_cut(self.server, thread.host):
            self._be_silent(thread, ticket)
            return
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
            if wish.operation == "wait_beside":
                empty: object = (None, self.values.get(wish.arguments[1]))
            else:
                empty = ([], max(wish.arguments[0], self.trimmed))
            thread.resume(ticket, empty)

        self.watchers.setdefault(topic, []).append(look)
        self.waits = [(thread, ticket), *(wait for wait in self.waits if wait[0].ticket == wait[1])]
        end = thread.host.clock.true(thread.host.clock.now() + max(0.0, wish.timeout))
        for start, _ in self.outages:
            if self.clockwork.now < start < end:
                self.clockwork.at(start, thread.resume, ticket, LOST)
        thread.host.after(wish.timeout, give_up)

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
        if self.is_closed:
            return None
        return getattr(self, f"_{wish.operation}")(thread, *wish.arguments)

    def copy(self) -> Store:
        """Return a store that holds what this one does: a snapshot."""
        return replace(
            self,
            facts=[*self.facts],
            values={**self.values},
            authors={**self.authors},
            heartbeats={**self.heartbeats},
            _seen={},
            slots=[*self.slots],
            times=[*self.times],
            kept_slots=len(self.slots),
            void=[*self.void],
            waits=[],
            outages=[],
            watchers={},
        )

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
                self.note_slot(self, *entry)
            self._wake(key)
        return self.values[key], self.values.get(other)

    def _replace(self, _: Thread, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        if self.values.get(key) == expected:
            self.values[key] = value
        return self.values.get(key)

    def _get(self, _: Thread, keys: list[str]) -> list[bytes | None]:
        return [self.values.get(key) for key in keys]

    def _write(self, thread: Thread, documents: dict[str, bytes]) -> None:
        self.values.update(documents)
        self.authors.update(dict.fromkeys(documents, getattr(thread.host, "node", "")))

    def _delete_where(self, _: Thread, keys: tuple[str, ...], expected: dict[str, bytes]) -> None:
        is_same = all(self.values.get(key) == value for key, value in expected.items())
        for key in keys if is_same else ():
            if self.values.pop(key, None) is not None:
                self.note_delete(self, key)

    def _trim(self, _: Thread, position: int) -> None:
        for index in range(self.trimmed, position):
            self.facts[index] = None
        self.trimmed = max(self.trimmed, position)

    def _heartbeat(self, _: Thread, node: str, last: int | None) -> int | None:
        """Count a heartbeat in place of the last one; None where that is gone."""
        if last is not None and self.heartbeats.get(node) != last:
            return None
        self._beaten += 1
        self.heartbeats[node] = self._beaten
        return self._beaten

    def _forget_heartbeats(self, _: Thread, nodes: list[str]) -> None:
        for node in nodes:
            self.heartbeats.pop(node, None)

    def _read_heartbeats(self, thread: Thread, nodes: tuple[str, ...]) -> dict[str, int | None]:
        """Return heartbeats; where none expire, a node that has one no more has the last that the thread has read."""
        found = {node: self.heartbeats.get(node) for node in nodes}
        if self.expires_heartbeats:
            return found
        seen = self._seen.setdefault(thread, {})
        seen.update({node: value for node, value in found.items() if value is not None})
        return {node: seen.get(node) for node in nodes}
