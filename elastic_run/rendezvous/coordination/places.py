"""Where the nodes of a job meet: endpoints at which an agent may coordinate, or a lease that says which agent does.

- Of several agents that may serve one endpoint, one serves it and the others connect to it. Linux may refuse all of
  them if they begin to listen at the same moment: `search` tries again while nobody listens there.
- With a lease (in etcd, or in a file that all nodes see), an agent opens a port first, and writes its address into the
  lease. Beside the lease stays the address of the last coordinator: an agent that takes over tells that one to step
  down, where it can be reached. It may live, and not know that its lease is over, since only it can't reach the store.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress

from elastic_run.contract import NO_RUN_ID
from elastic_run.core.job import coordinator_search as discovery
from elastic_run.core.job.founding import LEASE, MAJORITY, ONLY_ONE
from elastic_run.core.job.state import LEASE_SHARE, LeaseRenewed, StepDown
from elastic_run.records import replace
from elastic_run.rendezvous.addresses import (
    find_listening,
    find_local_address,
    find_loopback,
    find_whether_own_host,
    names_loopback,
)
from elastic_run.rendezvous.coordination.opening import Credentials, Hello, Identity, ask
from elastic_run.rendezvous.events import Notice
from elastic_run.report.waiting import Repetition
from elastic_run.store.connecting import format_endpoint
from elastic_run.store.errors import CLOSED, FOREIGN, SILENT, StoreError
from elastic_run.store.worker_store import PortTakenError, find_port_owner, open_listeners

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from collections.abc import Callable, Sequence

    from elastic_run.loop import Loop
    from elastic_run.rendezvous.coordination.lease import Holder, LeaseStore

#: Seconds for a name server to say whether the endpoint is this machine, and which interface reaches it; the same where
#: the look-up is made again until a coordinator was found, within the time of the first waiting line.
_LOOK_UP, _FIRST_LOOK_UP = 3.0, 1.5
#: Seconds for an agent to answer a look; for the coordinator before to hear that there is another one.
_LIVING = 1.0
_TELL = 2.0


class Place:
    """The endpoints of a job, as one agent sees them, in the user's order.

    `is_host` says whether this agent serves the first; None to find out. With static (`serves_workers`) the workers'
    store is at the same port.
    """

    dies_with_host = True  # whether the job's coordination ends with an agent that can't hand it over

    def __init__(
        self,
        kind: str,
        run_id: str,
        endpoints: Sequence[tuple[str, int]],
        *,
        is_host: bool | None,
        secret: bytes | None = None,
        serves_workers: bool = False,
    ) -> None:
        self.kind = kind
        self.run_id = run_id
        self.endpoints = {format_endpoint(*endpoint): endpoint for endpoint in endpoints}
        self.names = tuple(self.endpoints)  # as users write them, or `LEASE_STORE` alone
        self.name = next(iter(self.names), "")  # or the lease's store as the user wrote it, for messages
        self.choice = MAJORITY if len(self.endpoints) > 1 else ONLY_ONE  # a word of `core.job.founding`
        self.serves_workers = serves_workers
        self.credentials = None if secret is None else Credentials(secret)
        self.own = ""  # the endpoint that this agent serves, as `names` has it
        self.port = 0
        self.is_undecided = False  # whether it may have to serve one yet: a name has no address, or a port is taken
        self.notice = ""  # a line for the user about the addresses at which it listens
        self._is_host = is_host
        self._is_announced = False  # whether others come by an address that this agent tells them
        self._doubt = ""  # a possible mistake of the user if no node comes
        self._sockets: list[_socket.socket] = []

    @property
    def successors(self) -> tuple[str, ...]:
        """The endpoints that may take over from this agent's."""
        return tuple(name for name in self.names if name != self.own)

    # --- this agent's port -------------------------------------------------------------------------------------------
    def take_sockets(self) -> list[_socket.socket]:
        """Return the listening sockets of this agent's port, once, after `serve` or `serve_anywhere`."""
        sockets, self._sockets = self._sockets, []
        return sockets

    def serve(self) -> bool:
        """Listen at the first endpoint that is this agent's to serve, and return whether it listens; may take seconds.

        Raises OSError if the port is refused, and ValueError if another node has the rank that the user gave to this.
        """
        if self.own or self._is_host is False:
            return bool(self.own)
        self.is_undecided = False
        for name, (host, port) in self.endpoints.items():
            if self._is_host is None:
                is_own = find_whether_own_host(host, _FIRST_LOOK_UP)
                self.is_undecided = self.is_undecided or is_own is None
                if not is_own:
                    continue
            elif self.serves_workers:
                self._check_master()
            try:
                self._listen(host, port)
            except PortTakenError:
                # Another agent of the job on this machine was first, unless the user says that it must be this one.
                if self._is_host:
                    raise
                self.is_undecided = True
            else:
                self.own = name
                return True
        return False

    def serve_anywhere(self, address: str) -> None:
        """Listen at the endpoint's port or, if that is taken, at any: other nodes will come by this name or address."""
        port = next(iter(self.endpoints.values()))[1]
        try:
            self._listen(address, port)
        except PortTakenError:
            self._listen(address, 0)
        self._is_announced = True
        self.own = format_endpoint(address, self.port)
        self.endpoints = {self.own: (address, self.port)}
        self.name, self.names = self.own, (self.own,)

    def _listen(self, host: str, port: int, what: str = "the job's store listens") -> None:
        found = find_listening(host, _LOOK_UP)
        self._sockets = open_listeners(found.hosts, port)
        self.port = self._sockets[0].getsockname()[1]
        if found.reason:
            self.notice = f"{what} at port {self.port} of all interfaces: {found.reason}"

    def _check_master(self) -> None:
        """Look whether rank 0 is at its place: the user may have forgotten --node-rank here.

        An address of no interface may still lead here (a cloud's public one, a service's). So only a job that is
        served there already is proof.
        """
        name, (host, port) = next(iter(self.endpoints.items()))
        if names_loopback(host) or find_whether_own_host(host, _LOOK_UP) is not False:
            return
        self._doubt = (
            f"this node has rank 0, but {host} is no address of this machine: is --node-rank missing or wrong?"
        )
        try:
            hello = Hello(self.run_id, "", "")
            answer, _, _ = ask((host, port), hello, _LIVING, self.credentials, dark_after=_LIVING)
        except StoreError:
            return
        if answer.role == discovery.COORDINATES:
            message = (
                f"--node-rank: this node would have rank 0, but the node of rank 0 serves the job at {name}, "
                "which is no address of this machine: give all other nodes their --node-rank"
            )
            raise ValueError(message)

    def release(self, *, is_over: bool) -> None:
        """Give back what says that this agent coordinates; a port does so by its end."""

    def close(self) -> None:
        """Close the port if nobody has taken it over."""
        for one in self.take_sockets():
            one.close()

    # --- for the user ------------------------------------------------------------------------------------------------
    def find_local_address(self) -> str:
        """Return the address of the interface that reaches the coordinator."""
        host, port = next(iter(self.endpoints.values()))
        if names_loopback(host) and self._is_host is not False:
            # Only agents of this machine can come to the endpoint, so nobody else needs to reach their workers'.
            return next(iter(find_listening(host, _LOOK_UP).hosts), find_loopback())
        return find_local_address(host, port, _LOOK_UP)

    def describe_listener(self, name: str, reason: str) -> str:
        """Return a clause with the process of this machine that listens at an endpoint, or ""; may take a second."""
        host, port = self.endpoints.get(name, ("", 0))
        if self.own or reason not in (SILENT, CLOSED, FOREIGN) or not host:
            return ""
        owner = find_port_owner(port) if find_whether_own_host(host, _LOOK_UP) else ""
        return f"; {owner} listens there" if owner else ""

    def describe_need(self) -> str:
        """Return what other nodes have to give to come to this agent; "" where they know, or come elsewhere."""
        if not self.own or self._is_announced:
            return self._doubt
        host, port = self.endpoints[self.own]
        where = f"--rdzv-endpoint={','.join(self.names)}"
        if self.kind == "static":
            where = f"--master-addr={host} --master-port={port}"
        limit = f" (on this machine only: no other machine reaches {host} here)" if names_loopback(host) else ""
        need = f"other nodes need {where} --rdzv-id={self.run_id}{limit}"
        return "; ".join(filter(None, (self._doubt, need)))

    def describe_other_job(self) -> str:
        """Return a hint for a node that comes to a running job: without an id, another job may have the same place."""
        if self.run_id != NO_RUN_ID:
            return ""
        # A c10d endpoint belongs to one job, so an id of its own would not be enough there.
        flag = "--rdzv-endpoint" if self.dies_with_host else "--rdzv-id"
        return f"if this is another job, give it another {flag}"


