"""The doctor's checks of names, ports and interfaces.

Unless a variable names an interface, gloo offers other nodes the address that its host's own name has. A name server
that does not answer costs 5 s for each name that is not in /etc/hosts, and torch's own store looks up each peer's.
"""

from __future__ import annotations

import errno
import os
import socket
import time

import psutil

from elastic_run.diagnosis.doctor_report import problem, warning
from elastic_run.records import dataclass
from elastic_run.rendezvous.utils import can_bind
from elastic_run.store.connecting import connect_once, resolve
from elastic_run.store.errors import REFUSED, SILENT, UNRESOLVED, StoreConnectionError
from elastic_run.store.worker_store import find_port_owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elastic_run.diagnosis.doctor_report import Finding, Subject

_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_LOOPBACK = "lo"

# --- names ------------------------------------------------------------------------------------------------------------
#: Seconds: a look-up that takes longer stalls a start.
_SLOW = 1.0


@dataclass(frozen=True, slots=True)
class Lookup:
    """One look-up of a name; it has failed if there are no addresses."""

    name: str
    addresses: tuple[str, ...]
    seconds: float
    failure: str = ""


def check_names(subject: Subject) -> list[Finding]:
    """Look up this machine's own name and the endpoints' hosts."""
    own = _look_up(subject.hostname, subject.timeout)
    found = check_own_name(own, is_alone=subject.most_nodes == 1, interface=subject.environ.get(_GLOO, ""))
    for host in dict.fromkeys(host for host, _ in subject.endpoints):
        lookup = own if host == subject.hostname else _look_up(host, subject.timeout)
        if lookup.addresses:
            found += _check_time(lookup)
            continue
        what = f"the endpoint's host {host} has no address (asked for {lookup.seconds:.1f} s)"
        remedy = "check the spelling, add it to /etc/hosts, or give its address: --rdzv-endpoint=ADDRESS:PORT"
        found.append(problem(what, lookup.failure, remedy))
    return found


def _look_up(name: str, timeout: float) -> Lookup:
    start = time.monotonic()
    try:
        addresses = dict.fromkeys(str(address[0]) for _, address in resolve(name, 0, timeout))
    except StoreConnectionError as error:
        return Lookup(name, (), time.monotonic() - start, error.cause)
    return Lookup(name, tuple(addresses), time.monotonic() - start)


def check_own_name(lookup: Lookup, *, is_alone: bool, interface: str) -> list[Finding]:
    """Return the findings about this machine's own name."""
    mend = f"add a line 'ADDRESS {lookup.name}' to /etc/hosts, or set {_GLOO} to the interface of the network"
    if not lookup.addresses:
        what = f"this host's own name {lookup.name} has no address (asked for {lookup.seconds:.1f} s)"
        return [(warning if is_alone or interface else problem)(what, lookup.failure, mend)]
    found = _check_time(lookup)
    is_loopback = all(address.startswith("127.") or address == "::1" for address in lookup.addresses)
    if is_loopback and not is_alone and not interface:
        what = f"this host's own name {lookup.name} is {lookup.addresses[0]}, which gloo would offer to other nodes"
        found.append(warning(what, "/etc/hosts has a line for it", mend))
    return found


def _check_time(lookup: Lookup) -> list[Finding]:
    if lookup.seconds < _SLOW:
        return []
    what = f"the look-up of {lookup.name} takes {lookup.seconds:.1f} s"
    remedy = "put a name server that answers first in /etc/resolv.conf, or add the name to /etc/hosts"
    return [problem(what, f"it is {', '.join(lookup.addresses)}", remedy)]


# --- ports ------------------------------------------------------------------------------------------------------------
def check_ports(subject: Subject) -> list[Finding]:
    """Try each endpoint that has a port: it is free if this host serves it, or it can be reached."""
    return [found for host, port in subject.endpoints if port > 0 for found in _check_port(host, port, subject)]


