"""Endpoints and settings as users write them."""

from __future__ import annotations

import socket

import pytest

from elastic_run.rendezvous.utils import can_bind, parse_rendezvous_config, parse_rendezvous_endpoint


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("  ", {}),
        ("timeout=5", {"timeout": "5"}),
        (" a = 1 , b=x=y ", {"a": "1", "b": "x=y"}),
    ],
)
def test_settings_are_read_in_order(text: str, expected: dict[str, str]) -> None:
    """Settings come in their order, without blanks, and keep an equals sign within a value."""
    assert list(parse_rendezvous_config(text).items()) == list(expected.items())


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("timeout", "'timeout' in 'timeout' has no '='"),
        ("=5", "'=5' in '=5' has no key"),
        ("a=", "'a=' in 'a=' has no value"),
        ("a=1,", "'' in 'a=1,' has no key"),
        ("a=1,b", "'b' in 'a=1,b' has no '='"),
        ("a=1,a=2", "'a' is set twice in 'a=1,a=2', to '1' and to '2'"),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(text: str, named: str) -> None:
    """A mistake in the settings is one line that quotes the entry and says what is missing."""
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is compared below
        parse_rendezvous_config(text)
    assert str(raised.value).startswith(named)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, ("localhost", 29400)),
        ("", ("localhost", 29400)),
        ("  ", ("localhost", 29400)),
        ("node-1.cluster", ("node-1.cluster", 29400)),
        (" node_1:1234 ", ("node_1", 1234)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("host:65535", ("host", 65535)),
        ("host:00080", ("host", 80)),
        ("[::1]", ("::1", 29400)),
        ("[::1]:29500", ("::1", 29500)),
        ("[fe80::1%eth0]:29500", ("fe80::1%eth0", 29500)),
        ("::1", ("::1", 29400)),
        ("2001:db8:0:0:0:0:0:1", ("2001:db8:0:0:0:0:0:1", 29400)),
        ("2001:db8::1:29500", ("2001:db8::1", 29500)),
    ],
)
def test_an_endpoint_is_split_into_host_and_port(text: str | None, expected: tuple[str, int]) -> None:
    """Names, IPv4 and IPv6 addresses are understood, with a port and without."""
    assert parse_rendezvous_endpoint(text, default_port=29400) == expected


@pytest.mark.parametrize(
    "text", ["host:", "host:port", "host:-1", "host:65536", "host:123456", "host:1.5", "host:²", "host:1_0", "[::1]:x"]
)
def test_a_wrong_port_is_named_with_what_is_allowed(text: str) -> None:
    """A port that is no number from 0 to 65535 is refused in one line that quotes the endpoint."""
    with pytest.raises(ValueError, match="is not a number from 0 to 65535") as raised:
        parse_rendezvous_endpoint(text, default_port=29400)
    assert str(raised.value).startswith(f"rendezvous endpoint {text!r}: port ")


@pytest.mark.parametrize(
    "text",
    [
        *(":29400", "a b:1", "host$:1", "tcp://host:1", "[]:1", "a,b:1", "[x%y]:1", "h%e:1"),
        *("999.1.1.1:1", "1.2.3.4.5:1", "..:1", "host:1:2"),
    ],
)
def test_a_wrong_host_is_named(text: str) -> None:
    """A host that is neither a name nor an address is refused in one line that quotes the endpoint."""
    with pytest.raises(ValueError, match="is not a host name, an IPv4 or an") as raised:
        parse_rendezvous_endpoint(text, default_port=29400)
    assert str(raised.value).startswith(f"rendezvous endpoint {text!r}: ")


def test_only_an_address_of_this_machine_can_be_bound() -> None:
    """An address of an interface here is this machine's; one of another machine, or of another kind, is not."""
    assert can_bind(socket.AF_INET, ("127.0.0.1", 0))
    assert not can_bind(socket.AF_INET, ("192.0.2.1", 0))
