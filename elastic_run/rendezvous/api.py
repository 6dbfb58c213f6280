"""The interface between an agent and a rendezvous backend, with torch's names, signatures and meaning.

A handler brings this node together with the others: each `next_rendezvous` is one round, and says which rank this
node has among how many and where the workers' store is. A backend is a function from parameters to a handler, kept
by name in a registry; `BACKENDS` is the one table of those that come with elastic-run. Foreign handlers come written
against torch's classes, so nothing in elastic-run may ask `isinstance(handler, RendezvousHandler)`, nor rely on more
than torch's methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from elastic_run import lazy_names
from elastic_run.contract import DEFAULT_C10D_PORT
from elastic_run.records import dataclass, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, Protocol

__all__ = [
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
    "rendezvous_handler_registry",
]


class RendezvousError(Exception):
    """The root of everything that a rendezvous raises."""


class RendezvousClosedError(RendezvousError):
    """The rendezvous is closed: the job is over, nobody can join any more."""


class RendezvousTimeoutError(RendezvousError):
    """The nodes did not come together in time."""


class RendezvousConnectionError(RendezvousError):
    """The backend can't be reached, or the connection to it was lost."""


class RendezvousStateError(RendezvousError):
    """The values in the backend's store make no sense."""


class BackendNameError(ValueError, RuntimeError):
    """A handler belongs to another backend than the one that was asked for (torch: RuntimeError)."""


class RendezvousGracefulExitError(RendezvousError):
    """This node is not needed and leaves; that is not a failure."""


def is_kind(error: BaseException, kind: type[RendezvousError]) -> bool:
    """Tell whether an exception is of one of these classes, or of torch's class of that name.

    A foreign handler raises torch's errors, which have nothing in common with ours but the name.
    """
    return any(base.__name__ == kind.__name__ for base in type(error).__mro__)


if TYPE_CHECKING:

    class Store(Protocol):
        """The part of torch.distributed.Store that is used here; torch's stores and ours have it."""

        def set(self, key: str, value: bytes, /) -> object: ...
        def get(self, key: str, /) -> bytes: ...


_TRUE = ("1", "true", "t", "yes", "y")
_FALSE = ("0", "false", "f", "no", "n")


@dataclass
class RendezvousStoreInfo:
    """Where the workers find the store through which they set up their process groups.

    Args:
        master_addr: Host name or address; MASTER_ADDR of the workers.
        master_port: Port; MASTER_PORT of the workers.
    """

    # Without annotations, as torch has them: they are no fields.
    MASTER_ADDR_KEY = "MASTER_ADDR"
    MASTER_PORT_KEY = "MASTER_PORT"
    master_addr: str
    master_port: int

    @staticmethod
    def build(rank: int, store: Store, local_addr: str | None, server_port: int | None = None) -> RendezvousStoreInfo:
        """Agree on the address through a store that all nodes share: rank 0 writes its own, everybody reads it.

        Args:
            rank: Rank of this node.
            store: Store that all nodes of the round share.
            local_addr: Address of this node; None for its fully qualified name.
            server_port: Port on which rank 0 already serves a store; None for a free one.
        """
        if rank == 0:
            import socket

            from elastic_run.utils import get_free_port

            store.set(RendezvousStoreInfo.MASTER_ADDR_KEY, (local_addr or socket.getfqdn()).encode())
            store.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(server_port or get_free_port()).encode())
        return RendezvousStoreInfo(
            master_addr=store.get(RendezvousStoreInfo.MASTER_ADDR_KEY).decode(),
            master_port=int(store.get(RendezvousStoreInfo.MASTER_PORT_KEY).decode()),
        )


class RendezvousInfo:
    """The result of one round."""

    def __init__(self, store: Store, rank: int, world_size: int, bootstrap_store_info: RendezvousStoreInfo) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._bootstrap_store_info = bootstrap_store_info

    @property
    def store(self) -> Store:
        """Store that the agents of the round share; not the workers' store."""
        return self._store

    @property
    def rank(self) -> int:
        """Rank of this node in the round."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of nodes in the round."""
        return self._world_size

    @property
    def bootstrap_store_info(self) -> RendezvousStoreInfo | None:
        """Where the workers' store is."""
        return self._bootstrap_store_info


class RendezvousHandler(ABC):
    """One node's view of the rendezvous of one job. Subclass it to bring a backend of your own."""

    @abstractmethod
    def get_backend(self) -> str:
        """Return the name under which this backend is registered."""

    @property
    def use_agent_store(self) -> bool:
        """Whether the agent's side serves the workers' store, for the application's whole life."""
        return False

    @abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round and block until it is formed with this node in it.

        Raises:
            RendezvousClosedError: The job is over.
            RendezvousConnectionError: The backend can't be reached.
            RendezvousStateError: The backend's state makes no sense.
            RendezvousTimeoutError: Too few nodes came in time.
        """

    @abstractmethod
    def is_closed(self) -> bool:
        """Return whether the job is over, as far as this node knows; news may take a while to arrive."""

    @abstractmethod
    def set_closed(self) -> None:
        """Declare the job over, for all nodes."""

    @abstractmethod
    def num_nodes_waiting(self) -> int:
        """Return how many nodes came too late for this round and wait for the next."""

    @abstractmethod
    def get_run_id(self) -> str:
        """Return the id of the job."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Release everything that the handler holds; return whether that worked."""


