"""The coordinator's thread, on the node that was elected: reads facts and heartbeats, writes decisions.

What is decided is `core.job.coordinator`'s; here are its reads, its writes and its clock.

Rules
- Heartbeats are read several times in a keep-alive interval, so that a silent node is seen soon after the end of its
  lease.
- Heartbeats age only while they can be read: after an outage of its own, or when this process was stopped, all leases
  start anew.
- While many nodes join, some more come before the next facts are read: a batch costs about the same whatever its size.
- A slot is created after its documents. When the connection breaks in between, all of it is done again over a new one:
  the same proposal, so that nothing is decided twice.
"""

from __future__ import annotations

import json
import logging
import os
import time

from elastic_run.core.job import coordinator as core
from elastic_run.core.job import coordinator_slots as slots
from elastic_run.core.job.state import GATHERING
from elastic_run.core.node import messages as node_messages
from elastic_run.core.protocol import job_keys, messages
from elastic_run.core.protocol.log_start import is_trimmed
from elastic_run.rendezvous.elastic import decision_log
from elastic_run.rendezvous.elastic.exit_barrier import EXIT_BARRIER_NODES
from elastic_run.rendezvous.elastic.heartbeats import HeartbeatReader
from elastic_run.rendezvous.coordination.left_out_nodes import list_left_out
from elastic_run.report.wait_texts import FIRST
from elastic_run.store.errors import REPLACED, StoreAccessError, StoreError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from typing import Any

    from elastic_run.core.job.coordinator_state import Cleanup, Coordinator, Proposal
    from elastic_run.core.node.messages import Coordinate
    from elastic_run.rendezvous.elastic.context import SessionContext
    from elastic_run.store.jobstore.api import JobStore

__all__ = ["CoordinatorThread"]

#: Looks at the heartbeats in a keep-alive interval.
_LOOKS = 4
#: Seconds to wait for facts when nothing else is due.
_LONGEST_WAIT = 30.0
#: From so many nodes on, seconds between two reads of facts while the nodes gather: at least, and for each node.
_CROWD = 16
_BATCH_PAUSE = 0.005
_BATCH_PAUSE_PER_NODE = 5e-6

_log = logging.getLogger(__name__)


