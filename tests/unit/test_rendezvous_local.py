"""The rendezvous of one node, and the way to it from a backend's name."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run.rendezvous import (
    RendezvousClosedError,
    RendezvousParameters,
    RendezvousStoreInfo,
    get_rendezvous_handler,
)
from elastic_run.rendezvous.registry import LocalRendezvousHandler

if TYPE_CHECKING:
    from collections.abc import Callable


def _parameters(
    backend: str, endpoint: str = "", *, nodes: tuple[int, int] = (1, 1), **settings: object
) -> RendezvousParameters:
    return RendezvousParameters(backend, endpoint, "job", *nodes, **settings)  # type: ignore[arg-type] # any setting


def test_a_round_has_the_offered_store_and_one_node() -> None:
    """After the agent's offer a round is rank 0 of 1 at that address, and the workers may use the agent's store."""
    handler = LocalRendezvousHandler("job")
    assert handler.is_immediate
    handler.offer_worker_store("127.0.0.1", 1234)
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    assert info.bootstrap_store_info == RendezvousStoreInfo("127.0.0.1", 1234)
    assert handler.use_agent_store


def test_an_offer_may_be_for_rank_0_to_serve() -> None:
    """An address that the worker with rank 0 is to serve is passed on without promising the agent's store."""
    handler = LocalRendezvousHandler("job")
    handler.offer_worker_store("127.0.0.1", 1234, use_agent_store=False)
    assert handler.next_rendezvous().bootstrap_store_info == RendezvousStoreInfo("127.0.0.1", 1234)
    assert not handler.use_agent_store


def test_each_round_has_a_fresh_store() -> None:
    """Nothing that one round's agents wrote is there in the next round; torch is imported by whoever writes."""
    handler = LocalRendezvousHandler("job")
    handler.offer_worker_store("127.0.0.1", 1234)
    first, second = handler.next_rendezvous(), handler.next_rendezvous()
    assert second.store is not first.store


def test_without_an_offer_rank_0_serves_on_a_free_port() -> None:
    """In somebody else's agent the handler names a free port of this node and promises no store, as torch does."""
    handler = LocalRendezvousHandler("job")
    info = handler.next_rendezvous().bootstrap_store_info
    assert info is not None
    assert info.master_addr == "127.0.0.1"
    with socket.create_server((info.master_addr, info.master_port)):
        assert not handler.use_agent_store
    named = LocalRendezvousHandler("job", local_addr="10.0.0.1").next_rendezvous().bootstrap_store_info
    assert named is not None
    assert named.master_addr == "10.0.0.1"


@pytest.mark.parametrize("close", [LocalRendezvousHandler.set_closed, LocalRendezvousHandler.shutdown])
def test_a_closed_rendezvous_forms_no_round(close: Callable[[LocalRendezvousHandler], bool | None]) -> None:
    """Once closed or shut down there is no further round, and the error names the job."""
    handler = LocalRendezvousHandler("job-1")
    assert not handler.is_closed()
    assert close(handler) in (None, True)
    assert handler.is_closed()
    with pytest.raises(RendezvousClosedError, match="'job-1'"):
        handler.next_rendezvous()


@pytest.mark.parametrize("backend", ["local", "c10d"])
def test_one_node_is_served_under_the_name_it_asked_for(backend: str) -> None:
    """`local`, and `c10d` on this machine, give the local handler under the name that was asked for."""
    handler = get_rendezvous_handler(_parameters(backend, "localhost:0"))
    assert isinstance(handler, LocalRendezvousHandler)
    assert (handler.get_backend(), handler.get_run_id(), handler.num_nodes_waiting()) == (backend, "job", 0)


