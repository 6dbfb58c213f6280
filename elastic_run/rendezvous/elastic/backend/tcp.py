"""A job's store over TCPStore's protocol: which node serves it, how to open it, which endpoint is next.

Of several agents that may serve the store at one address, one serves it and the others connect to it. Linux may refuse
all of them if they begin to listen at the same moment: a refused agent tries again while nobody listens there.
"""

# ruff: noqa: D102 - Backend says what the methods promise
from __future__ import annotations

import time
from contextlib import suppress

from elastic_run.core.protocol import job_keys
from elastic_run.rendezvous.addresses import (
    find_listening,
    find_local_address,
    find_loopback,
    find_trouble,
    find_whether_own_host,
    is_own_host,
    names_loopback,
)
from elastic_run.rendezvous.elastic.backend.base import LOOK_UP, Backend, describe_backend, sign
from elastic_run.rendezvous.elastic.backend.hosting import HostedStore
from elastic_run.store.backoff import Backoff
from elastic_run.store.connecting import format_endpoint
from elastic_run.store.errors import CLOSED, FOREIGN, SILENT, UNRESOLVED, StoreConnectionError, StoreError
from elastic_run.store.tcpstore.listener import PortTakenError, find_port_owner, open_listeners

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from elastic_run.store.jobstore.api import JobStore
    from elastic_run.store.tcpstore.token_proof import ClientAuthentication

__all__ = ["TcpBackend"]

#: The same where the look-up is made again until the store was reached; within the time of the first waiting line.
_FIRST_LOOK_UP = 1.5
#: Seconds for a successor to show that it serves the store already.
_LIVING = 1.0
#: Seconds in which a refused agent tries again to listen while nobody listens; its pauses at first, and at most.
_CONTEST = 1.0
_FIRST_PAUSE = 0.005
_LONGEST_PAUSE = 0.1


