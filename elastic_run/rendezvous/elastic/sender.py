"""The sender thread: it opens the store, writes this node's facts, and writes and reads heartbeats.

Rules
- The thread wakes when there is a fact to write, and when a heartbeat is due (`heartbeats`); otherwise it waits.
- The sender alone decides whether the store answers. It opens a broken connection again: silently for one lease, then
  with a line from time to time. After a stated time it gives the store up and tells the agent `Lost`. A store that is
  read, but takes no writes, does not answer: its disk is full, or the network loses large packets.
- A thousand nodes may come at once, so all that a node reads before its first fact is one request. After that fact the
  log reader begins, which shares this thread's connection. The node's first heartbeat waits until that rush is over.
- The log reader wakes this thread when its connection has broken: until the next heartbeat, the sender would not notice
  that the store is gone.
- The first agent in a store writes the store's id. If the id is another one after an outage, the store is another,
  empty store, and the sender writes all that the job still needs again. The same holds for a store that was restored
  from a backup: no other thread uses it before the sender has seen to its log.
"""

from __future__ import annotations

import os
import time

from elastic_run.contract import NO_RUN_ID
from elastic_run.core.node import messages as node_messages
from elastic_run.core.node.messages import Refused
from elastic_run.core.protocol import job_keys, messages
from elastic_run.rendezvous.elastic.backend.tcp import TcpBackend
from elastic_run.rendezvous.elastic.decision_log import make_head, restart_log
from elastic_run.rendezvous.elastic.exit_barrier import pass_exit_barrier
from elastic_run.rendezvous.elastic.heartbeats import LOOKS_OF_ALL_NODES, NodeHeartbeats
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

    from elastic_run.rendezvous.elastic.backend.base import Backend
    from elastic_run.rendezvous.elastic.context import SessionContext
    from elastic_run.rendezvous.elastic.member_driver import MemberDriver
    from elastic_run.rendezvous.elastic.step_check import StepCheck
    from elastic_run.rendezvous.elastic.store_connection import StoreConnection
    from elastic_run.store.jobstore.api import JobStore

__all__ = ["Sender"]

_ID_PREFIX = b"store "


