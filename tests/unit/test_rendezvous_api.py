"""The interface to backends: parameters, results, registry, errors, and the table of built-in backends."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_run import contract, rendezvous
from elastic_run.cli.flags import FLAGS
from elastic_run.rendezvous import api, rendezvous_handler_registry
from elastic_run.rendezvous.api import BACKENDS, RendezvousHandlerRegistry, RendezvousParameters, RendezvousStoreInfo
from elastic_run.rendezvous.registry import LocalRendezvousHandler
from elastic_run.run import run_command


def _parameters(backend: str = "mine", **settings: object) -> RendezvousParameters:
    return RendezvousParameters(backend, "host:1", "job", 1, 1, **settings)  # type: ignore[arg-type] # any setting


def _create(params: RendezvousParameters) -> LocalRendezvousHandler:
    return LocalRendezvousHandler(params.run_id, backend="mine")


def test_parameters_keep_what_they_are_given() -> None:
    """Parameters hold everything under torch's names, the backend's own settings in config."""
    params = RendezvousParameters("static", "host:1", "job", 1, 4, local_addr="10.0.0.1", rank=0)
    assert (params.backend, params.endpoint, params.run_id) == ("static", "host:1", "job")
    assert (params.min_nodes, params.max_nodes, params.local_addr) == (1, 4, "10.0.0.1")
    assert params.config == {"rank": 0}


@pytest.mark.parametrize(
    ("backend", "nodes", "message"),
    [
        ("", (1, 1), "the name of the rendezvous backend is empty"),
        ("static", (0, 1), "the minimum number of nodes is 0; it must be 1 or more"),
        ("static", (3, 1), "the maximum number of nodes, 1, is less than the minimum, 3"),
    ],
)
def test_impossible_parameters_are_refused(backend: str, nodes: tuple[int, int], message: str) -> None:
    """A backend without a name and numbers of nodes that can't be are refused in one line."""
    with pytest.raises(ValueError, match=f"^{message}$"):
        RendezvousParameters(backend, "", "job", *nodes)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(True, True), (False, False), (1, True), (0, False), ("1", True), ("Yes", True), ("T", True), ("n", False)],
)
def test_a_truth_value_is_read_from_its_spellings(value: object, expected: bool) -> None:
    """The spellings of yes and no that torch takes are taken."""
    assert _parameters(is_host=value).get_as_bool("is_host") is expected


@pytest.mark.parametrize("value", ["maybe", "", 2, 1.0])
def test_what_is_no_truth_value_is_refused(value: object) -> None:
    """Anything else is refused, with the setting, the value and what is allowed."""
    with pytest.raises(ValueError, match=r"^rendezvous setting is_host=.*: not one of 1, true"):
        _parameters(is_host=value).get_as_bool("is_host")


def test_numbers_and_defaults_of_settings() -> None:
    """A setting is read as a whole number; one that is missing is the default; a wrong one is named."""
    params = _parameters(timeout="30", wrong="x", odd=[])
    assert params.get_as_int("timeout") == 30
    assert params.get_as_int("missing") is None
    assert params.get_as_int("missing", 7) == 7
    assert params.get_as_bool("missing", default=True) is True
    assert params.get("timeout") == "30"
    for key in ("wrong", "odd"):
        with pytest.raises(ValueError, match=f"^rendezvous setting {key}=.*: not a whole number$"):
            params.get_as_int(key)


def test_a_registered_backend_builds_handlers() -> None:
    """A creator that is registered, even twice, builds the handler of its name."""
    registry = RendezvousHandlerRegistry()
    registry.register("mine", _create)
    registry.register("mine", _create)
    assert registry.create_handler(_parameters()).get_run_id() == "job"


def test_a_name_belongs_to_one_creator() -> None:
    """Another creator under a name that is taken is refused, the built-in names included, and so is no name."""
    with pytest.raises(ValueError, match=r"^rendezvous backend 'static' can't be .*: it is .* already$"):
        rendezvous.rendezvous_handler_registry.register("static", _create)
    with pytest.raises(ValueError, match="is empty"):
        RendezvousHandlerRegistry().register("", _create)


def test_an_unregistered_backend_is_refused_with_those_that_are() -> None:
    """A registry that is asked for what it doesn't have lists what it has."""
    registry = RendezvousHandlerRegistry()
    with pytest.raises(ValueError, match=r"^rendezvous backend 'mine' is not registered; registered: none$"):
        registry.create_handler(_parameters())
    registry.register("other", _create)
    with pytest.raises(ValueError, match=r"registered: other$"):
        registry.create_handler(_parameters())


def test_a_handler_of_another_name_is_refused() -> None:
    """A creator whose handler claims to be another backend is a defect that is named."""
    registry = RendezvousHandlerRegistry()
    registry.register("other", _create)
    with pytest.raises(RuntimeError, match="'other' was asked for, but its handler says that it is 'mine'"):
        registry.create_handler(_parameters("other"))


