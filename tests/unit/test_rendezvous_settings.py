"""Endpoints, settings and the handler of jobs of several nodes: what is said, and what is wrong with it."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import pytest

from elastic_run.core.config import JobConfig, Window
from elastic_run.rendezvous import RendezvousParameters, addresses
from elastic_run.rendezvous.addresses import (
    find_listening,
    find_local_address,
    find_whether_own_host,
    parse_endpoints,
)
from elastic_run.rendezvous.coordination.places import Place
from elastic_run.rendezvous.handler import ElasticRendezvousHandler, create_handler
from elastic_run.rendezvous.session import Session
from elastic_run.rendezvous.settings import read_settings
from elastic_run.rendezvous.utils import can_bind, parse_rendezvous_config, parse_rendezvous_endpoint
from elastic_run.store.connecting import format_endpoint
from elastic_run.store.errors import UNRESOLVED, StoreConnectionError
from tests.support.sessions import plain_setup


# --- --rdzv-conf ------------------------------------------------------------------------------------------------------
def test_defaults() -> None:
    """Without settings the lease is 6 s, a node waits 600 s for others, and the last call takes 30 s."""
    settings = read_settings("c10d", {})
    config = settings.complete(JobConfig())
    assert (config.lease, config.join_timeout, config.last_call_timeout) == (6.0, 600.0, 30.0)
    assert settings.is_host is None


@pytest.mark.parametrize("backend", ["c10d", "static", "etcd", "etcd-v2", "etcd-v3"])
def test_every_common_key_is_understood(backend: str) -> None:
    """Each of torch's times can be given to each backend, as text or as a number."""
    settings = read_settings(
        backend,
        {
            "join_timeout": "60",
            "last_call_timeout": 0,
            "close_timeout": "5",
            "heartbeat_timeout": 1.5,
            "keep_alive_interval": "0.5",
            "keep_alive_max_attempt": "4",
            "read_timeout": "7",
            "cas_backoff_max_seconds": "0.5",
        },
    )
    config = settings.complete(JobConfig())
    assert (config.join_timeout, config.last_call_timeout, settings.close_timeout) == (60.0, 0.0, 5.0)
    assert (config.keep_alive_interval, config.keep_alive_max_attempt) == (0.5, 4)
    assert config.lease == 2.0


@pytest.mark.parametrize(
    ("backend", "timeout", "expected"),
    [
        ("c10d", 900, 600.0),
        ("c10d", 60, 60.0),
        ("etcd", 900, 900.0),
        ("etcd-v2", 900, 900.0),
        ("etcd-v3", 900, 600.0),
        ("static", 900, 900.0),
    ],
)
def test_timeout_is_the_former_name_of_join_timeout(backend: str, timeout: int, expected: float) -> None:
    """`timeout` counts as join_timeout, but for the one that torch's launcher puts into every job's settings."""
    assert read_settings(backend, {"timeout": timeout}).complete(JobConfig()).join_timeout == expected
    both = read_settings(backend, {"timeout": timeout, "join_timeout": 5})
    assert both.complete(JobConfig()).join_timeout == 5.0