class Sender:
    """Writes the facts of one node, and keeps its place in the job's store.

    Args:
        context: The data that the session's threads share.
        begin: Called once, when the store was reached, to make the member; its argument is the position of the log, or
            None if that is not known.
        follow: Called once, with this thread's connection, when the store has confirmed the first facts: the log reader
            begins.
    """

    def __init__(
        self,
        context: SessionContext,
        begin: Callable[[node_messages.HeadRead | None], None],
        follow: Callable[[StoreConnection], None],
    ) -> None:
        self._context = context
        self._begin = begin
        self._follow = follow
        self._connection = context.make_connection()
        self._is_followed = False
        self._heartbeats = NodeHeartbeats(context, draw_fraction)
        self._wait_notices = WaitNotices(
            state=context.member_state,
            doubt=lambda is_alone: (
                context.backend.find_doubts(context.node_info.host) if is_alone else context.backend.find_visitor()
            ),
            shows_waiting=context.shows_waiting,
            deliver=context.events.deliver,
            spare_hint=_make_spare_hint(context.backend),
            delay=0.0 if context.backend.is_host else draw_fraction() * context.config.min_nodes / LOOKS_OF_ALL_NODES,
        )
        self._step_check = _make_step_check(context)
        self._retry_deadline = RetryDeadline(context)
        self._connection.time_left = lambda: self._retry_deadline.attempt_limit
        self._partition = PartitionRecovery(context)

    @property
    def described_wait(self) -> str:
        """The nodes that are there and those that are missing, in one line; "" if this node waits for no others."""
        return self._wait_notices.described

    def run(self) -> None:
        """Write facts and heartbeats until the session ends."""
        self._retry_deadline.begin()
        try:
            # An unhealthy node comes to say why it goes. If it is to serve the store, no node could read it otherwise.
            if self._context.signals.is_unhealthy or not self._context.signals.is_leaving:
                self._context.backend.prepare()
        except OSError as error:
            self._context.events.deliver(Lost("rendezvous", f"the rendezvous store can't be served here: {error}"))
            return
        while not (self._context.signals.closing.is_set() or self._context.events.is_lost):
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

    # --- the store answers ----------------------------------------------------------------------------------------
    def _turn(self) -> None:
        """Identify a store that was opened just now; then write what is due, and wait."""
        context = self._context
        has_lost_log = context.signals.has_lost_log.is_set()
        context.signals.has_lost_log.clear()
        if context.signals.failovers:
            self._move(context.signals.failovers.popleft())  # without another request to a host that leaves
            return
        store = self._connection.store
        if self._retry_deadline.is_tried or context.sender.store_id is None or (has_lost_log and self._is_other(store)):
            self._identify_store(store)
            if context.events.is_over.is_set() and context.sender.member_driver is None:
                context.signals.closing.wait()
                return
        if store.restores != context.sender.restores and context.sender.member_driver is not None:
            self._go_on_in_restored_store(store, context.sender.member_driver)
        self._send_facts(store)
        if self._watch_job(store):
            self._note_recovery()
            self._begin_following()
            self._wait()

    def _watch_job(self, store: JobStore) -> bool:
        """Write or read a heartbeat, or tell who is missing, as due; return whether this node keeps this store."""
        context, now = self._context, time.monotonic()
        if now >= self._heartbeats.next_write:
            self._heartbeats.write(store, now)
            context.backend.leave_id(context.node_info.host)
            if context.sender.member_driver is not None and not context.sender.has_passed_exit_barrier:
                self._wait_notices.tell(store, now)
            others = self._partition.find_others(store)
            if others is not None:
                self._rejoin(others)
                return False
        elif now >= self._heartbeats.next_look:
            self._heartbeats.look(store)
        elif now >= self._wait_notices.first_due(now):
            self._wait_notices.tell(store, now)
        elif self._step_check is not None and now >= self._step_check.next_look:
            contradiction = self._step_check.look(now)
            if contradiction:
                context.events.deliver(Refused(contradiction))
        return True

    def _wait(self) -> None:
        """Wait until something is due, or another thread has something to write."""
        now = time.monotonic()
        self._heartbeats.hasten_first(now)
        # Asked again after all that was done: a round may have begun, or be over.
        if self._context.signals.wake.wait(max(0.0, self._find_next_due(now) - now)):
            # Cleared before facts are looked for, so that none is overlooked.
            self._context.signals.wake.clear()

    def _find_next_due(self, now: float) -> float:
        heartbeats = self._heartbeats
        looks = heartbeats.next_look
        if self._step_check is not None:
            looks = min(looks, self._step_check.next_look)
        return min(heartbeats.next_write, looks, self._wait_notices.first_due(now))

    def _note_recovery(self) -> None:
        """Note that the store answers, and tell the user if it did not before: it has taken a fact or a heartbeat."""
        if not self._retry_deadline.is_tried:
            return
        recovered = self._retry_deadline.recovered()
        if recovered:
            self._context.events.deliver(Notice(recovered))
            if self._context.shows_waiting:
                self._context.events.deliver(Waiting(None, is_for_nodes=False))

    def _begin_following(self) -> None:
        """Let the log reader begin, once the store has confirmed this node's first facts."""
        if not (self._is_followed or self._context.has_unsent or self._context.sender.member_driver is None):
            self._is_followed = True
            self._follow(self._connection)

    def _is_other(self, store: JobStore) -> bool:
        """Whether another store answers than before; fails where the store is gone."""
        return store.get([STORE_ID])[0] != self._context.sender.store_id

    def _identify_store(self, store: JobStore) -> None:
        store_id, head, start = store.get([STORE_ID, job_keys.HEAD, job_keys.LOG_START])
        is_new = store_id is None
        store_id = self._check_store_id(store, store_id)
        if store_id is None:
            return
        context, member_driver = self._context, self._context.sender.member_driver
        if context.backend.notice:
            context.events.deliver(Notice(context.backend.notice))
            context.backend.notice = ""
        if member_driver is None:
            context.sender.store_id, context.sender.restores = store_id, store.restores
            self._heartbeats.begin(time.monotonic())
            self._connection.identify(store_id)
            # Where the id was written only now, the head may be too old.
            self._begin(None if is_new else make_head(store, head, start))
            return
        if store_id == context.sender.store_id:
            member_driver.feed(node_messages.Interrupted())
            member_driver.feed(node_messages.Reconnected())
        else:
            self._change_store(member_driver, store_id)
        self._connection.identify(store_id)
        self._heartbeats.next_write = 0.0

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
        """Write all facts that still count again: this store knows nothing of the job."""
        context = self._context
        member_driver.change_store(store_id, serves_store=context.backend.is_host)
        self._heartbeats.forget_store()
        # Last, so that nobody takes the new store for the old one.
        context.sender.store_id = store_id
        for connection in tuple(context.connections):
            if connection is not self._connection:
                connection.interrupt()

    def _go_on_in_restored_store(self, store: JobStore, member_driver: MemberDriver) -> None:
        """Send this node's state again; the decisions that it has read must not be made again."""
        restores = store.restores
        start = restart_log(store, member_driver.member.log)
        name = self._context.backend.name
        self._context.events.deliver(
            Notice(f"the store at {name} was restored from a backup: this node sends its state again")
        )
        member_driver.feed(node_messages.StoreRestored(start))
        # Last, so that no other thread uses the store before.
        self._context.sender.restores = restores

    def _send_facts(self, store: JobStore) -> None:
        """Append the facts that are not confirmed, and do the member's tasks."""
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

    # --- the store does not answer --------------------------------------------------------------------------------
    def _refuse(self, error: StoreTokenError, asked_at: float) -> bool:
        """Tell the agent that its token is not the job's; return whether to try again."""
        if self._context.sender.member_driver is not None:
            return self._retry(error, asked_at)  # this node is in the job, so another job's store listens there now
        self._context.events.deliver(Refused(str(error)))
        return False

    def _retry(self, error: StoreError, asked_at: float) -> bool:
        """Wait before the next attempt; return whether to try again."""
        news = self._retry_deadline.failed(error, asked_at)
        if isinstance(news, Lost) and self._fail_over(news):
            return True
        if news is not None:
            self._context.events.deliver(news)
        if isinstance(news, Lost):
            return False
        self._connection.pause(error)
        return not self._context.signals.closing.is_set()

    # --- the job goes on at another endpoint ----------------------------------------------------------------------
    def _fail_over(self, lost: Lost) -> bool:
        """Go on at the next endpoint; return whether there is one."""
        context = self._context
        if context.sender.store_id is None or context.signals.closing.is_set() or not context.backend.advance():
            return False
        context.events.deliver(Notice(f"{lost.detail}; going on at {context.backend.name}"))
        return self._use_endpoint()

    def _move(self, endpoint: str) -> None:
        """Go to the endpoint that the store's host named before it left."""
        context = self._context
        before = context.backend.name
        if context.signals.closing.is_set() or context.signals.is_leaving or not context.backend.advance(endpoint):
            return
        self._connection.drop()
        context.events.deliver(
            Notice(f"the node that serves the store at {before} leaves; going on at {context.backend.name}")
        )
        self._use_endpoint()

    def _rejoin(self, endpoint: str) -> None:
        """Leave a store that no other node uses, for the store where the job has gone on."""
        if self._context.backend.advance(endpoint):
            self._connection.drop()
            self._context.events.deliver(Notice(f"the job has gone on at {endpoint}: joining it again"))
            self._use_endpoint()

    def _use_endpoint(self) -> bool:
        """Serve the store if the new endpoint is this node's, and try the endpoint for the full time."""
        self._retry_deadline.restart()
        for connection in tuple(self._context.connections):
            connection.interrupt()
        try:
            self._context.backend.prepare()
        except OSError as error:
            self._context.events.deliver(Lost("store_lost", f"the rendezvous store can't be served here: {error}"))
            return False
        return True


def _make_spare_hint(backend: Backend) -> str:
    """Return a hint for a node that comes to a running job: without an id, another job may have the same endpoint."""
    if backend.run_id != NO_RUN_ID:
        return ""
    # A c10d store ends with the job whose node serves it, so an id of its own would not be enough there.
    flag = "--rdzv-endpoint" if backend.dies_with_host else "--rdzv-id"
    return f"if this is another job, give it another {flag}"


def _make_step_check(context: SessionContext) -> StepCheck | None:
    launch_step = context.node_config.launch_step
    if launch_step is None or not isinstance(context.backend, TcpBackend):
        return None
    from elastic_run.rendezvous.elastic.step_check import StepCheck  # noqa: PLC0415 - only in a step of Slurm

    return StepCheck(context, context.backend, launch_step, draw_fraction())
