"""A node of a crowd: the real member and the real messages, without the threads.

It says on the wire what a session's sender and log reader say, in their order: one connection reads the store's id and
the head, appends the first facts, then waits for the next slot and reads assignments; heartbeats and later facts call
the wait off, or go over another connection where the store has no such waits; and at last there is a look whether
rank 0's store listens. What it decides is
`core.node.machine`'s; how its store is asked is said in `light_c10d` and `light_etcd`. A test holds the operations and
bytes that a server sees against those of real sessions. It never gives up, and asks again only where it is told that
the store can't answer now: a crowd that fares badly shows as time.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING

from elastic_run.core.node import machine as core
from elastic_run.core.node import messages as node_messages
from elastic_run.core.protocol import job_keys, messages
from elastic_run.rendezvous.elastic.store_connection import STORE_ID
from elastic_run.store.backoff import draw_fraction
from elastic_run.store.job_path import job_path
from tests.benchmarks.crowd.exchange import Exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from typing import TypeAlias, TypeVar

    from elastic_run.core.job.config import JobConfig
    from elastic_run.core.node.state import Member
    from elastic_run.loop import Loop
    from tests.benchmarks.crowd.exchange import Answers, Question, Script

    _T = TypeVar("_T")
    Asking: TypeAlias = Generator[Question | float | None, Answers, _T]


class LightNode(ABC):
    """One node.

    Args:
        loop: What drives it.
        address: The job's store.
        run_id: The job.
        number: Which of the crowd it is.
        config: The job's configuration.
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
        config: JobConfig,
        on_joined: Callable[[], None],
        on_formed: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._address = address
        self._path = job_path(run_id)
        self._node = f"node{number}_{os.getpid()}_{number:08x}"
        self._node_info = messages.NodeInfo(f"node{number}", os.getpid(), 8, version="0.1.0")
        self._config = config
        self._on_joined = on_joined
        self._on_formed = on_formed
        self._errands: deque[node_messages.Command] = deque()
        self.member: Member
        self._log_reader = Exchange(loop, address, self._join())
        self._sender: Exchange

    # --- the member --------------------------------------------------------------------------------------------------
    def _begin(self, head: bytes | None) -> None:
        # Nobody will ask for this port: rank 0 is the first to have come, a real session.
        store_address = messages.StoreAddress(self._address[0], 1)
        self._take(
            core.begin(
                self._node,
                node_info=self._node_info,
                config=self._config,
                store_address=store_address,
                now=time.monotonic(),
            )
        )
        self._errands.clear()  # it asks for what is known
        self.feed(node_messages.HeadRead(head))

    def feed(self, event: node_messages.Event) -> None:
        """Decide what follows an event, and note what is to be done."""
        self._take(core.decide(self.member, event, time.monotonic()))

    def _take(self, decision: core.Decision) -> None:
        self.member, commands = decision
        for command in commands:
            if isinstance(command, node_messages.ReadHead | node_messages.CreateEntry | node_messages.FetchAssignment):
                self._errands.append(command)
            elif isinstance(command, node_messages.Formed):
                master = command.assignment.master
                Exchange(self._loop, (master.host, master.port), None, self._on_formed)

    # --- what it says ------------------------------------------------------------------------------------------------
    def _join(self) -> Script:
        yield from self._open()
        # The first node was here: the store has an id. Nothing is trimmed within one round.
        _, head, _ = yield from self._get([STORE_ID, job_keys.HEAD, job_keys.LOG_START])
        self._begin(head)
        yield from self._say_facts()
        self._on_joined()
        wait = (self._config.first_leases - 1) * self._config.lease
        self._loop.call_later(wait + self._config.keep_alive_interval * (1 + draw_fraction()), self._begin_heartbeats)
        yield from self._follow()

    def _begin_heartbeats(self) -> None:
        """Write the first heartbeat over a connection of its own."""
        self._sender = Exchange(self._loop, self._address, self._send())

    def _send(self) -> Script:
        yield from self._open()
        yield from self._get([STORE_ID])
        while True:
            yield from self._send_due()
            self._loop.call_later(self._config.keep_alive_interval, self._sender.wake)
            yield None

    def _send_due(self) -> Asking[None]:
        yield from self._heartbeat()
        self.feed(node_messages.HeartbeatWritten())
        watched = self.member.watched
        if watched:
            heartbeat = yield from self._read_heartbeat(watched)
            self.feed(node_messages.CoordinatorHeartbeatRead(watched, heartbeat))
        yield from self._run_errands()
        yield from self._say_facts()

    def _follow(self) -> Asking[None]:
        yield from self._begin_following()
        while True:
            yield from self._run_errands()
            yield from self._say_facts()  # its Join comes after the first claim where there is no head yet
            slot = self.member.log.next_slot
            if slot is None:
                yield None
                continue
            value = yield from self._wait(job_keys.decision_key(slot))
            self.feed(node_messages.EntryRead(slot, value))

    def _run_errands(self) -> Asking[None]:
        while self._errands:
            errand = self._errands.popleft()
            if isinstance(errand, node_messages.CreateEntry):
                value = yield from self._create(job_keys.decision_key(errand.slot), messages.to_json(errand.claim))
                self.feed(node_messages.EntryRead(errand.slot, value))
            elif isinstance(errand, node_messages.FetchAssignment):
                key = job_keys.assignment_key(errand.slot, errand.term, self._node)
                (document,) = yield from self._get([key])
                self.feed(node_messages.AssignmentRead(errand.slot, errand.term, document))
            else:
                head, _ = yield from self._get([job_keys.HEAD, job_keys.LOG_START])
                self.feed(node_messages.HeadRead(head))
                self._log_reader.wake()

    def _say_facts(self) -> Asking[None]:
        while self.member.facts.outstanding:
            fact = self.member.facts.outstanding[0]
            yield from self._append(messages.to_json(fact))
            self.feed(node_messages.Appended(fact.sequence))

    # --- its store ---------------------------------------------------------------------------------------------------
    def _open(self) -> Asking[None]:
        """Greet the server over a new connection."""
        yield from ()

    @abstractmethod
    def _get(self, keys: Sequence[str]) -> Asking[list[bytes | None]]:
        """Read keys."""

    @abstractmethod
    def _create(self, key: str, value: bytes) -> Asking[bytes]:
        """Make a key unless it is there; returns what is there."""

    @abstractmethod
    def _append(self, value: bytes) -> Asking[None]:
        """Append a fact."""

    @abstractmethod
    def _heartbeat(self) -> Asking[None]:
        """Show that it lives."""

    @abstractmethod
    def _read_heartbeat(self, node: str) -> Asking[int | None]:
        """Read another node's heartbeat."""

    def _begin_following(self) -> Asking[None]:
        """Get ready to wait for slots."""
        yield from ()

    @abstractmethod
    def _wait(self, key: str) -> Asking[bytes]:
        """Wait for a slot."""
