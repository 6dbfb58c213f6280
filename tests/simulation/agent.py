"""One node of a simulated job: the driver's threads as generators, and workers that run, fail and stop.

It does with `core.member` and `core.coordinator` what the real driver does, and as little else as possible.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from elastic_run.core import coordinator as office
from elastic_run.core import member as membership
from elastic_run.core.job_keys import HEAD, LOG_START, assignment_key, decision_key, state_key
from elastic_run.core.log_start import find_start, is_trimmed
from elastic_run.core.messages import DIED, DONE, FAILED, LAST_SEQUENCE, STOPPED, Card, Leave, Offer, to_json
from elastic_run.core.rootcause import CONSEQUENCE
from tests.simulation.clockwork import Clock, Host, StoreLost, Thread
from tests.simulation.store import Pause, Request

if TYPE_CHECKING:
    from collections.abc import Generator

    from elastic_run.core.messages import Assignment, Fact, LogStart, Rules
    from tests.simulation.store import Store
    from tests.simulation.world import World


class Agent(Host):
    """A node.

    Attributes:
        member: What it knows.
        running: The assignment whose workers run, or None.
        end: The last thing that it was told, or None.
    """

    def __init__(  # noqa: PLR0913 - what tells one node of a simulation from another
        self,
        world: World,
        node: str,
        host: str,
        *,
        clock: Clock,
        rules: Rules,
        preferred_rank: int | None,
        store: Store,
        serves_store: bool = False,
        script: str = "train.py",
    ) -> None:
        super().__init__(world.clockwork, clock)
        self.world = world
        self.node = node
        self.random = world.random
        self.running: Assignment | None = None
        self.stopping = 0
        self.end: membership.Ended | membership.Refused | None = None
        self.formed: list[Assignment] = []
        self.port = 0
        self.has_left = False
        self.copy: bytes | None = None
        self.lost_since: float | None = None
        self.queue: list[Fact] = []
        self.orders: list[str] = []
        self.asked: list[membership.Command] = []
        self.coordinating: Thread | None = None
        self.store = store
        self.was_stalled_at = float("-inf")
        size = 1 + self.random.randrange(3)
        card = Card(host, 1, size, preferred_rank=preferred_rank, serves_store=serves_store, script=script)
        self.member, commands = membership.begin(node, card=card, rules=rules, offer=self._offer(), now=clock.now())
        self.speaker = Thread(self, self._speak(), self._perform)
        self.follower = Thread(self, self._follow(), self._perform)
        self.clerk = Thread(self, self._serve(), self._perform)
        self._obey(commands)

    def _offer(self) -> Offer:
        self.port += 1
        return Offer(self.node, self.port)

    def _perform(self, thread: Thread, wish: Request | Pause, store: Store | None = None) -> None:
        if thread is self.coordinating and isinstance(wish, Request) and self.world.note_operation(self):
            return
        (store or self.store).perform(thread, wish)

    # --- events in, commands out -------------------------------------------------------------------------------------
    def feed(self, event: membership.Event) -> None:
        """Feed one event into the member and perform what follows."""
        self.member, commands = membership.decide(self.member, event, self.clock.now())
        if self.world.trace is not None and commands:
            self.world.trace(f"{self.node}: {event} -> {self.member.state} {commands}")
        self._obey(commands)

    def _obey(self, commands: tuple[membership.Command, ...]) -> None:
        for command in commands:
            if isinstance(command, membership.Append):
                self.queue.append(command.fact)
                self._wake(self.speaker)
            elif isinstance(command, membership.ReadHead | membership.CreateEntry | membership.FetchAssignment):
                self.asked.append(command)
                self._wake(self.clerk)
            elif isinstance(command, membership.Coordinate):
                self.orders = []
                # An office never writes to another store than the one in which it was claimed.
                perform = partial(self._perform, store=self.store)
                self.coordinating = Thread(self, self._coordinate(command, self.orders), perform)
            elif isinstance(command, membership.HandOver):
                self.orders.append("resign")
            elif isinstance(command, membership.StopCoordinating):
                self.orders.append("stop")
            elif isinstance(command, membership.Formed):
                self._start(command.assignment)
            elif isinstance(command, membership.Halted):
                self._stop(command)
            elif isinstance(command, membership.Ended | membership.Refused):
                self.end = command
                self.running = None
                self.world.oracle.note_end(self, command)

    def _wake(self, thread: Thread) -> None:
        if thread.is_idle:
            self.clockwork.at(self.clockwork.now, thread.resume, thread.ticket, None)

    # --- workers -----------------------------------------------------------------------------------------------------
    def _start(self, place: Assignment) -> None:
        self.world.oracle.note_formed(self, place)
        self.formed.append(place)
        self.running = place
        time, outcome = self.world.draw_work(self)
        self.clockwork.at(self.clockwork.now + time, self._end_work, place.round, outcome)

    def _end_work(self, number: int, outcome: str) -> None:
        if not self.is_alive or self.running is None or self.running.round != number or self.stopping == number:
            return
        if self.stalled_until > self.clockwork.now:
            self.clockwork.at(self.stalled_until, self._end_work, number, outcome)
            return
        if outcome == DONE:
            self._report(number, DONE, None)
            return
        self.stopping = number
        self.world.oracle.note_failure(self.running)
        report = self.world.draw_report(self)
        self.feed(membership.WorkersFailing(number, report["severity"] == CONSEQUENCE))
        self.clockwork.at(self.clockwork.now + self.random.random(), self._report, number, FAILED, report)

    def _stop(self, halted: membership.Halted) -> None:
        if self.running is None or self.stopping == halted.round:
            return
        self.stopping = halted.round
        self.clockwork.at(self.clockwork.now + self.random.random(), self._report, halted.round, STOPPED, None)

    def _report(self, number: int, outcome: str, report: dict[str, Any] | None) -> None:
        if not self.is_alive or self.running is None or self.running.round != number:
            return
        if self.stalled_until > self.clockwork.now:
            self.clockwork.at(self.stalled_until, self._report, number, outcome, report)
            return
        place, self.running = self.running, None
        if outcome == DONE:
            self.world.oracle.note_done(self, place)
        self.feed(membership.WorkersGone(number, outcome, self._offer(), report))

    # --- faults ------------------------------------------------------------------------------------------------------
    def leave(self) -> None:
        """Be told to stop."""
        if self.is_alive and self.end is None:
            self.has_left = True
            self.running = None
            self.feed(membership.Leaving("signal"))

    def die(self, *, has_guardian: bool) -> None:
        """Be killed; a guardian tells so."""
        self.is_alive = False
        if has_guardian:
            ghost = Host(self.clockwork, self.clock)
            Thread(ghost, self._farewell(), self._perform)

    def _farewell(self) -> Generator[Request | Pause, Any, None]:
        for _ in range(3):
            try:
                yield Request("append", (to_json(Leave(self.node, LAST_SEQUENCE, DIED)),))
            except StoreLost:
                yield Pause(0.3)
            else:
                return

    # --- threads -----------------------------------------------------------------------------------------------------
    @property
    def _is_over(self) -> bool:
        return self.member.has_left

    def _idle(self, thread_name: str, seconds: float) -> Generator[Request | Pause, Any, None]:
        thread = getattr(self, thread_name)
        thread.is_idle = True
        yield Pause(seconds)
        thread.is_idle = False

    def _speak(self) -> Generator[Request | Pause, Any, None]:
        interval = self.world.rules.keep_alive_interval
        next_beat = self.clock.now()
        while not self._is_over:
            try:
                if self.queue:
                    fact = self.queue[0]
                    yield Request("append", (to_json(fact),))
                    if self.queue and self.queue[0] is fact:
                        del self.queue[0]
                        self.feed(membership.Appended(fact.sequence))
                elif self.clock.now() >= next_beat:
                    yield Request("beat", (self.node,))
                    next_beat = self.clock.now() + interval
                    self.feed(membership.Beaten())
                    if self.member.watched:
                        beats = yield Request("read_beats", ((self.member.watched,),))
                        for node, value in beats.items():
                            self.feed(membership.CoordinatorBeatRead(node, value))
                else:
                    yield from self._idle("speaker", next_beat - self.clock.now())
            except StoreLost:
                yield Pause(0.2)
                self.queue.clear()
                self.feed(membership.Reconnected())

    def _follow(self) -> Generator[Request | Pause, Any, None]:
        while not self._is_over:
            slot = self.member.next_slot
            try:
                if slot is None:
                    yield Pause(0.05)
                    yield Request("get", ([HEAD],))
                else:
                    value, start = yield Request("wait_beside", (decision_key(slot), LOG_START), 20.0)
                    if self._feed_entry(slot, value, start):
                        yield from self._copy_state()
                self.lost_since = None
            except StoreLost:
                yield Pause(0.2)
                self._maybe_change_store()

    def _maybe_change_store(self) -> None:
        """Go to the next store where this one was not heard for a lease."""
        now = self.clock.now()
        self.lost_since = now if self.lost_since is None else self.lost_since
        is_lost = now - self.lost_since > self.world.rules.lease and self.store is not self.world.stores[-1]
        if is_lost and self.world.rules.has_successors:
            self.store = self.world.stores[-1]
            self.lost_since = None
            self.asked.clear()
            self.queue.clear()
            self.feed(membership.StoreChanged(has_copy=self.copy is not None))

    def _copy_state(self) -> Generator[Request | Pause, Any, None]:
        if self.world.rules.has_successors and self.member.state_slot >= 0:
            key = state_key(self.member.state_slot, self.member.state_term)
            (state,) = yield Request("get", ([key],))
            self.copy = state or self.copy

    def _serve(self) -> Generator[Request | Pause, Any, None]:
        """Answer what the member asks for; the real driver may do so on any thread."""
        while not self._is_over:
            if not self.asked:
                yield from self._idle("clerk", 1000.0)
                continue
            ask = self.asked[0]
            try:
                if isinstance(ask, membership.ReadHead):
                    head, start = yield Request("get", ([HEAD, LOG_START],))
                    event: membership.Event = membership.HeadRead(head, start)
                elif isinstance(ask, membership.FetchAssignment):
                    (place,) = yield Request("get", ([assignment_key(ask.slot, ask.term, self.node)],))
                    event = membership.AssignmentRead(ask.slot, ask.term, place)
                elif isinstance(ask, membership.CreateEntry):
                    winner = yield from self._create(ask.slot, to_json(ask.claim))
                    event = membership.EntryTrimmed(ask.slot)
                    if winner is not None:
                        event = membership.EntryRead(ask.slot, winner)
                else:
                    raise TypeError(ask)
            except StoreLost:
                yield Pause(0.2)
                continue
            if self.asked and self.asked[0] is ask:
                del self.asked[0]
                self.feed(event)

    def _feed_entry(self, slot: int, value: bytes | None, start: bytes | None) -> bool:
        """Take in what a slot holds; returns whether that is an entry."""
        if is_trimmed(slot, start):
            self.feed(membership.EntryTrimmed(slot))
        elif value is not None:
            self.world.oracle.note_entry(self, slot, value)
            self.feed(membership.EntryRead(slot, value))
            return True
        return False

    def _create(self, slot: int, value: bytes) -> Generator[Request | Pause, Any, bytes | None]:
        """Create a slot; returns what it holds, None if it was trimmed."""
        key = decision_key(slot)
        winner: bytes
        winner, start = yield Request("create_beside", (key, value, LOG_START))
        if not is_trimmed(slot, start):
            return winner
        if winner == value:
            yield Request("delete", ((key,),))
        return None

    def _raise_start(self, start: LogStart) -> Generator[Request | Pause, Any, None]:
        value = to_json(start)
        (there,) = yield Request("get", ([LOG_START],))
        while (found := find_start(there)) is None or found.slot < start.slot:
            there = yield Request("replace", (LOG_START, there, value))

    def _take_office(self, command: membership.Coordinate) -> Generator[Request | Pause, Any, office.Coordinator]:
        state: bytes | None = None
        if command.is_copy:
            state = self.copy
            self.world.oracle.note_takeover(self, state)
        elif command.state_slot >= 0:
            while True:
                try:
                    (state,) = yield Request("get", ([state_key(command.state_slot, command.state_term)],))
                    state = state or b""
                    break
                except StoreLost:
                    yield Pause(0.2)
        known = office.take_office(
            self.node,
            term=command.term,
            slot=command.slot,
            state=state,
            now=self.clock.now(),
            jitter=self.random.random(),
            is_copy=command.is_copy,
            known_round=command.known_round,
            known_restarts=command.known_restarts,
            silent=command.silent,
            last_beat=command.last_beat,
            kept_slots=self.world.kept_slots,
        )
        while office.has_lost_state(known):
            try:
                entries, position = yield Request("read", (known.position,), 0.0)
            except StoreLost:
                yield Pause(0.2)
                continue
            known = office.skip(known, position)
            if not entries:
                break
        return known

    def _coordinate(self, command: membership.Coordinate, orders: list[str]) -> Generator[Request | Pause, Any, None]:
        known = yield from self._take_office(command)
        interval = self.world.rules.keep_alive_interval
        next_beats = self.clock.now() + interval
        has_resigned = False
        while not known.is_over and "stop" not in orders:
            if "resign" in orders and not has_resigned:
                known, has_resigned = office.resign(known), True
            try:
                proposal = office.propose(known, self.clock.now())
                if proposal is not None:
                    yield Request("write", (proposal.documents,))
                    winner = yield from self._create(proposal.slot, proposal.entry)
                    known, cleanup = office.settle(known, winner, now=self.clock.now(), jitter=self.random.random())
                    yield Request("write", (cleanup.documents,))
                    if cleanup.log_start is not None:
                        yield from self._raise_start(cleanup.log_start)
                    yield Request("delete", (cleanup.deleted,))
                    known = office.tidied(known)
                    if cleanup.trimmed is not None:
                        yield Request("trim", (cleanup.trimmed,))
                elif self.clock.now() >= next_beats:
                    beats = yield Request("read_beats", (known.watched,))
                    known = office.observe(known, beats, now=self.clock.now(), jitter=self.random.random())
                    next_beats = self.clock.now() + interval
                    known = office.check(known, *(yield Request("get", ([HEAD, LOG_START],))))
                    if not known.is_over:
                        yield Request("write", (office.notes(known, self.clock.now()),))
                else:
                    until = min(next_beats, known.wait_until or next_beats)
                    timeout = until - self.clock.now()
                    entries, position = yield Request("read", (known.position,), timeout)
                    known = office.receive(known, entries, position, now=self.clock.now(), jitter=self.random.random())
                    wake = known.wait_until
                    assert known.pending or wake is None or wake > self.clock.now(), "it would never wait"
            except StoreLost:
                yield Pause(0.2)
                known = office.interrupted(known, self.clock.now())
        if known.is_deposed:
            self.feed(membership.TermEnded(command.term))
