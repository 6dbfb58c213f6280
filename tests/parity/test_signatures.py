"""Every public name of torch's launching modules beside ours: the promise of the drop-in, introspected.

Which of our modules stands for which of torch's is the table that `elastic_run.compat` uses. Every difference is in the
tables below with its reason. An entry that is no difference any more fails, too: take it out.
"""

from __future__ import annotations

import inspect
import logging
import pkgutil
from importlib import import_module
from types import ModuleType

import pytest

from elastic_run.compat.borrowed_names import BORROWED_NAMES
from elastic_run.compat.paths import PATHS, ROOTS
from tests.parity.signatures import compare

_TORCH = "torch.distributed"

_ENGINE = "a part of torch's own rendezvous; ours is another, behind the same registry, backend names and --rdzv-conf"
_OUTPUT = "a part of how torch takes the workers' output; ours does without files and threads in between"
#: Modules of torch's for which none of ours stands. Whoever imports one gets torch's.
_MODULES_WITHOUT_TWIN = {
    "elastic": "an empty package",
    "elastic.agent": "an empty package",
    "elastic.multiprocessing.redirects": _OUTPUT,
    "elastic.multiprocessing.subprocess_handler": _OUTPUT,
    "elastic.multiprocessing.subprocess_handler.handlers": _OUTPUT,
    "elastic.multiprocessing.subprocess_handler.subprocess_handler": _OUTPUT,
    "elastic.multiprocessing.tail_log": _OUTPUT,
    "elastic.rendezvous._etcd_stub": "private",
    "elastic.rendezvous.c10d_rendezvous_backend": _ENGINE,
    "elastic.rendezvous.dynamic_rendezvous": _ENGINE,
    "elastic.rendezvous.etcd_rendezvous": _ENGINE,
    "elastic.rendezvous.etcd_rendezvous_backend": _ENGINE,
    "elastic.rendezvous.etcd_store": _ENGINE,
    "elastic.rendezvous.static_tcp_rendezvous": _ENGINE,
}

_LAUNCH_CONFIG = "also is made with (forward_signals, job_config, node_config, agent_config)"
#: Names that differ: our module and name, what differs, and why.
_DIFFERENCES: dict[tuple[str, str], str] = {
    ("elastic_run.launcher.LaunchConfig", _LAUNCH_CONFIG): "settings of our own, behind torch's and with defaults",
    ("elastic_run.agent.local_elastic_agent.LocalElasticAgent", "also is made with (keyword-only context)"): (
        "what the launcher knows beyond the spec"
    ),
    ("elastic_run.multiprocessing.errors.ChildFailedError", "also is made with (root_rank)"): (
        "the cause is known better than by torch's whole seconds"
    ),
    ("elastic_run.multiprocessing.LogsDest", "also is made with (kept_stdouts, kept_stderrs)"): (
        "a log directory alone keeps a copy of the output"
    ),
}

#: Names that are no names of ours, and why. With `elastic_run.compat` torch's paths have those of the first table.
_LEFT_TO_TORCH = {
    **{
        (path, name): "torch's own: ours would have to import torch"
        for path, homes in BORROWED_NAMES.items()
        for names in homes.values()
        for name in names.split()
    },
    (f"{_TORCH}.elastic.utils.data.elastic_distributed_sampler", "T"): "a type variable",
    (f"{_TORCH}.elastic.utils.data.elastic_distributed_sampler", "Dataset"): "torch's own, for an annotation",
}

_PAIRS = sorted(PATHS.items())


def _public_names(path: str) -> list[str]:
    """Return the public names that a program can take from a module of torch's: its own, and those of other modules."""
    module = import_module(path)
    found = dict.fromkeys(getattr(module, "__all__", ()))
    for name, value in vars(module).items():
        if not name.startswith("_") and (path, name) not in _LEFT_TO_TORCH and _is_of_torch(value, path):
            found[name] = None
    return list(found)


def _is_of_torch(value: object, path: str) -> bool:
    if isinstance(value, ModuleType):
        return value.__name__ in PATHS and not value.__name__.startswith(f"{path}.")
    home = getattr(value, "__module__", None)  # constants have none
    return home is None or home.startswith("torch.") or isinstance(value, logging.Logger)


def _differences(torch_path: str, our_path: str) -> set[tuple[str, str]]:
    theirs, ours = import_module(torch_path), import_module(our_path)
    return {
        (f"{our_path}.{name}", difference)
        for name in _public_names(torch_path)
        for difference in _compare(torch_path, name, getattr(theirs, name), getattr(ours, name, None))
    }


def _compare(torch_path: str, name: str, theirs: object, ours: object) -> list[str]:
    if isinstance(theirs, ModuleType):
        return [] if ours is import_module(PATHS[theirs.__name__]) else ["is another module"]
    home = theirs.__module__ if inspect.isclass(theirs) or inspect.isroutine(theirs) else ""
    if PATHS.get(home) in {None, PATHS[torch_path]}:
        return compare(theirs, ours)
    # Its signature is compared where it is at home.
    return [] if ours is getattr(import_module(PATHS[home]), name) else [f"is not the {name} of {PATHS[home]}"]


