"""The doctor's checks of the network and of the environment, and the run of all families of checks.

Unless a variable names an interface, gloo offers other nodes the address that its host's own name has. A name server
that does not answer costs 5 s for each name that is not in /etc/hosts, and torch's own store looks up each peer's.

A check can hang, on a dead network file system for one; so each family runs in a thread of its own, and a family that
does not end in time is a finding. Nothing is changed on the machine. torch is not imported: its metadata has the
version.
"""

from __future__ import annotations

import difflib
import errno
import os
import socket
import sys
import threading
import time

import psutil

from elastic_run.diagnosis import doctor_host
from elastic_run.diagnosis.doctor_report import PROBLEM, problem, warning
from elastic_run.records import dataclass
from elastic_run.rendezvous.utils import can_bind
from elastic_run.store.connecting import connect_once, resolve
from elastic_run.store.errors import REFUSED, SILENT, UNRESOLVED, StoreConnectionError
from elastic_run.store.worker_store import find_port_owner
from elastic_run.utils import describe_exception

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from elastic_run.diagnosis.doctor_report import Finding, Subject

    Check = Callable[[Subject], list[Finding]]

_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_LOOPBACK = "lo"

# --- names ------------------------------------------------------------------------------------------------------------
#: Seconds: a look-up that takes longer stalls a start.
_SLOW_LOOKUP = 1.0


@dataclass(frozen=True, slots=True)
class Lookup:
    """The result of looking up a name. Without addresses the look-up has failed, and `failure` says why."""

    name: str
    addresses: tuple[str, ...]
    seconds: float
    failure: str = ""


def check_names(subject: Subject) -> list[Finding]:
    """Check that this machine's own name and the hosts of the endpoints have addresses."""
    own = _look_up(subject.hostname, subject.timeout)
    found = check_own_name(own, is_alone=subject.most_nodes == 1, interface=subject.environ.get(_GLOO, ""))
    for host in dict.fromkeys(host for host, _ in subject.endpoints):
        lookup = own if host == subject.hostname else _look_up(host, subject.timeout)
        if lookup.addresses:
            found += _check_time(lookup)
            continue
        what = f"the endpoint's host {host} has no address (asked for {lookup.seconds:.1f} s)"
        remedy = "check the spelling, add it to /etc/hosts, or give its address: --rdzv-endpoint=ADDRESS:PORT"
        found.append(problem(what, lookup.failure, remedy))
    return found


def _look_up(name: str, timeout: float) -> Lookup:
    start = time.monotonic()
    try:
        addresses = dict.fromkeys(str(address[0]) for _, address in resolve(name, 0, timeout))
    except StoreConnectionError as error:
        return Lookup(name, (), time.monotonic() - start, error.cause)
    return Lookup(name, tuple(addresses), time.monotonic() - start)


def check_own_name(lookup: Lookup, *, is_alone: bool, interface: str) -> list[Finding]:
    """Return the findings about this machine's own name."""
    mend = f"add a line 'ADDRESS {lookup.name}' to /etc/hosts, or set {_GLOO} to the interface of the network"
    if not lookup.addresses:
        what = f"this host's own name {lookup.name} has no address (asked for {lookup.seconds:.1f} s)"
        return [(warning if is_alone or interface else problem)(what, lookup.failure, mend)]
    found = _check_time(lookup)
    is_loopback = all(address.startswith("127.") or address == "::1" for address in lookup.addresses)
    if is_loopback and not is_alone and not interface:
        what = f"this host's own name {lookup.name} is {lookup.addresses[0]}, which gloo would offer to other nodes"
        found.append(warning(what, "/etc/hosts has a line for it", mend))
    return found


def _check_time(lookup: Lookup) -> list[Finding]:
    if lookup.seconds < _SLOW_LOOKUP:
        return []
    what = f"the look-up of {lookup.name} takes {lookup.seconds:.1f} s"
    remedy = "put a name server that answers first in /etc/resolv.conf, or add the name to /etc/hosts"
    return [problem(what, f"it is {', '.join(lookup.addresses)}", remedy)]


