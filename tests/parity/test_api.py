"""What rendezvous, its stores, events, metrics and utils do, beside those of the torch that is installed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run.rendezvous import RendezvousParameters, get_rendezvous_handler
from tests.support.sessions import FAST, free_port

if TYPE_CHECKING:
    from pathlib import Path

    from elastic_run.rendezvous import RendezvousHandler

_TORCH = "torch.distributed.elastic"
_OURS = "elastic_run"


def test_registered_backends_are_torchs_and_more() -> None:
    """Every backend that torch knows has its name taken in our registry."""
    theirs = import_module(f"{_TORCH}.rendezvous").rendezvous_handler_registry._registry
    ours = import_module(f"{_OURS}.rendezvous").rendezvous_handler_registry._registry
    assert set(theirs) <= set(ours)


def test_event_handlers_are_torchs() -> None:
    """The event handlers that torch knows by name are there, of the same classes."""
    theirs = import_module(f"{_TORCH}.events.handlers")
    ours = import_module(f"{_OURS}.events").handlers
    for name, handler in theirs._log_handlers.items():
        assert type(ours.get_logging_handler(name)) is type(handler)


def test_events_are_written_as_torchs() -> None:
    """The JSON of an event is that of torch, byte for byte, and each reads the other's."""
    for kind, arguments in (
        ("Event", ("started", "source", 12, {"rank": 0, "ok": True, "loss": 0.5, "host": "nöde", "none": None})),
        ("RdzvEvent", ("a.py:join", "job", "joined", "node", 7, "node_state", "host:1", 3, 2, "Traceback")),
    ):
        written = []
        for package in (_TORCH, _OURS):
            module = import_module(f"{package}.events")
            enums = {"source": module.EventSource.WORKER, "node_state": module.NodeState.FAILED}
            written.append(getattr(module, kind)(*(enums.get(str(a), a) for a in arguments)).serialize())
        assert written[0] == written[1]
        for package in (_TORCH, _OURS):
            assert str(getattr(import_module(f"{package}.events"), kind).deserialize(written[0])) == written[0]


def test_endpoints_and_settings_are_read_as_torch_reads_them() -> None:
    """Every endpoint and every text of settings that torch understands means the same; what it refuses is refused."""
    theirs, ours = (import_module(f"{package}.rendezvous.utils") for package in (_TORCH, _OURS))
    good = ("", "host", "host:0", "host:65535", "a-b.c_d:1", "127.0.0.1:9", "[::1]", "[::1]:80", "[2001:db8::1]:1")
    for endpoint in (*good, "::1:29400"):
        expected = theirs.parse_rendezvous_endpoint(endpoint, 29400)
        assert ours.parse_rendezvous_endpoint(endpoint, default_port=29400) == expected, endpoint
    for endpoint in ("host:", "host:x", "host:65536", "host:-1", "ho st:1", "host$:1", ":1"):
        for module in (theirs, ours):
            with pytest.raises(ValueError, match="endpoint"):
                module.parse_rendezvous_endpoint(endpoint, 29400)
    for settings in ("", "a=1", " a = 1 , b = x=y "):
        assert ours._parse_rendezvous_config(settings) == theirs._parse_rendezvous_config(settings), settings


# --- the store of a round --------------------------------------------------------------------------------------------
dist: Any = import_module("torch.distributed")
_WAIT = timedelta(seconds=30)


@pytest.fixture
def two_nodes(request: pytest.FixtureRequest, tmp_path: Path) -> list[RendezvousHandler]:
    """Make the handlers of a job of two nodes on the backend that the test names."""
    port = free_port()
    backend, endpoint, conf = {
        "c10d": ("c10d", f"127.0.0.1:{port}", {}),
        "file": ("c10d", str(tmp_path / "store"), {"store_type": "file"}),
        "static": ("static", f"127.0.0.1:{port}", {}),
    }[request.param]
    ranks: list[dict[str, Any]] = [{"rank": rank} if backend == "static" else {} for rank in range(2)]
    return [
        get_rendezvous_handler(
            RendezvousParameters(backend, endpoint, "job", 2, 2, "127.0.0.1", **conf, **rank, **FAST)
        )
        for rank in ranks
    ]


@pytest.mark.parametrize("two_nodes", ["c10d", "file", "static"], indirect=True)
def test_two_nodes_share_a_store_of_torchs(two_nodes: list[RendezvousHandler]) -> None:
    """A process group is made of the handlers' stores, and a PrefixStore of one is read through the other."""
    with ThreadPoolExecutor(2) as pool:
        rounds = list(pool.map(lambda handler: handler.next_rendezvous(), two_nodes))
        first, second = (found.store for found in rounds)
        assert isinstance(first, dist.Store)
        dist.PrefixStore("application", first).set("key", "value")
        assert dist.PrefixStore("application", second).get("key") == b"value"
        groups = list(pool.map(lambda found: dist.ProcessGroupGloo(found.store, found.rank, 2, _WAIT), rounds))
        assert [group.size() for group in groups] == [2, 2]
        del groups
        assert all(pool.map(lambda handler: handler.shutdown(), two_nodes))


@pytest.mark.parametrize("backend", ["local", "c10d", "static"])
def test_one_node_has_a_store_of_torchs(backend: str) -> None:
    """A process group and a PrefixStore are made of it, and the timeout is torch's."""
    conf: dict[str, Any] = {"rank": 0} if backend == "static" else {}
    endpoint = "" if backend == "local" else f"127.0.0.1:{free_port()}"
    handler = get_rendezvous_handler(RendezvousParameters(backend, endpoint, "job", 1, 1, **conf))
    store: Any = handler.next_rendezvous().store
    assert isinstance(store, dist.Store)
    dist.PrefixStore("application", store).set("key", "value")
    store.set_timeout(timedelta(seconds=1))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dist.destroy_process_group()
    assert handler.shutdown()
