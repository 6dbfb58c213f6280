"""Checks before anything is started: values against each other, and against this machine.

A single value was checked when it was read (values.py). A check leaves nothing behind. Each finding is one line that
names the flag, the value and the remedy.
"""

from __future__ import annotations

import errno
import os

from elastic_run import contract
from elastic_run.cli.cluster_values import STARTERS
from elastic_run.cli.config import hosts_rendezvous, names_rendezvous
from elastic_run.cli.program_checks import check_health_check, check_program, name_reason
from elastic_run.cli.values import job_id, nearest, node_range, seconds
from elastic_run.errors import UsageError
from elastic_run.rendezvous.backend_table import BACKENDS, read_settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping

    from elastic_run.cli.origins import Origin

_EVENT_HANDLERS = ("null", "console", "dynamic_rendezvous")
#: Length of a log file's path below --log-dir: the directories of the run with its id, the attempt and the worker.
_LONGEST_BELOW = "/d" * 170
#: Variables of schedulers and starters that are read as whole numbers.
_NUMBERS = (
    *STARTERS.values(),
    "PMI_SIZE",
    "JOB_COMPLETION_INDEX",
    "SLURM_HET_SIZE",
    "SLURM_JOB_END_TIME",
    "SLURM_JOB_ID",
    "SLURM_JOB_NUM_NODES",
    "SLURM_RESTART_COUNT",
    "SLURM_STEP_ID",
    "SLURM_STEP_NUM_TASKS",
)
_MOST_DIGITS = 18
#: Seconds for the look-up of the master's name. Without an answer in time, the nodes notice a wrong name when they
#: meet.
_LOOK_UP = 1.0


def check_arguments(args: Namespace, worker_count: int, environ: Mapping[str, str]) -> None:
    """Check the values against each other, and against this machine."""
    _check_names(args)
    _check_rendezvous(args)
    _check_ranks(args, worker_count)
    _check_signals(args)
    _check_timeouts(environ)
    _check_virtual_ranks(args, worker_count, environ)
    _check_faults(args, worker_count)
    _check_event_log_handler(args)
    _check_log_dir(args)
    _check_events_file(args)
    _check_failure_rules(args)
    _check_numa_binding(args, worker_count)
    check_program(args, environ)
    check_health_check(args.health_check, environ)


def check_variables(environ: Mapping[str, str]) -> None:
    """Refuse variables with so many digits that they are no number of anything; Python reads no more than 4,300."""
    for name in _NUMBERS:
        text = environ.get(name, "")
        if text.isdecimal() and len(text) > _MOST_DIGITS:
            message = f"{name}: {text!r} is too large a number"
            raise UsageError(message)


# --- flags among themselves ------------------------------------------------------------------------------------


def _check_names(args: Namespace) -> None:
    """Refuse names that the job's messages, or the keys of its store, can't hold."""
    try:
        job_id(args.rdzv_id)
    except ValueError as error:
        message = f"--rdzv-id: {args.rdzv_id!r} {error}"
        raise UsageError(message) from None
    for flag, name in (("--rdzv-id", args.rdzv_id), ("--role", args.role)):
        length = len(name.encode(errors="surrogateescape"))
        if length > contract.LONGEST_NAME:
            message = f"{flag}: has {length} bytes, and {contract.LONGEST_NAME} are allowed"
            raise UsageError(message)


def _check_rendezvous(args: Namespace) -> None:
    least, most = node_range(args.nnodes)
    if args.standalone and least > 1:
        message = f"--standalone: is for one node, but --nnodes={args.nnodes} asks for {least} or more"
        raise UsageError(message)
    if args.rdzv_backend == "static" and args.node_rank >= most and not args.standalone:
        message = f"--node-rank: {args.node_rank} is not below the number of nodes (--nnodes={args.nnodes})"
        raise UsageError(message)
    if args.rdzv_backend == "static" and not args.standalone and (most > 1 or names_rendezvous(args)):
        _check_static_place(args)
    if args.rdzv_backend not in BACKENDS:
        _check_plugin_backend(args.rdzv_backend)
    if args.standalone:
        return
    if args.rdzv_endpoint and args.rdzv_backend in BACKENDS:
        _check_endpoints(args)
    _check_shared_store(args)
    _check_rendezvous_settings(args)


def _check_static_place(args: Namespace) -> None:
    """Refuse values that only the static backend needs, and that are passed over elsewhere, as with torch."""
    if args.node_rank < 0:
        message = f"--node-rank: '{args.node_rank}' is not a whole number from 0 up"
        raise UsageError(message)
    if not args.rdzv_endpoint and not args.master_addr:
        message = "--master-addr: '' is not a host name, an IPv4 or an IPv6 address"
        raise UsageError(message)