# --- ports ------------------------------------------------------------------------------------------------------------
def check_ports(subject: Subject) -> list[Finding]:
    """Try each endpoint that has a port: it is free if this host serves it, or it can be reached."""
    return [found for host, port in subject.endpoints if port > 0 for found in _check_port(host, port, subject)]


def _check_port(host: str, port: int, subject: Subject) -> list[Finding]:
    place = f"port {port} of {host}"
    try:
        addresses = resolve(host, port, subject.timeout)
        own = [(family, address) for family, address in addresses if can_bind(family, (address[0], 0))]
        if own:
            return _check_own_port(own, port, f"{place}, this host,")
        connect_once(host, port, subject.timeout, dark_after=subject.timeout).close()
    except StoreConnectionError as error:
        reason = error.reason
    else:
        return []
    # Where the nodes have yet to meet, a port without a server is in order; names are another family.
    if reason == UNRESOLVED or (reason == REFUSED and subject.most_nodes > 1):
        return []
    if reason == REFUSED:
        what = f"{place} refuses connections: the host answers, but nobody listens there"
        return [problem(what, "connection refused", "start the job on that host first, or correct the port")]
    if reason == SILENT:
        what = f"{place} does not answer in {subject.timeout:.1f} s"
        remedy = f"open TCP port {port} in the firewall between the hosts, and check that {host} is up"
        return [problem(what, "a packet for it gets no answer, not even a refusal", remedy)]
    remedy = "check the address, and `ip route`"
    return [problem(f"{place} can't be reached: {reason}", "the system has refused to connect", remedy)]


def _check_own_port(own: Sequence[tuple[int, tuple[object, ...]]], port: int, place: str) -> list[Finding]:
    """Open a port of this machine for a moment."""
    failure = next(filter(None, (_open(family, address) for family, address in own)), 0)
    if not failure:
        return []
    if failure == errno.EADDRINUSE:
        owner = find_port_owner(port)
        what = f"{place} is in use{f' by {owner}' if owner else ''}"
        remedy = "end that process, or take another port in --rdzv-endpoint"
        return [problem(what, "the port can't be opened", remedy)]
    reason = os.strerror(failure)
    remedy = "take a port from 1024 to 32767 in --rdzv-endpoint"
    return [problem(f"{place} can't be opened: {reason}", reason, remedy)]


def _open(family: int, address: tuple[object, ...]) -> int:
    """Open a port for a moment; return the system's error, or 0."""
    try:
        socket.create_server(address, family=family).close()
    except OSError as error:
        return error.errno or errno.EIO
    return 0


# --- interfaces -------------------------------------------------------------------------------------------------------
def check_interfaces(subject: Subject) -> list[Finding]:
    """Check that the interfaces in NCCL's and Gloo's variables exist and are up, and that there is any network."""
    interfaces = {name: state.isup for name, state in psutil.net_if_stats().items()}
    environ, is_alone = subject.environ, subject.most_nodes == 1
    found = [*check_nccl(environ.get(_NCCL, ""), interfaces), *_check_gloo(environ.get(_GLOO, ""), interfaces)]
    return found + check_network(interfaces, is_alone=is_alone)


def check_nccl(value: str, interfaces: Mapping[str, bool]) -> list[Finding]:
    """Judge NCCL's variable: prefixes, ``=name`` for whole names, ``^name`` for all but these.

    Each interface is given with whether it is up, as in the functions below.
    """
    if not value or value.startswith("^"):
        return []
    is_whole = value.startswith("=")
    wanted = [name for name in value.lstrip("=").split(",") if name]
    chosen = [name for name in interfaces if any(name == n if is_whole else name.startswith(n) for n in wanted)]
    return _check_choice(_NCCL, value, chosen, interfaces)


def _check_gloo(value: str, interfaces: Mapping[str, bool]) -> list[Finding]:
    """Judge Gloo's variable: whole names, separated by commas, each of which has to exist."""
    wanted = [name for name in value.split(",") if name]
    missing = [name for name in wanted if name not in interfaces]
    if missing:
        return _check_choice(_GLOO, ",".join(missing), [], interfaces)
    return _check_choice(_GLOO, value, wanted, interfaces) if wanted else []


