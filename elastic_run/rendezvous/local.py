"""The rendezvous of a job on one node: nobody to wait for, nothing to agree on.

Every round is formed at once, with this node as rank 0 of 1. The workers' store is served by the agent, which offers
its address before each round; then the workers are told that the agent serves it. Without an offer (somebody else's
agent uses this handler) it is as with torch: a free port is named, and the worker with rank 0 opens its store there.

The static backend with one node differs in the address: the workers' store is at the endpoint (--master-addr and
--master-port), unless the agent offers a store elsewhere.
"""

from __future__ import annotations

import sys

from elastic_run.rendezvous.api import RendezvousClosedError, RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from elastic_run.rendezvous.api import RendezvousParameters, Store
    from elastic_run.store.tcpstore.memory_store import MemoryStore

__all__ = [
    "LocalRendezvousHandler",
    "LocalStore",
    "create_handler",
    "create_static_handler",
    "find_torch_stores",
    "make_local_store",
]

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
        """Say where the workers' store of the next rounds is, and whether an agent serves it."""
        self._offered = RendezvousStoreInfo(host, port)
        self._use_agent_store = use_agent_store

    def next_rendezvous(self) -> RendezvousInfo:
        """Form the next round, at once and with an empty store of its own; RendezvousClosedError if the job is over."""
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
        """Close the rendezvous; there is nothing else to release. Returns True."""
        self._is_closed = True
        return True


def _find_port() -> int:
    from elastic_run.utils import get_free_port

    return get_free_port()


def create_handler(params: RendezvousParameters) -> LocalRendezvousHandler:
    """Return the handler of a job on one node, whose rounds form at once."""
    return LocalRendezvousHandler(params.run_id, backend=params.backend, local_addr=params.local_addr)


def create_static_handler(params: RendezvousParameters) -> LocalRendezvousHandler:
    """Return the handler of a job on one node whose address and rank are given.

    Raises:
        ValueError: The endpoint, its port or the rank is missing or wrong, or `timeout` is no number of seconds.
    """
    from elastic_run.rendezvous.utils import parse_rendezvous_endpoint

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


def make_local_store() -> Store:
    """Return an empty store for the one agent of a round: torch's where the program has imported torch, else ours.

    So `PrefixStore("x", store)` and `init_process_group(store=store)` take it. torch is never imported here.
    """
    torch_stores = find_torch_stores()
    if torch_stores is None:
        return LocalStore()
    made: Store = torch_stores.HashStore()
    return made


def find_torch_stores() -> Any | None:
    """Return `torch.distributed` where the program has it, built with its stores and imported to the end."""
    module = sys.modules.get("torch.distributed")
    return module if hasattr(module, "TCPStore") and hasattr(module, "HashStore") else None


class LocalStore:
    """Keys and values of one node's agent: torch's Store methods over a dictionary; text is taken for its UTF-8 bytes.

    There is no other node that could ever set a missing key. So asking for one fails at once, with the error that torch
    gives after its timeout (StoreTimeoutError), instead of blocking the agent.
    """

    def __init__(self) -> None:
        self._made: MemoryStore | None = None

    @property
    def _data(self) -> MemoryStore:
        if self._made is None:
            from elastic_run.store.tcpstore.memory_store import MemoryStore

            self._made = MemoryStore()
        return self._made

    def set(self, key: str, value: str | bytes) -> None:
        """Give a key a value."""
        self._data.set(_bytes(key), _bytes(value))

    def get(self, key: str) -> bytes:
        """Return a key's value."""
        (value,) = self.multi_get([key])
        return value

    def add(self, key: str, amount: int) -> int:
        """Count a key up, from 0 when missing, and return the sum."""
        return self._data.add(_bytes(key), amount)

    def append(self, key: str, value: str | bytes) -> None:
        """Put bytes behind a key's value."""
        self._data.append(_bytes(key), _bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Replace a value if it is the expected one, or missing with nothing expected; return the value now."""
        return self._data.compare_set(_bytes(key), _bytes(expected), _bytes(desired))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the keys' values."""
        found = self._data.multi_get([_bytes(key) for key in keys])
        values = [value for value in found if value is not None]
        if len(values) < len(found):
            raise _missing(keys[found.index(None)])
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Give each key its value."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        return self._data.check([_bytes(key) for key in keys])

    def wait(self, keys: Sequence[str], timeout: object = None) -> None:  # noqa: ARG002 - torch's signature
        """Return if all keys are there. Nobody else can set one, so the timeout is not used."""
        for key in keys:
            if not self.check([key]):
                raise _missing(key)

    def delete_key(self, key: str) -> bool:
        """Remove a key and return whether it was there."""
        return self._data.delete_key(_bytes(key))

    def num_keys(self) -> int:
        """Return the number of keys."""
        return self._data.num_keys()


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


def _missing(key: str) -> Exception:
    from elastic_run.store.errors import StoreTimeoutError

    return StoreTimeoutError(f"key {key!r} is not in the store of this round, and no other node could set it")
