"""Every public name of torch's launching modules beside ours: the promise of the drop-in, introspected.

Compared are what a program can see without running anything: names, kinds of things, parameters with kind and default,
fields, values, bases of exceptions, abstract methods, and the public members of classes with their parameters.
Annotations may be spelled differently. Which of our modules stands for which of torch's is the table that
`elastic_run.compat` uses. Every difference is in the tables below with its reason. An entry that is no difference any
more fails, too: take it out.
"""

from __future__ import annotations

import enum
import inspect
import logging
import pkgutil
from dataclasses import fields, is_dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from elastic_run.compat.alias import BORROWED_NAMES, PATHS

if TYPE_CHECKING:
    from collections.abc import Iterable

_PACKAGES = ("torch.distributed", "elastic_run")
#: Classes that others derive theirs from, and the hooks of theirs that subclasses override or call, private or not.
_BASES = frozenset(("SimpleElasticAgent", "LocalElasticAgent", "TimerServer", "LocalTimerServer", "PContext"))
_HOOKS = frozenset(
    (
        *("_start_workers", "_stop_workers", "_monitor_workers", "_shutdown", "_invoke_run", "_exit_barrier"),
        *("_rendezvous", "_initialize_workers", "_restart_workers", "_assign_worker_ranks", "_construct_event"),
        *("_record_worker_events", "_record_metrics", "_record_metric_with_condition", "_record_flakiness_metric"),
        *("_get_ranks", "_get_local_time", "_get_worker_state", "_set_master_addr_port"),
        *("_reap_worker", "_reap_worker_no_throw", "_run_watchdog", "_watchdog_loop", "_get_scopes"),
        *("_start", "_poll", "_close", "_log_watchdog_event", "_setup_local_watchdog", "_setup_healthcheck"),
    )
)


def compare(theirs: object, ours: object) -> list[str]:
    """Compare two objects of the same name."""
    if ours is None and theirs is not None:
        return ["is missing"]
    if isinstance(theirs, type):
        return _compare_classes(theirs, ours) if isinstance(ours, type) else ["is a class"]
    if inspect.isroutine(theirs) != inspect.isroutine(ours):
        return [f"is a {type(theirs).__name__}"]
    if isinstance(theirs, staticmethod | classmethod):
        return compare(theirs.__func__, getattr(ours, "__func__", ours))
    if inspect.isfunction(theirs):
        return _compare_parameters(parameters(theirs), parameters(ours), "takes")
    return _compare_values(theirs, ours)


def _compare_values(theirs: object, ours: object) -> list[str]:
    if isinstance(theirs, property) != isinstance(ours, property):
        return ["is a property" if isinstance(theirs, property) else "is no property"]
    same = theirs == ours or not isinstance(theirs, str | int)
    return [] if same else [f"is {ours!r} where torch's is {theirs!r}"]


def parameters(function: object) -> list[str]:
    """Return each parameter as `name = default`, with its kind in front unless it is the usual one."""
    described = []
    try:
        signature = inspect.signature(function)  # type: ignore[arg-type] # a callable
    except ValueError:
        return ["*args", "**kwargs"]  # an exception that leaves its making to Exception
    for parameter in signature.parameters.values():
        kind = parameter.kind.description.removeprefix("positional or keyword") + " "
        default = parameter.default
        shown = "" if default is inspect.Parameter.empty else f" = {_shown(default)}"
        described.append(f"{kind.lstrip()}{parameter.name}{shown}")
    return described


def _compare_parameters(theirs: list[str], ours: list[str], verb: str) -> list[str]:
    if theirs == ours:
        return []
    more = ours[len(theirs) :]
    if ours[: len(theirs)] == theirs and all(" = " in one for one in more):
        return [f"also {verb} {_listed(one.partition(' = ')[0] for one in more)}"]
    return [f"{verb} {_listed(ours)} where torch's {verb} {_listed(theirs)}"]


def _shown(default: object) -> str:
    # The marks of dataclasses for a default that is made by a factory differ from module to module.
    return "<factory>" if "factory" in repr(default) else repr(getattr(default, "value", default))


def _listed(names: Iterable[str]) -> str:
    return f"({', '.join(names)})"


def _members(cls: type) -> dict[str, object]:
    """Return a class's public members and hooks, inherited ones of its own package included."""
    hooks = _HOOKS if cls.__name__ in _BASES else ()
    found: dict[str, object] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith(_PACKAGES):
            members = vars(base).items()
            found |= {name: member for name, member in members if not name.startswith("_") or name in hooks}
    return found


def _compare_classes(theirs: type, ours: type) -> list[str]:
    if issubclass(theirs, enum.Enum):
        values = [[(one.name, one.value) for one in cls] for cls in (theirs, ours)]  # type: ignore[attr-defined] # enums
        return [] if values[0] == values[1] else ["members differ"]
    found = _compare_records(theirs, ours)
    bases = [[base.__name__ for base in cls.__mro__] for cls in (theirs, ours)]
    if issubclass(theirs, BaseException) and bases[0] != bases[1]:
        found.append("bases differ")
    abstract = [sorted(getattr(cls, "__abstractmethods__", ())) for cls in (theirs, ours)]
    if abstract[0] != abstract[1]:
        found.append(f"has the abstract methods {abstract[1]} where torch's has {abstract[0]}")
    found += _compare_parameters(parameters(theirs), parameters(ours), "is made with")
    for name, member in _members(theirs).items():
        if isinstance(member, property | staticmethod | classmethod) or inspect.isfunction(member):
            other = inspect.getattr_static(ours, name, None)
            found += [f"{name} {difference}" for difference in compare(member, other)]
    return found


