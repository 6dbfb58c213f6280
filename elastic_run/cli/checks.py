"""Checks before anything is started: values against each other, and against this machine.

A single value was checked when it was read (values.py). A check leaves nothing behind. Each finding is one line that
names the flag, the value and the remedy.
"""

from __future__ import annotations

import errno
import os

from elastic_run import contract
from elastic_run.cli.program import check_health_check, check_program, name_reason
from elastic_run.cli.values import nearest, seconds
from elastic_run.errors import UsageError
from elastic_run.multiprocessing.process.interpreter import own_interpreter
from elastic_run.rendezvous.backend_table import BACKENDS, read_settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping

    from elastic_run.cli.request import Request

_EVENT_HANDLERS = ("null", "console", "dynamic_rendezvous")
#: Length of a log file's path below --log-dir: the directories of the run with its id, the attempt and the worker.
_LONGEST_BELOW = "/d" * 170
#: Seconds for the look-up of the master's name. Without an answer in time, the nodes notice a wrong name when they
#: meet.
_LOOK_UP = 1.0


def check_request(request: Request, environ: Mapping[str, str]) -> None:
    """Check the values against each other, and against this machine.

    Raises:
        UsageError: The job can't be started so.
    """
    args = request.args
    _check_rendezvous(request)
    _check_ranks(request)
    _check_signals(args)
    _check_devices(request, environ)
    _check_files(args)
    if args.inject_fault:
        from elastic_run.cli.faults import check_faults

        check_faults(args.inject_fault, request.workers * request.most)
    if args.event_log_handler not in _EVENT_HANDLERS:
        _check_event_log_handler(args.event_log_handler)
    if text := environ.get(contract.ENV_UNINTERRUPTIBLE_STATE_TIMEOUT):  # the timeout that no flag names
        try:
            seconds(text)
        except ValueError as error:
            message = f"{contract.ENV_UNINTERRUPTIBLE_STATE_TIMEOUT}: {text!r} {error}"
            raise UsageError(message) from None
    check_program(request, environ)
    check_health_check(request.health_check, environ)


# --- flags among themselves ------------------------------------------------------------------------------------------


def _check_rendezvous(request: Request) -> None:
    args = request.args
    if args.standalone:
        if request.least > 1:
            message = f"--standalone: is for one node, but --nnodes={args.nnodes} asks for {request.least} or more"
            raise UsageError(message)
        if args.rdzv_backend not in BACKENDS:
            _check_plugin_backend(args.rdzv_backend)
        return
    if request.is_static:
        _check_static_place(request)
    backend = BACKENDS.get(args.rdzv_backend)
    if backend is None:
        _check_plugin_backend(args.rdzv_backend)
        return
    _check_endpoint(request)
    # The name that a job without a rendezvous of the user's gets later.
    name = "c10d" if request.hosts_rendezvous else args.rdzv_backend
    if request.settings and BACKENDS[name].has_store:
        try:
            read_settings(name, request.settings)
        except ValueError as error:
            message = f"--rdzv-conf: {error}"
            raise UsageError(message) from None


def _check_static_place(request: Request) -> None:
    """Check values that only this backend needs; they are passed over elsewhere, as with torch."""
    args = request.args
    if args.node_rank >= request.most:
        message = f"--node-rank: {args.node_rank} is not below the number of nodes (--nnodes={args.nnodes})"
        raise UsageError(message)
    is_used = request.most > 1 or request.names_rendezvous
    if is_used and args.node_rank < 0:
        message = f"--node-rank: '{args.node_rank}' is not a whole number from 0 up"
        raise UsageError(message)
    if is_used and not args.rdzv_endpoint and not args.master_addr:
        message = "--master-addr: '' is not a host name, an IPv4 or an IPv6 address"
        raise UsageError(message)


def _check_endpoint(request: Request) -> None:
    args, backend = request.args, BACKENDS[request.args.rdzv_backend]
    if backend.needs_port and any(port < 0 for _, port in request.endpoints):
        message = f"--rdzv-endpoint: {args.rdzv_endpoint!r} has no port, which the {args.rdzv_backend} backend needs"
        raise UsageError(message)
    if backend.is_shared and not args.rdzv_endpoint:
        message = f"--rdzv-endpoint: is needed with --rdzv-backend={args.rdzv_backend}: HOST:PORT of its server"
        raise UsageError(message)
    is_met_at = args.rdzv_backend == "c10d" and args.rdzv_endpoint
    if (is_met_at or backend.is_shared) and request.most > 1 and not args.rdzv_id:
        # As under torchrun, a job with an empty id gets a random one: each node another, so that they never meet.
        message = "--rdzv-id: '' is empty: give all nodes of this job the same id, or leave the flag out"
        raise UsageError(message)


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


