"""Private names that torch's own modules take from the modules in whose place ours stand.

Workers import these modules (torch.distributed.checkpoint is one), so that these names must be there without loading
torch's launcher for them.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def get_fully_qualified_hostname() -> str:
    """Return this host's name with its domain, as the resolver knows it."""
    import socket

    return socket.getfqdn(socket.gethostname())


#: Torch's path and name -> what stands for it. torch.distributed.checkpoint, torch 2.5 to 2.13.
PRIVATE_NAMES: dict[tuple[str, str], Callable[..., object]] = {
    ("torch.distributed.elastic.agent.server.api", "_get_fq_hostname"): get_fully_qualified_hostname,
}
