"""The thread that speaks for this node: it opens the store, says the node's facts, and beats.

Rules
- It wakes when there is a fact to say, and at every keep-alive interval; else it waits. While workers run it also looks
  at the coordinator's beat several times in an interval, as that one does at all: else a node that goes right after a
  beat, and the store that may go with it, would be missed an interval after the lease.
- It is the one that knows whether the store answers. A broken connection is opened anew, quietly for a lease, then with
  a line every ten seconds; after a stated time the store is given up and the agent is told `Lost`.
- A thousand nodes may come at once: what a node asks before its first fact is one question. After that fact the log
  reader takes over the connection, and this thread opens another one when there is something to say again: one
  connection for each node is enough while the nodes gather. Its beats begin after that rush, since the coordinator
  gives a node some time for the first (`JobConfig.first_leases`); at the latest when the job has a round, or when this
  node coordinates it. They begin at a random moment, so that those of all nodes never come in step.
- The log reader wakes this thread when its connection has broken: while this thread has none, nothing else would tell
  it that the store is gone.
- A beat replaces the last one of this node. Where that is gone the coordinator has dropped the node, which says again
  where it stands: so a machine that was suspended, or a process that was stopped, needs no clock to learn it.
- A store has an id, which its first agent writes. After an outage another id means another, emptied store, in which
  all that matters is sent again.
"""

from __future__ import annotations

import math
import os
import time

from elastic_run.core.node import messages as node_messages
from elastic_run.core.node.messages import Refused
from elastic_run.core.node.state import LEAVING, RUNNING, WAITING
from elastic_run.core.protocol import job_keys, messages
from elastic_run.rendezvous.elastic.decision_log import make_head, raise_start
from elastic_run.rendezvous.elastic.exit_barrier import pass_exit_barrier
from elastic_run.rendezvous.elastic.heartbeats import HeartbeatReader, HeartbeatWriter
from elastic_run.rendezvous.elastic.partition import PartitionRecovery
from elastic_run.rendezvous.elastic.retry_deadline import RetryDeadline
from elastic_run.rendezvous.elastic.store_connection import STORE_ID
from elastic_run.rendezvous.session import Lost, Notice, Waiting
from elastic_run.report.wait_notices import WaitNotices
from elastic_run.store.backoff import draw_fraction
from elastic_run.store.errors import StoreAccessError, StoreError, StoreForgedError, StoreTokenError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.rendezvous.elastic.context import SessionContext
    from elastic_run.rendezvous.elastic.member_driver import MemberDriver
    from elastic_run.store.jobstore.api import JobStore

__all__ = ["Sender"]

_ID_PREFIX = b"store "
#: The first beat comes before two of so many parts of the lease are over.
_FIRST_BEAT = 3
#: Looks in a keep-alive interval; and a second, by all nodes of a job together: a store has more to do.
_LOOKS = 8
_ALL_LOOKS = 200.0