class RendezvousParameters:
    """What a backend needs to know to build a handler.

    Args:
        backend: Name of the backend.
        endpoint: Where the backend lives, mostly ``host[:port]``.
        run_id: Id of the job.
        min_nodes: Smallest number of nodes to run with.
        max_nodes: Largest number of nodes to run with.
        local_addr: Address of this node; None to find it out.
        **kwargs: The backend's own settings (``--rdzv-conf``).

    Raises:
        ValueError: The backend has no name, or the numbers of nodes are not ``1 <= min <= max``.
    """

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not backend:
            message = "the name of the rendezvous backend is empty"
            raise ValueError(message)
        if min_nodes < 1:
            message = f"the minimum number of nodes is {min_nodes}; it must be 1 or more"
            raise ValueError(message)
        if max_nodes < min_nodes:
            message = f"the maximum number of nodes, {max_nodes}, is less than the minimum, {min_nodes}"
            raise ValueError(message)
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.config = kwargs
        self.local_addr = local_addr

    def get(self, key: str, default: Any = None) -> Any:
        """Return the setting `key`, or `default` where it is not given."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """Return the setting `key` as a truth value: 1/0, true/false, t/f, yes/no, y/n in any case; or ValueError."""
        return read_truth(key, self.get(key, default))

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """Return the setting `key` as a whole number, or raise ValueError."""
        value = self.get(key, default)
        if value is None:
            return None
        try:
            return int(value)
        except (TypeError, ValueError) as error:
            message = f"rendezvous setting {key}={value!r}: not a whole number"
            raise ValueError(message) from error


def read_truth(key: str, value: object) -> bool | None:
    """Return a setting as `RendezvousParameters.get_as_bool` does."""
    if value is None or isinstance(value, bool):
        return value
    word = str(value).strip().lower() if isinstance(value, int | str) else ""
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    message = f"rendezvous setting {key}={value!r}: not one of {', '.join((*_TRUE, *_FALSE))}"
    raise ValueError(message)


# --- backends --------------------------------------------------------------------------------------------------------
_ETCD_SETTINGS = ("protocol", "ssl_cert", "ssl_cert_key", "ca_cert", "cert", "key", "cacert", "etcd_prefix")


@dataclass(frozen=True, slots=True)
class BuiltInBackend:
    """A rendezvous backend that comes with elastic-run."""

    has_store: bool = True  # whether a job's nodes meet in a store; else it is for jobs of one node, without settings
    default_port: int = -1  # of an endpoint that names none; -1 where an endpoint has to name it
    settings: tuple[str, ...] = ()  # keys of `--rdzv-conf` beyond those that all backends have
    #: Whether torch's backend of this name reads `timeout`, which torch's LaunchConfig puts into each job's settings.
    reads_timeout: bool = False
    is_shared: bool = False  # the store outlives the job and other jobs use it: endpoint and id have to be given
    prefix: str = ""  # where torch's backend keeps its jobs in etcd: a cluster's access rules may name it
    etcd_version: int = 0  # of etcd's API; 0 where the job doesn't meet in etcd


_ETCD = BuiltInBackend(default_port=2379, settings=_ETCD_SETTINGS, is_shared=True, etcd_version=3)
_ETCD_V2 = replace(_ETCD, reads_timeout=True, etcd_version=2)

#: Name for `--rdzv-backend` -> the backend.
BACKENDS: Mapping[str, BuiltInBackend] = {
    "static": BuiltInBackend(settings=("rank",), reads_timeout=True),
    "c10d": BuiltInBackend(default_port=DEFAULT_C10D_PORT, settings=("store_type", "is_host")),
    "etcd": replace(_ETCD_V2, prefix="/torchelastic/p2p"),
    "etcd-v2": replace(_ETCD_V2, prefix="/torch/elastic/rendezvous"),
    "etcd-v3": _ETCD,
    "local": BuiltInBackend(has_store=False),
}


class RendezvousHandlerRegistry:
    """Backends by name."""

    _registry: dict[str, RendezvousHandlerCreator]

    def __init__(self) -> None:
        self._registry = {}

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Make a backend known by a name; ValueError if the name is empty, or taken by another creator."""
        if not backend:
            message = "the name of the rendezvous backend is empty"
            raise ValueError(message)
        current = self._registry.setdefault(backend, creator)
        if current != creator:
            message = f"rendezvous backend {backend!r} can't be {creator!r}: it is {current!r} already"
            raise ValueError(message)

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """Build the handler of ``params.backend``.

        Raises:
            ValueError: No such backend is registered.
            RuntimeError: The handler says that it belongs to another backend.
        """
        creator = self._registry.get(params.backend)
        if creator is None:
            known = ", ".join(sorted(self._registry)) or "none"
            message = f"rendezvous backend {params.backend!r} is not registered; registered: {known}"
            raise ValueError(message)
        handler = creator(params)
        if handler.get_backend() != params.backend:
            message = (
                f"rendezvous backend {params.backend!r} was asked for, but its handler says that it is "
                f"{handler.get_backend()!r}: get_backend() must return the name under which it is registered"
            )
            raise BackendNameError(message)
        return handler


if TYPE_CHECKING:
    RendezvousHandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]

#: The backends that the launcher can use; programs that embed it add their own here.
rendezvous_handler_registry = RendezvousHandlerRegistry()


def __getattr__(name: str) -> object:
    if name == "RendezvousHandlerCreator":
        from collections.abc import Callable

        return Callable[[RendezvousParameters], RendezvousHandler]
    return _load(name)


#: Torch's module has it from another one, and programs take it from here.
_load = lazy_names(__name__, {"get_free_port": "elastic_run.utils"})