class TcpBackend(Backend):
    """A store over TCPStore's protocol, ours or torch's.

    Args:
        kind: `c10d` or `static`.
        run_id: The job.
        endpoints: Host and port, and its successors'.
        is_host: Whether this agent serves it; None to find out.
        secret: The secret that the members of the job share, or None.
        serves_workers: Whether the workers' store is at the same port.
    """

    dies_with_host = True

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
        self.endpoint = endpoints[0]
        self.name = format_endpoint(*self.endpoint)
        self.serves_workers = serves_workers
        self._endpoints = list(endpoints)
        self._is_host = is_host
        self._secret = secret
        self._authentication: ClientAuthentication | None = None
        self._marked: HostedStore | None = None  # the store in which this job's id was left for nodes of other jobs
        self._own_host = ""  # by which this agent reaches the store that it serves
        # Whether this agent may have to serve the store yet: its name has no address, or the port was refused.
        self._is_undecided = False
        self._was_reached = False
        self._is_announced = False  # the line with the command for other nodes says where it is
        self._passed = 0  # endpoints since the last that was reached

    @property
    def successors(self) -> Sequence[tuple[str, int]]:
        # After the last comes the first: its host may be there again.
        return [*self._endpoints[self.rank + 1 :], *self._endpoints[: self.rank]]

    @property
    def others(self) -> Sequence[tuple[str, int]]:
        return [one for one in self._endpoints if one != self.endpoint]

    @property
    def rank(self) -> int:
        return self._endpoints.index(self.endpoint)

    def host_anywhere(self, address: str) -> None:
        """Serve the store at the endpoint's port or, if that is taken, at any: nobody was told of it yet.

        Args:
            address: Name or address by which other nodes will come.

        Raises:
            OSError: The system refuses.
        """
        try:
            self._host(address, self.endpoint[1])
        except PortTakenError:
            self._host(address, 0)
        self._is_announced = True
        self._endpoints = [(self.endpoint[0], self.port)]
        self._go_to(self._endpoints[0])

    def prepare(self) -> None:
        if self.hosted is not None or self._is_host is False:
            return
        if not self._was_reached and self._find_living():
            return  # the job has moved on before this node came
        if self._is_host is None:
            is_own = find_whether_own_host(self.endpoint[0], _FIRST_LOOK_UP)
            self._is_undecided = is_own is None
            if not is_own:
                return
        if self._is_host and self.serves_workers:
            self._check_master()
        try:
            self._host_in_turn()
        except PortTakenError:
            # Another agent of the job on this machine was first, unless the user says that it must be this one.
            if self._is_host:
                raise
            self._is_undecided = True
        else:
            self._is_undecided = False

    def _host_in_turn(self) -> None:
        """Serve the store at the endpoint; try again while it is refused and nobody listens there."""
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        end = time.monotonic() + _CONTEST
        while True:
            try:
                self._host(*self.endpoint)
            except PortTakenError:
                if time.monotonic() >= end or find_trouble(*self.endpoint, _LIVING) is None:
                    raise
            else:
                return
            time.sleep(backoff.next_pause())

    def _check_master(self) -> None:
        """Look whether rank 0 is at its place: the user may have forgotten --node-rank here.

        An address of no interface may still lead here (a cloud's public one, a service's). So only a job that is
        served there already is proof.
        """
        host = self.endpoint[0]
        if names_loopback(host) or find_whether_own_host(host, LOOK_UP) is not False:
            return
        self.doubt = f"this node has rank 0, but {host} is no address of this machine: is --node-rank missing or wrong?"
        try:
            with self.look_at(self.endpoint, _LIVING) as store:
                is_served = store.get([job_keys.HEAD])[0] is not None
        except StoreError:
            return
        if is_served:
            message = (
                f"--node-rank: this node would have rank 0, but the node of rank 0 serves the job at {self.name}, "
                "which is no address of this machine: give all other nodes their --node-rank"
            )
            raise ValueError(message)

    def _serve_late(self, error: StoreConnectionError) -> bool:
        """Serve the store if the endpoint is this machine's by now and its port is free; returns whether."""
        if not self._is_undecided or error.reason == UNRESOLVED:
            return False
        try:
            self.prepare()
        except OSError as refusal:
            message = f"the store can't be served here: {refusal}"
            raise StoreConnectionError(message) from refusal
        return self.hosted is not None

    def _find_living(self) -> bool:
        """Look for a successor that serves the store already, and go there."""
        for endpoint in self.successors:
            if find_trouble(*endpoint, _LIVING) is None:
                self._go_to(endpoint)
                return True
        return False

    def _host(self, host: str, port: int) -> None:
        found = find_listening(host, LOOK_UP)
        listener, *further = open_listeners(found.hosts, port)
        self._own_host = next(iter(found.hosts), find_loopback())
        port = listener.getsockname()[1]
        if found.hosts and not any(map(names_loopback, found.hosts)):
            with suppress(PortTakenError):  # another program has it there, and this agent comes as the others do
                further += open_listeners([find_loopback()], port)
                self._own_host = find_loopback()
        if found.reason:
            self.notice = f"the job's store listens at port {port} of all interfaces: {found.reason}"
        self.hosted = HostedStore(listener, further=further, serves_workers=self.serves_workers, token=self._secret)

    def _go_to(self, endpoint: tuple[str, int]) -> None:
        self.endpoint = endpoint
        self.name = format_endpoint(*endpoint)

    def advance(self, endpoint: str = "") -> bool:
        candidates = self.others if endpoint else self.successors
        following = [one for one in candidates if not endpoint or format_endpoint(*one) == endpoint]
        self._passed += 1
        if not following or self._passed >= len(self._endpoints):
            return False
        if self.hosted is not None:
            self.hosted.close()
            self.hosted = None
        self._is_host = None
        self._go_to(following[0])
        return True

    @property
    def is_successor(self) -> bool:
        return any(is_own_host(host, LOOK_UP) for host, _ in self._endpoints)

    def open(self, timeout: float) -> JobStore:
        is_known = self._was_reached or self.hosted is not None
        try:
            # Nodes start in any order: where nobody listens yet it fails at once, and the caller asks again soon. So it
            # does where another takes over: then each refusal tells.
            store = self._connect(timeout, tries_again=is_known and not self.successors)
        except StoreConnectionError as error:
            if is_known or not (self._find_living() or self._serve_late(error)):
                raise
            store = self._connect(timeout, tries_again=True)
        self._was_reached = True
        self._is_undecided = False
        self._passed = 0
        return sign(store, self._secret)

    def _connect(self, timeout: float, *, tries_again: bool) -> JobStore:
        from elastic_run.store.jobstore.c10d import C10dJobStore  # noqa: PLC0415 - imported when used

        host, port = self.endpoint
        if self.hosted is not None:
            host, port = self._own_host, self.port
        return C10dJobStore(
            host, port, self.run_id, timeout=timeout, tries_again=tries_again, authentication=self._authenticate()
        )

    def _authenticate(self) -> ClientAuthentication | None:
        """Return what proves the token, one for all connections of this node; None without a token."""
        if self._authentication is None and self._secret is not None:
            from elastic_run.store.tcpstore.token_proof import ClientAuthentication  # noqa: PLC0415 - imported when used

            self._authentication = ClientAuthentication(self._secret)
        return self._authentication

    @property
    def nearest_endpoint(self) -> tuple[str, int]:
        """Where this agent reaches the store; another host of the endpoint's name may not be reachable from here."""
        return self.endpoint if self.hosted is None else (self._own_host, self.port)

    def describe_listener(self, reason: str) -> str:
        is_other = self.hosted is None and reason in (SILENT, CLOSED, FOREIGN)
        if not is_other or not is_own_host(self.endpoint[0], LOOK_UP):
            return ""
        owner = find_port_owner(self.endpoint[1])
        return f"; {owner} listens there" if owner else ""

    def find_doubts(self, host: str) -> str:
        from elastic_run.rendezvous.elastic.other_jobs import (  # noqa: PLC0415 - only where nobody comes
            PLACE,
            describe_place,
            exchange_ids,
        )

        serves = self.hosted is not None
        others = "" if self._is_announced or not serves else describe_place(self.kind, self._endpoints, self.run_id)
        try:
            with self.look_at(self.nearest_endpoint, _LIVING, PLACE) as store:
                others = exchange_ids(store, host, self.run_id) or others
        except StoreError:
            pass  # this node's own connection tells of it
        return "; ".join(filter(None, (self.doubt, others)))

    def find_visitor(self) -> str:
        from elastic_run.rendezvous.elastic.other_jobs import PLACE, find_visitor  # noqa: PLC0415 - ditto

        if self.hosted is None:
            return ""
        try:
            with self.look_at(self.nearest_endpoint, _LIVING, PLACE) as store:
                return find_visitor(store, self.run_id)
        except StoreError:
            return ""  # this node's own connection tells of it

    def leave_id(self, host: str) -> None:
        # Imported by each node at its first heartbeat: `pip install` may have removed the file when a node serves the
        # store later.
        from elastic_run.rendezvous.elastic.other_jobs import PLACE, leave_id  # noqa: PLC0415 - the workers come first

        if self.hosted is None or self.hosted is self._marked:
            return
        with suppress(StoreError), self.look_at(self.nearest_endpoint, _LIVING, PLACE) as store:
            leave_id(store, host, self.run_id)
            self._marked = self.hosted

    def look_at(self, endpoint: tuple[str, int], timeout: float, run_id: str = "") -> JobStore:
        from elastic_run.store.jobstore.c10d import C10dJobStore  # noqa: PLC0415 - imported when used

        store = C10dJobStore(
            *endpoint, run_id or self.run_id, timeout=timeout, tries_again=False, authentication=self._authenticate()
        )
        return sign(store, self._secret)

    def find_local_address(self) -> str:
        host = self.endpoint[0]
        if names_loopback(host) and self._is_host is not False:
            # Only agents of this machine can come to the store there, so nobody else needs to reach their workers'.
            return next(iter(find_listening(host, LOOK_UP).hosts), find_loopback())
        return find_local_address(*self.endpoint, LOOK_UP)

    def describe(self) -> dict[str, Any]:
        endpoints = (self.endpoint, *(one for one in self._endpoints if one != self.endpoint))
        return describe_backend(self, ",".join(format_endpoint(*endpoint) for endpoint in endpoints), {}, self._secret)
