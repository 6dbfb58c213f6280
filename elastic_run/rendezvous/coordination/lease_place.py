"""Where the nodes of a job meet if a lease says who coordinates: in etcd, or in a file that all nodes see.

An agent that acquires the lease opens a port first, and writes its address into the lease. Beside the lease stays the
address of the last coordinator: an agent that takes over tells that one to step down, where it can be reached. It may
live, and not know that its lease is over, since only it can't reach the store.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress

from elastic_run.core.job.coordination import LeaseRenewed, StepDown
from elastic_run.core.job.coordination_state import LEASE_SHARE
from elastic_run.core.job.discovery import (
    COORDINATES,
    FOLLOWS,
    KNOWS_NOTHING,
    KNOWS_ROUND,
    LEASE_STORE,
    SEARCHES,
    Answer,
)
from elastic_run.core.job.succession import LEASE
from elastic_run.records import dataclass, replace
from elastic_run.rendezvous.addresses import find_listening, find_local_address, find_loopback
from elastic_run.rendezvous.coordination.opening import Identity, ask
from elastic_run.rendezvous.coordination.places import LOOK_UP, Place
from elastic_run.rendezvous.session import Notice
from elastic_run.report.waiting import Repetition
from elastic_run.store.connecting import format_endpoint
from elastic_run.store.errors import StoreError
from elastic_run.store.tcpstore.listener import open_listeners

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.loop import Loop
    from elastic_run.rendezvous.coordination.coordinator_thread import CoordinatorThread
    from elastic_run.rendezvous.leases.lease import Holder, LeaseStore

__all__ = ["LeasePlace"]

#: Seconds for the coordinator before to hear that there is another one.
_TELL = 2.0


@dataclass(frozen=True, slots=True)
class _Address:
    """Who holds a lease, and where it listens."""

    node: str = ""
    address: str = ""


class LeasePlace(Place):
    """The lease of a job, as one agent sees it. Calls of its store block, so they are made outside the loop's thread.

    Args:
        kind: Name of the backend.
        run_id: The job.
        endpoint: As the user wrote it.
        open_store: Opens the lease, for calls that may take so many seconds.
        host: A host and port with which to find this node's own address, or None.
        secret: The secret that the members of the job share, or None.
    """

    dies_with_host = False

    def __init__(
        self,
        kind: str,
        run_id: str,
        endpoint: str,
        open_store: Callable[[float], LeaseStore],
        *,
        host: tuple[str, int] | None,
        secret: bytes | None,
    ) -> None:
        super().__init__(kind, run_id, [], is_host=False, secret=secret)
        self._endpoint = endpoint
        self._host = host
        self._open_store = open_store
        self._store: LeaseStore | None = None
        self._found: Holder | None = None
        self._held: Holder | None = None
        self._address = ""
        self._is_released = False
        self._identity = Identity(run_id, "", "", "", 1.0, self.credentials)

    @property
    def names(self) -> tuple[str, ...]:
        """The lease's store alone."""
        return (LEASE_STORE,)

    @property
    def name(self) -> str:
        """The store as the user wrote it, for messages."""
        return self._endpoint

    @property
    def choice(self) -> str:
        """How a coordinator is chosen."""
        return LEASE

    @property
    def term(self) -> int:
        """The term of the lease that this agent holds."""
        return 0 if self._held is None else self._held.term

    def open(self, identity: Identity, timeout: float) -> None:
        """Prepare to use the store, which may take so many seconds for an answer."""
        self._identity = identity
        self._store = self._open_store(timeout)

    def listen(self, local_addr: str) -> None:
        """Open this agent's port at the address that other nodes use, once."""
        if self._address:
            return
        found = find_listening(local_addr, LOOK_UP)
        self._sockets = open_listeners(found.hosts)
        self.port = self._sockets[0].getsockname()[1]
        self._address = format_endpoint(local_addr, self.port)
        if found.reason:
            self.notice = f"this node listens for other nodes at port {self.port} of all interfaces: {found.reason}"

    # --- the lease; each of these may block --------------------------------------------------------------------------
    def look(self) -> Answer:
        """Read who holds the lease."""
        self._found = found = self._use().read()
        if found is None or not found.is_valid:
            return Answer(LEASE_STORE, SEARCHES)
        holder = _read(found.value)
        return Answer(LEASE_STORE, FOLLOWS, holder.node, holder.address)

    def acquire(self, instead_of: str) -> Answer:
        """Acquire the lease, if nobody holds it but the node that is given."""
        store, found = self._use(), self._found
        former = found if found is not None and _read(found.value).node == instead_of else None
        last = store.read_last()
        self._held = store.acquire(self._make_value(), self._identity.lease, instead_of=former)
        if self._held is None:
            return self.look()
        store.write_last(self._address)
        if last not in ("", self._address) and former is None:
            self._tell_successor(last)
        standing = KNOWS_ROUND if last or found is not None else KNOWS_NOTHING
        return Answer(LEASE_STORE, COORDINATES, self._identity.node, "", standing)

    def renew(self) -> LeaseRenewed | StepDown:
        """Hold the lease on, or acquire it again if nobody has it."""
        store, asked_at = self._use(), time.monotonic()
        until = asked_at + LEASE_SHARE * self._identity.lease
        if self._held is not None and store.renew(self._held, self._identity.lease):
            return LeaseRenewed(until, self._held.term)
        if not self._is_released:
            self._held = store.acquire(self._make_value(), self._identity.lease)
        if self._held is not None:
            return LeaseRenewed(until, self._held.term)
        found = store.read()
        return StepDown("" if found is None else _read(found.value).address)

    def release(self, *, is_over: bool) -> None:
        """Give the lease back, or remove all that the job has in the store; a store out of reach keeps it a while."""
        self._is_released = True  # a renewal may be on its way
        held, self._held = self._held, None
        with suppress(StoreError):
            if is_over:
                self._use().remove()
            elif held is not None:
                self._use().release(held)

    def _use(self) -> LeaseStore:
        if self._store is None:
            self._store = self._open_store(self._identity.lease)
        return self._store

    def _make_value(self) -> str:
        document = {"node": self._identity.node, "address": self._address, "nonce": os.urandom(8).hex()}
        return json.dumps(document, separators=(",", ":"))

    def _tell_successor(self, last: str) -> None:
        """Tell the coordinator before, which may live, that this agent coordinates now."""
        hello = replace(self._identity.make_hello(joins=True), successor=self._address, term=self.term)
        with suppress(StoreError):
            host, port = split_endpoint(last)
            _, connected, _ = ask((host, port), hello, _TELL, self.credentials, dark_after=_TELL)
            if connected is not None:
                connected.close()

    # --- for the user ------------------------------------------------------------------------------------------------
    def find_local_address(self) -> str:
        """Return the address of the interface that reaches the store."""
        return find_local_address(*(self._host or (find_loopback(), 1)), LOOK_UP)

    def describe_need(self) -> str:
        """Return nothing: other nodes know the store."""
        return ""

    def close(self) -> None:
        """Close the port if nobody has taken it over, and the connection to the store."""
        super().close()
        if self._store is not None:
            self._store.close()


