"""A node of a crowd: the real member and the real messages, without the threads.

It says on the wire what a session's speaker and follower say, in their order: one connection leaves a birth mark,
beats, reads the head and appends facts, another waits for the next slot and reads assignments, and at last there is a
look whether rank 0's store listens. What it decides is `core.member`'s. A test holds the operations and bytes that a
server sees against those of real sessions.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import TYPE_CHECKING

from elastic_run.core import job_keys, messages
from elastic_run.core import member as core
from elastic_run.store import c10d, wire
from elastic_run.store.client import NOTHING
from elastic_run.store.job_store import job_path
from tests.benchmarks.crowd.exchange import BYTE, NONCE, NUMBER, STRING, Exchange, Question

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from elastic_run.loop import Loop
    from tests.benchmarks.crowd.exchange import Answers, Script

_ENTRY = b"+"
_OPENING = Question(wire.encode_opening(os.getpid()), (NONCE,))


class LightNode:
    """One node.

    Args:
        loop: What drives it.
        address: The job's store.
        run_id: The job.
        number: Which of the crowd it is.
        rules: The job's rules.
        on_joined: Called when the store has confirmed that it is there.
        on_formed: Called when it is in a round and has seen that rank 0's store listens.

    Attributes:
        member: What it knows.
    """

    def __init__(
        self,
        loop: Loop,
        address: tuple[str, int],
        run_id: str,
        number: int,
        *,
        rules: messages.Rules,
        on_joined: Callable[[], None],
        on_formed: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._address = address
        self._prefix = f"/{job_path(run_id)}/"
        self._node = f"node{number}_{os.getpid()}_{number:08x}"
        self._card = messages.Card(f"node{number}", os.getpid(), 8, version="0.1.0")
        self._rules = rules
        self._on_joined = on_joined
        self._on_formed = on_formed
        self._errands: deque[core.Command] = deque()
        self.member: core.Member
        self._speaker = Exchange(loop, address, self._speak())
        self._follower: Exchange

    # --- the member --------------------------------------------------------------------------------------------------
    def _begin(self) -> None:
        # Nobody will ask for this port: rank 0 is the first to have come, a real session.
        offer = messages.Offer(self._address[0], 1)
        self._take(core.begin(self._node, card=self._card, rules=self._rules, offer=offer, now=time.monotonic()))
        self._follower = Exchange(self._loop, self._address, self._follow())

    def feed(self, event: core.Event) -> None:
        """Decide what follows an event, and note what is to be done."""
        self._take(core.decide(self.member, event, time.monotonic()))

    def _take(self, decision: core.Decision) -> None:
        self.member, commands = decision
        for command in commands:
            if isinstance(command, core.ReadHead | core.CreateEntry | core.FetchAssignment):
                self._errands.append(command)
            elif isinstance(command, core.Formed):
                master = command.assignment.master
                Exchange(self._loop, (master.host, master.port), None, self._on_formed)

    # --- what it says ------------------------------------------------------------------------------------------------
    def _speak(self) -> Script:
        yield _OPENING
        yield self._compare_set("k/birth", b"", b"born with " + self._node.encode())
        yield from self._beat()
        self._begin()
        yield from self._run_errands()
        yield from self._say_facts()
        self._on_joined()
        while True:
            self._loop.call_later(self._rules.keep_alive_interval, self._speaker.wake)
            yield None
            yield from self._beat()
            self.feed(core.Beaten())
            watched = self.member.watched
            if watched:
                beat = (yield self._look([f"b/{watched}"]))[0]
                self.feed(core.CoordinatorBeatRead(watched, int(beat) if beat.isdigit() else None))
            yield from self._run_errands()
            yield from self._say_facts()

    def _follow(self) -> Script:
        yield _OPENING
        yield self._look(["k/birth"])
        while True:
            yield from self._run_errands()
            slot = self.member.next_slot
            if slot is None:
                yield None
                continue
            key = f"k/{job_keys.decision_key(slot)}"
            yield Question(wire.encode(wire.WAIT, 1, self._key(key)), (BYTE,))
            value = (yield self._look([key]))[0]
            self.feed(core.EntryRead(slot, value))

    def _run_errands(self) -> Generator[Question | None, Answers, None]:
        while self._errands:
            errand = self._errands.popleft()
            if isinstance(errand, core.CreateEntry):
                claim = messages.to_json(errand.claim)
                value = (yield self._compare_set(f"k/{job_keys.decision_key(errand.slot)}", b"", claim))[0]
                self.feed(core.EntryRead(errand.slot, value))
            elif isinstance(errand, core.FetchAssignment):
                key = job_keys.assignment_key(errand.slot, errand.term, self._node)
                value = (yield self._look([f"k/{key}"]))[0]
                self.feed(core.AssignmentRead(errand.slot, errand.term, None if value == NOTHING else value))
            else:
                value = (yield self._look([f"k/{job_keys.HEAD}"]))[0]
                self.feed(core.HeadRead(None if value == NOTHING else value))
                self._follower.wake()

    def _say_facts(self) -> Generator[Question | None, Answers, None]:
        while self.member.outstanding:
            fact = self.member.outstanding[0]
            yield from self._append(messages.to_json(fact))
            self.feed(core.Appended(fact.sequence))

    def _beat(self) -> Generator[Question | None, Answers, None]:
        key = self._key(f"b/{self._node}")
        beat = wire.encode(wire.MULTI_SET, 1, key, b"%d" % (time.monotonic_ns() // 1_000_000))
        yield Question(beat + wire.encode(wire.CHECK, 1, key), (BYTE,))

    def _append(self, value: bytes) -> Generator[Question | None, Answers, None]:
        stream = job_keys.FACTS
        number = (yield Question(wire.encode(wire.ADD, self._key(c10d._count(stream)), 1), (NUMBER,)))[0]
        slot = wire.I64.unpack(number)[0]
        filling = self._compare_set(c10d._slot(stream, slot), b"", _ENTRY + value)
        floor = self._look([c10d._floor(stream)])
        yield Question(filling.data + floor.data, (STRING, STRING))

    def _look(self, keys: Sequence[str]) -> Question:
        questions = [self._compare_set(key, NOTHING, NOTHING) for key in keys]
        return Question(b"".join(question.data for question in questions), (STRING,) * len(questions))

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> Question:
        return Question(wire.encode(wire.COMPARE_SET, self._key(key), expected, desired), (STRING,))

    def _key(self, key: str) -> bytes:
        return (self._prefix + key).encode()
