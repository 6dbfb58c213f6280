"""Endpoints, and which addresses are this machine's."""

from __future__ import annotations

import socket

import pytest

from elastic_run.rendezvous import addresses
from elastic_run.rendezvous.addresses import (
    find_listening,
    find_local_address,
    find_trouble,
    find_whether_own_host,
    parse_endpoints,
)
from elastic_run.store.connecting import format_endpoint
from elastic_run.store.errors import UNRESOLVED, StoreConnectionError


def test_an_endpoint_and_its_successors() -> None:
    """Endpoints are separated by commas; those without a port get the default one, IPv6 stands in brackets."""
    assert parse_endpoints("a, b:1,[::1]:2", 29400) == [("a", 29400), ("b", 1), ("::1", 2)]
    assert [format_endpoint(*one) for one in parse_endpoints("a,[::1]:2", 9)] == ["a:9", "[::1]:2"]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "::1", "0.0.0.0"])  # noqa: S104 - any of ours
def test_own_addresses(host: str) -> None:
    """Loopback is this machine, and so is its own name, without asking anybody."""
    assert find_whether_own_host(host, 1.0)
    assert find_whether_own_host(socket.gethostname(), 1.0)


# 203.0.113.0/24 and 2001:db8::/32 are reserved for documentation: no machine has them.
@pytest.mark.parametrize("host", ["203.0.113.77", "2001:db8::1", "a" * 64])
def test_foreign_addresses(host: str) -> None:
    """An address of no interface, or a name that can't exist, is not this machine."""
    assert not find_whether_own_host(host, 1.0)


@pytest.mark.parametrize(("suffix", "expected"), [(".no.such.domain.invalid", True), ("x.invalid", False)])
def test_a_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch, suffix: str, expected: bool) -> None:
    """A full name of ours that no name server knows is ours still; another one is not."""

    def resolve(*_: object) -> list[object]:
        message = "no such name"
        raise StoreConnectionError(message, UNRESOLVED)

    monkeypatch.setattr(addresses, "resolve", resolve)
    own = socket.gethostname().partition(".")[0]
    assert bool(find_whether_own_host(own + suffix, 1.0)) is expected
    assert find_local_address(own + suffix, 1, 1.0)


def test_the_address_of_the_interface_that_reaches_the_endpoint() -> None:
    """Towards an address of this machine that isn't loopback, that address is ours."""
    towards_anywhere = find_local_address("127.0.0.1", 1, 1.0)
    assert find_local_address(towards_anywhere, 1, 1.0) == towards_anywhere
    assert find_whether_own_host(towards_anywhere, 1.0)


@pytest.mark.parametrize("has_ipv6", [True, False])
def test_all_loopback_addresses_are_tried_at_any_port(monkeypatch: pytest.MonkeyPatch, *, has_ipv6: bool) -> None:
    """Only root may bind most of the others."""

    def can_bind(family: int, address: tuple[str, int]) -> bool:
        return address[1] == 0 and (has_ipv6 or family == socket.AF_INET)

    monkeypatch.setattr(addresses, "can_bind", can_bind)
    assert find_listening("localhost", 1.0).hosts == ("127.0.0.1", "::1")[: 1 + has_ipv6]


def test_trouble_has_a_name() -> None:
    """A port that answers is no trouble; one where nobody listens is refused."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert find_trouble("127.0.0.1", port, 5.0) is None
    assert find_trouble("127.0.0.1", port, 5.0) == f"nobody listens (connection refused) at 127.0.0.1:{port}"
