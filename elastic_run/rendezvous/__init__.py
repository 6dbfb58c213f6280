"""How the nodes of a job come together: the public names of ``torch.distributed.elastic.rendezvous``.

Importing this package loads the interface and the registry and nothing else: a backend is imported when it is asked
for, plug-ins are looked for only when the backend is not one of ours.
"""

from __future__ import annotations

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
    from elastic_run.rendezvous.api import RendezvousHandlerCreator
    from elastic_run.rendezvous.etcd_server import EtcdServer
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


def __getattr__(name: str) -> object:
    if name == "RendezvousHandlerCreator":
        from elastic_run.rendezvous import api as module
    elif name in ("parse_rendezvous_config", "parse_rendezvous_endpoint"):
        from elastic_run.rendezvous import utils as module  # type: ignore[no-redef]
    elif name == "EtcdServer":
        from elastic_run.rendezvous import etcd_server as module  # type: ignore[no-redef]
    else:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(module, name)