def check_master(args: Namespace, origins: Mapping[str, Origin]) -> None:
    """Refuse the default rank 0 if another machine is the master: each node would wait for the others.

    A rank that the user gave is taken: an address of no interface (a cloud's public one, a service's) may lead here.
    """
    is_static = args.rdzv_backend == "static" and not args.standalone and node_range(args.nnodes)[1] > 1
    if not is_static or "node_rank" in origins or args.node_rank or hosts_rendezvous(args):
        return
    from elastic_run.rendezvous.addresses import find_whether_own_host, names_loopback
    from elastic_run.rendezvous.utils import parse_rendezvous_endpoint

    flag = "--rdzv-endpoint" if args.rdzv_endpoint else "--master-addr"
    host, _ = parse_rendezvous_endpoint(args.rdzv_endpoint or args.master_addr, default_port=0)
    if names_loopback(host) or find_whether_own_host(host, _LOOK_UP) is not False:
        return
    message = (
        f"--node-rank: is not given, so this node would have rank 0, but {flag}={host} is no address of this machine; "
        "give --node-rank=1 or higher here, or --node-rank=0 if that address leads to this machine"
    )
    raise UsageError(message)


def _check_endpoints(args: Namespace) -> None:
    from elastic_run.rendezvous.utils import parse_rendezvous_endpoint

    if args.rdzv_backend == "c10d" and "store_type=file" in args.rdzv_conf.replace(" ", ""):
        return  # a path
    for endpoint in args.rdzv_endpoint.split(","):
        try:
            _, port = parse_rendezvous_endpoint(endpoint, default_port=-1)
        except ValueError as error:
            message = f"--rdzv-endpoint: {error}"
            raise UsageError(message) from None
        if not endpoint.strip():
            message = f"--rdzv-endpoint: {args.rdzv_endpoint!r} names an empty endpoint"
            raise UsageError(message)
        if port < 0 and BACKENDS[args.rdzv_backend].needs_port:
            message = (
                f"--rdzv-endpoint: {args.rdzv_endpoint!r} has no port, which the {args.rdzv_backend} backend needs"
            )
            raise UsageError(message)


def _check_shared_store(args: Namespace) -> None:
    backend = BACKENDS.get(args.rdzv_backend)
    is_shared = backend is not None and backend.is_shared
    if is_shared and not args.rdzv_endpoint:
        message = f"--rdzv-endpoint: is needed with --rdzv-backend={args.rdzv_backend}: HOST:PORT of its server"
        raise UsageError(message)
    is_met_at = args.rdzv_backend == "c10d" and args.rdzv_endpoint
    if (is_met_at or is_shared) and node_range(args.nnodes)[1] > 1 and not args.rdzv_id:
        # As under torchrun, a job with an empty id gets a random one: each node another, so that they never meet.
        message = "--rdzv-id: '' is empty: give all nodes of this job the same id, or leave the flag out"
        raise UsageError(message)


def _check_rendezvous_settings(args: Namespace) -> None:
    # The name that a job without a rendezvous of the user's gets later.
    name = "c10d" if hosts_rendezvous(args) else args.rdzv_backend
    backend = BACKENDS.get(name)
    if not args.rdzv_conf or backend is None or not backend.has_store:
        return
    from elastic_run.rendezvous.utils import parse_rendezvous_config

    try:
        read_settings(name, parse_rendezvous_config(args.rdzv_conf))
    except ValueError as error:
        message = f"--rdzv-conf: {error}"
        raise UsageError(message) from None


def _check_plugin_backend(name: str) -> None:
    # What the program that calls `main` has registered, in one of our modules or under compat in one of torch's.
    from elastic_run.rendezvous.api import rendezvous_handler_registry

    registered = rendezvous_handler_registry._registry  # noqa: SLF001 - torch's class, ours to look into
    if name in registered:
        return
    from importlib.metadata import entry_points

    others = {*registered, *entry_points(group=contract.RENDEZVOUS_ENTRY_POINTS).names} - set(BACKENDS)
    known = [*BACKENDS, *sorted(others)]
    if name not in known:
        message = f"--rdzv-backend: {name!r} is none of {', '.join(known)}{nearest(name, known)}"
        raise UsageError(message)


def _check_faults(args: Namespace, worker_count: int) -> None:
    if args.inject_fault:
        from elastic_run.cli.faults import check_faults

        check_faults(args.inject_fault, worker_count * node_range(args.nnodes)[1])


def _check_ranks(args: Namespace, worker_count: int) -> None:
    filtered = [part for part in args.local_ranks_filter.split(",") if part]
    named = (
        ("--redirects", args.redirects, _find_ranks(args.redirects)),
        ("--tee", args.tee, _find_ranks(args.tee)),
        ("--local-ranks-filter", args.local_ranks_filter, filtered),
    )
    there = "local rank 0" if worker_count == 1 else f"local ranks 0 to {worker_count - 1}"
    for name, value, ranks in named:
        for rank in ranks:
            if int(rank) >= worker_count:
                message = f"{name}: {value!r} names local rank {int(rank)}, but this node has only {there}"
                raise UsageError(message)


