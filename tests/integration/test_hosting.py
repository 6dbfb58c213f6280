"""A store that an agent serves for its whole job: its thread and its end."""

from __future__ import annotations

import contextlib
import sys
import threading
import time

import pytest

from elastic_run.rendezvous.elastic.backend.hosting import HostedStore
from elastic_run.rendezvous.elastic.backend.tcp import TcpBackend
from elastic_run.store.errors import StoreConnectionError
from elastic_run.store.tcpstore.client import StoreClient
from elastic_run.store.tcpstore.listener import open_listener
from tests.support.sessions import free_port
from tests.support.wait import DEADLINE, stretched


@pytest.mark.parametrize("is_used", [False, True])
def test_a_hosted_store_ends_at_once(*, is_used: bool) -> None:
    """`close` ends the thread, the port and every connection in far less than the ten seconds that it would wait."""
    before = threading.enumerate()
    hosted = HostedStore(open_listener())
    client = StoreClient("127.0.0.1", hosted.port, DEADLINE) if is_used else None
    begun = time.monotonic()
    hosted.close()
    assert time.monotonic() - begun < stretched(2.0)
    assert set(threading.enumerate()) <= set(before)
    if client is not None:
        with client, pytest.raises(StoreConnectionError):
            client.add("key", 1)
    open_listener("127.0.0.1", hosted.port).close()
    hosted.close()


def test_a_hosted_store_is_not_alone_while_another_node_is_connected() -> None:
    """A connection of the agent's own that closes during the wait makes no room for one of another node."""
    hosted = HostedStore(open_listener())
    own = [StoreClient("127.0.0.1", hosted.port, DEADLINE) for _ in range(2)]
    with StoreClient("127.0.0.1", hosted.port, DEADLINE) as other:
        for client in (*own, other):
            client.add("key", 1)
        alone = threading.Event()
        hosted.set_when_alone(alone, lambda: len(own))
        own.pop().close()
        for _ in range(2):
            other.add("key", 1)  # the server has seen the end of the other connection
        assert not alone.is_set()
    assert alone.wait(DEADLINE)
    own.pop().close()
    hosted.close()


@pytest.mark.parametrize(("kind", "serves_workers", "doubt"), [("c10d", False, ""), ("static", True, "rank 0")])
def test_only_the_node_of_rank_0_doubts_an_address_of_no_interface(
    kind: str, doubt: str, *, serves_workers: bool
) -> None:
    """With `static` its number may be missing or wrong; a user who says that a node serves the store knows it."""
    port = free_port()
    backend = TcpBackend(kind, "job", [("203.0.113.1", port)], is_host=True, serves_workers=serves_workers)
    backend.prepare()
    assert backend.port == port
    assert doubt in backend.doubt
    assert bool(backend.doubt) == bool(doubt)
    backend.close()


def test_a_job_with_another_id_at_the_same_store_is_named() -> None:
    """On both sides, and also beside other nodes; the node that serves the store says how to come to it before."""
    port = free_port()
    backend, other = (
        TcpBackend("c10d", name, [("127.0.0.1", port)], is_host=name == "job") for name in ("job", "typo")
    )
    backend.prepare()
    assert backend.find_local_address() == "127.0.0.1"
    assert "other nodes need" in backend.find_doubts("first")
    assert "first came to this store with --rdzv-id=job" in other.find_doubts("second")
    assert other.find_visitor() == ""
    visitor = "second came to this store with --rdzv-id=typo, and this job has --rdzv-id=job"
    assert [backend.find_visitor() for _ in range(2)] == [visitor, visitor]
    assert "second came to this store with --rdzv-id=typo" in backend.find_doubts("first")
    assert backend.find_visitor() == ""
    backend.close()
    assert backend.find_visitor() == ""


@pytest.mark.parametrize("secret", [None, b"0" * 32])
def test_a_late_node_hears_the_id_of_the_job_that_serves_the_store(secret: bytes | None) -> None:
    """Each time that it looks, also where no node of that job has waited alone; a node of that job hears nothing."""
    port = free_port()
    backend, late, other = (
        TcpBackend("c10d", name, [("127.0.0.1", port)], is_host=is_host, secret=secret)
        for name, is_host in (("job", True), ("typo", False), ("job", False))
    )
    backend.prepare()
    for node in (backend, late, other):
        node.leave_id("first")
    told = f"first serves the store at 127.0.0.1:{port} with --rdzv-id=job, and this job has --rdzv-id=typo"
    assert [late.find_doubts("second") for _ in range(2)] == [told, told]
    assert other.find_doubts("third") == "second came to this store with --rdzv-id=typo, and this job has --rdzv-id=job"
    backend.close()


def test_a_node_that_serves_no_store_yet_has_what_it_needs_when_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install` may replace the files of elastic-run before that: then a failover ended the job."""
    name = "elastic_run.rendezvous.elastic.other_jobs"
    monkeypatch.delitem(sys.modules, name, raising=False)
    TcpBackend("c10d", "job", [("127.0.0.1", 1), ("127.0.0.1", 2)], is_host=False).leave_id("second")
    assert name in sys.modules


def test_a_store_of_which_nobody_was_told_yet_is_served_at_any_port_if_its_own_is_taken() -> None:
    """Other nodes are told the port where the store is."""
    with contextlib.closing(open_listener()) as other:
        taken = other.getsockname()[1]
        backend = TcpBackend("c10d", "job", [("127.0.0.1", taken)], is_host=True)
        backend.host_anywhere("127.0.0.1")
        assert backend.port not in (0, taken)
        assert backend.endpoint == ("127.0.0.1", backend.port)
        with StoreClient(*backend.endpoint, DEADLINE) as client:
            assert client.add("key", 1) == 1
        backend.close()
