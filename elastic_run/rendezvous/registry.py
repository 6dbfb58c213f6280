"""From the name of a backend to its handler.

Built-in backends are imported when they are asked for. Packages offer more in the entry-point group
``torchrun.handlers``: each entry point is a function without arguments that returns a creator, as in torch, or, as some
packages have it, the creator itself. They are looked for only when the name is neither built in nor registered, since
reading the installed packages' metadata takes longer than starting the workers. torch loads every plug-in at import and
logs the broken ones; we load the one that is asked for, and a broken one is an error that names its package.
"""

from __future__ import annotations

import sys

from elastic_run import lazy_names
from elastic_run.contract import RENDEZVOUS_ENTRY_POINTS
from elastic_run.rendezvous.api import RendezvousParameters, rendezvous_handler_registry
from elastic_run.rendezvous.backend_table import BACKENDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.metadata import EntryPoint
    from logging import LogRecord
    from typing import Any

    from elastic_run.rendezvous.api import (
        RendezvousHandler,
        RendezvousHandlerCreator,
        RendezvousHandlerRegistry,
    )

__all__ = ["get_rendezvous_handler", "register_built_in_handlers"]

#: Names that torch's module has from others, and that programs take from there.
__getattr__ = lazy_names(
    __name__,
    {
        "RendezvousHandler": "elastic_run.rendezvous.api",
        "RendezvousParameters": "elastic_run.rendezvous.api",
        "handler_registry": "elastic_run.rendezvous.api:rendezvous_handler_registry",
    },
    logger="log",
)

#: Where torch has the classes that plug-ins are written against; under compat these are ours.
_TORCHS_INTERFACE = "torch.distributed.elastic.rendezvous"
_TORCHS_REGISTRY = f"{_TORCHS_INTERFACE}.registry"
#: Seconds for a name server to say whether an endpoint is this machine.
_LOOK_UP = 3.0


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Build the handler for ``params.backend``.

    Args:
        params: The backend's name and everything that it needs.

    Returns:
        A handler of this job.

    Raises:
        ValueError: Nobody knows the backend, its plug-in is broken, or the parameters don't suit it.
        RuntimeError: The plug-in's handler gives another name than the one it is registered by.
    """
    if params.backend not in rendezvous_handler_registry._registry:  # noqa: SLF001 - torch's class, ours to look into
        _register_plugin(params.backend)
    return rendezvous_handler_registry.create_handler(params)


def register_built_in_handlers(registry: RendezvousHandlerRegistry) -> None:
    """Register the backends that come with elastic-run; their modules are imported when one is used."""
    for_one_node = {"local": _create_local_handler, "static": _create_static_handler, "c10d": _create_c10d_handler}
    for name in BACKENDS:
        registry.register(name, for_one_node.get(name, _create_elastic_handler))


def _create_local_handler(params: RendezvousParameters) -> RendezvousHandler:
    if params.max_nodes > 1:
        message = f"rendezvous backend 'local' is for one node, not for up to {params.max_nodes}"
        raise ValueError(message)
    from elastic_run.rendezvous.local import create_handler

    return create_handler(params)


def _create_static_handler(params: RendezvousParameters) -> RendezvousHandler:
    if params.max_nodes > 1:
        return _create_elastic_handler(params)
    from elastic_run.rendezvous.local import create_static_handler

    return create_static_handler(params)


def _create_c10d_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Serve the one-node job that a user of torchrun starts with c10d by itself: its store has nobody to talk to."""
    if params.max_nodes > 1 or not _hosts_its_store(params):
        return _create_elastic_handler(params)
    from elastic_run.rendezvous.local import create_handler

    return create_handler(params)


def _create_elastic_handler(params: RendezvousParameters) -> RendezvousHandler:
    from elastic_run.rendezvous.coordination.handler import create_handler

    return create_handler(params)


