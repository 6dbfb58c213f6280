"""The store that the agents of a round share, as `next_rendezvous().store` gives it to an agent or a program.

In a program that has imported torch it is a `torch.distributed.Store`, so that `PrefixStore("x", store)` and
`init_process_group(store=store)` take it. Elsewhere it is one of ours with the same methods. Both may be used in one
round: the keys are the same. torch is never imported here. Rank 0's agent serves it from a thread of its own
(`ServedRoundStore`): an agent written against torch has no loop.
"""

from __future__ import annotations

import logging
import threading

from elastic_run.loop import Loop
from elastic_run.rendezvous.local_store import find_torch_stores
from elastic_run.store.tcpstore.client import StoreClient
from elastic_run.store.tcpstore.listener import open_listeners
from elastic_run.store.tcpstore.server import StoreServer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from elastic_run.rendezvous.api import Store

__all__ = ["RoundStore", "ServedRoundStore", "open_round_store"]

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
        """Close the port and every connection; harmless when closed."""
        if not self._is_over:
            self._loop.call_soon_threadsafe(self._end)
            self._thread.join(_END_LIMIT)

    def _tell_refusal(self, _kind: str, what: str) -> None:
        """Say it; the server does so once for each kind, since a scanner would fill the log."""
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
        """Wait until all keys are there.

        Args:
            keys: The keys.
            timeout: How long; the client's timeout if None.

        Raises:
            StoreTimeoutError: A key did not appear in time.
        """
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
