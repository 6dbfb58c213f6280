"""Reaching a server: names, addresses and connections, with one deadline on all of it and a reason when it fails.

Rules
- A numeric address asks no name server. A name is looked up in a helper thread, since a resolver that never answers
  can't be interrupted: the thread is given up at the deadline, and ends when the resolver does.
- A host that goes dark sends nothing, not even that it is gone. The kernel asks it now and then (keep-alive) and breaks
  the connection when neither that nor data is acknowledged in time, so that a wait on it ends too.
- Every failure says why, in the words of `errors`.
- A thousand clients whose server was slow for a moment would ask again at the same time, and make it slow by that. So
  each pause between attempts is drawn from all lengths up to a bound that doubles (full jitter).
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time

from elastic_run.contract import LONGEST_WAIT
from elastic_run.store.errors import CLOSED, REFUSED, SILENT, UNREACHABLE, UNRESOLVED, StoreConnectionError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from typing import TypeAlias

    Address: TypeAlias = tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]]

_LOOK_UP_LEAST = 0.001
#: One address of several gets this share of the time that is left, so that a dark one doesn't take all of it.
_PROBES = 3
#: Seconds: the kernel takes no pause between two probes beyond 32767.
_LONGEST_DARKNESS = 86400.0
_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def connect_once(host: str, port: int, timeout: float, *, dark_after: float) -> socket.socket:
    """Connect to the first address of a host (a name, or an address without brackets) that takes the connection.

    The timeout is for the look-up and all addresses together. After `dark_after` seconds without any sign of the other
    side the kernel breaks the connection. Raises `StoreConnectionError` with the reason of the last address.
    """
    deadline = time.monotonic() + min(timeout, LONGEST_WAIT)
    addresses = resolve(host, port, timeout)
    failed: list[tuple[str, str]] = []  # each address, and why it can't be reached
    for tried, (family, address) in enumerate(addresses, 1):
        left = max(deadline - time.monotonic(), _LOOK_UP_LEAST)
        connecting = socket.socket(family, socket.SOCK_STREAM)
        try:
            connecting.settimeout(left / (len(addresses) - tried + 1))
            connecting.connect(address)
            notice_darkness(connecting, dark_after)
        except OSError as error:
            connecting.close()
            failed.append((format_endpoint(str(address[0]), port), _describe(error)))
            if tried == len(addresses):
                raise StoreConnectionError(_describe_all(failed), reason_of(error)) from error
        else:
            return connecting
    message = f"{format_endpoint(host, port)}: no address"
    raise StoreConnectionError(message, UNRESOLVED)


def resolve(host: str, port: int, timeout: float) -> list[Address]:
    """Return the addresses of a host; `StoreConnectionError` if it has none, or no name server answers in time."""
    try:
        return _look_up(host, port, socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        pass  # a name
    found: list[list[Address] | Exception] = []

    def look_up() -> None:
        try:
            found.append(_look_up(host, port, 0))
        except (OSError, UnicodeError) as error:
            found.append(error)

    thread = threading.Thread(target=look_up, name=f"look-up of {host}", daemon=True)
    thread.start()
    thread.join(max(min(timeout, LONGEST_WAIT), _LOOK_UP_LEAST))
    answer = found[0] if found else TimeoutError()
    if isinstance(answer, TimeoutError):
        message = f"no name server answers for the name {host!r}"
        raise StoreConnectionError(message, UNRESOLVED) from answer
    if isinstance(answer, Exception):
        reason = answer.strerror if isinstance(answer, socket.gaierror) else str(answer)
        message = f"the name {host!r} has no address ({reason})"
        raise StoreConnectionError(message, UNRESOLVED) from answer
    return answer


def notice_darkness(connected: socket.socket | _socket.socket, seconds: float) -> None:
    """Have the kernel break a connection whose other side gave no sign for so long; send small messages at once.

    The connections of a listening socket get the same. Where the kernel can't do better it counts in whole seconds.
    """
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = min(seconds, _LONGEST_DARKNESS)
    pause = max(1, int(seconds / _PROBES))
    options = (("TCP_KEEPIDLE", pause), ("TCP_KEEPALIVE", pause), ("TCP_KEEPINTVL", pause), ("TCP_KEEPCNT", _PROBES))
    for name, value in (*options, ("TCP_USER_TIMEOUT", max(1, int(seconds * 1000)))):
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def reason_of(error: OSError) -> str:
    """Return the word of `errors` for what the system says of a connection."""
    if isinstance(error, TimeoutError) or error.errno in (errno.ETIMEDOUT, errno.EAGAIN):
        return SILENT
    if error.errno == errno.ECONNREFUSED:
        return REFUSED
    if error.errno in _NO_WAY:
        return UNREACHABLE
    return CLOSED


def _describe(error: OSError) -> str:
    """Say why a connection was not made, in words that go before an address."""
    reason = reason_of(error)
    if reason == REFUSED:
        return "nobody listens (connection refused) at"
    if reason == SILENT:
        return "nothing answers at"
    return f"{(error.strerror or str(error)).lower()}:"


def _describe_all(failed: list[tuple[str, str]]) -> str:
    """Say why no address of a host can be reached, the last one tried first; each cause once, with its addresses."""
    causes: dict[str, list[str]] = {}
    for address, cause in reversed(failed):
        causes.setdefault(cause, []).append(address)
    return ", and ".join(f"{cause} {' or '.join(reversed(where))}" for cause, where in causes.items())


def _look_up(host: str, port: int, flags: int) -> list[Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def format_endpoint(host: str, port: int) -> str:
    """Return an endpoint as users write it: an IPv6 address has brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Backoff:
    """Counts failures in a row, and says how long to wait after each: at most `first`, and later `longest` seconds."""

    def __init__(self, first: float, longest: float) -> None:
        self._longest = longest
        self._bound = first

    def next_pause(self) -> float:
        """Return the seconds to wait now; the next pause may be twice as long."""
        bound, self._bound = self._bound, min(2 * self._bound, self._longest)
        # The module `random` would take milliseconds to import.
        return bound * int.from_bytes(os.urandom(4), "big") / 2**32