class LeasePlace(Place):
    """The lease of a job, as one agent sees it. Calls of its store block, and are made outside the loop's thread."""

    dies_with_host = False

    def __init__(
        self,
        kind: str,
        run_id: str,
        endpoint: str,
        store: LeaseStore,
        *,
        host: tuple[str, int] | None,
        secret: bytes | None,
    ) -> None:
        super().__init__(kind, run_id, [], is_host=False, secret=secret)
        self.name, self.names, self.choice = endpoint, (discovery.LEASE_STORE,), LEASE
        self._host = host
        self._store = store
        self._found: Holder | None = None
        self._held: Holder | None = None
        self._address = ""
        self._is_released = False
        self._is_kept = False
        self._identity = Identity(run_id, "", "", 1.0, self.credentials)

    @property
    def term(self) -> int:
        """The term of the lease that this agent holds."""
        return 0 if self._held is None else self._held.term

    def prepare(self, identity: Identity, local_addr: str) -> None:
        """Open this agent's port, once, at the address that other nodes use; it may take seconds, or raise OSError."""
        self._identity = identity
        if not self._address:
            local_addr = local_addr or self.find_local_address()
            self._listen(local_addr, 0, "this node listens for other nodes")
            self._address = format_endpoint(local_addr, self.port)

    # --- the lease; each of these may block --------------------------------------------------------------------------
    def look(self) -> discovery.Answer:
        """Read who holds the lease."""
        self._found = found = self._store.read()
        if found is None or not found.is_valid:
            return discovery.Answer(discovery.LEASE_STORE, discovery.SEARCHES)
        node, address = _read(found.value)
        return discovery.Answer(discovery.LEASE_STORE, discovery.FOLLOWS, node, address)

    def acquire(self, instead_of: str) -> discovery.Answer:
        """Acquire the lease, if nobody holds it but the node that is given."""
        found = self._found
        former = found if found is not None and _read(found.value)[0] == instead_of else None
        last = self._store.read_last()
        self._held = self._store.acquire(self._make_value(), self._identity.lease, instead_of=former)
        if self._held is None:
            return self.look()
        self._store.write_last(self._address)
        if last not in ("", self._address) and former is None:
            self._tell_successor(last)
        standing = discovery.KNOWS_ROUND if last or found is not None else discovery.KNOWS_NOTHING
        return discovery.Answer(discovery.LEASE_STORE, discovery.COORDINATES, self._identity.node, "", standing)

    def _renew(self) -> LeaseRenewed | StepDown:
        """Hold the lease on, or acquire it again if nobody has it."""
        store, until = self._store, time.monotonic() + LEASE_SHARE * self._identity.lease
        if self._held is not None and store.renew(self._held, self._identity.lease):
            return LeaseRenewed(until, self._held.term)
        if not self._is_released:
            self._held = store.acquire(self._make_value(), self._identity.lease)
        if self._held is not None:
            return LeaseRenewed(until, self._held.term)
        found = store.read()
        return StepDown("" if found is None else _read(found.value)[1])

    def release(self, *, is_over: bool) -> None:
        """Give the lease back, or remove all that the job has in the store; a store out of reach keeps it a while."""
        self._is_released = True  # a renewal may be on its way
        held, self._held = self._held, None
        with suppress(Exception):
            if is_over:
                self._store.remove()
            elif held is not None:
                self._store.release(held)

    def _make_value(self) -> str:
        document = {"node": self._identity.node, "address": self._address, "nonce": os.urandom(8).hex()}
        return json.dumps(document, separators=(",", ":"))

    def _tell_successor(self, last: str) -> None:
        """Tell the coordinator before, which may live, that this agent coordinates now."""
        hello = replace(self._identity.make_hello(joins=True), successor=self._address, term=self.term)
        with suppress(StoreError):
            _, connected, _ = ask(split_endpoint(last), hello, _TELL, self.credentials, dark_after=_TELL)
            if connected is not None:
                connected.close()

    # --- while this agent coordinates --------------------------------------------------------------------------------
    def keep(
        self,
        loop: Loop,
        is_needed: Callable[[], bool],
        tell_result: Callable[[LeaseRenewed | StepDown], None],
        tell_user: Callable[[Notice], None],
    ) -> None:
        """Renew the lease, each time in a thread, and again in a third of its time, in the coordinator's loop."""
        failing_since, repetition = 0.0, Repetition()

        def begin() -> None:
            self._is_kept = is_needed()
            if self._is_kept:
                threading.Thread(target=renew, name="rendezvous-lease", daemon=True).start()

        def renew() -> None:
            trouble = ""
            try:
                tell_result(self._renew())
            except Exception as error:  # noqa: BLE001 - as in `search`: without a renewal the lease would be over
                trouble = getattr(error, "cause", str(error) if isinstance(error, StoreError) else repr(error))
            loop.call_soon_threadsafe(lambda: again(trouble))

        def again(trouble: str) -> None:
            nonlocal failing_since, repetition
            now, lease = loop.now(), self._identity.lease
            silent_for = now - failing_since if failing_since else 0.0
            if not trouble:
                failing_since, repetition = 0.0, Repetition()
                if silent_for >= lease:
                    tell_user(Notice(f"the store at {self.name} answers again after {silent_for:.0f} s"))
            else:
                failing_since = failing_since or now
                if silent_for >= lease and repetition.is_due(trouble, now):
                    fact = f"the store at {self.name} has been out of reach for {silent_for:.0f} s: {trouble}"
                    tell_user(Notice(f"{fact}; the job goes on, and its next round waits for the store"))
            loop.call_later(lease / 3, begin)

        if not self._is_kept:
            begin()

    # --- for the user ------------------------------------------------------------------------------------------------
    def find_local_address(self) -> str:
        """Return the address of the interface that reaches the store."""
        return find_local_address(*(self._host or (find_loopback(), 1)), _LOOK_UP)


def _read(value: str) -> tuple[str, str]:
    """Return the node that holds a lease, and where it listens."""
    try:
        document = json.loads(value)
        return str(document["node"]), str(document["address"])
    except (ValueError, KeyError, TypeError):
        return "", ""


def split_endpoint(name: str) -> tuple[str, int]:
    """Return the host and the port of an address that `format_endpoint` has made."""
    host, _, port = name.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port) if port.isdigit() else 0
