"""Heartbeats: a node writes its own, and reads the coordinator's.

Rules
- A heartbeat replaces the last heartbeat of its node. If that one is gone, the coordinator has dropped the node, which
  then writes its facts again: so a suspended machine or a stopped process learns of its absence without a clock.
- Only a store in which heartbeats expire tells that a node has none any more. In another store a missing heartbeat was
  overwritten by another program, or the server was restarted: the node only ages until its next heartbeat.
- A node that comes back writes its heartbeat before its facts. So the coordinator reads the facts after it has removed
  the old heartbeats, or the node's next heartbeat finds its last one gone again.
- While workers run, a node reads the coordinator's heartbeat several times in an interval, and the coordinator reads
  the heartbeats of all nodes as often. Otherwise the loss of a node right after its heartbeat would be noticed an
  interval after the lease, and so would the loss of the store on that node.
- The first heartbeat comes after the rush of nodes at the start, since the coordinator gives a node some time for it
  (`JobConfig.first_leases`); at the latest when the job has a round, or when this node coordinates it. The moment is
  random, so that the heartbeats of all nodes never come at once.
"""

from __future__ import annotations

import math
import time

from elastic_run.core.node import messages as node_messages
from elastic_run.core.node.state import LEAVING, RUNNING, WAITING
from elastic_run.core.protocol import job_keys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elastic_run.rendezvous.elastic.context import SessionContext
    from elastic_run.store.jobstore.api import JobStore

__all__ = ["LOOKS_OF_ALL_NODES", "HeartbeatReader", "HeartbeatWriter", "NodeHeartbeats"]

#: The first heartbeat comes before two of this many parts of the lease are over.
_FIRST_PARTS = 3
#: Looks at the coordinator's heartbeat in a keep-alive interval.
_LOOKS = 8
#: Looks in a second by all nodes of a job together: with more the store would have no time for facts.
LOOKS_OF_ALL_NODES = 200.0


class NodeHeartbeats:
    """Writes this node's heartbeats and looks at the coordinator's, on the sender's thread.

    Args:
        context: The data that the session's threads share.
        draw: Returns a random number from 0 to 1.

    Attributes:
        next_write: Monotonic seconds at which the next heartbeat is due.
    """

    def __init__(self, context: SessionContext, draw: Callable[[], float]) -> None:
        self.next_write = 0.0
        self._context = context
        self._draw = draw
        self._reader = HeartbeatReader()
        self._writer = HeartbeatWriter(context.node)
        self._is_founding = False  # the first heartbeat waits for the job's first round
        self._last_look = 0.0
        self._last_read: float | None = None

    def begin(self, now: float) -> None:
        """Set the time of the first heartbeat in the first store."""
        config = self._context.config
        self.next_write = now + (config.first_leases - 1) * config.lease + self._draw_first_pause()
        self._is_founding = True

    def hasten_first(self, now: float) -> None:
        """Bring the first heartbeat forward if other nodes look at it by now: in a round, or if this node coordinates.

        Args:
            now: Monotonic seconds.
        """
        member_driver = self._context.sender.member_driver
        if not self._is_founding or member_driver is None:
            return
        member = member_driver.member
        if member.job.known_round > 0 or member.coordination.is_coordinator:
            self._is_founding = False
            self.next_write = min(self.next_write, now + self._draw_first_pause())

    def forget_store(self) -> None:
        """Begin again in another store, in which this node has no heartbeat."""
        self._writer = HeartbeatWriter(self._context.node)

    def _draw_first_pause(self) -> float:
        """Return seconds to the first heartbeat: one to two intervals, and well before a lease is over."""
        config = self._context.config
        return min(config.keep_alive_interval, config.lease / _FIRST_PARTS) * (1 + self._draw())

    def write(self, store: JobStore, now: float) -> None:
        """Write this node's heartbeat and look at the coordinator's; tell the member what both have shown.

        Raises:
            StoreConnectionError: The store can't be reached.
        """
        context, member_driver = self._context, self._context.sender.member_driver
        self.next_write = now + context.config.keep_alive_interval
        if context.sender.has_passed_exit_barrier:
            return  # no node looks any more, and the job's keys may be removed at any moment: nothing must follow that
        state = None if member_driver is None else member_driver.member.state
        # A node that was dropped before its first heartbeat reads so in the log, unless it waited all the time.
        is_unknown = self._writer.is_first and state == WAITING
        is_first = self._writer.is_first
        was_dropped = self._writer.write(store, comes_back=state != LEAVING)
        context.sender.last_heartbeat_at = now
        if was_dropped or is_first:
            context.signals.check_store()  # somebody may have emptied the store, since the last heartbeat or before it
        if member_driver is None:
            return
        member_driver.feed(node_messages.HeartbeatWritten(was_dropped, is_unknown))
        if member_driver.member.state != RUNNING:
            context.death_proofs.look()
        self.look(store, is_after_write=True)

    @property
    def next_look(self) -> float:
        """Monotonic seconds at which the next look at the coordinator's heartbeat is due; infinity without a round."""
        member_driver = self._context.sender.member_driver
        place = None if member_driver is None else member_driver.member.round.place
        formed_at = self._context.signals.formed_at
        if place is None or formed_at is None or self._context.sender.has_passed_exit_barrier:
            return math.inf  # after the end the store may go at any moment, and must not be replaced
        pause = max(self._context.config.keep_alive_interval / _LOOKS, place.group_world_size / LOOKS_OF_ALL_NODES)
        # A look when a round is formed would be another request of all nodes at once, and show nothing new.
        return max(self._last_look, formed_at) + pause

    def look(self, store: JobStore, *, is_after_write: bool = False) -> None:
        """Read the coordinator's heartbeat, or this node's own: either shows that the store answers.

        The same request reads whether somebody asks for this node's status. In a store in which that takes a request of
        its own, it is read after this node's heartbeats only.

        Args:
            store: The job's store.
            is_after_write: Whether this node has just written its heartbeat.

        Raises:
            StoreConnectionError: The store can't be reached.
        """
        context, member_driver = self._context, self._context.sender.member_driver
        if member_driver is None:
            return
        self._last_look = now = time.monotonic()
        watched = member_driver.member.watched
        if self._last_read is not None and now - self._last_read > 2 * context.config.keep_alive_interval:
            # This process was stopped, or the machine slept: a heartbeat that did not change meanwhile shows nothing.
            member_driver.feed(node_messages.Interrupted())
        node = watched or context.node
        # A lease of etcd can be renewed although somebody has deleted the heartbeat that hangs on it.
        nodes = {node, context.node} if is_after_write and store.expires_heartbeats else {node}
        if store.reads_beside or is_after_write:
            heartbeats, asked = self._reader.read_beside(store, [*nodes], job_keys.STATUS_REQUEST)
            context.status_answers.note_request(asked)
        else:
            heartbeats = self._reader.read(store, [*nodes])
        self._last_read = time.monotonic()
        if context.node in nodes and heartbeats[context.node] is None and store.expires_heartbeats:
            self._writer.lose()
        if watched:
            member_driver.feed(node_messages.CoordinatorHeartbeatRead(watched, heartbeats[node]))
        member_driver.run_store_tasks(store, context.sender.store_id)