def _find_ranks(streams: str) -> list[str]:
    """Return the local ranks from which a map takes output; `7:0` takes none, so there may be no rank 7."""
    entries = [entry.partition(":") for entry in streams.split(",")]
    return [rank for rank, colon, choice in entries if colon and choice != "0"]


def _check_signals(args: Namespace) -> None:
    handled = [name.strip() for name in args.signals_to_handle.split(",")]
    for name in (name.strip() for name in args.forward_signals.split(",")):
        if name and name in handled:
            message = (
                f"--forward-signals: {name} is in --signals-to-handle too, where it stops the job: "
                "name it in only one of them"
            )
            raise UsageError(message)


def _check_timeouts(environ: Mapping[str, str]) -> None:
    """Check the timeout that no flag names."""
    text = environ.get(contract.ENV_UNINTERRUPTIBLE_STATE_TIMEOUT)
    if text:
        try:
            seconds(text)
        except ValueError as error:
            message = f"{contract.ENV_UNINTERRUPTIBLE_STATE_TIMEOUT}: {text!r} {error}"
            raise UsageError(message) from None


def _check_virtual_ranks(args: Namespace, worker_count: int, environ: Mapping[str, str]) -> None:
    if not args.virtual_local_rank:
        return
    from elastic_run.cluster.devices import virtual_device

    try:
        virtual_device(worker_count - 1, environ)
    except ValueError as error:
        message = f"--virtual-local-rank: {error}; --nproc-per-node starts {worker_count} workers"
        raise UsageError(message) from None


def _check_event_log_handler(args: Namespace) -> None:
    if args.event_log_handler in _EVENT_HANDLERS:
        return
    from elastic_run.events import get_logging_handler

    try:
        get_logging_handler(args.event_log_handler)
    except ValueError as error:
        if not str(error).startswith("unknown"):
            message = f"--event-log-handler: {error}"
            raise UsageError(message) from error
        hint = nearest(args.event_log_handler, _EVENT_HANDLERS)
        message = f"--event-log-handler: {args.event_log_handler!r} is none of {', '.join(_EVENT_HANDLERS)}{hint}"
        raise UsageError(message) from None


# --- flags against the machine ---------------------------------------------------------------------------------


def _check_log_dir(args: Namespace) -> None:
    """Try it out in the directory, or in the nearest one above it that exists, and leave nothing behind.

    Permissions alone don't tell: not to root, not on a network's file system, not on a full disk.
    """
    if args.log_dir is None or args.log_dir == os.devnull:
        return
    try:
        place = os.path.abspath(args.log_dir)
    except FileNotFoundError:
        reason = "this process's working directory was deleted"
        message = f"--log-dir: {args.log_dir!r} is not a writable directory: {reason}"
        raise UsageError(message) from None
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    _check_length(args.log_dir, place)
    probe = os.path.join(place, f".elastic-run-{os.urandom(8).hex()}")
    try:
        os.mkdir(probe)
        os.rmdir(probe)
    except OSError as error:
        message = f"--log-dir: {args.log_dir!r} is not a writable directory: {place}: {name_reason(error)}"
        raise UsageError(message) from None


def _check_events_file(args: Namespace) -> None:
    """Open the file as the launcher will, and remove a new file again, because --explain must change nothing."""
    path = args.events_file
    if not path:
        return
    is_new = not os.path.lexists(path)
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY))
        if is_new:
            os.unlink(path)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return  # a named pipe that has no reader yet
        message = f"--events-file: {path!r} can't be written: {name_reason(error)}"
        raise UsageError(message) from None


def _check_failure_rules(args: Namespace) -> None:
    if not args.failure_rules:
        return
    from elastic_run.report.job_result import read_rules

    try:
        read_rules(args.failure_rules)
    except ValueError as error:
        message = f"--failure-rules: {error}"
        raise UsageError(message) from None


def _check_length(log_dir: str, place: str) -> None:
    """Check the names of directories that are to be made, and that the paths of log files in them aren't too long."""
    from errno import ENAMETOOLONG

    whole = os.path.abspath(log_dir)
    missing = os.path.relpath(whole, place).split(os.sep)
    for path in (*(os.path.join(place, name) for name in missing), whole + _LONGEST_BELOW):
        try:
            os.lstat(path)
        except OSError as error:
            if error.errno == ENAMETOOLONG:
                message = f"--log-dir: {log_dir!r} cannot be created: {name_reason(error)}"
                raise UsageError(message) from None


def _check_numa_binding(args: Namespace, worker_count: int) -> None:
    if args.numa_binding is not None:
        from elastic_run.cluster import numa
        from elastic_run.multiprocessing.process.interpreter import own_interpreter

        try:
            options = numa.NumaOptions(numa.AffinityMode(args.numa_binding))
            numa.worker_affinities(options, worker_count, python=own_interpreter())
        except numa.NumaError as error:
            message = f"--numa-binding: {error}"
            raise UsageError(message) from None
