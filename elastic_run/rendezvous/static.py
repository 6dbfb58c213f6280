"""The static rendezvous of a job on one node; on several nodes the backend `static` is served by `elastic.handler`.

It differs from the local one in the address: the workers' store is to be at the endpoint (--master-addr and
--master-port), which the agent reads from `master_addr` and `master_port`.
"""

from __future__ import annotations

from elastic_run.rendezvous.api import RendezvousStoreInfo
from elastic_run.rendezvous.errors import NotInThisReleaseError
from elastic_run.rendezvous.local import LocalRendezvousHandler
from elastic_run.rendezvous.utils import parse_rendezvous_endpoint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.rendezvous.api import RendezvousParameters

__all__ = ["StaticRendezvousHandler", "create_handler"]

_DEFAULT_TIMEOUT = 600


class StaticRendezvousHandler(LocalRendezvousHandler):
    """One node at a given address.

    Args:
        master_addr: Host name or address of rank 0.
        master_port: Port of the workers' store there.
        rank: Rank of this node.
        world_size: Number of nodes.
        run_id: Id of the job.
        timeout: Seconds to wait for the other nodes.

    Raises:
        ValueError: The rank is not below the number of nodes (torch waits for the timeout to find out).
        NotInThisReleaseError: There is more than one node.
    """

    def __init__(
        self, master_addr: str, master_port: int, rank: int, world_size: int, run_id: str, timeout: int
    ) -> None:
        super().__init__(run_id, backend="static", local_addr=master_addr)
        if not 0 <= rank < world_size:
            message = f"--node-rank: {rank} is not in 0 to {world_size - 1}, the ranks of {world_size} node(s)"
            raise ValueError(message)
        if world_size > 1:
            message = (
                f"rendezvous backend 'static' for {world_size} nodes is not in this release; this release runs jobs "
                f"of one node: give --nnodes=1"
            )
            raise NotInThisReleaseError(message)
        self.master_addr = master_addr
        self.master_port = master_port
        self.rank = rank
        self.world_size = world_size
        self.run_id = run_id
        self.timeout = timeout

    def _address_without_offer(self) -> RendezvousStoreInfo:
        return RendezvousStoreInfo(self.master_addr, self.master_port)


def create_handler(params: RendezvousParameters) -> StaticRendezvousHandler:
    """Build the handler of a job whose addresses and ranks are given.

    Args:
        params: The endpoint with its port, and the settings ``rank`` and ``timeout`` (seconds, default 600).

    Returns:
        A handler for this node.

    Raises:
        ValueError: The endpoint, its port or the rank is missing or wrong.
        NotInThisReleaseError: There is more than one node.
    """
    rank = params.get_as_int("rank")
    if rank is None:
        message = "rendezvous backend 'static' needs the rank of this node (rank=N): give --node-rank"
        raise ValueError(message)
    if not params.endpoint.strip():
        message = "rendezvous backend 'static' needs an endpoint: give --master-addr and --master-port"
        raise ValueError(message)
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=-1)
    if port < 0:
        message = f"rendezvous endpoint {params.endpoint!r} has no port: give --master-port"
        raise ValueError(message)
    timeout = params.get_as_int("timeout", _DEFAULT_TIMEOUT)
    return StaticRendezvousHandler(host, port, rank, params.max_nodes, params.run_id, timeout or _DEFAULT_TIMEOUT)