class HeartbeatWriter:
    """Writes the heartbeats of one node into one store, over one connection after another.

    Args:
        node: The node.

    Attributes:
        is_first: Whether this object has written none yet, so that it does not know whether the node was dropped.
    """

    def __init__(self, node: str) -> None:
        self.is_first = True
        self._node = node
        self._last: int | None = None
        self._was_dropped = False

    def lose(self) -> None:
        """Note that the last heartbeat is gone: the next one is written anew, and tells it."""
        if self._last is not None:
            self._last, self._was_dropped = None, True

    def write(self, store: JobStore, *, comes_back: bool = True) -> bool:
        """Write a heartbeat in place of the last one.

        Args:
            store: The job's store.
            comes_back: Whether to write a new heartbeat if the last one is gone.

        Returns:
            Whether the last one was gone: the coordinator has dropped this node.

        Raises:
            StoreConnectionError: The store can't be reached. The next call returns what this one would have.
        """
        if self._last is not None:
            self._last = store.heartbeat(self._node, self._last)
            self._was_dropped = self._was_dropped or self._last is None
        if self._was_dropped and not comes_back:
            return True
        if self._last is None:
            self._last = store.heartbeat(self._node)
        self.is_first = False
        was_dropped, self._was_dropped = self._was_dropped, False
        return was_dropped


class HeartbeatReader:
    """Reads heartbeats, and remembers the last of each node."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def read(self, store: JobStore, nodes: Sequence[str]) -> dict[str, int | None]:
        """Return the heartbeats of nodes.

        Args:
            store: The job's store.
            nodes: The nodes.

        Returns:
            The counter of each node; None if the node never had one, or if the store says that it is gone.

        Raises:
            StoreConnectionError: The store can't be reached.
        """
        found = dict(zip(nodes, store.read_heartbeats(nodes), strict=True)) if nodes else {}
        return self._remember(store, nodes, found)

    def read_beside(
        self, store: JobStore, nodes: Sequence[str], other: str
    ) -> tuple[dict[str, int | None], bytes | None]:
        """Do `read`, and read a key in the same request.

        Args:
            store: The job's store.
            nodes: The nodes.
            other: The key.

        Returns:
            The result of `read`, and the key's value or None.

        Raises:
            StoreConnectionError: The store can't be reached.
        """
        heartbeats, beside = store.read_heartbeats_beside(nodes, other)
        return self._remember(store, nodes, dict(zip(nodes, heartbeats, strict=True))), beside

    def _remember(self, store: JobStore, nodes: Sequence[str], found: dict[str, int | None]) -> dict[str, int | None]:
        if store.expires_heartbeats:
            return found
        self._known = {node: known for node in nodes if (known := found[node] or self._known.get(node)) is not None}
        return {node: self._known.get(node) for node in nodes}
