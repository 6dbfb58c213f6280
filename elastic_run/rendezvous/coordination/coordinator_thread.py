"""The thread of an agent's port and of its `Coordinator`, with a loop of its own, so that no workers wait for it.

An agent that has a port and doesn't coordinate says whom it follows, or that it searches.
"""

from __future__ import annotations

import logging
import threading
import time

from elastic_run.core.job import coordination as rules
from elastic_run.core.job.coordination import StepDown
from elastic_run.core.job.discovery import COORDINATES, FOLLOWS, SEARCHES, compute_standing
from elastic_run.core.job.host_lists import list_hosts
from elastic_run.core.job.succession import LEASE
from elastic_run.core.protocol.outcomes import UNHEALTHY
from elastic_run.loop import Loop
from elastic_run.records import replace
from elastic_run.rendezvous.coordination.coordinator import Coordinator
from elastic_run.rendezvous.coordination.link import Link
from elastic_run.rendezvous.coordination.listener import Listener
from elastic_run.rendezvous.coordination.opening import Answer

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    import socket
    from collections.abc import Callable, Sequence
    from typing import Any

    from elastic_run.core.job.coordination import Coordination
    from elastic_run.core.job.coordination_state import Event
    from elastic_run.core.job.documents import Promise, Round
    from elastic_run.core.job.state import Job
    from elastic_run.rendezvous.coordination.opening import Hello, Identity

__all__ = [
    "CoordinatorThread",
    "list_left_out",
]

_log = logging.getLogger(__name__)

#: Seconds after which the end of a job tells that it waits for nodes that don't know it.
_MOMENT = 1.0
#: Seconds for a call into the thread, which never blocks.
_CALL_LIMIT = 10.0