class Sender:
    """Speaks for one node.

    Args:
        context: What the session's threads share.
        begin: Called once, when the store was reached: makes the member. It is given where the log stands, if that is
            known.
        follow: Lets the log be followed: called with the connection over which the first facts were said; with None
            whenever it is another store from then on.
        draw: Returns a random number from 0 to 1.
    """

    def __init__(
        self,
        context: SessionContext,
        begin: Callable[[node_messages.HeadRead | None], None],
        follow: Callable[[JobStore | None], None],
        draw: Callable[[], float] = draw_fraction,
    ) -> None:
        self._context = context
        self._begin = begin
        self._follow = follow
        self._draw = draw
        self._connection = context.make_connection()
        self._is_followed = False
        self._has_given = False  # the log reader has the connection, and there was nothing to say since
        self._beats = HeartbeatReader()
        self._next_beat = 0.0
        self._is_founding = False  # the first beat waits for the job's first round
        self._writer = HeartbeatWriter(context.node)
        self._restores = 0
        self._last_look = 0.0
        self._last_read: float | None = None
        self._wait_notices = WaitNotices(
            state=context.member_state,
            doubt=lambda: context.backend.doubt,
            shows_waiting=context.shows_waiting,
            deliver=context.events.deliver,
            delay=0.0 if context.backend.is_host else draw() * context.config.min_nodes / _ALL_LOOKS,
        )
        self._retry_deadline = RetryDeadline(context)
        self._connection.time_left = lambda: self._retry_deadline.attempt_limit
        self._partition = PartitionRecovery(context)

    def run(self) -> None:
        """Speak until the session ends."""
        self._retry_deadline.begin()
        try:
            if not self._context.signals.is_leaving:  # a node that comes to say why it goes serves no store
                self._context.backend.prepare()
        except OSError as error:
            self._context.events.deliver(Lost("rendezvous", f"the rendezvous store can't be served here: {error}"))
            return
        while not (self._context.signals.closing.is_set() or self._context.events.is_lost):
            if self._has_given and not self._needs_store:
                self._wait()
                continue
            asked_at = time.monotonic()
            try:
                self._turn()
            except StoreTokenError as error:
                self._connection.drop()
                if not self._refuse(error, asked_at):
                    return
            except StoreAccessError as error:
                self._context.events.deliver(Lost("rendezvous", f"the store at {self._context.backend.name}: {error}"))
                return
            except StoreError as error:
                self._connection.drop()
                if not self._retry(error, asked_at):
                    return
        self._connection.drop()

    # --- the store answers ---------------------------------------------------------------------------------------
    def _turn(self) -> None:
        """Greet a store that was opened just now; then say what there is to say, and wait."""
        context = self._context
        context.signals.has_lost_log = False
        if self._has_given and context.signals.failover_to is not None:
            self._move(context.signals.failover_to)  # without another connection to a host that leaves
            return
        store = self._connection.store
        if self._retry_deadline.is_tried or context.sender.store_id is None or self._is_replaced(store):
            self._identify_store(store)
            if context.events.is_over.is_set() and context.sender.member_driver is None:
                context.signals.closing.wait()
                return
        if store.restores != self._restores and context.sender.member_driver is not None:
            self._resend_all(store, context.sender.member_driver)
            self._restores = store.restores
        if context.signals.failover_to is not None:
            self._move(context.signals.failover_to)
            return
        self._send_facts(store)
        if self._watch_job(store):
            self._give_connection()
            self._wait()

    def _watch_job(self, store: JobStore) -> bool:
        """Beat, look at the coordinator or at who is missing, as it is due; returns whether this node stays here."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._beat(store, now)
            others = self._partition.find_others(store)
            if others is not None:
                self._rejoin(others)
                return False
        elif now >= self._next_look:
            self._look(store)
        elif now >= self._wait_notices.first_due(now):
            self._wait_notices.tell(store, now)
        return True

    def _wait(self) -> None:
        """Wait until something is due, or there may be something to say."""
        now = time.monotonic()
        self._hasten_first_beat(now)
        # Asked again after all that was done: a round may have begun, or be over.
        if self._context.signals.wake.wait(max(0.0, self._find_next_due(now) - now)):
            # Cleared before facts are looked for, so that none is overlooked.
            self._context.signals.wake.clear()

    def _hasten_first_beat(self, now: float) -> None:
        if self._is_founding and self._has_founded:
            self._is_founding = False
            self._next_beat = min(self._next_beat, now + self._first_pause())

    def _find_next_due(self, now: float) -> float:
        return min(self._next_beat, self._next_look, self._wait_notices.first_due(now))

    @property
    def _has_founded(self) -> bool:
        """Whether the job has a round, or this node coordinates it: others look at this node's beats then."""
        member_driver = self._context.sender.member_driver
        if member_driver is None:
            return False
        return member_driver.member.job.known_round > 0 or member_driver.member.coordination.is_coordinator

    @property
    def _needs_store(self) -> bool:
        """Whether there is something to say or to do; what else the member wants of the store the log reader does."""
        context, now = self._context, time.monotonic()
        has_unsent = context.has_unsent or context.status_answers.has_unsent
        is_urgent = self._retry_deadline.is_tried or has_unsent or context.signals.has_lost_log
        return is_urgent or context.signals.failover_to is not None or now >= self._find_next_due(now)

    def _give_connection(self) -> None:
        """Let the log reader take over the connection, once all that this node had to say first was confirmed.

        The node that serves the store keeps its own and opens another one: later there may be no room for it, and this
        is the node that must not fall silent then.
        """
        if self._is_followed or self._context.has_unsent or self._context.sender.member_driver is None:
            return
        self._is_followed = True
        self._has_given = not self._context.backend.is_host
        self._follow(self._connection.give() if self._has_given else None)

    def _is_replaced(self, store: JobStore) -> bool:
        """Whether it is another store since the last connection was given away."""
        has_given, self._has_given = self._has_given, False
        return has_given and store.get([STORE_ID])[0] != self._context.sender.store_id

    def _identify_store(self, store: JobStore) -> None:
        self._has_given = False
        store_id, head, start = store.get([STORE_ID, job_keys.HEAD, job_keys.LOG_START])
        is_new = store_id is None
        store_id = self._check_store_id(store, store_id)
        if store_id is None:
            return
        recovered = self._retry_deadline.recovered()
        if recovered:
            self._context.events.deliver(Notice(recovered))
            if self._context.shows_waiting:
                self._context.events.deliver(Waiting(None, is_for_nodes=False))
        context, member_driver = self._context, self._context.sender.member_driver
        if context.backend.notice:
            context.events.deliver(Notice(context.backend.notice))
            context.backend.notice = ""
        if member_driver is None:
            context.sender.store_id = store_id
            wait = (context.config.first_leases - 1) * context.config.lease
            self._next_beat = time.monotonic() + wait + self._first_pause()
            self._is_founding = True
            # Where the id was written only now, the head may be too old.
            self._begin(None if is_new else make_head(store, head, start))
            return
        if store_id == context.sender.store_id:
            member_driver.feed(node_messages.Interrupted())
            member_driver.feed(node_messages.Reconnected())
        else:
            self._change_store(member_driver, store_id)
        self._next_beat = 0.0

    def _first_pause(self) -> float:
        """Return seconds to the first beat: one to two intervals, and well before a lease is over."""
        config = self._context.config
        return min(config.keep_alive_interval, config.lease / _FIRST_BEAT) * (1 + self._draw())

    def _check_store_id(self, store: JobStore, store_id: bytes | None) -> bytes | None:
        """Return the store's id, or None after telling the agent that its token is not the job's."""
        name = self._context.backend.name
        try:
            if store_id is None:
                # Random, not this node's name: the same node may be the first in two stores one after another.
                store_id = store.create(STORE_ID, _ID_PREFIX + os.urandom(8).hex().encode())
        except StoreForgedError:
            self._context.events.deliver(Refused(f"the job at {name} has another token than this node, or none"))
            return None
        if not store_id.startswith(_ID_PREFIX):
            self._context.events.deliver(Refused(f"the job at {name} has a token, and this node was given none"))
            return None
        return store_id

    def _change_store(self, member_driver: MemberDriver, store_id: bytes) -> None:
        """Say all again: this store knows nothing of the job."""
        context = self._context
        member_driver.change_store(store_id, serves_store=context.backend.is_host)
        self._writer = HeartbeatWriter(context.node)
        # Last, so that nobody takes the new store for the old one.
        context.sender.store_id = store_id
        for connection in tuple(context.connections):
            if connection is not self._connection:
                connection.interrupt()
        self._is_followed = True
        self._follow(None)

    def _resend_all(self, store: JobStore, member_driver: MemberDriver) -> None:
        """Go on in a store that was restored from a backup: nobody decides again what has been decided since."""
        known = member_driver.member.log
        if known.next_slot is not None and known.term:
            raise_start(store, messages.LogStart(known.next_slot, known.term))
        name = self._context.backend.name
        self._context.events.deliver(
            Notice(f"the store at {name} was restored from a backup: this node says again where it stands")
        )
        member_driver.feed(node_messages.Interrupted())
        member_driver.feed(node_messages.Reconnected())
        member_driver.feed(node_messages.HeartbeatWritten(was_dropped=True))

    def _send_facts(self, store: JobStore) -> None:
        """Append what was not confirmed, and do the member's tasks."""
        member_driver = self._context.sender.member_driver
        if member_driver is None:
            return
        context = self._context
        context.death_proofs.tell(store, context.sender.store_id, member_driver.member.job.known_round)
        while (fact := member_driver.next_fact) is not None:
            context.death_proofs.note_fact(fact, context.sender.store_id)
            store.append(job_keys.FACTS, messages.to_json(fact))
            member_driver.feed(node_messages.Appended(fact.sequence))
        if self._context.events.is_over.is_set() and not self._context.sender.has_passed_exit_barrier:
            pass_exit_barrier(store, self._context.node)
            self._context.sender.has_passed_exit_barrier = True
        if not context.sender.has_passed_exit_barrier:
            context.status_answers.send(store)
        member_driver.run_store_tasks(store, self._context.sender.store_id)
        self._context.signals.has_sent.set()

    def _beat(self, store: JobStore, now: float) -> None:
        context, member_driver = self._context, self._context.sender.member_driver
        interval = context.config.keep_alive_interval
        self._next_beat = now + interval
        if context.sender.has_passed_exit_barrier:
            return  # nobody watches any more, and the job may be removed at any moment: nothing must come after that
        state = None if member_driver is None else member_driver.member.state
        # A node that was dropped before its first beat reads so in the log, unless it waited all the time.
        is_unknown = self._writer.is_first and state == WAITING
        was_dropped = self._writer.write(store, comes_back=state != LEAVING) or is_unknown
        context.sender.last_heartbeat_at, context.signals.fenced_for = now, 0.0
        if member_driver is None:
            return
        member_driver.feed(node_messages.HeartbeatWritten(was_dropped))
        if member_driver.member.state != RUNNING:
            context.death_proofs.look()
        self._look(store, is_beating=True)
        self._wait_notices.tell(store, now)

    @property
    def _next_look(self) -> float:
        member_driver = self._context.sender.member_driver
        place = None if member_driver is None else member_driver.member.round.place
        formed_at = self._context.signals.formed_at
        if place is None or formed_at is None or self._context.sender.has_passed_exit_barrier:
            return math.inf  # after the end the store may go at any moment, and nobody is to take its place
        pause = max(self._context.config.keep_alive_interval / _LOOKS, place.group_world_size / _ALL_LOOKS)
        # A look when a round is formed would be one more question of all nodes at once, and tell nothing new.
        return max(self._last_look, formed_at) + pause

    def _look(self, store: JobStore, *, is_beating: bool = False) -> None:
        """See how the coordinator is, and in any case that the store answers; do what follows from it.

        With it comes whether somebody asks for this node's state; where that costs an exchange, only at a heartbeat.
        """
        member_driver = self._context.sender.member_driver
        if member_driver is None:
            return
        self._last_look = now = time.monotonic()
        watched = member_driver.member.watched
        if self._last_read is not None and now - self._last_read > 2 * self._context.config.keep_alive_interval:
            # We were stopped, or the machine slept: what did not change meanwhile says nothing.
            member_driver.feed(node_messages.Interrupted())
        read = watched or self._context.node
        if store.reads_beside or is_beating:
            beats, asked = self._beats.read_beside(store, [read], job_keys.STATUS_REQUEST)
            self._context.status_answers.note_request(asked)
        else:
            beats = self._beats.read(store, [read])
        value = beats[read]
        self._last_read = time.monotonic()
        if watched:
            member_driver.feed(node_messages.CoordinatorHeartbeatRead(watched, value))
        member_driver.run_store_tasks(store, self._context.sender.store_id)

    # --- it doesn't ----------------------------------------------------------------------------------------------
    def _refuse(self, error: StoreTokenError, asked_at: float) -> bool:
        """Tell the agent that its token is not the job's; returns whether there is to be another attempt."""
        if self._context.sender.member_driver is not None:
            return self._retry(error, asked_at)  # this node is in the job: what listens there now is another one's
        self._context.events.deliver(Refused(str(error)))
        return False

    def _retry(self, error: StoreError, asked_at: float) -> bool:
        """Wait a moment before the next attempt; returns whether there is to be one."""
        news = self._retry_deadline.failed(error, asked_at)
        if isinstance(news, Lost) and self._fail_over(news):
            return True
        if news is not None:
            self._context.events.deliver(news)
        if isinstance(news, Lost):
            return False
        self._connection.pause(error)
        return not self._context.signals.closing.is_set()

    # --- it goes on elsewhere ------------------------------------------------------------------------------------
    def _fail_over(self, lost: Lost) -> bool:
        """Go on at the next endpoint, if there is one; returns whether."""
        context = self._context
        if context.sender.store_id is None or context.signals.closing.is_set() or not context.backend.advance():
            return False
        context.events.deliver(Notice(f"{lost.detail}; going on at {context.backend.name}"))
        return self._use_endpoint()

    def _move(self, endpoint: str) -> None:
        """Follow the host that has said where the store goes on."""
        context = self._context
        context.signals.failover_to = None
        before = context.backend.name
        if context.signals.closing.is_set() or context.signals.is_leaving or not context.backend.advance(endpoint):
            return
        self._connection.drop()
        context.events.deliver(
            Notice(f"the node that serves the store at {before} leaves; going on at {context.backend.name}")
        )
        self._use_endpoint()

    def _rejoin(self, endpoint: str) -> None:
        """Leave a store that nobody else uses for the one where the job has gone on."""
        if self._context.backend.advance(endpoint):
            self._connection.drop()
            self._context.events.deliver(Notice(f"the job has gone on at {endpoint}: joining it again"))
            self._use_endpoint()

    def _use_endpoint(self) -> bool:
        """Serve the store here if it is this node's turn, and wait for it anew."""
        self._retry_deadline.restart()
        for connection in tuple(self._context.connections):
            connection.interrupt()
        try:
            self._context.backend.prepare()
        except OSError as error:
            self._context.events.deliver(Lost("store_lost", f"the rendezvous store can't be served here: {error}"))
            return False
        return True