def test_a_store_address_is_a_value() -> None:
    """Addresses are compared by value, shown, matched and not hashed, as torch's dataclass is."""
    info = RendezvousStoreInfo("host", 1)
    assert info == RendezvousStoreInfo(master_addr="host", master_port=1)
    assert info != RendezvousStoreInfo("host", 2)
    another_kind: object = ("host", 1)
    assert info != another_kind
    assert repr(info) == "RendezvousStoreInfo(master_addr='host', master_port=1)"
    with pytest.raises(TypeError):
        hash(info)
    match info:
        case RendezvousStoreInfo(addr, port):
            assert (addr, port) == ("host", 1)


class FakeStore:
    """What `build` needs of a store."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.get, self.set = self.values.__getitem__, self.values.__setitem__


def test_rank_0_tells_the_others_its_address() -> None:
    """What rank 0 writes to the store is what every rank gets; without a port it is a free one."""
    store = FakeStore()
    first = RendezvousStoreInfo.build(0, store, "10.0.0.1", server_port=1234)
    assert first == RendezvousStoreInfo.build(1, store, "10.0.0.2") == RendezvousStoreInfo("10.0.0.1", 1234)
    assert store.get("MASTER_ADDR") == b"10.0.0.1"
    assert RendezvousStoreInfo.build(0, FakeStore(), "10.0.0.1").master_port > 0


def test_errors_form_one_tree() -> None:
    """Every rendezvous error is a RendezvousError."""
    for name in ("Closed", "Timeout", "Connection", "State", "GracefulExit"):
        assert issubclass(getattr(rendezvous, f"Rendezvous{name}Error"), rendezvous.RendezvousError)


def test_errors_of_torch_are_known_by_name() -> None:
    """An exception with the name of one of ours, as torch's have, is of that kind, and so are its subclasses."""
    torchs_error = type("RendezvousError", (Exception,), {})
    torchs_closed = type("RendezvousClosedError", (torchs_error,), {})
    assert api.is_kind(torchs_closed(), api.RendezvousClosedError)
    assert api.is_kind(torchs_closed(), api.RendezvousError)
    assert api.is_kind(api.RendezvousStateError(), api.RendezvousError)
    assert not api.is_kind(ValueError(), api.RendezvousError)
    assert not api.is_kind(torchs_error(), api.RendezvousClosedError)


@pytest.mark.parametrize("module", [api, rendezvous])
def test_lazy_names_are_there(module: object) -> None:
    """Everything that __all__ promises can be had, and nothing else; torch's own stays where it is."""
    for name in set(module.__all__) - {"EtcdServer"}:  # type: ignore[attr-defined] # both modules have it
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        module.nonsense  # type: ignore[attr-defined] # noqa: B018 - asking for it is the test


# --- the table of built-in backends -----------------------------------------------------------------------------------
_ROOT = Path(__file__).parents[2] / "elastic_run"


def test_the_registry_knows_each_backend() -> None:
    """Every backend of the table is registered."""
    assert set(BACKENDS) <= set(rendezvous_handler_registry._registry)


def test_the_help_names_each_backend_that_meets_in_a_store() -> None:
    """The help of --rdzv-backend lists the names that a user can give."""
    (flag,) = (flag for flag in FLAGS if flag.dest == "rdzv_backend")
    assert flag.text.startswith("Rendezvous backend: static, c10d, etcd, etcd-v2, etcd-v3, or ")


def test_the_facts_of_a_backend_stand_in_the_table_only() -> None:
    """No module but the table writes the name of an etcd backend; default ports stand there or in `contract`."""
    facts = {"etcd-v2", "etcd-v3", 2379, contract.DEFAULT_C10D_PORT}
    homes = {
        path.relative_to(_ROOT).as_posix()
        for path in _ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in facts
    }
    assert homes == {"rendezvous/api.py", "contract.py"}


def test_the_table_loads_no_backend() -> None:
    """To read the table costs no import of a store, a handler or torch."""
    program = (
        "import sys, elastic_run.rendezvous.api; "
        "rooms = 'elastic_run.store', 'elastic_run.rendezvous.coordination'; "
        "others = 'torch', 'socket', 'dataclasses', 'typing'; "
        "print([name for name in sys.modules if name.startswith(rooms) or name in others])"
    )
    told = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert told == "[]\n"


@pytest.mark.parametrize("name", ["etcd", "etcd-v2", "etcd-v3"])
def test_a_store_that_other_jobs_use_has_no_default_place(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No server is known that this node could ask."""
    with pytest.raises(SystemExit):
        run_command([f"--rdzv-backend={name}", "--rdzv-id=j", __file__])
    assert f"error: --rdzv-endpoint: is needed with --rdzv-backend={name}: " in capsys.readouterr().err