class CoordinatorThread:
    """One agent's port, and its job while it coordinates; see `Coordinator` and `Listener` for the callbacks."""

    def __init__(
        self,
        identity: Identity,
        *,
        on_standing: Callable[[int], None],
        on_contradiction: Callable[[str], None],
        on_defect: Callable[[Exception], None],
    ) -> None:
        self._identity = identity
        self._node = identity.node
        self._on_contradiction = on_contradiction
        self._on_defect = on_defect
        self._loop = Loop()
        self._coordinator = Coordinator(self._loop, identity.node, on_standing)
        self._is_over = False
        self._listener: Listener | None = None
        self._answer = Answer(SEARCHES, identity.node)
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()

    # --- calls of other threads --------------------------------------------------------------------------------------
    def listen(self, sockets: Sequence[_socket.socket], *, serves_workers: bool = False) -> int:
        """Open this agent's port; returns it. A workers' store at the same port is emptied before each round."""
        port = int(sockets[0].getsockname()[1])

        def begin() -> None:
            hand_on = self._open_worker_store(sockets) if serves_workers else None
            self._listener = Listener(
                self._loop,
                sockets,
                identity=self._identity,
                describe=self._describe_self,
                admit=self._welcome,
                tell_contradiction=self._on_contradiction,
                hand_on=hand_on,
            )

        self._call(begin)
        return port

    def begin(
        self,
        promise: Promise,
        choice: str,
        own: socket.socket,
        *,
        dead: str,
        silent: str,
        short_since: float | None,
        may_found: bool,
    ) -> None:
        """Coordinate the job from now on; see `Coordination` and `Job` for the values.

        `own` is this side of the connection to this agent's own node.
        """

        def make(started_by: tuple[Round, ...]) -> Coordination:
            state = rules.begin(promise, choice, time.monotonic(), dead=dead, silent=silent, started_by=started_by)
            return replace(state, may_found=may_found, job=replace(state.job, short_since=short_since))

        def start() -> None:
            self._coordinator.begin(make)
            link = Link(self._loop, own, lease=self._identity.lease)
            self._coordinator.admit(self._node, self._identity.host, link, promise.term)

        self._call(start)

    def note(self, event: Event) -> None:
        """Take in an event that no node brings, such as `MayFound`."""
        self._loop.call_soon_threadsafe(lambda: self._coordinator.feed(event))

    def end_term(self) -> None:
        """Coordinate no longer; harmless when this agent does not coordinate."""
        self._call(self._coordinator.end)

    def set_answer(self, answer: Answer) -> None:
        """Say from now on whom this agent follows, or that it searches, while it doesn't coordinate."""

        def begin() -> None:
            self._answer = answer

        self._loop.call_soon_threadsafe(begin)

    def end_job(self, detail: str) -> None:
        """Let the job end with this agent, which goes, for a reason: a sentence."""
        self._call(lambda: self._coordinator.end_job(detail))

    def wait_empty(self, timeout: float) -> bool:
        """Wait until no other node is connected; returns whether that is so."""
        return self._wait(lambda: not self._coordinator.has_others, timeout)

    def wait_others(self, timeout: float) -> bool:
        """Wait until another node is connected; returns whether one is."""
        return self._wait(lambda: self._coordinator.has_others, timeout)

    def _wait(self, is_so: Callable[[], bool], timeout: float) -> bool:
        has_come = threading.Event()

        def look() -> None:
            if is_so():
                has_come.set()

        def begin() -> None:
            self._coordinator.on_change = look
            look()

        self._call(begin)
        return has_come.wait(timeout)

    def wait_known(self, timeout: float) -> None:
        """Wait until each node that is connected has gone with the verdict; a line tells of the wait."""
        if self.wait_empty(min(_MOMENT, timeout)):
            return
        left = timeout - _MOMENT
        if left > 0:
            hosts = sorted(host for node, host in tuple(self._coordinator.hosts.items()) if node != self._node)
            _log.warning(
                "elastic-run: the job is over; waiting up to %.0f s for nodes that do not know it yet: %s",
                left,
                ", ".join(list_hosts(hosts)),
            )
            self.wait_empty(left)

    def list_left_out(self) -> list[dict[str, Any]]:
        """Return the nodes that the job goes on without; see `list_left_out`."""
        state = self._coordinator.state
        return [] if state is None else list_left_out(state.job, time.monotonic())

    @property
    def has_heirs(self) -> bool:
        """Whether other nodes are connected that stay."""
        state = self._coordinator.state
        return state is not None and any(node != self._node and not one.leaving for node, one in state.here.items())

    @property
    def has_others(self) -> bool:
        """Whether other nodes are connected."""
        return self._coordinator.has_others

    def close(self) -> None:
        """Close the port and all connections, and end the thread; harmless when closed."""
        if not self._is_over:
            self._call(self._end)
            self._thread.join(_CALL_LIMIT)

    def _end(self) -> None:
        self._is_over = True

    def _call(self, function: Callable[[], None]) -> None:
        """Call in the loop's thread, and wait until that is done."""
        is_done = threading.Event()

        def call() -> None:
            try:
                function()
            finally:
                is_done.set()

        self._loop.call_soon_threadsafe(call)
        is_done.wait(_CALL_LIMIT)

    # --- the thread --------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            self._loop.run_until(lambda: self._is_over)
        except Exception as error:  # noqa: BLE001 - whatever it is, the agent is told
            _log.exception("a defect in the rendezvous, thread coordinator")
            self._is_over = True
            self._on_defect(error)
        finally:
            self._coordinator.end()
            if self._listener is not None:
                self._listener.close()
            self._loop.close()

    def _open_worker_store(
        self, sockets: Sequence[_socket.socket]
    ) -> Callable[[_socket.socket, tuple[str, int]], None]:
        from elastic_run.store.tcpstore.server import StoreServer

        server = StoreServer(self._loop, sockets[0], is_fed=True)
        self._coordinator.clear_workers = server.reset
        return server.serve

    # --- nodes -------------------------------------------------------------------------------------------------------
    def _describe_self(self) -> Answer:
        state = self._coordinator.state
        if state is not None and not state.is_over and self._coordinator.is_ready:
            return Answer(COORDINATES, self._node, compute_standing(state), state.promise.term)
        # Before the coordinator has heard what its own node knows, it would seem to know of no job.
        return self._answer if self._answer.role == FOLLOWS else replace(self._answer, role=SEARCHES)

    def _welcome(self, hello: Hello, link: Link, term: int) -> None:
        state = self._coordinator.state
        if not hello.successor:
            self._coordinator.admit(hello.node, hello.host, link, term)
            return
        link.close()
        if state is not None and state.choice == LEASE and hello.term > state.promise.term:
            self._coordinator.feed(StepDown(hello.successor))


#: Nodes that an answer names.
_MOST = 32


def list_left_out(job: Job, now: float) -> list[dict[str, Any]]:
    """Return what the user needs to know of each node, the latest last.

    Args:
        job: The coordinator's state of the job.
        now: Monotonic seconds of this process.

    Returns:
        Documents with `host`, `kind` (`excluded` or `unhealthy`), `reason` (a clause), `seconds` since then, and
        `expires` (seconds until the machine may join again). The last two are None where they are not known; an
        exclusion without `expires` lasts as long as the job.
    """
    window = None if job.config is None else job.config.exclude_after
    period = None if window is None else window.seconds
    found: list[dict[str, Any]] = []
    for one in job.exclusions:
        expires = None if period is None else one.at + period - now
        if expires is None or expires > 0:
            found.append(_describe(one.host, "excluded", one.reason, seconds=now - one.at, expires=expires))
    hosts = {node.node_info.host for node in job.nodes.values()}
    for gone in job.gone.values():
        if gone.reason == UNHEALTHY and gone.was is not None and gone.was.node_info.host not in hosts:
            reason = gone.detail.removeprefix(UNHEALTHY).removeprefix(": ")
            found.append(_describe(gone.was.node_info.host, UNHEALTHY, reason, seconds=None, expires=None))
    return found[-_MOST:]


def _describe(host: str, kind: str, reason: str, *, seconds: float | None, expires: float | None) -> dict[str, Any]:
    return {"host": host, "kind": kind, "reason": reason, "seconds": seconds, "expires": expires}