@pytest.mark.parametrize(("torch_path", "our_path"), _PAIRS, ids=[path.removeprefix("torch.") for path, _ in _PAIRS])
def test_names_and_signatures_are_torchs(torch_path: str, our_path: str) -> None:
    """Every public name of a module of torch's is in ours with the same signature, but for the reviewed differences."""
    names = _public_names(torch_path)
    assert names, "torch's module has no public names: is this still the module that is meant?"
    expected = {
        (f"{our_path}.{name}", what) for name in names for where, what in _DIFFERENCES if where == f"{our_path}.{name}"
    }
    assert _differences(torch_path, our_path) == expected


def test_every_reviewed_difference_is_one() -> None:
    """The table above holds no entry of a name that torch doesn't have, or that isn't compared."""
    compared = {f"{ours}.{name}" for theirs, ours in _PAIRS for name in _public_names(theirs)}
    assert {where for where, _ in _DIFFERENCES} <= compared


def test_every_name_that_is_left_to_torch_is_one() -> None:
    """The table of names that are torch's own holds only names that torch's modules have and ours haven't."""
    for path, name in _LEFT_TO_TORCH:
        assert hasattr(import_module(path), name), (path, name)
        assert not hasattr(import_module(PATHS[path]), name), (path, name)


def test_every_module_of_torchs_is_accounted_for() -> None:
    """A module that torch adds is noticed: it gets a twin, or a reason in the table above."""
    found = set(ROOTS)
    for root in ROOTS:
        module = import_module(root)
        if hasattr(module, "__path__"):
            found |= {name for _, name, _ in pkgutil.walk_packages(module.__path__, f"{root}.")}
    without = {f"{_TORCH}.{name}" for name in _MODULES_WITHOUT_TWIN}
    assert found == PATHS.keys() | without
    assert not PATHS.keys() & without


@pytest.mark.parametrize(("torch_path", "our_path"), _PAIRS, ids=[path.removeprefix("torch.") for path, _ in _PAIRS])
def test_star_imports_bring_torchs_names(torch_path: str, our_path: str) -> None:
    """Whoever imports everything from a module of torch's gets all of it from ours."""
    theirs, ours = import_module(torch_path), import_module(our_path)
    missing = {where.rpartition(".")[2] for where, what in _DIFFERENCES if what == "is missing"}
    assert set(getattr(theirs, "__all__", ())) - missing <= set(getattr(ours, "__all__", dir(ours)))


#: Names that the contract lists for a package, where torch has them in a module below, or nowhere in `__all__`.
_CONTRACT = {
    "elastic_run.agent": "ElasticAgent RunResult SimpleElasticAgent Worker WorkerGroup WorkerSpec WorkerState "
    "LocalElasticAgent",
    "elastic_run.launcher": "LaunchConfig elastic_launch launch_agent",
    "elastic_run.multiprocessing": "start_processes PContext MultiprocessContext SubprocessContext RunProcsResult "
    "SignalException Std LogsDest LogsSpecs DefaultLogsSpecs to_map",
    "elastic_run.multiprocessing.errors": "ProcessFailure ChildFailedError record ErrorHandler get_error_handler",
    "elastic_run.rendezvous": "RendezvousHandler RendezvousInfo RendezvousStoreInfo RendezvousParameters "
    "RendezvousHandlerRegistry RendezvousHandlerCreator rendezvous_handler_registry get_rendezvous_handler "
    "RendezvousError RendezvousClosedError RendezvousConnectionError RendezvousStateError RendezvousTimeoutError "
    "RendezvousGracefulExitError parse_rendezvous_endpoint EtcdServer",
    "elastic_run.events": "record record_rdzv_event construct_and_record_rdzv_event get_logging_handler Event "
    "EventMetadataValue EventSource NodeState RdzvEvent",
    "elastic_run.metrics": "configure put_metric prof initialize_metrics getStream MetricData MetricHandler "
    "MetricsConfig ConsoleMetricHandler NullMetricHandler get_elapsed_time_ms",
    "elastic_run.timer": "configure expires TimerClient TimerRequest TimerServer RequestQueue LocalTimerClient "
    "LocalTimerServer FileTimerClient FileTimerRequest FileTimerServer",
    "elastic_run.utils": "macros get_socket_with_port get_free_port",
    "elastic_run.utils.data": "CyclingIterator ElasticDistributedSampler",
    "elastic_run.run": "get_args_parser parse_args parse_min_max_nnodes determine_local_world_size get_rdzv_endpoint "
    "get_use_env config_from_args run_script_path run main",
}


@pytest.mark.parametrize("path", _CONTRACT)
def test_what_is_promised_can_be_imported(path: str) -> None:
    """Each name of the promise can be had from the package where it is promised."""
    module = import_module(path)
    assert [name for name in _CONTRACT[path].split() if getattr(module, name, None) is None] == []