def _hosts_its_store(params: RendezvousParameters) -> bool:
    """Tell whether torch would open the c10d store on this machine, from the endpoint and ``is_host``."""
    from elastic_run.rendezvous.addresses import is_own_host
    from elastic_run.rendezvous.utils import parse_rendezvous_endpoint

    store_type = str(params.get("store_type", "tcp")).strip().lower()
    if store_type not in ("tcp", "file"):
        message = f"rendezvous setting store_type={store_type!r}: not tcp or file"
        raise ValueError(message)
    if store_type == "file":
        return True
    is_host = params.get_as_bool("is_host")
    if is_host is not None:
        return is_host
    host, _ = parse_rendezvous_endpoint(params.endpoint.partition(",")[0], default_port=0)
    return is_own_host(host, _LOOK_UP)


def _register_plugin(backend: str) -> None:
    """Load the installed plug-in of that name, and no other."""
    from importlib.metadata import entry_points

    plugins = entry_points(group=RENDEZVOUS_ENTRY_POINTS)
    for plugin in plugins:
        if plugin.name == backend:
            rendezvous_handler_registry.register(backend, _load_plugin(plugin))
            return
    known = sorted({*rendezvous_handler_registry._registry, *plugins.names})  # noqa: SLF001 - ditto
    message = (
        f"the rendezvous backend {backend!r} is not registered{_nearest(backend, known)}; known: {', '.join(known)}"
    )
    raise ValueError(message)


def _load_plugin(plugin: EntryPoint) -> RendezvousHandlerCreator:
    try:
        loaded = _quieten(plugin.load)
        creator: RendezvousHandlerCreator = loaded if _takes_parameters(loaded) else _quieten(loaded)
    except Exception as error:  # whatever foreign code raises is told to the user as its package's
        from elastic_run.utils import describe_exception

        raise ValueError(_broken(plugin, f"can't be loaded: {describe_exception(error)}")) from error
    if not callable(creator):
        raise ValueError(_broken(plugin, f"returned {creator!r}, not a function that builds a handler"))  # noqa: TRY004 - the plug-in's mistake
    return lambda params: _quieten(lambda: creator(_PluginParameters.of(params)))


def _quieten(call: Callable[[], Any]) -> Any:
    """Call a plug-in's code without what torch's registry logs of plug-ins meanwhile.

    Where that code imports torch's rendezvous, torch fills its own registry, which isn't used here, with all plug-ins.
    It logs a traceback for each that is half imported then, or is a creator itself; nothing is wrong.
    """
    import logging

    logger = logging.getLogger(_TORCHS_REGISTRY)
    logger.addFilter(_is_not_of_plugins)
    try:
        return call()
    finally:
        logger.removeFilter(_is_not_of_plugins)


def _takes_parameters(loaded: Callable[..., object]) -> bool:
    """Whether an entry point is a creator, which can't be called without the parameters."""
    import inspect

    try:
        inspect.signature(loaded).bind()
    except TypeError:
        return True
    except ValueError:  # code in C that doesn't tell what it takes
        return False
    return False


class _PluginParameters(RendezvousParameters):
    """Parameters that a plug-in takes for torch's where it has imported torch's class, of which it may ask for one."""

    @classmethod
    def of(cls, params: RendezvousParameters) -> _PluginParameters:
        """Return the same parameters for a plug-in."""
        addresses = (params.backend, params.endpoint, params.run_id)
        return cls(*addresses, params.min_nodes, params.max_nodes, params.local_addr, **params.config)

    @property  # type: ignore[misc] # isinstance looks here after the type, and the plug-in may import torch late
    def __class__(self) -> type:
        return getattr(sys.modules.get(_TORCHS_INTERFACE), "RendezvousParameters", _PluginParameters)


def _is_not_of_plugins(record: LogRecord) -> bool:
    return "out of tree plugin" not in str(record.msg)


def _broken(plugin: EntryPoint, what: str) -> str:
    package = f"{plugin.dist.name} {plugin.dist.version}" if plugin.dist else "of an unknown package"
    return " ".join(f"rendezvous backend {plugin.name!r}: plug-in {package} ({plugin.value}) {what}".split())


def _nearest(backend: str, known: list[str]) -> str:
    import difflib

    found = difflib.get_close_matches(backend.lower(), known, n=1)
    return f", did you mean {found[0]!r}?" if found else ""