def check_network(interfaces: Mapping[str, bool], *, is_alone: bool) -> list[Finding]:
    """Judge whether other nodes can be reached at all."""
    others = [name for name in interfaces if name != _LOOPBACK]
    if is_alone or any(interfaces[name] for name in others):
        return []
    what = "this host has no network beside the loopback: other nodes can't reach it"
    remedy = f"ip link set {others[0] if others else 'eth0'} up; in docker --network=host"
    return [problem(what, f"interfaces: {_list_interfaces(interfaces)}", remedy)]


def _check_choice(variable: str, value: str, chosen: list[str], interfaces: Mapping[str, bool]) -> list[Finding]:
    if any(interfaces[name] for name in chosen):
        return []
    usable = ",".join(name for name, is_up in interfaces.items() if is_up and name != _LOOPBACK) or "eth0"
    state = "that is down" if chosen else "that this host does not have"
    remedy = f"unset {variable}, or export {variable}={usable}"
    what = f"{variable} names {value}, an interface {state}"
    return [problem(what, f"interfaces: {_list_interfaces(interfaces)}", remedy)]


def _list_interfaces(interfaces: Mapping[str, bool]) -> str:
    return ", ".join(f"{name}{'' if is_up else ' (down)'}" for name, is_up in interfaces.items())


# --- Python -----------------------------------------------------------------------------------------------------------
#: Names of modules that torch imports. A file of that name beside the script hides the module.
_HIDEABLE = ("torch", "numpy", "random", "queue", "socket", "logging", "tempfile", "typing", "types", "signal", "json")


def check_python(subject: Subject) -> list[Finding]:
    """Check which interpreter workers would run, and what it would import."""
    environ, found = subject.environ, []
    worker_python = environ.get("PYTHON_EXEC", "")
    if worker_python and not os.access(worker_python, os.X_OK):
        what = f"PYTHON_EXEC is {worker_python}, which can't be executed"
        found.append(problem(what, "workers run it", "unset PYTHON_EXEC, or give the path of an interpreter"))
    variable = next((name for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if environ.get(name)), "")
    prefix, active = os.path.realpath(sys.prefix), os.path.realpath(environ.get(variable, "") or sys.prefix)
    if not worker_python and active != prefix:
        what = f"{variable} is {active}, but workers would run {sys.executable}"
        remedy = f"pip install elastic-run in {active}, or run python -m elastic_run with its python"
        found.append(problem(what, f"elastic-run is installed in {prefix}", remedy))
    if not worker_python and not find_version("torch"):
        what = f"torch is not installed for {sys.executable}"
        found.append(warning(what, "it has no metadata of torch", f"{sys.executable} -m pip install torch"))
    names = (name for module in _HIDEABLE for name in (f"{module}.py", f"{module}/__init__.py"))
    if hidden := next(filter(os.path.exists, names), ""):
        what = f"{hidden} in this directory hides the module of that name from scripts here"
        found.append(problem(what, os.getcwd(), f"rename it: mv {hidden} my_{hidden}"))
    return found


