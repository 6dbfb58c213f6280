"""torch's plain rendezvous on a session: for agents that ask for a round, watch a number, and ask again.

Such an agent knows nothing of reports. When it comes back for another round, its workers are gone: because the round
was halted (then `num_nodes_waiting` had told it to), or because they failed. Its own restart budget counts; the job's
has no limit here. The store of the round's agents is the server that rank 0 opens for the workers.
"""

from __future__ import annotations

import logging
import threading

from elastic_run.core.job.node_events import Ended, Formed, Halted, Refused, Warned
from elastic_run.core.protocol.facts import StoreAddress
from elastic_run.core.protocol.outcomes import DONE, FAILED, STOPPED
from elastic_run.loop import Loop
from elastic_run.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from elastic_run.rendezvous.local import find_torch_stores
from elastic_run.rendezvous.session import Lost
from elastic_run.store.tcpstore.client import StoreClient
from elastic_run.store.tcpstore.listener import open_listeners
from elastic_run.store.tcpstore.server import StoreServer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from elastic_run.core.job.node_events import Assignment
    from elastic_run.rendezvous.api import Store
    from elastic_run.rendezvous.session import Session, SessionEvent

__all__ = [
    "RoundStore",
    "ServedRoundStore",
    "TorchStyleRounds",
    "open_round_store",
]


class TorchStyleRounds:
    """The rounds of one plain handler.

    Args:
        session: Its session, not yet started.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._changed = threading.Condition()
        self._formed: Assignment | None = None
        self._current: Assignment | None = None
        self._end: Ended | Lost | Refused | None = None
        self._is_halted = False
        self._is_finished = False
        self._store: ServedRoundStore | None = None
        self._client: StoreClient | None = None

    @property
    def is_over(self) -> bool:
        """Whether no further round comes."""
        return self._end is not None

    @property
    def num_nodes_waiting(self) -> int:
        """1 if the agent has to restart the workers for another round, or to stop them for the end; otherwise 0."""
        return int(self._current is not None and (self._is_halted or self.is_over))

    def next_round(self) -> RendezvousInfo:
        """Come back, and wait for the next round."""
        self._close_client()
        if self._current is None:
            self._session.start(self._renew_store, self._take)
        else:
            self._come_back(self._current, self._renew_store(self._session.listening_host))
        with self._changed:
            self._changed.wait_for(lambda: self._formed is not None or self._end is not None)
            place, self._formed = self._formed, None
            if place is None:
                raise self._closed()
            self._current, self._is_halted = place, False
        master = place.master
        store, self._client = open_round_store(master.host, master.port, f"agents/{place.round}")
        return RendezvousInfo(
            store, place.group_rank, place.group_world_size, RendezvousStoreInfo(master.host, master.port)
        )

    def _come_back(self, current: Assignment, store_address: StoreAddress) -> None:
        if self._is_halted:
            self._session.report_ready(current.round, STOPPED, report=None, store_address=store_address)
            return
        self._session.report_failing(current.round)
        report = {"exit_code": 1, "signature": None, "is_deterministic": False, "uptime": 0.0, "severity": 0}
        self._session.report_ready(current.round, FAILED, report=report, store_address=store_address)

    def finish(self) -> None:
        """Say that this node's workers are done; once."""
        if self._current is None or self._is_finished or self.is_over:
            return
        self._is_finished = True
        store_address = StoreAddress("", self._store.port if self._store else 0, use_agent_store=True)
        self._session.report_ready(self._current.round, DONE, report=None, store_address=store_address)

    def close(self, timeout: float) -> None:
        """Wait for the end of the other nodes, for this many seconds at most, and close the session."""
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None or self._current is None, timeout)
        self._close_client()
        self._session.close(timeout)
        if self._store is not None:
            self._store.close()

    def _take(self, event: SessionEvent) -> None:
        with self._changed:
            if isinstance(event, Formed):
                self._formed = event.assignment
            elif isinstance(event, Halted | Warned):
                self._is_halted = True
            elif isinstance(event, Ended | Lost | Refused):
                self._end = event
            self._changed.notify_all()

    def _close_client(self) -> None:
        if self._client is not None:
            self._client.close()

    def _renew_store(self, host: str) -> StoreAddress:
        if self._store is not None:
            self._store.close()
        self._store = ServedRoundStore(host)
        return StoreAddress("", self._store.port, use_agent_store=True)

    def _closed(self) -> RendezvousError:
        end = self._end
        if isinstance(end, Refused):
            return RendezvousStateError(end.detail)
        if isinstance(end, Lost):
            return RendezvousConnectionError(end.detail)
        if isinstance(end, Ended) and end.end.verdict == "rendezvous":
            return RendezvousTimeoutError(end.end.detail)
        return RendezvousClosedError((end.end.detail if end is not None else "") or "the job is over")


_log = logging.getLogger(__name__)

#: Seconds to wait for the server, and for keys unless the caller says otherwise.
_TIMEOUT = 300.0
#: Seconds for the thread of the server to end, which never blocks.
_END_LIMIT = 10.0


class ServedRoundStore:
    """The server of one round, on a port that is open from now on.

    Args:
        host: The address at which it listens; "" for all interfaces.

    Attributes:
        port: Its port.
    """

    def __init__(self, host: str) -> None:
        listener, *further = open_listeners([host] if host else [])
        self._loop = Loop()
        self._server = StoreServer(self._loop, listener, further=further, on_refusal=self._tell_refusal)
        self.port = self._server.address[1]
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="round-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the port and all connections; a second call does nothing."""
        if not self._is_over:
            self._loop.call_soon_threadsafe(self._end)
            self._thread.join(_END_LIMIT)

    def _tell_refusal(self, _kind: str, what: str) -> None:
        """Log that the server has closed a connection; the server calls this once for each kind of reason."""
        _log.warning("elastic-run: the round's store at port %d closed a connection: %s", self.port, what)

    def _run(self) -> None:
        try:
            self._loop.run_until(lambda: self._is_over)
        finally:
            self._server.close()
            self._loop.close()

    def _end(self) -> None:
        self._is_over = True


class RoundStore(StoreClient):
    """A client of ours whose timeouts are seconds or, as with torch's stores, a `timedelta`."""

    def wait(self, keys: Sequence[str | bytes], timeout: timedelta | float | None = None) -> None:
        """Wait until all keys are there, at most for the client's timeout if none is given (StoreTimeoutError)."""
        super().wait(keys, None if timeout is None else _seconds(timeout))

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Set the timeout."""
        super().set_timeout(_seconds(timeout))


def _seconds(timeout: timedelta | float) -> float:
    return timeout if isinstance(timeout, int | float) else timeout.total_seconds()


def open_round_store(host: str, port: int, prefix: str) -> tuple[Store, StoreClient | None]:
    """Connect to the store that rank 0 serves for the agents of a round.

    Args:
        host: Its name or address.
        port: Its port.
        prefix: What is put before each key, with a slash behind it.

    Returns:
        The store, and what has to be closed after the round: torch's closes by itself.

    Raises:
        Exception: The store can't be reached; ours raises StoreConnectionError, torch's a DistStoreError.
    """
    torch_stores = find_torch_stores()
    if torch_stores is None:
        client = RoundStore(host, port, _TIMEOUT, prefix=f"/{prefix}/")
        return client, client
    from datetime import timedelta

    wait = timedelta(seconds=_TIMEOUT)
    connection = torch_stores.TCPStore(host, port, is_master=False, timeout=wait, wait_for_workers=False)
    # It puts a slash before each key by itself.
    return torch_stores.PrefixStore(prefix, connection), None
