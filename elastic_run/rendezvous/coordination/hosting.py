"""The store that this node serves for the whole job: our server, on a loop and a thread of its own.

Rules
- It listens at the endpoint's address, and on loopback for this agent itself: no interface that goes down comes between
  them. Where that address isn't known for sure it listens on all interfaces (`addresses.find_listening`).
- A thread of its own, because it must answer while the agent's loop is busy, and even when no agent runs a loop yet.
- With static rendezvous the workers' store of each round is on the same port: `HostedWorkerStore` gives the agent the
  workers' half of the server, which forgets all between two rounds while the agents' half stays.
"""

from __future__ import annotations

import logging
import threading

from elastic_run.loop import Loop
from elastic_run.store.tcpstore.server import GARBAGE, StoreServer
from elastic_run.store.tcpstore.worker_store import WorkerStore

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from collections.abc import Callable, Sequence

    from elastic_run.store.tcpstore.admission import TokenRequirement

_log = logging.getLogger(__name__)

__all__ = ["HostedStore", "HostedWorkerStore"]

#: Seconds for a call into the server's thread, which never blocks.
_WAIT_LIMIT = 10.0


class HostedStore:
    """Serves a store from a thread, until closed.

    Args:
        listener: A listening, non-blocking socket; this object owns it from now on.
        further: More of them, on other addresses.
        serves_workers: Whether workers use the same port, with their process groups kept apart.
        on_unknown_operation: Called from the thread when a client asks for an operation that we don't know.
        token: The secret that agents must prove before anything else; None to serve everybody.
    """

    def __init__(
        self,
        listener: _socket.socket,
        *,
        further: Sequence[_socket.socket] = (),
        serves_workers: bool = False,
        on_unknown_operation: Callable[[int], None] | None = None,
        token: bytes | None = None,
    ) -> None:
        self._loop = Loop()
        self._server = StoreServer(
            self._loop,
            listener,
            further=further,
            on_unknown_operation=on_unknown_operation,
            on_refusal=self._tell_refusal,
            separates_groups=serves_workers,
            requirement=None if token is None else self._require(token, is_shared=serves_workers),
        )
        self.port = self._server.address[1]
        self._is_over = False
        self._count_own: Callable[[], int] | None = None
        self._alone = threading.Event()
        self._others = threading.Event()
        self._thread = threading.Thread(target=self._run, name="job-store", daemon=True)
        self._thread.start()

    def _tell_refusal(self, kind: str, what: str) -> None:
        """Say it; the server does so once for each kind: a scanner, or a wrong address, would fill the log."""
        if kind == GARBAGE:
            _log.warning(
                "elastic-run: refused a message at port %d that does not fit the store's protocol: %s", self.port, what
            )
        else:
            _log.warning("elastic-run: the job's store at port %d closed a connection: %s", self.port, what)

    def _require(self, token: bytes, *, is_shared: bool) -> TokenRequirement:
        from elastic_run.store.tcpstore.admission import TokenRequirement  # noqa: PLC0415 - most jobs have no token

        return TokenRequirement(token, is_shared, self._tell_refused)

    def _tell_refused(self, reason: str) -> None:
        _log.warning("elastic-run: the job's store at port %d refused a connection: %s", self.port, reason)

    def reset(self) -> None:
        """Forget what the workers of the last round have left, and drop their connections."""
        self._call(self._server.reset)

    def set_when_alone(self, alone: threading.Event, count_own: Callable[[], int]) -> None:
        """Set an event when no more clients are connected than this agent has itself.

        Args:
            alone: The event; it takes the place of one given before.
            count_own: Returns how many these are. It is called from the server's thread, whenever a client has come or
                gone: a connection of this agent may end meanwhile.
        """

        def begin() -> None:
            self._count_own, self._alone = count_own, alone

        self._call(begin)
        self._call(lambda: None)  # a turn later the loop has asked

    def wait_alone(self, count_own: Callable[[], int], timeout: float) -> bool:
        """Wait until no more clients are connected than this agent has itself.

        Args:
            count_own: See `set_when_alone`.
            timeout: Seconds.

        Returns:
            Whether it is so.
        """
        alone = threading.Event()
        self.set_when_alone(alone, count_own)
        return alone.wait(timeout)

    def wait_others(self, count_own: Callable[[], int], timeout: float) -> bool:
        """Wait until more clients are connected than this agent has itself; the rest as for `wait_alone`."""
        others = threading.Event()

        def begin() -> None:
            self._count_own, self._others = count_own, others

        self._call(begin)
        return others.wait(timeout)

    def close(self) -> None:
        """Close the port and every connection; harmless when closed."""
        if not self._is_over:
            self._call(self._end)
            self._thread.join(_WAIT_LIMIT)

    def _run(self) -> None:
        try:
            self._loop.run_until(self._is_to_end)
        finally:
            self._server.close()
            self._loop.close()

    def _is_to_end(self) -> bool:
        """Asked after every turn of the loop, so whenever a client has come or gone."""
        if self._count_own is not None:
            is_alone = self._server.connections <= self._count_own()
            (self._alone if is_alone else self._others).set()
        return self._is_over

    def _end(self) -> None:
        self._is_over = True

    def _call(self, function: Callable[[], None]) -> None:
        """Call in the server's thread, and wait until that is done."""
        is_done = threading.Event()

        def call() -> None:
            function()
            is_done.set()

        self._loop.call_soon_threadsafe(call)
        is_done.wait(_WAIT_LIMIT)


class HostedWorkerStore(WorkerStore):
    """The workers' half of a hosted store, as the agent sees it.

    Args:
        hosted: The store.
        host: MASTER_ADDR of the workers.
    """

    mode = "agent"
    use_agent_store = True

    def __init__(self, hosted: HostedStore, host: str) -> None:
        self.host = host
        self.port = hosted.port

    def serve(self, loop: Loop) -> None:
        """Nothing to do: it is served by a thread of its own."""

    def renew(self) -> WorkerStore:
        """Return this same store: its port is fixed.

        It isn't emptied yet, since workers of other nodes may still use it: `RoundAdmission` empties it later.
        """
        return self

    def close(self) -> None:
        """Nothing to do: the port belongs to the job's store as well, and stays for the other agents."""
