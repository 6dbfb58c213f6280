"""One node of a simulated job: the driver's threads as generators, and workers that run, fail and stop.

It does with `core.node.machine` and `core.job.coordinator` what the real driver does, and as little else as possible.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from elastic_run.core.failure.root_cause import LOST_RANK
from elastic_run.core.node import machine as membership
from elastic_run.core.node import messages as node_messages
from elastic_run.core.protocol.messages import (
    DIED,
    DONE,
    FAILED,
    LAST_SEQUENCE,
    SEAT_CONFIRMED,
    SEAT_RUNNING,
    SEAT_UNTOLD,
    STOPPED,
    FailoverRequest,
    Join,
    Leave,
    NodeInfo,
    Ready,
    SeatDead,
    StoreAddress,
    to_json,
)
from elastic_run.records import replace
from tests.simulation.clockwork import LOST, Clock, Host, StoreLost, Thread
from tests.simulation.connection import Connection, Endpoint
from tests.simulation.coordinator_thread import coordinate
from tests.simulation.store import Pause, Request
from tests.simulation.threads import follow, run_errands, speak

if TYPE_CHECKING:
    from collections.abc import Generator

    from elastic_run.core.job.config import JobConfig
    from elastic_run.core.protocol.messages import Assignment, Copy, Fact
    from tests.simulation.store import Store
    from tests.simulation.world import World


#: What another thread asks the store for.
_ASKED = (
    node_messages.ReadHead,
    node_messages.CreateEntry,
    node_messages.FetchAssignment,
    node_messages.PrepareRejoin,
    node_messages.KeepState,
)


#: True seconds for which an agent that was told to go tries to say so, in whatever store.
_LEAVE_TIME = 6.0


@dataclass(frozen=True, slots=True)
class Lost:
    """The end of a node that finds no store any more."""


@dataclass(frozen=True, slots=True)
class Proof:
    """How the others hear of a node's death.

    Args:
        delays: When its guardian says so, in true seconds after it; never, late, or twice.
        is_misled: Whether it says so at the first endpoint, wherever the job is.
        is_heard: Whether no partition keeps it from any store: the guardian has other ways than the agent had.
    """

    delays: tuple[float, ...] = ()
    is_misled: bool = False
    is_heard: bool = False


class Agent(Host):
    """A node.

    Attributes:
        member: What it knows.
        running: The assignment whose workers run, or None.
        end: The last thing that it was told, or None.
    """

    def __init__(
        self,
        world: World,
        node: str,
        host: str,
        *,
        clock: Clock,
        config: JobConfig,
        preferred_rank: int | None,
        script: str = "train.py",
        predecessor: Agent | None = None,
    ) -> None:
        super().__init__(world.clockwork, clock, host)
        self.world = world
        self.node = node
        self.random = world.random
        self.running: Assignment | None = None
        self.stopping = 0
        self.end: node_messages.Ended | node_messages.Refused | Lost | None = None
        self.formed: list[Assignment] = []
        self.port = 0
        self.has_left = False
        self.copy: bytes | None = None
        self.queue: list[Fact] = []
        self.orders: list[str] = []
        self.asked: list[node_messages.Command] = []
        self.awaited: int | None = None
        self.coordinating: Thread | None = None
        self.connection = Connection(world, self)
        self.progress: tuple[int, bool] | None = None
        self.unchanged_since = 0.0
        self.record = SeatDead(self.node, "", "", 0, 0, SEAT_UNTOLD)
        self.confirmed: Copy | None = None
        self.is_doomed = False
        self.predecessor = predecessor
        self.last_heartbeat: int | None = None
        size = 1 + self.random.randrange(3)
        serves_store = self._serves_store
        node_info = NodeInfo(host, 1, size, preferred_rank=preferred_rank, serves_store=serves_store, script=script)
        self.member, commands = membership.begin(
            node, node_info=node_info, config=config, store_address=self.offer(), now=clock.now()
        )
        self.speaker = Thread(self, speak(self), self._perform_for_speaker)
        self.follower = Thread(self, follow(self), self._perform)
        self.clerk = Thread(self, run_errands(self), self._perform)
        self._obey(commands)

    def offer(self) -> StoreAddress:
        """Open another workers' store."""
        self.port += 1
        return StoreAddress(self.node, self.port)

    @property
    def store(self) -> Store | None:
        """The store with which its member lives, None before it has reached one."""
        return self.connection.bound

    @property
    def _serves_store(self) -> bool:
        current = self.connection.current
        return current is not None and current.server is self

    def _perform(self, thread: Thread, wish: Request | Pause, store: Store | None = None) -> None:
        """Carry out what a thread yields, at the store of the member, or at the one in which a term was claimed."""
        current, bound = self.connection.current, self.connection.bound
        if current is None or bound is None:
            self._send(thread, wish, None)
            return
        # Who has heard that the store was restored waits for the speaker: it sees to it that no slot is decided again.
        is_there = current is bound or (current.birth == bound.birth and not thread.has_met(current))
        is_there = is_there and (store is None or current.birth == store.birth)
        self._send(thread, wish, current if is_there else None)

    def _perform_for_speaker(self, thread: Thread, wish: Request | Pause) -> None:
        opened = self.connection.opened
        self._send(thread, wish, opened if opened is self.connection.current else None)

    def _send(self, thread: Thread, wish: Request | Pause, store: Store | None) -> None:
        if isinstance(wish, Pause):
            self.after(wish.seconds, thread.resume, thread.ticket, None)
            return
        store = wish.store or store
        if thread is self.coordinating:
            pause = self.world.faults.note_operation(self, wish.operation)
            if not self.is_alive:
                return
            if pause:
                # It goes on with what it was about to write.
                self.clockwork.at(self.clockwork.now + pause, self._send_late, thread, thread.ticket, wish, store)
                return
        if store is None:
            self.after(0.1, thread.resume, thread.ticket, LOST)
        else:
            store.perform(thread, wish)

    def _send_late(self, thread: Thread, ticket: int, wish: Request, store: Store | None) -> None:
        if self.is_stalled:
            self.clockwork.at(self.stalled_until, self._send_late, thread, ticket, wish, store)
        elif self.is_alive and thread.ticket == ticket:
            if store is None:
                thread.resume(ticket, LOST)
            else:
                store.perform(thread, wish)

    # --- events in, commands out -------------------------------------------------------------------------------------
    def feed(self, event: node_messages.Event) -> None:
        """Feed one event into the member and perform what follows."""
        self.member, commands = membership.decide(self.member, event, self.clock.now())
        if self.world.trace is not None and commands:
            self.world.trace(f"{self.node}: {event} -> {self.member.state} {commands}")
        self._obey(commands)
        if isinstance(event, node_messages.HeadRead) and self.awaited not in (None, self.member.log.next_slot):
            self.awaited = None
            self.clockwork.at(self.clockwork.now, self.follower.resume, self.follower.ticket, LOST)

    def _obey(self, commands: tuple[node_messages.Command, ...]) -> None:
        for command in commands:
            if isinstance(command, node_messages.Append):
                self._note_offer(command.fact)
                self.queue.append(command.fact)
                self._wake(self.speaker)
            elif isinstance(command, _ASKED):
                self.asked.append(command)
                self._wake(self.clerk)
            elif isinstance(command, node_messages.Coordinate | node_messages.EndTerm | node_messages.StopCoordinating):
                self._coordinate(command)
            else:
                self._tell(command)

    def _coordinate(
        self, command: node_messages.Coordinate | node_messages.EndTerm | node_messages.StopCoordinating
    ) -> None:
        if isinstance(command, node_messages.Coordinate):
            self.orders = []
            # A coordinator never writes to another store than the one in which it claimed its term.
            perform = partial(self._perform, store=self.store)
            self.coordinating = Thread(self, coordinate(self, command, self.orders, self.store), perform)
        else:
            self.orders.append("resign" if isinstance(command, node_messages.EndTerm) else "stop")

    def _tell(self, command: node_messages.Command) -> None:
        """Do what the agent does with what it is told."""
        if isinstance(command, node_messages.Formed):
            self._start(command.assignment)
        elif isinstance(command, node_messages.Halted):
            self._stop(command)
        elif isinstance(command, node_messages.UseStore):
            self.follow_store(command.endpoint)
        elif isinstance(command, node_messages.Ended | node_messages.Refused):
            self.end = command
            self.running = None
            self.world.oracle.note_end(self)
            if isinstance(command, node_messages.Refused):
                self._hand_store_over()

    def _wake(self, thread: Thread) -> None:
        if thread.is_idle:
            self.clockwork.at(self.clockwork.now, thread.resume, thread.ticket, None)

    # --- workers -----------------------------------------------------------------------------------------------------
    def _note_offer(self, fact: Fact) -> None:
        """Write down in which store it says that it has read a `Prepare`, before it says so."""
        if not isinstance(fact, Join | Ready) or self.store is None:
            return
        self.world.faults.note_offer(self)
        if isinstance(fact, Join) and fact.prepared not in (None, self.confirmed):
            self.confirmed = fact.prepared
            status = SEAT_UNTOLD if self.record.status == SEAT_UNTOLD else SEAT_CONFIRMED
            self.record = replace(self.record, status=status, store_id=self.store.birth)

    def _start(self, place: Assignment) -> None:
        self.record = SeatDead(
            self.node, place.round_id, place.incarnation, place.round, place.group_rank, SEAT_RUNNING
        )
        self.world.oracle.note_formed(self, place)
        self.formed.append(place)
        self.running = place
        self.world.oracle.note_started()
        time, outcome = self.world.draw_work(self)
        self.clockwork.at(self.clockwork.now + time, self._end_work, place.round, outcome)

    def _end_work(self, number: int, outcome: str) -> None:
        if not self.is_alive or self.running is None or self.running.round != number or self.stopping == number:
            return
        if self.is_stalled:
            self.clockwork.at(self.stalled_until, self._end_work, number, outcome)
            return
        if outcome == DONE:
            self._report(number, DONE, None)
            return
        self.stopping = number
        self.world.oracle.note_failure(self.running)
        report = self.world.draw_report(self)
        self.feed(node_messages.WorkersFailing(number, report["severity"] == LOST_RANK))
        self.clockwork.at(self.clockwork.now + self.random.random(), self._report, number, FAILED, report)

    def _stop(self, halted: node_messages.Halted) -> None:
        if self.running is None or self.stopping == halted.round:
            return
        self.stopping = halted.round
        self.clockwork.at(self.clockwork.now + self.random.random(), self._report, halted.round, STOPPED, None)

    def _report(self, number: int, outcome: str, report: dict[str, Any] | None) -> None:
        if not self.is_alive or self.running is None or self.running.round != number:
            return
        if self.is_stalled:
            self.clockwork.at(self.stalled_until, self._report, number, outcome, report)
            return
        place, self.running = self.running, None
        if outcome == DONE:
            self.world.oracle.note_done(self, place)
        self.feed(node_messages.WorkersGone(number, outcome, self.offer(), report))

    # --- faults ------------------------------------------------------------------------------------------------------
    def leave(self) -> None:
        """Be told to stop."""
        if self.is_alive and self.end is None:
            self.has_left = True
            self.running = None
            self.feed(node_messages.Leaving("signal"))
            self._hand_store_over()
            self.clockwork.at(self.clockwork.now + _LEAVE_TIME, self._give_up_leaving)

    def _give_up_leaving(self) -> None:
        """End, whether or not its last word was heard, and with it the store that it has come to serve."""
        if self.is_alive and self.end is None:
            self.lose_store()

    def _hand_store_over(self) -> None:
        """Say where the store goes on that this node serves, and serve it until the others have heard it."""
        store = self.connection.bound
        if store is None or store.server is not self:
            return
        following = self.connection.others
        where = following[0].host if following else ""
        perform = partial(self._perform, store=store)
        Thread(self, _say_again(to_json(FailoverRequest(where, f"{self.name} goes"))), perform)
        self.clockwork.at(self.clockwork.now + self.random.uniform(1.0, 3.0), store.close)

    def die(self, proof: Proof) -> None:
        """Be killed; its guardian proves that, or not."""
        self.is_alive = False
        if self._serves_store and self.connection.current is not None:
            self.connection.current.close()
        for delay in proof.delays:
            self.clockwork.at(self.clockwork.now + delay, self._prove, proof)

    def _prove(self, proof: Proof) -> None:
        """Let its guardian say at all endpoints that it is dead, or only at the first."""
        ghost = Host(self.clockwork, self.clock, f"guardian of {self.name}" if proof.is_heard else self.name)
        for endpoint in self.world.endpoints[: 1 if proof.is_misled else None]:
            Thread(ghost, _say_farewell(self, endpoint), self._perform_for_ghost)

    def _perform_for_ghost(self, thread: Thread, wish: Request | Pause) -> None:
        if isinstance(wish, Pause):
            thread.host.after(wish.seconds, thread.resume, thread.ticket, None)
        elif wish.store is None:
            thread.host.after(0.1, thread.resume, thread.ticket, LOST)
        else:
            wish.store.perform(thread, wish)

    @property
    def is_over(self) -> bool:
        """Whether its threads end."""
        return self.member.has_left or isinstance(self.end, Lost)

    def lose_store(self) -> None:
        """End: no endpoint answers."""
        self.end = Lost()
        self.running = None
        self.orders.append("stop")
        self.connection.close()
        self.world.say(f"{self.node} has lost the store")

    def follow_store(self, host: str) -> None:
        """Go on at an endpoint."""
        if self.end is None and not self.has_left and host and host != self.connection.name:
            self.connection.advance(host)


def _say_farewell(agent: Agent, endpoint: Endpoint) -> Generator[Request | Pause, Any, None]:
    facts: list[Leave | SeatDead] = [Leave(agent.node, LAST_SEQUENCE, DIED), agent.record]
    until = agent.clock.now() + 2 * agent.world.config.lease + 10.0
    while facts and agent.clock.now() < until:
        try:
            yield Request("append", (to_json(facts[0]),), store=endpoint.open_store)
            del facts[0]
        except StoreLost:
            yield Pause(0.3)


def _say_again(fact: bytes) -> Generator[Request | Pause, Any, None]:
    for _ in range(3):
        try:
            yield Request("append", (fact,))
        except StoreLost:
            yield Pause(0.3)
        else:
            return
