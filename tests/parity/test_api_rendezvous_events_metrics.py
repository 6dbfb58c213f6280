"""Names and signatures of rendezvous, events, metrics and utils beside those of the torch that is installed.

Every difference is in the table below, with its reason. An entry that is no difference any more fails, too.
"""

from __future__ import annotations

import enum
import inspect
from dataclasses import fields, is_dataclass
from importlib import import_module

import pytest

_TORCH = "torch.distributed.elastic"
_OURS = "elastic_run"

#: Modules, and what others import from them: torch's __all__ where there is one, else what the contract lists.
_MODULES: dict[str, tuple[str, ...]] = {
    "rendezvous": (),
    "rendezvous.api": (),
    "rendezvous.registry": (),
    "rendezvous.utils": ("parse_rendezvous_endpoint", "_parse_rendezvous_config"),
    "events": (
        *("record", "record_rdzv_event", "construct_and_record_rdzv_event", "get_logging_handler"),
        *("Event", "EventMetadataValue", "EventSource", "NodeState", "RdzvEvent"),
    ),
    "events.api": (),
    "events.handlers": ("get_logging_handler",),
    "metrics": (
        *("configure", "ConsoleMetricHandler", "get_elapsed_time_ms", "getStream", "MetricData", "MetricHandler"),
        *(
            "MetricsConfig",
            "NullMetricHandler",
            "prof",
            "profile",
            "publish_metric",
            "put_metric",
            "initialize_metrics",
        ),
    ),
    "metrics.api": (),
    "utils": ("get_env_variable_or_raise", "get_socket_with_port", "macros"),
    "utils.api": ("get_env_variable_or_raise", "get_socket_with_port", "macros"),
    "utils.distributed": (),
    "utils.log_level": ("get_log_level",),
    "utils.logging": ("get_logger",),
    "utils.data": ("CyclingIterator", "ElasticDistributedSampler"),
}

#: Each deliberate difference: where, what, why.
_DIFFERENCES: dict[tuple[str, str], str] = {
    ("utils.distributed.create_c10d_store", "is missing"): (
        "it builds torch's TCPStore, which the launcher doesn't use; torch's own is there for programs that do"
    ),
}


def _names(module: str) -> tuple[str, ...]:
    return _MODULES[module] or tuple(import_module(f"{_TORCH}.{module}").__all__)


def _parameters(function: object) -> list[str]:
    """Return each parameter as `kind name = default`; annotations may differ in spelling."""
    described = []
    for parameter in inspect.signature(function).parameters.values():  # type: ignore[arg-type] # a callable
        default = parameter.default
        shown = "" if default is inspect.Parameter.empty else f" = {getattr(default, 'value', default)!r}"
        described.append(f"{parameter.kind.description} {parameter.name}{shown}")
    return described


def _members(cls: type) -> dict[str, object]:
    """Return a class's public members and its constructor, inherited ones of its own package included."""
    found: dict[str, object] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith((_TORCH, _OURS)):
            found |= {name: member for name, member in vars(base).items() if not name.startswith("_")}
    return found


def _compare_classes(theirs: type, ours: type) -> list[str]:
    found = []
    if issubclass(theirs, enum.Enum):
        return [] if [(e.name, e.value) for e in theirs] == [(e.name, e.value) for e in ours] else ["members differ"]  # type: ignore[attr-defined] # enums
    if is_dataclass(theirs) != is_dataclass(ours):
        found.append("is a dataclass")
    elif is_dataclass(theirs) and [f.name for f in fields(theirs)] != [f.name for f in fields(ours)]:
        found.append("fields differ")
    bases = [[base.__name__ for base in cls.__mro__] for cls in (theirs, ours)]
    if issubclass(theirs, BaseException) and bases[0] != bases[1]:
        found.append("bases differ")
    if getattr(theirs, "__abstractmethods__", None) != getattr(ours, "__abstractmethods__", None):
        found.append("abstract methods differ")
    if not issubclass(theirs, BaseException) and _parameters(theirs) != _parameters(ours):
        found.append(f"constructor: {_parameters(theirs)} / {_parameters(ours)}")
    for name, member in _members(theirs).items():
        other = inspect.getattr_static(ours, name, None)
        found += [f"{name}: {difference}" for difference in _compare(member, other)]
    return found


def _compare(theirs: object, ours: object) -> list[str]:
    """Return what a caller of torch's object would find different in ours."""
    if ours is None and theirs is not None:
        return ["is missing"]
    if isinstance(theirs, type):
        return _compare_classes(theirs, ours) if isinstance(ours, type) else ["is a class"]
    if type(theirs).__name__ != type(ours).__name__:
        return [f"is a {type(theirs).__name__}"]
    if isinstance(theirs, staticmethod):
        return _compare(theirs.__func__, ours.__func__)  # type: ignore[attr-defined] # of the same type
    if inspect.isfunction(theirs):
        same = _parameters(theirs) == _parameters(ours)
        return [] if same else [f"parameters: {_parameters(theirs)} / {_parameters(ours)}"]
    same = theirs == ours or not isinstance(theirs, str | int)
    return [] if same else [f"value: {theirs!r} / {ours!r}"]


def _found_differences(module: str) -> set[tuple[str, str]]:
    theirs, ours = import_module(f"{_TORCH}.{module}"), import_module(f"{_OURS}.{module}")
    return {
        (f"{module}.{name}", difference)
        for name in _names(module)
        for difference in _compare(getattr(theirs, name), getattr(ours, name, None))
    }


@pytest.mark.parametrize("module", _MODULES)
def test_names_and_signatures_are_torchs(module: str) -> None:
    """Every public name of torch's module is in ours with the same signature, but for the reviewed differences."""
    expected = {where for where in _DIFFERENCES if where[0].rpartition(".")[0] == module}
    assert _found_differences(module) == expected


@pytest.mark.parametrize("module", ["rendezvous", "rendezvous.api", "events.api", "metrics.api"])
def test_star_imports_bring_torchs_names(module: str) -> None:
    """Whoever imports everything from torch's module gets all of it from ours."""
    theirs = set(import_module(f"{_TORCH}.{module}").__all__)
    assert theirs <= set(import_module(f"{_OURS}.{module}").__all__)


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
