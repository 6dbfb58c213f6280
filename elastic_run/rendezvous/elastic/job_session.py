"""The session of one agent: puts the threads together, and stands between them and the agent.

From `start` to `close`: the sender opens the store, makes the member driver and says the node's first facts; then the
log reader follows the log; while this node is the coordinator it has a coordinator thread as well. The member's
commands for the agent are delivered from here.
"""

# ruff: noqa: D102 - Session says what the methods promise
from __future__ import annotations

import logging
import threading
import time

from elastic_run.core.node import machine as member
from elastic_run.core.node import messages as node_messages
from elastic_run.core.protocol import messages
from elastic_run.core.protocol.outcomes import EXCLUDED, UNHEALTHY
from elastic_run.records import replace
from elastic_run.rendezvous.elastic import exit_barrier
from elastic_run.rendezvous.addresses import find_listening
from elastic_run.rendezvous.elastic.log_reader import LogReader
from elastic_run.rendezvous.elastic.member_driver import MemberDriver
from elastic_run.rendezvous.elastic.node_death.proofs import find_notice_limit
from elastic_run.rendezvous.elastic.round_admission import RoundAdmission
from elastic_run.rendezvous.elastic.sender import Sender
from elastic_run.rendezvous.elastic.state_copy import StateCopy
from elastic_run.rendezvous.elastic.status_exchange import gather
from elastic_run.rendezvous.session import Lost, Notice, Session
from elastic_run.store.errors import StoreError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.rendezvous.elastic.context import SessionContext
    from elastic_run.rendezvous.elastic.coordinator_thread import CoordinatorThread
    from elastic_run.rendezvous.elastic.store_connection import StoreConnection
    from elastic_run.rendezvous.session import Document, SessionEvent

__all__ = ["JobSession"]

_log = logging.getLogger(__name__)

_WILDCARDS = ("", "0.0.0.0", "::")  # noqa: S104 - compared, not bound
#: Seconds for the threads to end once their connections were closed; where this node was told to go.
_WAIT_LIMIT = 5.0
_MOMENT = 0.2
#: Seconds for a node that was told to go to say so, and to end its term.
_LEAVE_TIME = 1.0
#: The same for an unhealthy node whose store is not there yet, or that serves the store: nodes that come later are to
#: learn its reason.
_LATE_STORE = 30.0
#: The guardian imports it when the agent has died.
_NOTICE_MODULE = "elastic_run.rendezvous.elastic.node_death.notice"
#: Seconds for a name server to say which of this machine's addresses others use.
_LOOK_UP = 3.0


