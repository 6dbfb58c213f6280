"""What a caller of torch's object would find different in ours, told in a few words each.

Compared are what a program can see without running anything: names, kinds of things, parameters with kind and default,
fields, values, bases of exceptions, abstract methods, and the public members of classes with their parameters.
Annotations may be spelled differently.
"""

from __future__ import annotations

import enum
import inspect
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

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
