"""Where the nodes of a job meet: the endpoints at which an agent may coordinate.

Of several agents that may serve one endpoint, one serves it and the others connect to it. Linux may refuse all of them
if they begin to listen at the same moment: a refused agent tries again while nobody listens there.
"""

from __future__ import annotations

import time

from elastic_run.contract import NO_RUN_ID
from elastic_run.core.job.discovery import COORDINATES
from elastic_run.core.job.succession import MAJORITY, ONLY_ONE
from elastic_run.rendezvous.addresses import (
    find_listening,
    find_local_address,
    find_loopback,
    find_trouble,
    find_whether_own_host,
    is_own_host,
    names_loopback,
)
from elastic_run.rendezvous.coordination.opening import Credentials, Hello, ask
from elastic_run.store.connecting import Backoff, format_endpoint
from elastic_run.store.errors import CLOSED, FOREIGN, SILENT, StoreError
from elastic_run.store.tcpstore.listener import PortTakenError, find_port_owner, open_listeners

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from collections.abc import Sequence

__all__ = ["Place"]

#: Seconds for a name server to say whether the endpoint is this machine, and which interface reaches it.
LOOK_UP = 3.0
#: The same where the look-up is made again until a coordinator was found; within the time of the first waiting line.
_FIRST_LOOK_UP = 1.5
#: Seconds in which a refused agent tries again to listen while nobody listens; its pauses at first, and at most.
_CONTEST = 1.0
_FIRST_PAUSE = 0.005
_LONGEST_PAUSE = 0.1
#: Seconds for an agent to answer a look.
_LIVING = 1.0