class CoordinatorThread:
    """One term of this node as the coordinator.

    Args:
        context: What the session's threads share.
        command: What the member said: the term, and where its state is.

    Attributes:
        has_ended: Whether this thread has ended the job.
    """

    def __init__(self, context: SessionContext, command: Coordinate) -> None:
        self.has_ended = False
        self._context = context
        self._command = command
        self._store_id = store_id = context.sender.store_id
        self._connection = context.make_connection(lambda: store_id)
        self._coordinator: Coordinator | None = None
        self._next_look = 0.0
        self._has_listened = False
        self._has_read_facts = False
        self._next_documents = 0.0
        self._last_look = time.monotonic()
        self._complaint = ""
        self._heartbeats = HeartbeatReader()
        self._known: set[str] | None = None  # nodes that may have heartbeats in the store, None before the first look
        self._is_stopped = False
        self._is_resigning = False
        # While the last entry of the term is written and garbage is removed: a reader of that entry stops this thread.
        self._is_final_decision = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin."""
        self._thread = self._context.spawn(f"coordinator of term {self._command.term}", self._run)

    def stop(self) -> None:
        """End without a word: another node coordinates, or the job is over."""
        self._is_stopped = True
        if not self._is_final_decision:
            self._connection.interrupt()

    def resign(self) -> None:
        """End the term, once all that this node has sent was taken in."""
        self._is_resigning = True

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None:
            self._thread.join(timeout)

    def list_left_out(self) -> list[dict[str, Any]]:
        """Return the nodes that the job goes on without; [] once this term is over. May be called from any thread."""
        coordinator = self._coordinator
        if coordinator is None or self._is_over:
            return []
        return list_left_out(coordinator.job, time.monotonic())

    # --- the thread ----------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while not self._is_over:
            try:
                self._turn(self._connection.store)
            except StoreAccessError as error:
                # The sender, which is refused as well, tells the agent.
                _log.warning("elastic-run: the coordinator of term %d stops: %s", self._command.term, error)
                break
            except StoreError as error:
                self._connection.drop()
                self._is_final_decision = False
                if not self._is_over:
                    if getattr(error, "reason", None) == REPLACED:
                        self._context.signals.check_store()
                    self._connection.pause(error)
                    self._restart_leases()
        self._connection.drop()
        self._context.connections.remove(self._connection)
        if (
            self._coordinator is not None
            and self._coordinator.is_superseded
            and self._context.sender.member_driver is not None
        ):
            self._context.sender.member_driver.feed_from(
                self._store_id, node_messages.TermEnded(self._coordinator.term)
            )

    @property
    def _is_over(self) -> bool:
        is_over = self._coordinator is not None and self._coordinator.is_over
        return is_over or self._is_stopped or self._context.events.is_lost or self._context.signals.closing.is_set()

    def _restart_leases(self) -> None:
        now = self._last_look = time.monotonic()
        if self._coordinator is not None:
            self._coordinator = core.interrupted(self._coordinator, now)

    def _turn(self, store: JobStore) -> None:
        """Write the pending decision. Then read the heartbeats if that is due, or wait for facts."""
        self._coordinator = coordinator = self._coordinator or self._start_term(store)
        now = time.monotonic()
        proposal = slots.propose(coordinator, now)
        if coordinator.wants is not None and proposal is None:
            copy = decision_log.get_document(store, job_keys.copy_key(coordinator.wants))
            self._coordinator = core.take_copy(coordinator, copy, now=now, jitter=_jitter())
        elif proposal is not None:
            self._coordinator = self._write(store, coordinator, proposal)
        elif (cleanup := slots.unfinished_cleanup(coordinator)) is not None:
            self._coordinator = self._clean_up(store, coordinator, cleanup)
        elif now >= self._next_look and self._has_listened:
            self._coordinator = self._look(store, coordinator, now)
        else:
            self._coordinator = self._listen(store, coordinator, now)
        self._complain(self._coordinator)

    def _start_term(self, store: JobStore) -> Coordinator:
        command = self._command
        state, key = None, ""
        if command.state_slot >= 0:
            key = job_keys.state_key(command.state_slot, command.state_term)
            # Nothing where something should be: a stranger has deleted it, or its signature is wrong.
            state = decision_log.get_document(store, key) or b""
        coordinator = core.start_term(
            self._context.node,
            term=command.term,
            slot=command.slot,
            state=state,
            now=time.monotonic(),
            jitter=_jitter(),
            is_successor=self._context.backend.rank > 0,
            known_round=command.known_round,
            newest_round=command.newest_round,
            known_restarts=command.known_restarts,
            silent=command.silent,
            last_heartbeat=command.last_heartbeat,
            store_id="" if self._store_id is None else self._store_id.decode(),
        )
        if core.has_lost_state(coordinator):
            backup = decision_log.read_newest_state(store, command.slot)
            coordinator = core.take_backup(coordinator, backup, time.monotonic())
            entries = [b""]
            while entries:
                entries, position = store.read(job_keys.FACTS, coordinator.position, 0.0)
                log_start = decision_log.get_document(store, job_keys.LOG_START)
                coordinator = core.skip(coordinator, entries, position, log_start)
            self._complaint = coordinator.complaint
            if self._complaint:
                _log.warning(
                    "elastic-run: %s (at %s): all nodes are asked for their state, and the job goes on",
                    self._complaint,
                    key,
                )
        return coordinator

    def _write(self, store: JobStore, coordinator: Coordinator, proposal: Proposal) -> Coordinator:
        documents = dict(proposal.documents)
        decision = messages.read_decision(proposal.entry)
        if isinstance(decision, messages.End):
            documents[EXIT_BARRIER_NODES] = json.dumps(list(coordinator.watched)).encode()
            self.has_ended = True
        store.write(documents)
        self._is_final_decision = isinstance(decision, messages.End | messages.Resign | messages.Failover)
        entry = decision_log.create_entry(store, proposal.slot, decision)
        winner, log_start = None, None
        if isinstance(entry, node_messages.EntryRead):
            winner = entry.value
        else:
            log_start = decision_log.get_document(store, job_keys.LOG_START)
        coordinator, cleanup = slots.settle(
            coordinator, winner, now=time.monotonic(), jitter=_jitter(), log_start=log_start
        )
        # Settled, whatever happens to the connection now: the rest may come later.
        self._coordinator = coordinator
        coordinator = self._clean_up(store, coordinator, cleanup)
        self._is_final_decision = False
        return coordinator

    def _clean_up(self, store: JobStore, coordinator: Coordinator, cleanup: Cleanup) -> Coordinator:
        """Write and delete what follows a decision; where the connection breaks, the next turn does it again."""
        if cleanup.documents:
            store.write(cleanup.documents)
        expected = {**cleanup.expected}
        is_raised = True
        if cleanup.log_start is not None:
            there = expected[job_keys.LOG_START] = decision_log.raise_start(store, cleanup.log_start)
            # Otherwise the log was begun anew in a later term: this term is over, as its node is about to read.
            is_raised = is_trimmed(cleanup.log_start.slot - 1, there)
        if cleanup.deleted and is_raised:
            store.delete_where(cleanup.deleted, expected)
        if cleanup.trimmed is not None and is_raised:
            store.trim(job_keys.FACTS, cleanup.trimmed)
        self._coordinator = slots.garbage_deleted(coordinator)
        return self._coordinator

    def _look(self, store: JobStore, coordinator: Coordinator, now: float) -> Coordinator:
        """Read the heartbeats of all nodes; from time to time write which nodes are there."""
        interval = self._context.config.keep_alive_interval
        if now - self._last_look > 2 * interval:
            coordinator = core.interrupted(coordinator, now)
        watched = coordinator.watched
        heartbeats = self._heartbeats.read(store, watched)
        now = self._last_look = time.monotonic()
        look_pause, documents_pause = self._find_pauses(coordinator)
        self._next_look = now + look_pause
        self._forget_heartbeats(store, coordinator)
        coordinator = core.observe(coordinator, heartbeats, now=now, jitter=_jitter())
        if now >= self._next_documents:
            self._next_documents = now + documents_pause
            there = decision_log.read_head(store)
            coordinator = core.check(coordinator, there.head, there.log_start)
            if not coordinator.is_over:
                store.write(core.make_documents(coordinator, now))
        return coordinator

    def _find_pauses(self, coordinator: Coordinator) -> tuple[float, float]:
        """Return the seconds until the next look, and until the documents are written again.

        Nodes that wait are to know soon who is there, also in a job with a long keep-alive interval.
        """
        interval = self._context.config.keep_alive_interval
        if coordinator.job.phase != GATHERING:
            return interval / _LOOKS, interval
        return min(interval, FIRST) / _LOOKS, min(interval, FIRST) if coordinator.job.nodes else 0.0

    def _forget_heartbeats(self, store: JobStore, coordinator: Coordinator) -> None:
        """Remove the heartbeats of nodes that are gone. Some stores never expire heartbeats by themselves.

        Again with each change for those that are still remembered: a node sends heartbeats until its workers have
        ended. The first time in any case: the coordinator before may have ended before it removed them. A node that is
        about to be refused keeps its heartbeat: it may be the coordinator, and then no other node is to claim.
        """
        watched = {*coordinator.watched, *(refusal.node for refusal in coordinator.job.refusals)}
        gone = {*(self._known or ()), *coordinator.job.gone} - watched if self._known != watched else set()
        if gone:
            store.forget_heartbeats(sorted(gone))
        self._known = watched

    def _listen(self, store: JobStore, coordinator: Coordinator, now: float) -> Coordinator:
        """Wait for facts, until something is due."""
        until = min(self._next_look, now + _LONGEST_WAIT)
        if coordinator.wait_until is not None:
            until = min(until, coordinator.wait_until)
        # Before it resigns it takes in what this node has said, and decides what follows from it.
        is_last = self._is_resigning and self._has_sent_all
        if not is_last:
            self._await_batch(coordinator)
        timeout = 0.0 if is_last else max(0.0, until - now)
        entries, position = store.read(job_keys.FACTS, coordinator.position, timeout)
        self._has_read_facts = bool(entries)
        # A node that has said that it goes is not to be found silent instead.
        self._has_listened = True
        if is_last and not entries:
            return core.resign(coordinator)
        return core.receive(coordinator, entries, position, now=time.monotonic(), jitter=_jitter())

    def _await_batch(self, coordinator: Coordinator) -> None:
        """Let more facts come, if many nodes gather and facts came just now; the first of a rush is read at once."""
        nodes = len(coordinator.job.nodes)
        if self._has_read_facts and coordinator.job.phase == GATHERING and nodes >= _CROWD:
            self._context.signals.closing.wait(max(_BATCH_PAUSE, nodes * _BATCH_PAUSE_PER_NODE))

    def _complain(self, coordinator: Coordinator) -> None:
        """Tell of garbage, once: whoever writes garbage may write other garbage for ever."""
        if coordinator.complaint and not self._complaint:
            self._complaint = coordinator.complaint
            _log.warning("elastic-run: unreadable messages of nodes are ignored from now on: %s", self._complaint)

    @property
    def _has_sent_all(self) -> bool:
        member_driver = self._context.sender.member_driver
        return member_driver is None or member_driver.next_fact is None


def _jitter() -> float:
    return int.from_bytes(os.urandom(2), "big") / 65536
