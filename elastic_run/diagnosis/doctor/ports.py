"""The port of each endpoint: is it free if this host serves it, or reachable; does the host refuse, or is it silent."""

from __future__ import annotations

import errno
import os
import socket

from elastic_run.diagnosis.doctor.finding import problem
from elastic_run.records import dataclass
from elastic_run.rendezvous.utils import can_bind
from elastic_run.store.connecting import connect_once, resolve
from elastic_run.store.errors import REFUSED, SILENT, UNRESOLVED, StoreConnectionError
from elastic_run.store.tcpstore.listener import find_port_owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.diagnosis.doctor.finding import Finding, Subject

_MANY = 32768  # Linux gives outgoing connections ports from here on


@dataclass(frozen=True, slots=True)
class PortState:
    """The result of an attempt at one endpoint.

    Attributes:
        host: The endpoint's host.
        port: The endpoint's port.
        is_own: Whether the host is this machine.
        failure: The error of the system when this machine's port was opened, 0 for none; or why another host's can't be
            reached, one of the words of `store.errors`.
        owner: The process that has this machine's port, if it can be seen.
    """

    host: str
    port: int
    is_own: bool
    failure: int | str
    owner: str = ""


def check(subject: Subject) -> list[Finding]:
    """Try each endpoint that has a port."""
    states = (_try(host, port, subject) for host, port in subject.endpoints if port > 0)
    return [found for state in states for found in judge(state, subject.timeout, meets=subject.most_nodes > 1)]


def judge(state: PortState, seconds: float, *, meets: bool) -> list[Finding]:
    """Return the findings about an endpoint.

    Args:
        state: The result of the attempt.
        seconds: Time limit of the attempt.
        meets: Whether the nodes have yet to meet, so that a port without a server is in order.
    """
    if not state.failure or state.failure == UNRESOLVED:
        return []  # names are another family
    place = f"port {state.port} of {state.host}"
    if state.is_own:
        return [_judge_own(state, place)]
    if state.failure == REFUSED:
        if meets:
            return []
        what = f"{place} refuses connections: the host answers, but nobody listens there"
        return [problem(what, "connection refused", "start the job on that host first, or correct the port")]
    if state.failure == SILENT:
        what = f"{place} does not answer in {seconds:.1f} s"
        remedy = f"open TCP port {state.port} in the firewall between the hosts, and check that {state.host} is up"
        return [problem(what, "a packet for it gets no answer, not even a refusal", remedy)]
    remedy = "check the address, and `ip route`"
    return [problem(f"{place} can't be reached: {state.failure}", "the system has refused to connect", remedy)]


def _judge_own(state: PortState, place: str) -> Finding:
    if state.failure == errno.EADDRINUSE:
        what = f"{place}, this host, is in use{f' by {state.owner}' if state.owner else ''}"
        return problem(what, "the port can't be opened", "end that process, or take another port in --rdzv-endpoint")
    reason = os.strerror(int(state.failure))
    remedy = f"take a port from 1024 to {_MANY - 1} in --rdzv-endpoint"
    return problem(f"{place}, this host, can't be opened: {reason}", reason, remedy)


def _try(host: str, port: int, subject: Subject) -> PortState:
    try:
        addresses = resolve(host, port, subject.timeout)
    except StoreConnectionError as error:
        return PortState(host, port, is_own=False, failure=error.reason)
    own = [(family, address) for family, address in addresses if can_bind(family, (address[0], 0))]
    if own:
        failure = next(filter(None, (_open(family, address) for family, address in own)), 0)
        owner = find_port_owner(port) if failure == errno.EADDRINUSE else ""
        return PortState(host, port, is_own=True, failure=failure, owner=owner)
    try:
        connect_once(host, port, subject.timeout, dark_after=subject.timeout).close()
    except StoreConnectionError as error:
        return PortState(host, port, is_own=False, failure=error.reason)
    return PortState(host, port, is_own=False, failure=0)


def _open(family: int, address: tuple[object, ...]) -> int:
    """Open a port for a moment; returns the system's error, or 0."""
    try:
        socket.create_server(address, family=family).close()
    except OSError as error:
        return error.errno or errno.EIO
    return 0
