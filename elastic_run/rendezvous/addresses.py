"""The address of this node for other nodes; whether an endpoint is on this machine.

Rules
- Interface addresses decide, not names: an address is ours if a socket can be bound to it.
- A name server that never answers stalls nothing: `store.connecting` looks names up in a thread, with a deadline.
- A port is opened at the address that other nodes use. If this address is not certain, the port is opened on all
  interfaces, and a line gives the reason. The other choice is worse: no node could join the job.
"""

from __future__ import annotations

import socket

from elastic_run.records import dataclass
from elastic_run.rendezvous.utils import can_bind, parse_rendezvous_endpoint
from elastic_run.store.connecting import format_endpoint, resolve
from elastic_run.store.errors import StoreConnectionError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LOOPBACKS = ("127.0.0.1", "::1")
#: Names that are loopback on every machine. Another name that is loopback here may be a real address elsewhere: Debian
#: gives a machine's own name 127.0.1.1 in its /etc/hosts.
_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")

#: Addresses of the documentation (RFC 5737, RFC 3849): connecting a UDP socket sends nothing, and the route that the
#: kernel would take is the default one.
_ANYWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
_ANY_PORT = 9
WILDCARDS = frozenset(("0.0.0.0", "::"))  # noqa: S104 - compared, not bound


def parse_endpoints(text: str, default_port: int) -> list[tuple[str, int]]:
    """Read ``host[:port][,host[:port]…]``, the endpoint and its successors; raise ValueError."""
    if not text.strip():
        message = "there is no rendezvous endpoint: give HOST:PORT (--rdzv-endpoint, LaunchConfig.rdzv_endpoint)"
        raise ValueError(message)
    endpoints: list[tuple[str, int]] = []
    for part in text.split(","):
        if not part.strip():
            message = f"rendezvous endpoint {text!r}: a host between the commas is missing"
            raise ValueError(message)
        host, port = parse_rendezvous_endpoint(part, default_port)
        if port == 0:
            message = f"rendezvous endpoint {part.strip()!r}: port 0 is any port, so other nodes can't know which"
            raise ValueError(message)
        if (host, port) in endpoints:
            message = f"rendezvous endpoint {text!r}: {format_endpoint(host, port)} is listed twice"
            raise ValueError(message)
        endpoints.append((host, port))
    return endpoints


def find_whether_own_host(host: str, timeout: float) -> bool | None:
    """Tell whether an endpoint's host is this machine: whether one of its addresses is one of our interfaces'.

    A name without any address is ours if it begins with our own name; otherwise None, as it may get an address yet.
    """
    own_name = socket.gethostname()
    if host in ("localhost", own_name):
        return True
    try:
        found = resolve(host, 0, timeout)
    except StoreConnectionError:
        return host.partition(".")[0] == own_name.partition(".")[0] or None
    return any(can_bind(family, address) for family, address in found)


def names_loopback(host: str) -> bool:
    """Tell whether a host is loopback on every machine, so that it can only mean this machine."""
    return _is_loopback(host) or host in _LOOPBACK_NAMES or host.endswith(".localhost")


def find_loopback() -> str:
    """Return the numeric loopback address of this machine."""
    return next(iter(_own_loopbacks()), _LOOPBACKS[0])


@dataclass(frozen=True, slots=True)
class Listening:
    """The addresses at which to listen; none for all interfaces, for a reason that the user is told."""

    hosts: tuple[str, ...]
    reason: str = ""


def find_listening(host: str, timeout: float) -> Listening:
    """Find the addresses of this machine at which nodes arrive that connect to a host's name."""
    if names_loopback(host) and not _is_loopback(host):
        return Listening(tuple(_own_loopbacks()))
    try:
        found = resolve(host, 0, timeout)
    except StoreConnectionError as error:
        return Listening((), error.cause)
    hosts = tuple(dict.fromkeys(str(address[0]) for _, address in found))
    name = "" if host in hosts else f"{host} is "
    foreign = next((str(address[0]) for family, address in found if not can_bind(family, address)), None)
    if foreign is not None:
        return Listening((), f"{name}{foreign}, which is no address of this machine")
    loopback = next(filter(_is_loopback, hosts), None)
    if loopback is not None and not names_loopback(host):
        return Listening((), f"{name}{loopback} here, and another address on other machines")
    return Listening((), f"{host} means all interfaces") if WILDCARDS.intersection(hosts) else Listening(hosts)


def _own_loopbacks() -> list[str]:
    families = (socket.AF_INET, socket.AF_INET6)
    return [one for family, one in zip(families, _LOOPBACKS, strict=True) if can_bind(family, (one, 0))]


def find_outward_address() -> str:
    """Find the address by which other machines probably reach this one, without asking a name server."""
    for family, address in _ANYWHERE:
        source = _source_towards(family, (address, _ANY_PORT))
        if source is not None and not _is_loopback(source):
            return source
    return next((one for one in _list_interface_addresses() if not _is_loopback(one)), None) or find_loopback()


def find_local_address(host: str, port: int, timeout: float) -> str:
    """Find the address of the interface that reaches a host: the address to tell the nodes that meet there.

    If that is loopback, because the host is this machine, other machines need the address of `find_outward_address`.
    """
    try:
        targets = resolve(host, port, timeout)
    except StoreConnectionError:
        targets = []
    for target in targets:
        source = _source_towards(*target)
        if source is not None and not _is_loopback(source):
            return source
    return find_outward_address()


def _source_towards(family: socket.AddressFamily, address: tuple[Any, ...]) -> str | None:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _list_interface_addresses() -> list[str]:
    """Return the addresses of the interfaces that are up: those of IPv4, then the global ones of IPv6."""
    import psutil

    is_up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = [one for name, addresses in psutil.net_if_addrs().items() if name in is_up for one in addresses]
    families = (socket.AF_INET, socket.AF_INET6)
    return [one.address for family in families for one in found if one.family == family and "%" not in one.address]


def _is_loopback(address: str) -> bool:
    return (address.startswith("127.") and address.replace(".", "").isdigit()) or address in ("::1", "::ffff:127.0.0.1")
