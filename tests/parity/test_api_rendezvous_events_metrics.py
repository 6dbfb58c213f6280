"""What rendezvous, events, metrics and utils do, beside those of the torch that is installed."""

from __future__ import annotations

from importlib import import_module

import pytest

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
    ours = import_module(f"{_OURS}.events.handlers")
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


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "host",
        "host:0",
        "host:65535",
        "a-b.c_d:1",
        "127.0.0.1:9",
        "[::1]",
        "[::1]:80",
        "[2001:db8::1]:1",
        "::1:29400",
    ],
)
def test_endpoints_are_read_as_torch_reads_them(endpoint: str) -> None:
    """Every endpoint that torch understands means the same."""
    theirs, ours = (import_module(f"{package}.rendezvous.utils") for package in (_TORCH, _OURS))
    expected = theirs.parse_rendezvous_endpoint(endpoint, 29400)
    assert ours.parse_rendezvous_endpoint(endpoint, default_port=29400) == expected


@pytest.mark.parametrize("endpoint", ["host:", "host:x", "host:65536", "host:-1", "ho st:1", "host$:1", ":1"])
def test_endpoints_that_torch_refuses_are_refused(endpoint: str) -> None:
    """Every endpoint that torch refuses is refused."""
    for package in (_TORCH, _OURS):
        with pytest.raises(ValueError, match="endpoint"):
            import_module(f"{package}.rendezvous.utils").parse_rendezvous_endpoint(endpoint, 29400)


@pytest.mark.parametrize("settings", ["", "a=1", " a = 1 , b = x=y "])
def test_settings_are_read_as_torch_reads_them(settings: str) -> None:
    """Every text of settings that torch understands means the same."""
    theirs, ours = (import_module(f"{package}.rendezvous.utils") for package in (_TORCH, _OURS))
    assert ours._parse_rendezvous_config(settings) == theirs._parse_rendezvous_config(settings)


@pytest.mark.parametrize(("size", "replicas", "start"), [(10, 2, 0), (10, 3, 4), (11, 4, 1), (100, 7, 50), (4, 4, 0)])
@pytest.mark.parametrize("epoch", [0, 3])
def test_samples_are_shared_out_as_torch_does(size: int, replicas: int, start: int, epoch: int) -> None:
    """Each worker gets the same samples in the same order as from torch's sampler."""
    shares = []
    for package in (_TORCH, _OURS):
        sampler_class = import_module(f"{package}.utils.data").ElasticDistributedSampler
        samplers = [sampler_class(range(size), replicas, rank, start) for rank in range(replicas)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        shares.append([(len(sampler), list(sampler)) for sampler in samplers])
    assert shares[0] == shares[1]


def test_fewer_samples_than_workers_are_shared_out() -> None:
    """With one sample left for four workers each gets that one (torch: AssertionError)."""
    sampler_class = import_module(f"{_OURS}.utils.data").ElasticDistributedSampler
    assert [list(sampler_class(range(10), 4, rank, 9)) for rank in range(4)] == [[9]] * 4


def test_wrong_data_sets_are_refused() -> None:
    """A start behind the end and data without a length are refused."""
    sampler_class = import_module(f"{_OURS}.utils.data").ElasticDistributedSampler
    with pytest.raises(ValueError, match=r"^start index 10 is not below the data set's size, 10$"):
        sampler_class(range(10), 2, 0, 10)
    with pytest.raises(TypeError, match="has no length"):
        sampler_class(iter([1]), 2, 0)
