"""How the nodes of a job come together: the public names of ``torch.distributed.elastic.rendezvous``.

Importing this package loads the interface and the registry and nothing else: a backend is imported when it is asked
for, plug-ins are looked for only when the backend is not one of ours.
"""

from __future__ import annotations

from elastic_run import lazy_names
from elastic_run.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousHandlerRegistry,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from elastic_run.rendezvous.registry import get_rendezvous_handler, register_built_in_handlers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.etcd_server import EtcdServer

    from elastic_run.rendezvous.api import RendezvousHandlerCreator
    from elastic_run.rendezvous.utils import parse_rendezvous_config, parse_rendezvous_endpoint

__all__ = [
    "EtcdServer",
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousHandler",
    "RendezvousHandlerCreator",
    "RendezvousHandlerRegistry",
    "RendezvousInfo",
    "RendezvousParameters",
    "RendezvousStateError",
    "RendezvousStoreInfo",
    "RendezvousTimeoutError",
    "get_rendezvous_handler",
    "parse_rendezvous_config",
    "parse_rendezvous_endpoint",
    "rendezvous_handler_registry",
]

# Here and not in registry.py, as in torch: whoever gets hold of the registry finds the built-in names in it already.
register_built_in_handlers(rendezvous_handler_registry)


__getattr__ = lazy_names(
    __name__,
    {
        "EtcdServer": "torch.distributed.elastic.rendezvous.etcd_server",  # for tests with an etcd of their own
        "RendezvousHandlerCreator": "api",
        "parse_rendezvous_config": "utils",
        "parse_rendezvous_endpoint": "utils",
    },
)
