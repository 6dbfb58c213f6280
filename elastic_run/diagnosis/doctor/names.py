"""Host names of this machine and of the endpoints, and the name servers.

Unless a variable names an interface, gloo offers other nodes the address that its host's own name has. A name server
that does not answer costs 5 s for each name that is not in /etc/hosts, and torch's own store looks up each peer's.
"""

from __future__ import annotations

import os
import socket
import time

from elastic_run.cluster.limits import read_text
from elastic_run.diagnosis.doctor.finding import problem, warning
from elastic_run.records import dataclass
from elastic_run.store.connecting import resolve
from elastic_run.store.errors import StoreConnectionError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from elastic_run.diagnosis.doctor.finding import Finding, Subject

#: Seconds: a look-up that takes longer stalls a start.
_SLOW = 1.0
_DNS_PORT = 53
#: A question for the name servers of the root (RFC 1035): each name server has an answer, if only a refusal.
_QUESTION = b"\x45\x52\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\x01"
_GLOO = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True, slots=True)
class Lookup:
    """One look-up of a name.

    Attributes:
        name: The name.
        addresses: Its addresses; none if the look-up failed.
        seconds: Duration of the look-up.
        failure: The reason why there are none.
    """

    name: str
    addresses: tuple[str, ...]
    seconds: float
    failure: str = ""


def check(subject: Subject) -> list[Finding]:
    """Look up all names, and ask each name server."""
    own = look_up(subject.hostname, subject.timeout)
    hosts = dict.fromkeys(host for host, _ in subject.endpoints)
    found = judge_own_name(own, is_alone=subject.most_nodes == 1, interface=subject.environ.get(_GLOO, ""))
    for host in hosts:
        found += judge_endpoint(own if host == subject.hostname else look_up(host, subject.timeout))
    servers = list(_list_servers(read_text(subject.path("etc/resolv.conf"))))
    silent = [server for server in servers if not _answers(server, subject.timeout)]
    return found + judge_servers(servers, silent, subject.timeout)


def look_up(name: str, timeout: float) -> Lookup:
    """Look up a name, for so many seconds at most."""
    start = time.monotonic()
    try:
        addresses = dict.fromkeys(str(address[0]) for _, address in resolve(name, 0, timeout))
    except StoreConnectionError as error:
        return Lookup(name, (), time.monotonic() - start, error.cause)
    return Lookup(name, tuple(addresses), time.monotonic() - start)


def judge_own_name(lookup: Lookup, *, is_alone: bool, interface: str) -> list[Finding]:
    """Return the findings about this machine's own name."""
    mend = f"add a line 'ADDRESS {lookup.name}' to /etc/hosts, or set {_GLOO} to the interface of the network"
    if not lookup.addresses:
        told = f"this host's own name {lookup.name} has no address (asked for {lookup.seconds:.1f} s)"
        return [(warning if is_alone or interface else problem)(told, lookup.failure, mend)]
    found = _judge_time(lookup)
    is_loopback = all(address.startswith("127.") or address == "::1" for address in lookup.addresses)
    if is_loopback and not is_alone and not interface:
        told = f"this host's own name {lookup.name} is {lookup.addresses[0]}, which gloo would offer to other nodes"
        found.append(warning(told, "/etc/hosts has a line for it", mend))
    return found


def judge_endpoint(lookup: Lookup) -> list[Finding]:
    """Return the findings about the name of an endpoint's host."""
    if lookup.addresses:
        return _judge_time(lookup)
    what = f"the endpoint's host {lookup.name} has no address (asked for {lookup.seconds:.1f} s)"
    remedy = "check the spelling, add it to /etc/hosts, or give its address: --rdzv-endpoint=ADDRESS:PORT"
    return [problem(what, lookup.failure, remedy)]


def _judge_time(lookup: Lookup) -> list[Finding]:
    if lookup.seconds < _SLOW:
        return []
    what = f"the look-up of {lookup.name} takes {lookup.seconds:.1f} s"
    remedy = "put a name server that answers first in /etc/resolv.conf, or add the name to /etc/hosts"
    return [problem(what, f"it is {', '.join(lookup.addresses)}", remedy)]


def judge_servers(servers: list[str], silent: list[str], seconds: float) -> list[Finding]:
    """Return the findings about the name servers."""
    if not silent:
        return []
    what = f"the name server {' and '.join(silent)} does not answer in {seconds:.1f} s"
    evidence = "a look-up of a name that is not in /etc/hosts stalls 5 s for each such server"
    remedy = "remove it from /etc/resolv.conf, or open UDP port 53 to it"
    return [(problem if silent == servers else warning)(what, evidence, remedy)]


def _list_servers(text: str) -> Iterable[str]:
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == "nameserver":
            yield words[1]


def _answers(server: str, timeout: float) -> bool:
    """Whether a name server answers. A refusal is an answer, since it delays nothing."""
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.settimeout(timeout)
            asking.connect((server.partition("%")[0], _DNS_PORT))
            asking.send(os.urandom(2) + _QUESTION[2:])
            return bool(asking.recv(512))
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