@pytest.mark.parametrize(
    ("endpoint", "settings"),
    [
        ("", {}),
        ("localhost:29400", {"join_timeout": "30"}),
        ("127.0.0.1", {}),
        ("192.0.2.1:29400", {"is_host": "1"}),
        ("/tmp/rendezvous", {"store_type": "file"}),
    ],
)
def test_c10d_on_one_node_is_served_wherever_torch_would_open_its_store_here(
    endpoint: str, settings: dict[str, Any]
) -> None:
    """Every way of saying in torch that the c10d store is this machine's own is served."""
    assert get_rendezvous_handler(_parameters("c10d", endpoint, **settings)).get_backend() == "c10d"


@pytest.mark.parametrize(
    "params",
    [
        _parameters("c10d", "192.0.2.1:29400"),
        _parameters("c10d", "localhost:1", is_host="0"),
        _parameters("c10d", "localhost:1", nodes=(1, 4)),
        _parameters("static", "localhost:1", nodes=(2, 2), rank=1),
        _parameters("etcd", "localhost:1"),
        _parameters("etcd-v2", "localhost:1", nodes=(1, 2)),
        _parameters("etcd-v3", "localhost:1"),
    ],
    ids=lambda params: f"{params.backend} for {params.max_nodes}",
)
def test_a_store_elsewhere_or_several_nodes_make_an_elastic_job(params: RendezvousParameters) -> None:
    """Where other nodes may be met the handler opens sessions, under the name that was asked for, and nothing yet."""
    handler = get_rendezvous_handler(params)
    assert hasattr(handler, "open_session")
    assert handler.get_backend() == params.backend


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (_parameters("local", nodes=(1, 2)), "'local' is for one node, not for up to 2"),
        (_parameters("c10d", "host:x"), "port 'x' is not a number"),
        (_parameters("c10d", store_type="s3"), "store_type='s3': not tcp or file"),
        (_parameters("c10d", is_host="maybe"), "is_host='maybe'"),
        (_parameters("static", "host:1"), "give --node-rank"),
        (_parameters("static", rank=0), "give --master-addr and --master-port"),
        (_parameters("static", "host", rank=0), "'host' has no port: give --master-port"),
        (_parameters("static", "host:1", rank=1), "--node-rank: 1 is not 0, the only rank of one node"),
        (_parameters("static", "host:1", rank="x"), "rank='x': not a whole number"),
        (_parameters("static", "host:1", rank=0, timeout="x"), "timeout='x': not a whole number"),
    ],
)
def test_wrong_parameters_of_a_backend_are_named(params: RendezvousParameters, message: str) -> None:
    """What a built-in backend can't work with is one line that names it and the remedy."""
    with pytest.raises(ValueError, match=message) as raised:
        get_rendezvous_handler(params)
    assert "\n" not in str(raised.value)


def test_static_on_one_node_is_at_its_endpoint() -> None:
    """One static node meets itself at --master-addr:--master-port, unless the agent offers a store elsewhere."""
    handler = get_rendezvous_handler(_parameters("static", "10.0.0.1:1234", rank="0", timeout="5"))
    assert isinstance(handler, LocalRendezvousHandler)
    assert handler.get_backend() == "static"
    assert handler.next_rendezvous().bootstrap_store_info == RendezvousStoreInfo("10.0.0.1", 1234)
    assert not handler.use_agent_store
    handler.offer_worker_store("127.0.0.1", 4321)
    assert handler.next_rendezvous().bootstrap_store_info == RendezvousStoreInfo("127.0.0.1", 4321)
    assert handler.use_agent_store


def test_static_on_one_node_may_have_any_port() -> None:
    """No other node has to know it: accelerate's notebook_launcher asks for port 0."""
    handler = get_rendezvous_handler(_parameters("static", "127.0.0.1:0", rank="0"))
    info = handler.next_rendezvous().bootstrap_store_info
    assert info is not None
    assert info.master_addr == "127.0.0.1"


def test_an_unknown_backend_lists_the_known() -> None:
    """A misspelt backend is answered with all names, in one line."""
    with pytest.raises(
        ValueError, match=r"^the rendezvous backend 'c1od' is not registered; known: c10d, etcd, etcd-v2, "
    ):
        get_rendezvous_handler(_parameters("c1od"))