def _check_port(host: str, port: int, subject: Subject) -> list[Finding]:
    place = f"port {port} of {host}"
    try:
        addresses = resolve(host, port, subject.timeout)
        own = [(family, address) for family, address in addresses if can_bind(family, (address[0], 0))]
        if own:
            return _check_own_port(own, port, f"{place}, this host,")
        connect_once(host, port, subject.timeout, dark_after=subject.timeout).close()
    except StoreConnectionError as error:
        reason = error.reason
    else:
        return []
    # Where the nodes have yet to meet, a port without a server is in order; names are another family.
    if reason == UNRESOLVED or (reason == REFUSED and subject.most_nodes > 1):
        return []
    if reason == REFUSED:
        what = f"{place} refuses connections: the host answers, but nobody listens there"
        return [problem(what, "connection refused", "start the job on that host first, or correct the port")]
    if reason == SILENT:
        what = f"{place} does not answer in {subject.timeout:.1f} s"
        remedy = f"open TCP port {port} in the firewall between the hosts, and check that {host} is up"
        return [problem(what, "a packet for it gets no answer, not even a refusal", remedy)]
    remedy = "check the address, and `ip route`"
    return [problem(f"{place} can't be reached: {reason}", "the system has refused to connect", remedy)]


def _check_own_port(own: Sequence[tuple[int, tuple[object, ...]]], port: int, place: str) -> list[Finding]:
    """Open a port of this machine for a moment."""
    failure = next(filter(None, (_open(family, address) for family, address in own)), 0)
    if not failure:
        return []
    if failure == errno.EADDRINUSE:
        owner = find_port_owner(port)
        what = f"{place} is in use{f' by {owner}' if owner else ''}"
        remedy = "end that process, or take another port in --rdzv-endpoint"
        return [problem(what, "the port can't be opened", remedy)]
    reason = os.strerror(failure)
    remedy = "take a port from 1024 to 32767 in --rdzv-endpoint"
    return [problem(f"{place} can't be opened: {reason}", reason, remedy)]


def _open(family: int, address: tuple[object, ...]) -> int:
    """Open a port for a moment; return the system's error, or 0."""
    try:
        socket.create_server(address, family=family).close()
    except OSError as error:
        return error.errno or errno.EIO
    return 0


# --- interfaces -------------------------------------------------------------------------------------------------------
def check_interfaces(subject: Subject) -> list[Finding]:
    """Check that the interfaces in NCCL's and Gloo's variables exist and are up, and that there is any network."""
    interfaces = {name: state.isup for name, state in psutil.net_if_stats().items()}
    environ, is_alone = subject.environ, subject.most_nodes == 1
    found = [*check_nccl(environ.get(_NCCL, ""), interfaces), *_check_gloo(environ.get(_GLOO, ""), interfaces)]
    return found + check_network(interfaces, is_alone=is_alone)


def check_nccl(value: str, interfaces: Mapping[str, bool]) -> list[Finding]:
    """Judge NCCL's variable: prefixes, ``=name`` for whole names, ``^name`` for all but these.

    Each interface is given with whether it is up, as in the functions below.
    """
    if not value or value.startswith("^"):
        return []
    is_whole = value.startswith("=")
    wanted = [name for name in value.lstrip("=").split(",") if name]
    chosen = [name for name in interfaces if any(name == n if is_whole else name.startswith(n) for n in wanted)]
    return _check_choice(_NCCL, value, chosen, interfaces)


def _check_gloo(value: str, interfaces: Mapping[str, bool]) -> list[Finding]:
    """Judge Gloo's variable: whole names, separated by commas, each of which has to exist."""
    wanted = [name for name in value.split(",") if name]
    missing = [name for name in wanted if name not in interfaces]
    if missing:
        return _check_choice(_GLOO, ",".join(missing), [], interfaces)
    return _check_choice(_GLOO, value, wanted, interfaces) if wanted else []


def check_network(interfaces: Mapping[str, bool], *, is_alone: bool) -> list[Finding]:
    """Judge whether other nodes can be reached at all."""
    others = [name for name in interfaces if name != _LOOPBACK]
    if is_alone or any(interfaces[name] for name in others):
        return []
    what = "this host has no network beside the loopback: other nodes can't reach it"
    remedy = f"ip link set {others[0] if others else 'eth0'} up; in docker --network=host"
    return [problem(what, f"interfaces: {_list(interfaces)}", remedy)]


def _check_choice(variable: str, value: str, chosen: list[str], interfaces: Mapping[str, bool]) -> list[Finding]:
    if any(interfaces[name] for name in chosen):
        return []
    usable = ",".join(name for name, is_up in interfaces.items() if is_up and name != _LOOPBACK) or "eth0"
    state = "that is down" if chosen else "that this host does not have"
    remedy = f"unset {variable}, or export {variable}={usable}"
    return [problem(f"{variable} names {value}, an interface {state}", f"interfaces: {_list(interfaces)}", remedy)]


def _list(interfaces: Mapping[str, bool]) -> str:
    return ", ".join(f"{name}{'' if is_up else ' (down)'}" for name, is_up in interfaces.items())
