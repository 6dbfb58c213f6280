"""The store that the agents of a round share, as `next_rendezvous().store` gives it to an agent or a program.

In a program that has imported torch it is a `torch.distributed.Store`, so that `PrefixStore("x", store)` and
`init_process_group(store=store)` take it. Elsewhere it is one of ours with the same methods. Both may be used in one
round: the keys are the same. torch is never imported here.
"""

from __future__ import annotations

from elastic_run.rendezvous.local_store import find_torch_stores
from elastic_run.store.tcpstore.client import StoreClient

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from elastic_run.rendezvous.api import Store

__all__ = ["RoundStore", "open_round_store"]

#: Seconds to wait for the server, and for keys unless the caller says otherwise.
_TIMEOUT = 300.0


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
    from datetime import timedelta  # noqa: PLC0415 - torch has it loaded

    wait = timedelta(seconds=_TIMEOUT)
    connection = torch_stores.TCPStore(host, port, is_master=False, timeout=wait, wait_for_workers=False)
    # It puts a slash before each key by itself.
    return torch_stores.PrefixStore(prefix, connection), None