def find_version(package: str) -> str:
    """Return the version of an installed package; "" where it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""


# --- variables --------------------------------------------------------------------------------------------------------
#: Variables of one worker. The launcher sets them for its workers; before that they are another job's.
_OF_A_WORKER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_OF_THE_PLACE = ("MASTER_ADDR", "MASTER_PORT")
#: Values with which a job runs, but slowly or without some of its devices, and why.
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": ("1", "each CUDA kernel is waited for"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "each collective is checked by a second one"),
    "NCCL_P2P_DISABLE": ("1", "GPUs of a node don't use NVLink"),
    "NCCL_IB_DISABLE": ("1", "nodes don't use InfiniBand"),
    "NCCL_SHM_DISABLE": ("1", "workers of a node don't use shared memory"),
}


def check_variables(subject: Subject) -> list[Finding]:
    """Check for leftovers of other jobs, settings for debugging, and names with a typing error."""
    environ, found = subject.environ, _check_leftovers(subject.environ)
    found += [
        warning(f"{name}={environ[name]}: {effect}", "", f"unset {name}, unless you look for an error")
        for name, (value, effect) in _SLOW.items()
        if environ.get(name, "").upper() == value
    ]
    threads = environ.get("OMP_NUM_THREADS")
    if threads is not None and not threads.split(",")[0].isdecimal():
        what = f"OMP_NUM_THREADS={threads!r} is not a number: each worker starts a thread per CPU"
        found.append(problem(what, "", "unset OMP_NUM_THREADS, or set it to CPUs divided by workers"))
    known = subject.known_variables
    for name in sorted(environ) if known else ():
        if name.startswith("PET_") and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {near[0]}?" if near else f"unset {name}"
            found.append(problem(f"{name} is not a variable of elastic-run: its value is not used", "", remedy))
    return found


def _check_leftovers(environ: Mapping[str, str]) -> list[Finding]:
    """Judge variables of a worker of another job."""
    if "TORCHELASTIC_RUN_ID" in environ:
        what = "this process is a worker of a job: TORCHELASTIC_RUN_ID is set"
        remedy = "run it outside of the job; if this shell only kept the variable: unset TORCHELASTIC_RUN_ID"
        return [warning(what, _list(environ, ["TORCHELASTIC_RUN_ID"]), remedy)]
    found = []
    # The training operator of Kubeflow gives each pod all of them, for scripts without a launcher.
    if ranks := [name for name in _OF_A_WORKER if name in environ]:
        others = "scripts started without the launcher would wait for others"
        what = f"{ranks[0]} is set, as if this were a worker: {others}"
        found.append(warning(what, _list(environ, ranks), f"unset {' '.join(ranks)}"))
    if places := [name for name in _OF_THE_PLACE if name in environ]:
        what = f"{' and '.join(places)} {'is' if len(places) == 1 else 'are'} set, perhaps by another job"
        remedy = f"unset {' '.join(places)}; the launcher reads --master-addr, PET_MASTER_ADDR or --rdzv-endpoint"
        found.append(warning(what, _list(environ, places), remedy))
    return found


def _list(environ: Mapping[str, str], names: list[str]) -> str:
    return " ".join(f"{name}={environ[name]}" for name in names)


# --- all families -----------------------------------------------------------------------------------------------------
#: Seconds for all families together.
_DEADLINE = 40.0
#: Families by the word that a user reads, in the order of the report.
FAMILIES: dict[str, Check] = {
    "names": check_names,
    "ports": check_ports,
    "interfaces": check_interfaces,
    "shared memory": doctor_host.check_shared_memory,
    "limits": doctor_host.check_limits,
    "control groups": doctor_host.check_control_groups,
    "directories": doctor_host.check_directories,
    "Python": check_python,
    "GPUs": doctor_host.check_gpus,
    "variables": check_variables,
}


def run_checks(
    subject: Subject, *, families: Mapping[str, Check] = FAMILIES, deadline: float = _DEADLINE
) -> list[Finding]:
    """Run all families; return problems first, otherwise in the families' order."""
    found: dict[str, list[Finding]] = {}
    threads = {}
    end = time.monotonic() + deadline
    for name, check in families.items():
        thread = threading.Thread(target=_run, args=(name, check, subject, found), name=f"check of {name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            what = "no thread can be started, so that some checks were left out"
            remedy = "raise the limit of processes: ulimit -u, pids.max of the control group, docker --pids-limit"
            found[name] = [problem(what, str(error), remedy)]
        else:
            threads[name] = thread
    for name, thread in threads.items():
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            what = f"the check of {name} hangs for more than {deadline:.0f} s"
            remedy = (
                "a network file system or a driver does not answer: look for state D in ps -eo pid,stat,wchan,cmd, "
                "and at dmesg"
            )
            found[name] = [problem(what, "the check was left out", remedy)]
    every = list(dict.fromkeys(finding for name in families for finding in found[name]))
    return sorted(every, key=lambda finding: finding.severity != PROBLEM)


def _run(name: str, check: Check, subject: Subject, found: dict[str, list[Finding]]) -> None:
    try:
        found[name] = check(subject)
    except Exception as error:  # noqa: BLE001 - a check that fails must not hide what the others find
        what = f"{name} can't be checked: {describe_exception(error)}"
        found[name] = [warning(what, "a defect of elastic-run", "please report it")]
