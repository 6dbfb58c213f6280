"""Network interfaces: do those in NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME exist, and is there any network."""

from __future__ import annotations

import psutil

from elastic_run.diagnosis.doctor.finding import problem
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_run.diagnosis.doctor.finding import Finding, Subject

_NCCL, _GLOO = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"
_LOOPBACK = "lo"


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface.

    Attributes:
        name: Its name.
        is_up: Whether it is up and has a carrier.
    """

    name: str
    is_up: bool


def check(subject: Subject) -> list[Finding]:
    """List the interfaces of this machine."""
    found = [Interface(name, is_up=state.isup) for name, state in psutil.net_if_stats().items()]
    environ = subject.environ
    judged = [*judge_nccl(environ.get(_NCCL, ""), found), *judge_gloo(environ.get(_GLOO, ""), found)]
    return judged + judge_network(found, is_alone=subject.most_nodes == 1)


def judge_nccl(value: str, interfaces: Sequence[Interface]) -> list[Finding]:
    """Judge NCCL's variable: prefixes, ``=name`` for whole names, ``^name`` for all but these."""
    if not value or value.startswith("^"):
        return []
    is_whole = value.startswith("=")
    names = [name for name in value.lstrip("=").split(",") if name]
    chosen = [one for one in interfaces if any(one.name == n if is_whole else one.name.startswith(n) for n in names)]
    return _judge_choice(_NCCL, value, chosen, interfaces)


def judge_gloo(value: str, interfaces: Sequence[Interface]) -> list[Finding]:
    """Judge Gloo's variable: whole names, separated by commas, each of which has to exist."""
    names = [name for name in value.split(",") if name]
    known = {one.name: one for one in interfaces}
    missing = [name for name in names if name not in known]
    if missing:
        return _judge_choice(_GLOO, ",".join(missing), [], interfaces)
    return _judge_choice(_GLOO, value, [known[name] for name in names], interfaces) if names else []


def judge_network(interfaces: Sequence[Interface], *, is_alone: bool) -> list[Finding]:
    """Judge whether other nodes can be reached at all."""
    others = [one for one in interfaces if one.name != _LOOPBACK]
    if is_alone or any(one.is_up for one in others):
        return []
    what = "this host has no network beside the loopback: other nodes can't reach it"
    remedy = f"ip link set {others[0].name if others else 'eth0'} up; in docker --network=host"
    return [problem(what, f"interfaces: {_write(interfaces)}", remedy)]


def _judge_choice(
    variable: str, value: str, chosen: Sequence[Interface], interfaces: Sequence[Interface]
) -> list[Finding]:
    usable = ",".join(one.name for one in interfaces if one.is_up and one.name != _LOOPBACK) or "eth0"
    remedy = f"unset {variable}, or export {variable}={usable}"
    evidence = f"interfaces: {_write(interfaces)}"
    if not chosen:
        return [problem(f"{variable} names {value}, an interface that this host does not have", evidence, remedy)]
    if not any(one.is_up for one in chosen):
        return [problem(f"{variable} names {value}, an interface that is down", evidence, remedy)]
    return []


def _write(interfaces: Sequence[Interface]) -> str:
    return ", ".join(f"{one.name}{'' if one.is_up else ' (down)'}" for one in interfaces)
