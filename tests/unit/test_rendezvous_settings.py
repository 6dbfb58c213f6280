"""What --rdzv-conf says to the rendezvous of several nodes, and what is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_run.core.job.config import JobConfig
from elastic_run.rendezvous import RendezvousParameters
from elastic_run.rendezvous.backend_table import read_settings
from elastic_run.rendezvous.handler import create_handler


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
        ("etcd-v3", "a:1", "job", {"password": "x"}, "password needs user=NAME"),
        ("etcd-v3", "a:1", "job", {"user": "x", "password_file": "/no/such"}, "password_file=/no/such"),
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
