"""Where a job's store is, and how to open it: one `Backend` per agent, for all kinds of stores.

Rules
- `open` may be called by any thread, for a connection of its own.
- An agent may serve the store itself (`is_host`): with c10d where the endpoint is an address of this machine, with
  static on rank 0. Then the agent reaches the store by loopback, without a name server and without a network.
- The modules of a store are imported when it is used.
"""

# ruff: noqa: D102 - Backend says what the methods promise
from __future__ import annotations

from abc import ABC, abstractmethod

from elastic_run.rendezvous.addresses import find_local_address, find_loopback
from elastic_run.store.errors import StoreConnectionError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from elastic_run.rendezvous.elastic.backend.hosting import HostedStore
    from elastic_run.store.jobstore.api import JobStore

__all__ = ["LOOK_UP", "Backend", "SharedBackend", "describe_backend", "sign"]

#: Seconds for a name server to say whether the endpoint is this machine, and which interface reaches it.
LOOK_UP = 3.0


class Backend(ABC):
    """A job's store, as one agent reaches it.

    Attributes:
        kind: The name of the backend, such as `c10d`.
        run_id: The job.
        name: The store for messages.
        hosted: The store that this agent serves, or None.
        notice: A line for the user about the addresses at which the store is served, or "".
        dies_with_host: Whether the store is gone for good when no process listens there any more.
        doubt: A possible mistake of the user if no node comes; the lines about missing nodes show it.
    """

    kind: str
    run_id: str
    name: str
    hosted: HostedStore | None = None
    notice = ""
    dies_with_host = False
    doubt = ""

    @property
    def successors(self) -> Sequence[tuple[str, int]]:
        """The endpoints that take over when this one is gone, in their order."""
        return ()

    @property
    def others(self) -> Sequence[tuple[str, int]]:
        """All endpoints but this one, as the user ordered them."""
        return ()

    @property
    def rank(self) -> int:
        """The place of this endpoint in that order."""
        return 0

    @property
    def is_host(self) -> bool:
        """Whether this agent serves the store."""
        return self.hosted is not None

    @property
    def port(self) -> int:
        """The port at which this agent serves the store, 0 if it doesn't."""
        return 0 if self.hosted is None else self.hosted.port

    @abstractmethod
    def prepare(self) -> None:
        """Serve the store if that is this agent's task; may take seconds if a name has to be looked up.

        Raises:
            PortTakenError: The user said that this agent serves the store, and another process has the port.
            OSError: The system refuses the port.
            ValueError: Another node has the rank or the address that the user gave to this node.
        """

    @abstractmethod
    def open(self, timeout: float) -> JobStore:
        """Open a connection for one thread.

        Args:
            timeout: Seconds for the attempt, and for each answer later.

        Raises:
            StoreConnectionError: The store can't be reached; the reason says why.
            StoreAccessError: The store refuses this node.
        """

    def advance(self, endpoint: str = "") -> bool:  # noqa: ARG002 - most stores have no successors
        """Go on at another endpoint from now on; `prepare` comes next.

        Args:
            endpoint: The endpoint as the user wrote it; "" for the next one.

        Returns:
            Whether there is an endpoint that was not tried in vain since the store answered last.
        """
        return False

    def look_at(self, endpoint: tuple[str, int], timeout: float) -> JobStore:
        """Open a connection to a store that may be served at another endpoint. Close it soon: it is for one look.

        Args:
            endpoint: One of `others`.
            timeout: Seconds, also for each answer.

        Raises:
            StoreConnectionError: Nothing is there.
        """
        message = f"a store of kind {self.kind!r} has one endpoint, not {endpoint} as well, for {timeout} s"
        raise StoreConnectionError(message)

    def describe_listener(self, reason: str) -> str:  # noqa: ARG002 - only stores over TCP are served on this machine
        """Return a clause with the process of this machine that listens at the endpoint, or ""; may take a second.

        Args:
            reason: A word of `store.errors` for the failure of the last attempt to reach the store.
        """
        return ""

    def find_doubts(self, host: str) -> str:  # noqa: ARG002 - a store of many jobs knows of no other nodes
        """Return one line for the user of a node that waits alone, or ""; may take a second."""
        return self.doubt

    def find_visitor(self) -> str:
        """Return one line about a launcher of another job that came to the store of this node, or ""."""
        return ""

    def leave_id(self, host: str) -> None:  # noqa: B027 - only stores over TCP are served by an agent
        """Tell nodes of other jobs the id of this job, once for each store that this agent serves."""

    @property
    def is_successor(self) -> bool:
        """Whether this machine may have to serve the store later; may take seconds if a name has to be looked up."""
        return False

    @abstractmethod
    def find_local_address(self) -> str:
        """Return the address of the interface that reaches the store."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the values with which another process opens the store, as JSON: `node_death.notice` reads them."""

    def close(self) -> None:
        """Stop serving the store, if this agent does."""
        if self.hosted is not None:
            self.hosted.close()


class SharedBackend(Backend):
    """A store that no agent serves: etcd, or a directory that all nodes see.

    Args:
        kind: Name of the backend.
        run_id: The job.
        endpoint: The endpoint as the user wrote it.
        conf: The settings that the store reads, as the user gave them.
        host: A host and port with which to find this node's own address, or None.
        open_store: Opens a connection; its argument is the timeout in seconds.
        secret: The secret that the members of the job share, or None.
    """

    def __init__(
        self,
        kind: str,
        run_id: str,
        endpoint: str,
        *,
        conf: Mapping[str, Any],
        host: tuple[str, int] | None,
        open_store: Callable[[float], JobStore],
        secret: bytes | None = None,
    ) -> None:
        self.kind = kind
        self.run_id = run_id
        self.name = endpoint
        self._conf = conf
        self._host = host
        self._open_store = open_store
        self._secret = secret

    def prepare(self) -> None:
        """Do nothing: another process serves this store."""

    def open(self, timeout: float) -> JobStore:
        return sign(self._open_store(timeout), self._secret)

    def find_local_address(self) -> str:
        return find_local_address(*(self._host or (find_loopback(), 1)), LOOK_UP)

    def describe(self) -> dict[str, Any]:
        return describe_backend(self, self.name, self._conf, self._secret)


def describe_backend(backend: Backend, endpoint: str, conf: Mapping[str, Any], secret: bytes | None) -> dict[str, Any]:
    """Return what another process needs to open the same store; see `Backend.describe`."""
    return {
        "backend": backend.kind,
        "run_id": backend.run_id,
        "endpoint": endpoint,
        "conf": {key: str(value) for key, value in conf.items()},
        "secret": None if secret is None else secret.hex(),
    }


def sign(store: JobStore, secret: bytes | None) -> JobStore:
    """Return the store, which signs what is written if the job has a secret."""
    if secret is None:
        return store
    from elastic_run.store.jobstore.signed import SignedStore  # noqa: PLC0415 - imported when used

    return SignedStore(store, secret)