@pytest.mark.parametrize("backend", ["c10d", "static", "etcd-v3"])
def test_names_of_flags_are_passed_over(backend: str) -> None:
    """What command lines for accelerate have in --rdzv-conf by mistake has no effect, as under torchrun."""
    config = {"rdzv_backend": "c10d", "rdzv_endpoint": "h:1", "rdzv_id": "j"}
    assert read_settings(backend, config) == read_settings(backend, {})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"join_timout": "1"},
            "unknown rendezvous setting 'join_timout' for c10d; known: cas_backoff_max_seconds, close_timeout",
        ),
        ({"cacert": "x"}, "unknown rendezvous setting 'cacert' for c10d"),
        ({"join_timeout": "soon"}, "join_timeout='soon': not a number of seconds above 0"),
        ({"join_timeout": "0"}, "join_timeout='0': not a number of seconds above 0"),
        ({"cas_backoff_max_seconds": "nan"}, "cas_backoff_max_seconds='nan': not a number of seconds from 0"),
        ({"last_call_timeout": "-1"}, "last_call_timeout='-1': not a number of seconds from 0"),
        ({"keep_alive_interval": "inf"}, "keep_alive_interval='inf'"),
        ({"keep_alive_interval": "1e-300"}, "keep_alive_interval='1e-300': the shortest interval is 0.001 seconds"),
        ({"keep_alive_max_attempt": "x"}, "keep_alive_max_attempt='x': not a whole number"),
        ({"keep_alive_max_attempt": 0}, "shorter than one keep-alive"),
        ({"is_host": "maybe"}, "is_host='maybe'"),
        ({"store_type": "s3"}, "store_type='s3': not tcp or file"),
    ],
)
def test_a_wrong_setting_is_named(config: dict[str, Any], message: str) -> None:
    """What is wrong is one line with the key, the value and what is allowed."""
    with pytest.raises(ValueError, match=r".") as raised:
        read_settings("c10d", config)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("backend", "endpoint", "run_id", "settings", "message"),
    [
        ("etcd-v3", "host", "", {}, "a job whose nodes meet at host needs a run id"),
        ("c10d", "host:0", "job", {}, "port 0 is any port"),
        ("c10d", "host:99999", "job", {}, "port '99999' is not a number from 0 to 65535"),
        ("c10d", "a:1,a:1", "job", {}, "a:1 is listed twice"),
        ("c10d", "a:1,,b:1", "job", {}, "a host between the commas is missing"),
        ("etcd", "", "job", {}, "there is no rendezvous endpoint: give HOST:PORT"),
        ("c10d", "", "job", {"is_host": "0"}, "is_host=false needs an endpoint"),
        ("c10d", "", "job", {"store_type": "file"}, "needs the path of a file that all nodes see"),
        ("static", "a:1", "job", {}, "give --node-rank"),
        ("static", "a:1", "job", {"rank": 2}, "--node-rank: 2 is not in 0 to 1"),
        ("static", "", "job", {"rank": 0}, "give --master-addr and --master-port"),
        ("static", "a", "job", {"rank": 0}, "'a' has no port: give --master-port"),
        ("static", "a:1,b:1", "job", {"rank": 0}, "'static' knows one endpoint"),
        ("etcd", "a:1", "job", {"protocol": "ftp"}, "protocol='ftp': not http or https"),
        ("etcd", "a:1", "job", {"cacert": "/none"}, "give protocol=https"),
        ("etcd", "a:1", "job", {"protocol": "https", "cacert": "/no/such"}, "/no/such"),
    ],
)
def test_what_does_not_suit_a_backend_is_named(
    backend: str, endpoint: str, run_id: str, settings: dict[str, Any], message: str
) -> None:
    """A handler is not made of what can't work; the message names the flag or the setting."""
    with pytest.raises(ValueError, match=r".") as raised:
        create_handler(RendezvousParameters(backend, endpoint, run_id, 2, 2, **settings))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


# --- endpoints and settings as users write them -----------------------------------------------------------------------
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


# --- which addresses are this machine's -------------------------------------------------------------------------------
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


# --- what a handler over a job store takes from its settings ----------------------------------------------------------
class FakeRounds:
    """Notes how it was closed."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def finish(self) -> None:
        """Note it."""
        self.calls.append("finish")

    def close(self, timeout: float) -> None:
        """Note how long that may take."""
        self.calls.append(timeout)


def test_a_shutdown_takes_as_long_as_close_timeout_says() -> None:
    """The end of a session may take `close_timeout` seconds; before, the node says that its part is done."""
    handler = object.__new__(ElasticRendezvousHandler)
    rounds = FakeRounds()
    handler._rounds = rounds  # type: ignore[assignment] # a fake
    handler._settings = read_settings("c10d", {"close_timeout": "5"})
    assert handler.shutdown()
    assert rounds.calls == ["finish", 5.0]


@pytest.mark.parametrize(
    "values",
    [
        {"preferred_rank": 1 << 60},
        {"location": "x" * 99999},
    ],
)
def test_a_value_that_the_job_could_not_read_is_refused(values: dict[str, Any]) -> None:
    """The job would pass over the node's messages, its own coordinator's as well, and the node would wait for ever."""
    setup = plain_setup()
    setup = replace(setup, node_info=replace(setup.node_info, **values))
    place = Place("c10d", "job", [("127.0.0.1", 1)], is_host=False)
    with pytest.raises(ValueError, match=r"^the other nodes could not read a value of this node: NodeInfo.* must be "):
        Session(place, read_settings("c10d", {}), setup, local_addr="127.0.0.1")


def test_a_window_that_the_job_could_not_read_is_refused() -> None:
    """A configuration is sent as well."""
    setup = plain_setup(membership_window=Window(1 << 60, 5.0))
    place = Place("c10d", "job", [("127.0.0.1", 1)], is_host=False)
    with pytest.raises(
        ValueError, match=r"^the other nodes could not read a value of this node: Window\.count must be "
    ):
        Session(place, read_settings("c10d", {}), setup, local_addr="127.0.0.1")
