"""The rendezvous of a job on one node: nobody to wait for, nothing to agree on.

Every round is formed at once, with this node as rank 0 of 1. The workers' store is served by the agent, which offers
its address before each round; then the workers are told that the agent serves it. Without an offer (somebody else's
agent uses this handler) it is as with torch: a free port is named, and the worker with rank 0 opens its store there.
"""

from __future__ import annotations

from elastic_run.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from elastic_run.rendezvous.errors import RendezvousClosedError
from elastic_run.rendezvous.local_store import make_local_store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.rendezvous.api import RendezvousParameters

__all__ = ["LocalRendezvousHandler", "create_handler"]

_LOOPBACK = "127.0.0.1"


class LocalRendezvousHandler(RendezvousHandler):
    """One node that meets itself.

    Args:
        run_id: Id of the job.
        backend: The name that the user asked for: ``c10d`` on one node is served by this class too.
        local_addr: Address of this node for the workers' store, where the agent offers none.
        port: Port of the store there; None for a free one.
    """

    #: `next_rendezvous` never waits: an agent may call it in its loop, without a thread of its own.
    is_immediate = True

    def __init__(
        self, run_id: str, *, backend: str = "local", local_addr: str | None = None, port: int | None = None
    ) -> None:
        self._run_id = run_id
        self._backend = backend
        self._local_addr = local_addr or _LOOPBACK
        self._port = port
        self._offered: RendezvousStoreInfo | None = None
        self._use_agent_store = False
        self._is_closed = False

    def get_backend(self) -> str:
        """Return the name that the user asked for."""
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        """Whether the agent has offered a store that it serves itself."""
        return self._use_agent_store

    def offer_worker_store(self, host: str, port: int, *, use_agent_store: bool = True) -> None:
        """Say where the workers' store of the next rounds is. Call it before `next_rendezvous`.

        Args:
            host: Host name or address; MASTER_ADDR of the workers.
            port: Port; MASTER_PORT of the workers.
            use_agent_store: Whether it is served already; False if the worker with rank 0 has to open it.
        """
        self._offered = RendezvousStoreInfo(host, port)
        self._use_agent_store = use_agent_store

    def next_rendezvous(self) -> RendezvousInfo:
        """Form the next round, at once and with an empty store of its own.

        Returns:
            Rank 0 of 1, and the address of the workers' store.

        Raises:
            RendezvousClosedError: The job is over.
        """
        if self._is_closed:
            message = f"the rendezvous of job {self._run_id!r} is closed: the job is over"
            raise RendezvousClosedError(message)
        return RendezvousInfo(
            store=make_local_store(),
            rank=0,
            world_size=1,
            bootstrap_store_info=self._offered or RendezvousStoreInfo(self._local_addr, self._port or _find_port()),
        )

    def is_closed(self) -> bool:
        """Return whether the job is over."""
        return self._is_closed

    def set_closed(self) -> None:
        """Declare the job over."""
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        """Return 0: there is no other node."""
        return 0

    def get_run_id(self) -> str:
        """Return the id of the job."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the rendezvous; there is nothing else to release.

        Returns:
            True.
        """
        self._is_closed = True
        return True


def _find_port() -> int:
    from elastic_run.utils import get_free_port

    return get_free_port()


def create_handler(params: RendezvousParameters) -> LocalRendezvousHandler:
    """Build the handler of a job on one node.

    Args:
        params: Its id, its address and the name of the backend that the user asked for.

    Returns:
        A handler whose rounds form at once.
    """
    return LocalRendezvousHandler(params.run_id, backend=params.backend, local_addr=params.local_addr)