class JobSession(Session):
    """One agent's membership of one job.

    Args:
        context: The data that the session's threads share.
        shares_server: Whether workers and agents share one server.
        describe_join: Says how others join, once the store is there at a host and a port; None where they know.
    """

    def __init__(
        self,
        context: SessionContext,
        *,
        shares_server: bool,
        describe_join: Callable[[str, int], str] | None,
    ) -> None:
        self.node = context.node
        self._context = context
        self._store_address = messages.StoreAddress("", 0)
        self._open_worker_store: Callable[[str], messages.StoreAddress] = lambda _: self._store_address
        self._listening_host = ""
        self._terms: list[CoordinatorThread] = []
        self._sender: Sender | None = None
        self._is_prepared = False
        self._has_begun = threading.Event()
        self._leaving: node_messages.Leaving | None = None
        self._threads: dict[str, threading.Thread] = {}
        self._describe_join = describe_join
        self._has_end = False
        self._is_refused = self._is_excluded = False
        self._unreadable: set[str] = set()
        self._lock = threading.RLock()
        self._admission = RoundAdmission(
            context, feed=self._feed, store_address=self._advertised, shares_server=shares_server
        )

    @property
    def local_addr(self) -> str:
        """The address at which others reach this node, empty until it is known."""
        return self._context.sender.local_addr

    @property
    def listening_host(self) -> str:
        return self._listening_host

    # --- what the agent says -------------------------------------------------------------------------------------
    def start(
        self, open_worker_store: Callable[[str], messages.StoreAddress], deliver: Callable[[SessionEvent], None]
    ) -> None:
        self._open_worker_store = open_worker_store
        context = self._context
        context.events.deliver_to_agent = deliver
        context.death_proofs.say = lambda text: context.events.deliver(Notice(text))
        context.death_proofs.open(context.node)
        self._sender = sender = Sender(context, self._begin, self._follow)
        self._threads["sender"] = context.spawn("sender", sender.run)

    def report_failing(self, round: int, *, is_secondary: bool = False) -> None:  # noqa: A002 - the events' word
        self._feed(node_messages.WorkersFailing(round, is_secondary))

    def report_ready(
        self,
        round: int,  # noqa: A002 - the events' word
        outcome: str,
        *,
        report: Document | None,
        store_address: messages.StoreAddress,
        detail: str = "",
        verdict: str = "",
        ends: messages.NodeEnds | None = None,
    ) -> None:
        self._store_address = store_address
        self._feed(
            node_messages.WorkersGone(
                round,
                outcome,
                self._advertised(),
                report=None if report is None else dict(report),
                verdict=verdict,
                detail=detail,
                ends=ends,
            )
        )

    def leave(self, reason: str, detail: str = "") -> None:
        self._context.signals.is_leaving = True
        self._context.signals.is_unhealthy = reason == UNHEALTHY
        self._leaving = node_messages.Leaving(reason, detail)
        self._feed(self._leaving)

    def _feed(self, event: node_messages.Event) -> None:
        member_driver = self._context.sender.member_driver
        if member_driver is not None:
            member_driver.feed(event)
            self._context.signals.wake.set()

    def _advertised(self) -> messages.StoreAddress:
        host = self._context.sender.local_addr if self._store_address.host in _WILDCARDS else self._store_address.host
        if self.worker_store is not None:
            host = self.worker_store.host  # what the user calls rank 0 on every node
        return replace(self._store_address, host=host)

    # --- what the job says ---------------------------------------------------------------------------------------
    def _begin(self, head: node_messages.HeadRead | None) -> None:
        """Join: the store was reached just now, by the sender's thread, which may have seen where the log stands."""
        context = self._context
        if not context.sender.local_addr:
            context.sender.local_addr = context.backend.find_local_address()
        self._choose_listening_host()
        try:
            self._store_address = self._open_worker_store(self._listening_host)
        except OSError as error:
            context.events.deliver(Lost("rendezvous", f"the workers' store can't be served here: {error}"))
            return
        if self._describe_join is not None and self._leaving is None:
            context.events.deliver(Notice(self._describe_join(context.sender.local_addr, context.backend.port)))
        node_info = replace(context.node_info, serves_store=context.backend.is_host)
        begun = member.begin(
            context.node,
            node_info=node_info,
            config=context.config,
            store_address=self._advertised(),
            now=time.monotonic(),
        )
        context.sender.member_driver = MemberDriver(
            begun,
            perform=self._perform,
            on_facts=context.signals.wake.set,
            copy=StateCopy(context.backend),
            renew_worker_store=self._renew_worker_store,
            store_id=context.sender.store_id,
        )
        if self._leaving is not None:
            # Said while the store was being reached. First, so that no round is formed with this node.
            context.sender.member_driver.feed(self._leaving)
        if head is not None:
            context.sender.member_driver.take_head(head)
        self._has_begun.set()
        if context.node_config.fence_after == "lease":
            from elastic_run.rendezvous.elastic.partition import Fence  # noqa: PLC0415 - imported when asked for

            context.sender.last_heartbeat_at = time.monotonic()
            self._threads["fence"] = context.spawn("fence", Fence(context, context.sender.member_driver).run)

    def _renew_worker_store(self) -> messages.StoreAddress | None:
        """Offer another workers' store: a round may have been formed with the last one in a store that is lost."""
        if not self.offers_store:
            return None
        try:
            self._store_address = self._open_worker_store(self._listening_host)
        except OSError as error:
            self._context.events.deliver(Lost("rendezvous", f"the workers' store can't be served here: {error}"))
            return None
        return self._advertised()

    def _choose_listening_host(self) -> None:
        """Choose where this node's workers' stores listen; told to the user where that is everywhere."""
        context = self._context
        found = find_listening(context.sender.local_addr, _LOOK_UP)
        reason = found.reason
        if len(found.hosts) == 1:
            self._listening_host = found.hosts[0]
        elif found.hosts:
            reason = f"{context.sender.local_addr} has several addresses ({', '.join(found.hosts)})"
        if reason and self.offers_store:
            context.events.deliver(Notice(f"the workers' store listens on all interfaces: {reason}"))

    def _follow(self, connection: StoreConnection) -> None:
        """Follow the log of the store that is the job's, over the sender's connection."""
        member_driver = self._context.sender.member_driver
        if member_driver is not None:
            log_reader = LogReader(self._context, member_driver, connection)
            self._threads["log_reader"] = self._context.spawn("log_reader", log_reader.run)

    def _perform(self, command: node_messages.Command) -> None:
        """Hand on what the member says, to the agent or to the coordinator's thread."""
        context = self._context
        if isinstance(command, node_messages.Formed):
            context.death_proofs.note_round(command.assignment)
            self._admission.announce(command)
            context.signals.formed_at = time.monotonic()
            context.signals.wake.set()  # the sender looks at the coordinator from now on
            if not self._is_prepared:
                self._is_prepared = True
                context.spawn("prepare", _prepare_to_coordinate)
        elif isinstance(command, node_messages.Warned):
            self._admission.warn(command)
        elif isinstance(command, node_messages.Halted):
            if not self._admission.has_withdrawn(command.round):
                context.events.deliver(command)
        elif isinstance(command, node_messages.Refused):
            self._is_refused = True
            self._is_excluded = command.verdict == EXCLUDED
            detail = command.detail + exit_barrier.describe_failover(context)
            context.events.deliver(replace(command, detail=detail))
        elif isinstance(command, node_messages.Ended):
            self._has_end = True
            context.events.deliver(command)
        elif isinstance(command, node_messages.Settled | node_messages.Unreadable):
            self._tell_user(command)
        elif isinstance(command, node_messages.UseStore):
            self._move(command)
        else:
            self._coordinate(command)

    def _tell_user(self, command: node_messages.Settled | node_messages.Unreadable) -> None:
        """Tell the user what this node has found out; that a document of the job is garbage only once."""
        if isinstance(command, node_messages.Settled):
            self._context.events.deliver(Notice(command.detail))
        elif command.key not in self._unreadable:
            self._unreadable.add(command.key)
            where = f"{command.key} at {self._context.backend.name}"
            text = f"{where} can't be read: {command.detail}; the coordinator writes it again"
            self._context.events.deliver(Notice(text))

    def _coordinate(self, command: node_messages.Command) -> None:
        if isinstance(command, node_messages.Coordinate):
            # Only the node that was elected needs it.
            from elastic_run.rendezvous.elastic.coordinator_thread import CoordinatorThread  # noqa: PLC0415

            term = CoordinatorThread(self._context, command)
            del self._terms[:-1]  # those long past have ended, and each holds a state of the whole job
            self._terms.append(term)
            term.start()
        elif isinstance(command, node_messages.StopCoordinating) and self._terms:
            self._terms[-1].stop()
        elif isinstance(command, node_messages.EndTerm) and self._terms:
            self._terms[-1].resign()

    def _move(self, command: node_messages.UseStore) -> None:
        context = self._context
        context.signals.has_failed_over.set()
        if context.signals.is_leaving:
            return
        if command.endpoint:
            context.signals.failovers.append(command.endpoint)
            context.signals.wake.set()
        else:
            context.events.deliver(Lost("store_lost", command.detail))

    # --- the state of all nodes, where somebody asks ----------------------------------------------------------------
    @property
    def has_place(self) -> bool:
        driver = self._context.sender.member_driver
        return driver is not None and driver.member.round.place is not None

    def tell_status(self, document: Document, question: str) -> None:
        self._context.status_answers.add(dict(document), question)

    def gather_status(self, question: str, wait_limit: float, deliver: Callable[[list[dict[str, Any]]], None]) -> None:
        context = self._context

        def ask() -> None:
            connection = context.make_connection(lambda: context.sender.store_id)
            found: list[dict[str, Any]] = []
            try:
                found = gather(connection.store, wait_limit=wait_limit, question=question)
            except StoreError as error:
                _log.debug("elastic-run: the state of other nodes can't be read: %s", error)
            finally:
                connection.drop()
                context.connections.remove(connection)
                deliver(found)

        # Not with `spawn`: whatever goes wrong here is no reason to end the session.
        threading.Thread(target=ask, name="status", daemon=True).start()

    def list_left_out(self) -> list[dict[str, Any]]:
        return self._terms[-1].list_left_out() if self._terms else []

    def describe_wait(self) -> str:
        return "" if self._sender is None else self._sender.described_wait

    # --- the end -------------------------------------------------------------------------------------------------
    def close(self, timeout: float) -> None:
        context = self._context
        with self._lock:
            if context.signals.closing.is_set():
                return
            deadline = time.monotonic() + (_LATE_STORE if context.signals.is_unhealthy else timeout)
            if context.signals.is_leaving:
                self._send_leave(deadline)
            else:
                exit_barrier.wait_sent(context, min(deadline, time.monotonic() + context.config.lease))
            is_going = context.signals.is_leaving or self._is_refused
            if self._has_end and (context.backend.is_host or self._has_ended_the_job):
                exit_barrier.wait_exit_barrier(context, deadline, removes_job=not context.backend.dies_with_host)
            elif context.signals.is_unhealthy and context.backend.is_host and self._is_needed:
                exit_barrier.stay_for_store(context, deadline if self._is_awaited else 0.0)
            elif is_going and context.backend.is_host and not context.events.is_lost:
                exit_barrier.fail_over(context, deadline, is_refused=self._is_refused)
            context.signals.closing.set()
            context.signals.wake.set()
            for connection in tuple(context.connections):
                connection.interrupt()
        # One that just opens a connection can't be woken; a node that was told to go doesn't wait for it.
        joined_by = time.monotonic() + (_MOMENT if context.signals.is_leaving else _WAIT_LIMIT)
        for thread in tuple(self._threads.values()):
            thread.join(max(0.0, joined_by - time.monotonic()))
        for term in self._terms:
            term.join(max(0.0, joined_by - time.monotonic()))
        context.backend.close()
        context.death_proofs.close(is_over=self._has_end or (self._is_refused and not self._is_excluded))

    def _send_leave(self, deadline: float) -> None:
        """Say that this node goes, and end its term, so that nobody has to find out by a lease."""
        if self._context.signals.is_unhealthy:
            # Its user waits for nothing, and the others should know why it does not come: it may not be there yet.
            self._has_begun.wait(deadline - time.monotonic())
        else:
            deadline = min(deadline, time.monotonic() + _LEAVE_TIME)
        exit_barrier.wait_sent(self._context, deadline)
        if self._terms and not self._context.has_unsent:
            self._terms[-1].join(max(0.0, deadline - time.monotonic()))

    @property
    def _is_needed(self) -> bool:
        """Whether no other node can serve the store. Before the first round, a successor may not have started yet."""
        return not self._context.backend.successors or self._is_awaited

    @property
    def _is_awaited(self) -> bool:
        """Whether other nodes may still come to this node's store, to learn why it takes no part."""
        return self._context.signals.formed_at is None and self._describe_join is None

    @property
    def _has_ended_the_job(self) -> bool:
        return bool(self._terms) and self._terms[-1].has_ended

    def death_notice(self) -> dict[str, Any] | None:
        context = self._context
        return {
            **context.backend.describe(),
            "module": _NOTICE_MODULE,
            "node": context.node,
            "job": context.death_proofs.job,
            "record": context.death_proofs.path,
            "seconds": find_notice_limit(context.config.lease),
        }


def _prepare_to_coordinate() -> None:
    """Import what only a coordinator needs: by the time that it does, the installation may have been upgraded."""
    import elastic_run.rendezvous.elastic.coordinator_thread  # noqa: F401, PLC0415
