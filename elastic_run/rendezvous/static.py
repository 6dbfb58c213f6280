"""The static rendezvous of a job on one node; several nodes meet by `coordination.handler`.

It differs from the local one in the address: the workers' store is at the endpoint (--master-addr and
--master-port), unless the agent offers a store elsewhere.
"""

from __future__ import annotations

from elastic_run.rendezvous.local import LocalRendezvousHandler
from elastic_run.rendezvous.utils import parse_rendezvous_endpoint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.rendezvous.api import RendezvousParameters

__all__ = ["create_handler"]


def create_handler(params: RendezvousParameters) -> LocalRendezvousHandler:
    """Build the handler of a job on one node whose address and rank are given.

    Args:
        params: The endpoint with its port, and the setting ``rank``. The setting ``timeout`` must be a number of
            seconds; nobody waits for it.

    Returns:
        A handler whose rounds form at once.

    Raises:
        ValueError: The endpoint, its port or the rank is missing or wrong.
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
    params.get_as_int("timeout")
    if rank != 0:  # torch waits for the timeout to find out
        message = f"--node-rank: {rank} is not 0, the only rank of a job on one node"
        raise ValueError(message)
    return LocalRendezvousHandler(params.run_id, backend=params.backend, local_addr=host, port=port)