def _compare_records(theirs: type, ours: type) -> list[str]:
    if not is_dataclass(theirs):
        return []
    if not is_dataclass(ours):
        return ["is a dataclass"]
    names = [[one.name for one in fields(cls)] for cls in (theirs, ours)]
    # What it is made with is compared elsewhere, and shows what is added behind torch's.
    same = names[1][: len(names[0])] == names[0]
    return [] if same else [f"has the fields {names[1]} where torch's has {names[0]}"]


# --- the modules -----------------------------------------------------------------------------------------------------
_TORCH = "torch.distributed"

_ENGINE = "a part of torch's own rendezvous; ours is another, behind the same registry, backend names and --rdzv-conf"
_OUTPUT = "a part of how torch takes the workers' output; ours does without files and threads in between"
_HELPER = "runs in workers and programs, which have torch; elastic_run.timer and .utils have its names"
#: Modules of torch's for which none of ours stands. Whoever imports one gets torch's.
_MODULES_WITHOUT_TWIN = {
    "elastic": "an empty package",
    "elastic.agent": "an empty package",
    "elastic.control_plane": "runs in workers, which have torch",
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
    "elastic.rendezvous.etcd_server": "starts a server for tests, as torch's does",
    "elastic.rendezvous.etcd_store": _ENGINE,
    "elastic.rendezvous.static_tcp_rendezvous": _ENGINE,
    "elastic.rendezvous.utils": "torch's own backends take private names of it",
    "elastic.timer": _HELPER,
    "elastic.timer.api": _HELPER,
    "elastic.timer.debug_info_logging": _HELPER,
    "elastic.timer.file_based_local_timer": _HELPER,
    "elastic.timer.local_timer": _HELPER,
    "elastic.utils": _HELPER,
    "elastic.utils.api": _HELPER,
    "elastic.utils.data": _HELPER,
    "elastic.utils.data.cycling_iterator": _HELPER,
    "elastic.utils.data.elastic_distributed_sampler": _HELPER,
    "elastic.utils.distributed": _HELPER,
    "elastic.utils.log_level": _HELPER,
    "elastic.utils.logging": _HELPER,
    "elastic.utils.process_state": _HELPER,
    "elastic.utils.store": _HELPER,
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
}

#: Packages of torch's that stay torch's under `elastic_run.compat`, with ours that have their names.
_BESIDE = {f"{_TORCH}.elastic.{name}": f"elastic_run.{name}" for name in ("timer", "utils", "utils.data")}
_OURS = PATHS | _BESIDE
_PAIRS = sorted(_OURS.items())


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
        return [] if ours is import_module(_OURS[theirs.__name__]) else ["is another module"]
    home = theirs.__module__ if inspect.isclass(theirs) or inspect.isroutine(theirs) else ""
    if _OURS.get(home) in {None, _OURS[torch_path]}:
        return compare(theirs, ours)
    # Its signature is compared where it is at home.
    return [] if ours is getattr(import_module(_OURS[home]), name) else [f"is not the {name} of {_OURS[home]}"]


@pytest.mark.parametrize(("torch_path", "our_path"), _PAIRS, ids=[path.removeprefix("torch.") for path, _ in _PAIRS])
def test_names_and_signatures_are_torchs(torch_path: str, our_path: str) -> None:
    """Every public name of a module of torch's is in ours with the same signature, but for the reviewed differences."""
    names = _public_names(torch_path)
    assert names, "torch's module has no public names: is this still the module that is meant?"
    expected = {
        (f"{our_path}.{name}", what) for name in names for where, what in _DIFFERENCES if where == f"{our_path}.{name}"
    }
    assert _differences(torch_path, our_path) == expected
    # Whoever imports everything from torch's module gets all of it from ours.
    theirs, ours = import_module(torch_path), import_module(our_path)
    assert set(getattr(theirs, "__all__", ())) <= set(getattr(ours, "__all__", dir(ours)))


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
    roots = [f"{_TORCH}.{name}" for name in ("run", "launch", "launcher", "elastic")]
    found = set(roots)
    for root in roots:
        module = import_module(root)
        if hasattr(module, "__path__"):
            found |= {name for _, name, _ in pkgutil.walk_packages(module.__path__, f"{root}.")}
    without = {f"{_TORCH}.{name}" for name in _MODULES_WITHOUT_TWIN}
    assert found == PATHS.keys() | without
    assert not PATHS.keys() & without


@pytest.mark.parametrize("package", ["events", "metrics", "timer", "utils"])
def test_paths_below_these_packages_are_torchs(package: str) -> None:
    """A program that replaces `torch.distributed.elastic` in its imports finds each module, with its names."""
    root = f"{_TORCH}.elastic.{package}"
    paths = [name for _, name, _ in pkgutil.walk_packages(import_module(root).__path__, f"{root}.")]
    assert paths
    for path in paths:
        ours = import_module(path.replace(f"{_TORCH}.elastic", "elastic_run"))
        names = {name for name in _public_names(path) if not isinstance(getattr(import_module(path), name), ModuleType)}
        assert {name for name in names if not hasattr(ours, name)} == set(), path


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


def test_what_is_promised_can_be_imported() -> None:
    """Each name of the promise can be had from the package where it is promised."""
    for path, names in _CONTRACT.items():
        module = import_module(path)
        assert [name for name in names.split() if getattr(module, name, None) is None] == [], path