def check_master(request: Request) -> None:
    """Refuse the default rank 0 if another machine is the master: each node would wait for the others.

    A rank that the user gave is taken: an address of no interface (a cloud's public one, a service's) may lead here.
    """
    args = request.args
    is_given = "node_rank" in request.origins or args.node_rank
    if not request.is_static or request.most == 1 or is_given or request.hosts_rendezvous:
        return
    from elastic_run.rendezvous.addresses import find_whether_own_host, names_loopback

    flag = "--rdzv-endpoint" if args.rdzv_endpoint else "--master-addr"
    host = request.endpoints[0][0] if request.endpoints else args.master_addr.strip("[]")
    if names_loopback(host) or find_whether_own_host(host, _LOOK_UP) is not False:
        return
    message = (
        f"--node-rank: is not given, so this node would have rank 0, but {flag}={host} is no address of this machine; "
        "give --node-rank=1 or higher here, or --node-rank=0 if that address leads to this machine"
    )
    raise UsageError(message)


def _check_ranks(request: Request) -> None:
    args, count = request.args, request.workers
    named = [("--local-ranks-filter", args.local_ranks_filter, args.local_ranks_filter.split(","))]
    for flag, text, streams in (("--redirects", args.redirects, request.redirects), ("--tee", args.tee, request.tee)):
        # From `7:0` no output is taken, so there may be no rank 7.
        ranks = [] if isinstance(streams, int) else [str(rank) for rank, value in streams.items() if value]
        named.append((flag, text, ranks))
    there = "local rank 0" if count == 1 else f"local ranks 0 to {count - 1}"
    for flag, text, ranks in named:
        for rank in ranks:
            if rank and int(rank) >= count:
                message = f"{flag}: {text!r} names local rank {int(rank)}, but this node has only {there}"
                raise UsageError(message)


def _check_signals(args: Namespace) -> None:
    handled = [name.strip() for name in args.signals_to_handle.split(",")]
    for name in (name.strip() for name in args.forward_signals.split(",")):
        if name and name in handled:
            message = (
                f"--forward-signals: {name} is in --signals-to-handle too, where it stops the job: "
                "name it in only one of them"
            )
            raise UsageError(message)


def _check_event_log_handler(name: str) -> None:
    from elastic_run.events import get_logging_handler

    try:
        get_logging_handler(name)
    except ValueError as error:
        if not str(error).startswith("unknown"):
            message = f"--event-log-handler: {error}"
            raise UsageError(message) from error
        hint = nearest(name, _EVENT_HANDLERS)
        message = f"--event-log-handler: {name!r} is none of {', '.join(_EVENT_HANDLERS)}{hint}"
        raise UsageError(message) from None


# --- flags against the machine ---------------------------------------------------------------------------------------


def _check_devices(request: Request, environ: Mapping[str, str]) -> None:
    args, count = request.args, request.workers
    if args.virtual_local_rank:
        from elastic_run.cluster.devices import virtual_device

        try:
            virtual_device(count - 1, environ)
        except ValueError as error:
            message = f"--virtual-local-rank: {error}; --nproc-per-node starts {count} workers"
            raise UsageError(message) from None
    if args.numa_binding is not None:
        from elastic_run.cluster import numa

        try:
            options = numa.NumaOptions(numa.AffinityMode(args.numa_binding))
            numa.worker_affinities(options, count, python=own_interpreter())
        except numa.NumaError as error:
            message = f"--numa-binding: {error}"
            raise UsageError(message) from None


def _check_files(args: Namespace) -> None:
    if args.log_dir is not None and args.log_dir != os.devnull:
        _check_log_dir(args.log_dir)
    if args.events_file:
        _check_events_file(args.events_file)
    if args.failure_rules:
        from elastic_run.report.job_result import read_rules

        try:
            read_rules(args.failure_rules)
        except ValueError as error:
            message = f"--failure-rules: {error}"
            raise UsageError(message) from None


def _check_log_dir(log_dir: str) -> None:
    """Try it out in the directory, or in the nearest one above it that exists, and leave nothing behind.

    Permissions alone don't tell: not to root, not on a network's file system, not on a full disk.
    """
    try:
        place = whole = os.path.abspath(log_dir)
    except FileNotFoundError:
        reason = "this process's working directory was deleted"
        message = f"--log-dir: {log_dir!r} is not a writable directory: {reason}"
        raise UsageError(message) from None
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    # The names of directories that are to be made, and the paths of log files in them, may be too long.
    missing = os.path.relpath(whole, place).split(os.sep)
    for path in (*(os.path.join(place, name) for name in missing), whole + _LONGEST_BELOW):
        try:
            os.lstat(path)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                message = f"--log-dir: {log_dir!r} cannot be created: {name_reason(error)}"
                raise UsageError(message) from None
    probe = os.path.join(place, f".elastic-run-{os.urandom(8).hex()}")
    try:
        os.mkdir(probe)
        os.rmdir(probe)
    except OSError as error:
        message = f"--log-dir: {log_dir!r} is not a writable directory: {place}: {name_reason(error)}"
        raise UsageError(message) from None


def _check_events_file(path: str) -> None:
    """Open the file as the launcher will, and remove a new file again, because --explain must change nothing."""
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
