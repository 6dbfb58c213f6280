"""From the name of a backend to its handler, and the handler of jobs of one node.

Built-in backends are imported when they are asked for. Packages offer more in the entry-point group
``torchrun.handlers``: each entry point is a function without arguments that returns a creator, as in torch, or, as some
packages have it, the creator itself. They are looked for only when the name is neither built in nor registered, since
reading the installed packages' metadata takes longer than starting the workers. A broken one is an error that names its
package.
"""

from __future__ import annotations

import sys

from elastic_run import lazy_names
from elastic_run.contract import RENDEZVOUS_ENTRY_POINTS
from elastic_run.rendezvous.api import (
    BACKENDS,
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.metadata import EntryPoint
    from typing import Any

    from elastic_run.rendezvous.api import RendezvousHandlerCreator, RendezvousHandlerRegistry

__all__ = ["LocalRendezvousHandler", "get_rendezvous_handler", "register_built_in_handlers"]

#: Names that torch's module has from others, and that programs take from there.
__getattr__ = lazy_names(
    __name__, {"handler_registry": "elastic_run.rendezvous.api:rendezvous_handler_registry"}, logger="log"
)

#: Where torch has the classes that plug-ins are written against; under compat these are ours.
_TORCHS_INTERFACE = "torch.distributed.elastic.rendezvous"
#: Seconds for a name server to say whether an endpoint is this machine.
_LOOK_UP = 3.0


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Build the handler of ``params.backend``.

    Raises:
        ValueError: Nobody knows the backend, its plug-in is broken, or the parameters don't suit it.
        RuntimeError: The plug-in's handler gives another name than the one it is registered by.
    """
    if params.backend not in rendezvous_handler_registry._registry:  # noqa: SLF001 - torch's class, ours to look into
        _register_plugin(params.backend)
    return rendezvous_handler_registry.create_handler(params)


def register_built_in_handlers(registry: RendezvousHandlerRegistry) -> None:
    """Register the backends that come with elastic-run; their modules are imported when one is used."""
    for name in BACKENDS:
        registry.register(name, _create_handler)


def _create_handler(params: RendezvousParameters) -> RendezvousHandler:
    backend = params.backend
    if backend == "local" and params.max_nodes > 1:
        message = f"rendezvous backend 'local' is for one node, not for up to {params.max_nodes}"
        raise ValueError(message)
    if params.max_nodes == 1 and backend == "static":
        from elastic_run.rendezvous.settings import check_static

        host, port = check_static(params.endpoint, params.get_as_int("rank"), 1)
        params.get_as_int("timeout")
        return LocalRendezvousHandler(params.run_id, backend=backend, local_addr=host, port=port)
    # A user of torchrun starts a job of one node with c10d by itself: its store has nobody to talk to.
    if backend == "local" or (params.max_nodes == 1 and backend == "c10d" and _hosts_its_store(params)):
        return LocalRendezvousHandler(params.run_id, backend=backend, local_addr=params.local_addr)
    from elastic_run.rendezvous.handler import create_handler

    return create_handler(params)


class LocalRendezvousHandler(RendezvousHandler):
    """One node that meets itself, so that every round is formed at once.

    The agent offers the address of its workers' store before each round. Without an offer (by a foreign agent) the
    worker with rank 0 opens the store, as with torch: at `local_addr`, at `port` or at a free one.
    """

    #: `next_rendezvous` never waits: an agent may call it in its loop, without a thread of its own.
    is_immediate = True

    def __init__(
        self, run_id: str, *, backend: str = "local", local_addr: str | None = None, port: int | None = None
    ) -> None:
        self._run_id = run_id
        self._backend = backend
        self._local_addr = local_addr or "127.0.0.1"
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
        """Say where the workers' store of the next rounds is, and whether an agent serves it."""
        self._offered = RendezvousStoreInfo(host, port)
        self._use_agent_store = use_agent_store

    def next_rendezvous(self) -> RendezvousInfo:
        """Form the next round, at once and with an empty store of its own; RendezvousClosedError if the job is over."""
        if self._is_closed:
            message = f"the rendezvous of job {self._run_id!r} is closed: the job is over"
            raise RendezvousClosedError(message)
        # A store of torch's own where the program has torch: it may be made a part of others.
        make_store: Any = getattr(sys.modules.get("torch.distributed"), "HashStore", _LateStore)
        info = self._offered
        if info is None:
            from elastic_run.utils import get_free_port

            info = RendezvousStoreInfo(self._local_addr, self._port or get_free_port())
        return RendezvousInfo(make_store(), 0, 1, info)

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
        """Close the rendezvous; there is nothing else to release. Returns True."""
        self._is_closed = True
        return True


class _LateStore:
    """A HashStore of torch's for the one agent of a round, which imports torch when somebody uses it: we never do."""

    def __getattr__(self, name: str) -> Any:
        import torch.distributed

        stores: Any = torch.distributed
        self._made = self.__dict__.get("_made") or stores.HashStore()
        return getattr(self._made, name)


def _hosts_its_store(params: RendezvousParameters) -> bool:
    """Tell whether torch would open the c10d store on this machine, from the endpoint and ``is_host``."""
    from elastic_run.rendezvous.addresses import find_whether_own_host
    from elastic_run.rendezvous.utils import parse_rendezvous_endpoint

    store_type = str(params.get("store_type", "tcp")).strip().lower()
    if store_type != "tcp":
        return store_type == "file"
    is_host = params.get_as_bool("is_host")
    if is_host is not None:
        return is_host
    host, _ = parse_rendezvous_endpoint(params.endpoint.partition(",")[0], default_port=0)
    return bool(find_whether_own_host(host, _LOOK_UP))


def _register_plugin(backend: str) -> None:
    """Load the installed plug-in of that name, and no other."""
    from importlib.metadata import entry_points

    plugins = entry_points(group=RENDEZVOUS_ENTRY_POINTS)
    for plugin in plugins:
        if plugin.name == backend:
            rendezvous_handler_registry.register(backend, _load_plugin(plugin))
            return
    known = sorted({*rendezvous_handler_registry._registry, *plugins.names})  # noqa: SLF001 - ditto
    message = f"the rendezvous backend {backend!r} is not registered; known: {', '.join(known)}"
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
    return lambda params: _quieten(lambda: creator(_PluginParameters(params)))


def _quieten(call: Callable[[], Any]) -> Any:
    """Call a plug-in's code without what torch's registry logs of plug-ins meanwhile."""
    import logging

    # Where that code imports torch's rendezvous, torch fills its own registry, unused here, with all plug-ins. It logs
    # a traceback for each that is half imported then, or is a creator itself; nothing is wrong.
    logger = logging.getLogger(f"{_TORCHS_INTERFACE}.registry")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        return call()
    finally:
        logger.disabled = was_disabled


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

    def __init__(self, params: RendezvousParameters) -> None:
        self.__dict__.update(params.__dict__)

    @property  # type: ignore[misc] # isinstance looks here after the type, and the plug-in may import torch late
    def __class__(self) -> type:
        return getattr(sys.modules.get(_TORCHS_INTERFACE), "RendezvousParameters", _PluginParameters)


def _broken(plugin: EntryPoint, what: str) -> str:
    package = f"{plugin.dist.name} {plugin.dist.version}" if plugin.dist else "of an unknown package"
    return " ".join(f"rendezvous backend {plugin.name!r}: plug-in {package} ({plugin.value}) {what}".split())