class Place:
    """The endpoints of a job, as one agent sees them.

    Args:
        kind: `c10d` or `static`.
        run_id: The job.
        endpoints: Hosts and ports, in the user's order.
        is_host: Whether this agent serves the first; None to find out.
        secret: The secret that the members of the job share, or None.
        serves_workers: Whether the workers' store is at the same port.

    Attributes:
        own: The endpoint that this agent serves, as `names` has it; "" for none.
        port: The port that it serves, 0 for none.
        is_undecided: Whether it may have to serve one yet: a name has no address, or the port was refused.
        notice: A line for the user about the addresses at which it listens, or "".
        doubt: A possible mistake of the user if no node comes; the lines about missing nodes show it.
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
        self.endpoints = {format_endpoint(*endpoint): endpoint for endpoint in endpoints}
        self.is_host = is_host
        self.serves_workers = serves_workers
        self.credentials = None if secret is None else Credentials(secret)
        self.own = ""
        self.port = 0
        self.is_undecided = False
        self.is_announced = False
        self.notice = ""
        self.doubt = ""
        self._sockets: list[_socket.socket] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The endpoints as users write them."""
        return tuple(self.endpoints)

    @property
    def name(self) -> str:
        """The first endpoint, for messages."""
        return self.names[0]

    @property
    def choice(self) -> str:
        """How a coordinator is chosen, a word of `core.job.succession`."""
        return MAJORITY if len(self.endpoints) > 1 else ONLY_ONE

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
        """Listen at the first endpoint that is this agent's to serve; returns whether it listens.

        It may take seconds if a name has to be looked up.

        Raises:
            PortTakenError: The user said that this agent serves the endpoint, and another process has the port.
            OSError: The system refuses the port.
            ValueError: Another node has the rank or the address that the user gave to this node.
        """
        if self.own or self.is_host is False:
            return bool(self.own)
        self.is_undecided = False
        for name, (host, port) in self.endpoints.items():
            if self.is_host is None:
                is_own = find_whether_own_host(host, _FIRST_LOOK_UP)
                self.is_undecided = self.is_undecided or is_own is None
                if not is_own:
                    continue
            elif self.serves_workers:
                self._check_master()
            try:
                self._listen_in_turn(host, port)
            except PortTakenError:
                # Another agent of the job on this machine was first, unless the user says that it must be this one.
                if self.is_host:
                    raise
                self.is_undecided = True
            else:
                self.own = name
                return True
        return False

    def serve_anywhere(self, address: str) -> None:
        """Listen at the endpoint's port or, if that is taken, at any: nobody was told of it yet.

        Other nodes will come by this name or address. Raises OSError if the system refuses.
        """
        port = next(iter(self.endpoints.values()))[1]
        try:
            self._listen(address, port)
        except PortTakenError:
            self._listen(address, 0)
        self.is_announced = True
        self.own = format_endpoint(address, self.port)
        self.endpoints = {self.own: (address, self.port)}

    def _listen_in_turn(self, host: str, port: int) -> None:
        """Listen; try again while it is refused and nobody listens there."""
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        end = time.monotonic() + _CONTEST
        while True:
            try:
                self._listen(host, port)
            except PortTakenError:
                if time.monotonic() >= end or find_trouble(host, port, _LIVING) is None:
                    raise
            else:
                return
            # The kernel has no event for a port that becomes free, so the bind is retried (law 2 allows it).
            time.sleep(backoff.next_pause())

    def _listen(self, host: str, port: int) -> None:
        found = find_listening(host, LOOK_UP)
        self._sockets = open_listeners(found.hosts, port)
        self.port = self._sockets[0].getsockname()[1]
        if found.reason:
            self.notice = f"the job's store listens at port {self.port} of all interfaces: {found.reason}"

    def _check_master(self) -> None:
        """Look whether rank 0 is at its place: the user may have forgotten --node-rank here.

        An address of no interface may still lead here (a cloud's public one, a service's). So only a job that is
        served there already is proof.
        """
        name, (host, port) = next(iter(self.endpoints.items()))
        if names_loopback(host) or find_whether_own_host(host, LOOK_UP) is not False:
            return
        self.doubt = f"this node has rank 0, but {host} is no address of this machine: is --node-rank missing or wrong?"
        try:
            hello = Hello(self.run_id, "", "", "")
            answer, _, _ = ask((host, port), hello, _LIVING, self.credentials, dark_after=_LIVING)
        except StoreError:
            return
        if answer.role == COORDINATES:
            message = (
                f"--node-rank: this node would have rank 0, but the node of rank 0 serves the job at {name}, "
                "which is no address of this machine: give all other nodes their --node-rank"
            )
            raise ValueError(message)

    def release(self, *, is_over: bool) -> None:
        """Give back what says that this agent coordinates; a port does so by its end."""

    # --- for the user ------------------------------------------------------------------------------------------------
    def find_local_address(self) -> str:
        """Return the address of the interface that reaches the coordinator."""
        host, port = next(iter(self.endpoints.values()))
        if names_loopback(host) and self.is_host is not False:
            # Only agents of this machine can come to the endpoint, so nobody else needs to reach their workers'.
            return next(iter(find_listening(host, LOOK_UP).hosts), find_loopback())
        return find_local_address(host, port, LOOK_UP)

    def describe_listener(self, name: str, reason: str) -> str:
        """Return a clause with the process of this machine that listens at an endpoint, or ""; may take a second."""
        host, port = self.endpoints.get(name, ("", 0))
        if self.own or reason not in (SILENT, CLOSED, FOREIGN) or not host or not is_own_host(host, LOOK_UP):
            return ""
        owner = find_port_owner(port)
        return f"; {owner} listens there" if owner else ""

    def describe_need(self) -> str:
        """Return what other nodes have to give to come to this agent; "" where they know, or come elsewhere."""
        if not self.own or self.is_announced:
            return self.doubt
        host, port = self.endpoints[self.own]
        where = f"--rdzv-endpoint={','.join(self.names)}"
        if self.kind == "static":
            where = f"--master-addr={host} --master-port={port}"
        limit = f" (on this machine only: no other machine reaches {host} here)" if names_loopback(host) else ""
        need = f"other nodes need {where} --rdzv-id={self.run_id}{limit}"
        return "; ".join(filter(None, (self.doubt, need)))

    def describe_other_job(self) -> str:
        """Return a hint for a node that comes to a running job: without an id, another job may have the same place."""
        if self.run_id != NO_RUN_ID:
            return ""
        # A c10d endpoint belongs to one job, so an id of its own would not be enough there.
        flag = "--rdzv-endpoint" if self.dies_with_host else "--rdzv-id"
        return f"if this is another job, give it another {flag}"

    def close(self) -> None:
        """Close the port if nobody has taken it over."""
        for one in self.take_sockets():
            one.close()