class LeaseRenewal:
    """Holds the lease on while this agent coordinates, in threads: the store may take seconds."""

    def __init__(
        self,
        loop: Loop,
        place: LeasePlace,
        lease: float,
        is_needed: Callable[[], bool],
        deliver: Callable[[Notice], None],
    ) -> None:
        self._loop = loop
        self._place = place
        self._lease = lease
        self._is_needed = is_needed
        self._deliver = deliver
        self._is_running = False
        self._failing_since: float | None = None
        self._repetition = Repetition()

    def begin(self, coordinator: CoordinatorThread) -> None:
        """Renew the lease, and again in a third of its time; harmless where that goes on already."""
        if not self._is_running:
            self._is_running = True
            self._renew(coordinator)

    def _renew(self, coordinator: CoordinatorThread) -> None:
        if not self._is_needed():
            self._is_running = False
            return

        def call() -> None:
            error = None
            try:
                coordinator.note(self._place.renew())
            except StoreError as caught:
                error = caught
            self._loop.call_soon_threadsafe(lambda: again(error))

        def again(error: StoreError | None) -> None:
            self._report(error)
            self._loop.call_later(self._lease / 3, lambda: self._renew(coordinator))

        threading.Thread(target=call, name="rendezvous-lease", daemon=True).start()

    def _report(self, error: StoreError | None) -> None:
        """Tell the user that the lease can't be renewed, as soon as it is over, and that it can again."""
        now, name = self._loop.now(), self._place.name
        silent_for = 0.0 if self._failing_since is None else now - self._failing_since
        if error is None:
            if silent_for >= self._lease:
                self._deliver(Notice(f"the store at {name} answers again after {silent_for:.0f} s"))
            self._failing_since = None
            return
        if self._failing_since is None:
            self._failing_since, self._repetition = now, Repetition()
        trouble = getattr(error, "cause", str(error))
        if silent_for >= self._lease and self._repetition.is_due(trouble, now):
            fact = f"the store at {name} has been out of reach for {silent_for:.0f} s: {trouble}"
            self._deliver(Notice(f"{fact}; the job goes on, and its next round waits for the store"))


def _read(value: str) -> _Address:
    try:
        document = json.loads(value)
        return _Address(str(document["node"]), str(document["address"]))
    except (ValueError, KeyError, TypeError):
        return _Address()


def split_endpoint(name: str) -> tuple[str, int]:
    """Return the host and the port of an address that `format_endpoint` has made."""
    host, _, port = name.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port) if port.isdigit() else 0
