"""Which address this node has for the others, whether an endpoint is on this machine, whether a port can be reached.

Rules
- Interface addresses decide, not names: an address is ours if a socket can be bound to it.
- A name server that never answers stalls nothing: `store.dialing` looks names up in a helper thread, with a deadline.
- What went wrong has a name, one of the words of `store.errors`: refused, unresolved, silent, unreachable.
"""

from __future__ import annotations

import socket

from elastic_run.rendezvous.utils import parse_rendezvous_endpoint
from elastic_run.store.dialing import connect_once, resolve
from elastic_run.store.errors import StoreConnectionError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["find_local_address", "find_trouble", "is_own_host", "parse_endpoints", "written"]

#: Addresses of the documentation (RFC 5737, RFC 3849): connecting a UDP socket sends nothing, and the route that the
#: kernel would take is the default one.
_ANYWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
_ANY_PORT = 9


def parse_endpoints(text: str, default_port: int) -> list[tuple[str, int]]:
    """Read ``host[:port][,host[:port]…]``: the endpoint and its successors.

    Args:
        text: As the user wrote it.
        default_port: Port of those that name none.

    Returns:
        Hosts and ports, the first one first.

    Raises:
        ValueError: One is empty, wrong, has port 0 or is there twice.
    """
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
            message = f"rendezvous endpoint {text!r}: {written(host, port)} is there twice"
            raise ValueError(message)
        endpoints.append((host, port))
    return endpoints


def written(host: str, port: int) -> str:
    """Return an endpoint as users write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_own_host(host: str, timeout: float) -> bool:
    """Tell whether an endpoint's host is this machine.

    Args:
        host: Name or address.
        timeout: Seconds to wait for the name server.

    Returns:
        Whether one of its addresses is one of our interfaces'; a name without any address is ours if it begins with
        our own name.
    """
    own_name = socket.gethostname()
    if host in ("localhost", own_name):
        return True
    try:
        found = resolve(host, 0, timeout)
    except StoreConnectionError:
        return host.partition(".")[0] == own_name.partition(".")[0]
    return any(_can_bind(family, address) for family, address in found)


def _can_bind(family: socket.AddressFamily, address: tuple[Any, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def find_local_address(host: str, port: int, timeout: float) -> str:
    """Find the address of the interface that reaches a host: the one to advertise to nodes that meet there.

    Where that is loopback, because the host is this machine, other machines need another one: that of the default
    route, if there is any.

    Args:
        host: Name or address of the endpoint.
        port: Its port.
        timeout: Seconds to wait for the name server.

    Returns:
        A numeric address; ``127.0.0.1`` where there is no network at all.
    """
    try:
        targets = resolve(host, port, timeout)
    except StoreConnectionError:
        targets = []
    sources = [source for target in targets if (source := _source_towards(*target))]
    beyond = [source for family, address in _ANYWHERE if (source := _source_towards(family, (address, _ANY_PORT)))]
    for source in (*sources, *beyond):
        if not _is_loopback(source):
            return source
    return sources[0] if sources else "127.0.0.1"


def _source_towards(family: socket.AddressFamily, address: tuple[Any, ...]) -> str | None:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "::ffff:127.0.0.1")


def find_trouble(host: str, port: int, timeout: float) -> str | None:
    """Try to connect to a port.

    Args:
        host: Name or address.
        port: The port.
        timeout: Seconds for all of it.

    Returns:
        None if it can be reached, else a word of `store.errors` that says why not.
    """
    try:
        connect_once(host, port, timeout, dark_after=timeout).close()
    except StoreConnectionError as error:
        return error.reason
    return None
