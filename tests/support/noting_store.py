"""A job store in memory that notes each use of its connections, and can be told to break, to be emptied or to move."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from elastic_run.core.protocol import job_keys, messages
from elastic_run.rendezvous.backend_table import read_settings
from elastic_run.rendezvous.elastic.backend.base import Backend
from elastic_run.rendezvous.coordination.handler import open_session
from elastic_run.store.errors import CLOSED, SILENT, StoreConnectionError
from elastic_run.store.jobstore.memory import JobSpace, MemoryJobStore
from tests.support.configs import plain_setup
from tests.support.sessions import Node

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, TypeAlias

    from elastic_run.store.jobstore.api import JobStore

    #: Called with each use of a connection, before it: the connection, what is done, and with which key or stream.
    OnUse: TypeAlias = Callable[["NotingStore", str, str], None]

ELSEWHERE = "elsewhere:1"
ATTEMPTS = 3
FIRST_AND_LAST = (messages.Join, messages.Leave)
#: Settings with which heartbeats come after more time than a test takes.
SLOW = {"keep_alive_interval": "300", "join_timeout": "300", "last_call_timeout": "0"}


class NotingStore(MemoryJobStore):
    """Notes what it is used for.

    Args:
        space: The store.
        on_use: Called before each use.

    Attributes:
        uses: What was done, and with which key or stream.
        facts: What was said over it.
        reason: Why it broke, once it did.
        timeout: Seconds for each answer.
    """

    reason = CLOSED
    timeout = 0.0

    def __init__(self, space: JobSpace, on_use: OnUse) -> None:
        super().__init__(space)
        self.uses: list[tuple[str, str]] = []
        self.facts: list[object] = []
        self._on_use = on_use

    def _note(self, what: str, where: str) -> None:
        self.uses.append((what, where))
        self._on_use(self, what, where)

    def append(self, stream: str, value: bytes) -> None:
        """Note it, and do it; a second note says that it is done."""
        self._note("append", stream)
        super().append(stream, value)
        if stream == job_keys.FACTS:
            self.facts.append(messages.read_fact(value))
        self._note("appended", stream)

    def read(self, stream: str, position: int, timeout: float) -> tuple[list[bytes], int]:
        """Note it, and do it."""
        self._note("read", stream)
        return super().read(stream, position, timeout)

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """Note it, and do it."""
        self._note("get", keys[0])
        return super().get(keys)

    def wait(self, key: str, timeout: float) -> bytes | None:
        """Note it, and do it."""
        self._note("wait", key)
        return super().wait(key, timeout)

    def fetch_heartbeats(self, nodes: Sequence[str]) -> list[bytes | None]:
        """Note it, and do it."""
        self._note("heartbeats", nodes[0])
        return super().fetch_heartbeats(nodes)

    def write_heartbeat(self, node: str, value: bytes, last: bytes | None = None) -> bool:
        """Note it, and do it."""
        self._note("heartbeat", node)
        return super().write_heartbeat(node, value, last)

    def share(self) -> NotingStore:
        """Return an object for the log reader, over this connection."""
        return SharedStore(self)

    def set_timeout(self, timeout: float) -> None:
        """Note it."""
        self.timeout = timeout

    def fall_silent(self) -> None:
        """Let the operation under way, and each later one, fail since the store does not answer."""
        self.reason = SILENT
        self.close()

    def _check(self) -> None:
        if self._is_closed:
            message = "the connection is closed"
            raise StoreConnectionError(message, self.reason)
        super()._check()

    @property
    def is_coordinators(self) -> bool:
        """Whether the coordinator's thread has used it."""
        return any(what in ("read", "create") for what, _ in self.uses)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._is_closed


class SharedStore(NotingStore):
    """Another thread's view of a connection; what it is used for counts there."""

    def __init__(self, owner: NotingStore) -> None:
        self._owner = owner
        self.is_shared = True
        super().__init__(owner.space, lambda _, what, where: owner._note(what, where))
        self.facts = owner.facts

    def _check(self) -> None:
        self._owner._check()

    def _wait_until(self, is_there: Callable[[], bool], timeout: float) -> bool:
        return self._owner._wait_until(is_there, timeout)

    def close(self) -> None:
        """Leave the connection as it is."""


class NotingBackend(Backend):
    """Opens connections to a store in memory, and keeps them.

    Attributes:
        opened: All connections.
        on_use: Called before each use of a connection.
        failure: The error that the next attempts to open a connection raise.
        failures: How many attempts have failed so.
    """

    kind = "memory"
    name = "memory"

    def __init__(self) -> None:
        # A job of its own: the agents of other tests on this machine are dead, and a new agent would say so.
        self.run_id = secrets.token_hex()
        self.space = JobSpace()
        self.opened: list[NotingStore] = []
        self.on_use: OnUse = lambda *_: None
        self.failure: StoreConnectionError | None = None
        self.failures = 0

    def prepare(self) -> None:
        """Nothing is served."""

    def open(self, timeout: float) -> JobStore:
        """Open a connection, or fail."""
        if self.failure is not None:
            self.failures += 1
            raise self.failure
        self.opened.append(NotingStore(self.space, self._note_use))
        self.opened[-1].timeout = timeout
        return self.opened[-1]

    def _note_use(self, store: NotingStore, what: str, where: str) -> None:
        self.on_use(store, what, where)

    def empty(self) -> None:
        """Put an empty store in the place of this one, whose connections break."""
        self.space, before = JobSpace(), self.space
        before.set_reachable(is_reachable=False)

    def advance(self, endpoint: str = "") -> bool:
        """Go on in an empty store, if it is the one endpoint that there is beside this."""
        if endpoint == ELSEWHERE:
            self.space = JobSpace()
            self.name = ELSEWHERE
        return endpoint == ELSEWHERE

    def find_local_address(self) -> str:
        """Return loopback."""
        return "127.0.0.1"

    def describe(self) -> dict[str, Any]:
        """Return what names the job."""
        return {"endpoint": self.name}

    def users_of(self, what: str, where: str = "") -> list[NotingStore]:
        """Return the connections that were used for something."""
        return [store for store in self.opened if any(a == what and b.startswith(where) for a, b in store.uses)]

    @property
    def facts(self) -> list[object]:
        """What was said, over whatever connection, in whatever store."""
        return [fact for store in self.opened for fact in store.facts]


def make_node(
    backend: Backend,
    conf: Mapping[str, str] | None = None,
    **changes: Any,  # noqa: ANN401 - of any field
) -> Node:
    """Return a node of a job over a store, not yet started.

    Args:
        backend: The store's.
        conf: Settings of the rendezvous beside `SLOW`, or in their place.
        changes: Fields of the job's configuration with other values than by default.
    """
    settings = read_settings("c10d", {**SLOW, **(conf or {})})
    return Node(open_session(backend, settings, plain_setup(**changes), local_addr="127.0.0.1"))
