"""Checks before anything is started: values against each other and against this machine, and the workers' program.

A single value was checked when it was read (values.py). A check leaves nothing behind. Each finding is one line that
names the flag, the value and the remedy. `find_notices` has the lines about values with which the job can run, but not
as the user may think.
"""

from __future__ import annotations

import errno
import os
import sys

from elastic_run import contract
from elastic_run.cli.flags import FLAGS
from elastic_run.cli.make_config import compare_with_gpus
from elastic_run.cli.request import get_use_env
from elastic_run.cli.values import nearest, seconds
from elastic_run.multiprocessing.fork_exec import own_interpreter
from elastic_run.notices import UsageError
from elastic_run.rendezvous.api import BACKENDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping
    from typing import Any, NoReturn

    from elastic_run.cli.request import Request

_EVENT_HANDLERS = ("null", "console", "dynamic_rendezvous")
#: Bytes of a log directory's path: the directories of the run with its id, the attempt and the worker follow.
_LONGEST_LOG_DIR = 3700
#: Seconds to look the master's name up; without an answer, the nodes notice a wrong name when they meet.
_LOOK_UP = 1.0
#: The first bytes of a program that no interpreter runs.
_ELF = b"\x7fELF"
#: Bytes of a token: half of 16 random bytes in hexadecimal form, which still can't be guessed.
_SHORTEST_TOKEN = 16
#: Flags whose names many scripts have for flags of their own.
_COMMON_NAMES = (
    *("--config", "--explain", "--help", "--log-dir", "--module", "--preload", "--role", "--start-method"),
    *("--hosts", "--local-addr", "--master-addr", "--master-port", "--health-port", "--metrics-port", "--version"),
)


def check_request(request: Request, environ: Mapping[str, str]) -> None:
    """Check the values against each other, and against this machine; UsageError if the job can't be started so."""
    args = request.args
    if args.hosts:
        _refuse("--hosts: works with the command elastic-run only")
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
            _refuse(f"{contract.ENV_UNINTERRUPTIBLE_STATE_TIMEOUT}: {text!r} {error}")
    _check_program(args, environ)
    if args.health_check:
        import shlex

        _check_command(shlex.split(args.health_check)[0], environ, "--health-check")


def _refuse(message: str) -> NoReturn:
    raise UsageError(message) from None


# --- flags among themselves ------------------------------------------------------------------------------------------
def _check_rendezvous(request: Request) -> None:
    args = request.args
    backend = BACKENDS.get(args.rdzv_backend)
    if args.standalone and request.least > 1:
        _refuse(f"--standalone: is for one node, but --nnodes={args.nnodes} asks for {request.least} or more")
    if request.is_static:
        _check_static_place(request)
    if backend is None:
        _check_plugin_backend(args.rdzv_backend)
    if backend is None or args.standalone:
        return
    if backend.has_store and backend.default_port < 0 and any(port < 0 for _, port in request.endpoints):
        _refuse(f"--rdzv-endpoint: {args.rdzv_endpoint!r} has no port, which the {args.rdzv_backend} backend needs")
    if backend.is_shared and not args.rdzv_endpoint:
        _refuse(f"--rdzv-endpoint: is needed with --rdzv-backend={args.rdzv_backend}: HOST:PORT of its server")
    is_met_at = args.rdzv_backend == "c10d" and args.rdzv_endpoint
    if (is_met_at or backend.is_shared) and request.most > 1 and not args.rdzv_id:
        # As under torchrun, a job with an empty id gets a random one: each node another, so that they never meet.
        _refuse("--rdzv-id: '' is empty: give all nodes of this job the same id, or leave the flag out")
    # The name that a job without a rendezvous of the user's gets later.
    name = "c10d" if request.hosts_rendezvous else args.rdzv_backend
    if request.settings and BACKENDS[name].has_store:
        from elastic_run.rendezvous.settings import read_settings

        try:
            read_settings(name, request.settings)
        except ValueError as error:
            _refuse(f"--rdzv-conf: {error}")


def _check_static_place(request: Request) -> None:
    """Check values that only this backend needs; they are passed over elsewhere, as with torch."""
    args = request.args
    if args.node_rank >= request.most:
        _refuse(f"--node-rank: {args.node_rank} is not below the number of nodes (--nnodes={args.nnodes})")
    is_used = request.most > 1 or request.names_rendezvous
    if is_used and args.node_rank < 0:
        _refuse(f"--node-rank: '{args.node_rank}' is not a whole number from 0 up")
    if is_used and not args.rdzv_endpoint and not args.master_addr:
        _refuse("--master-addr: '' is not a host name, an IPv4 or an IPv6 address")


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
        _refuse(f"--rdzv-backend: {name!r} is none of {', '.join(known)}{nearest(name, known)}")


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
    _refuse(
        f"--node-rank: is not given, so this node would have rank 0, but {flag}={host} is no address of this machine; "
        "give --node-rank=1 or higher here, or --node-rank=0 if that address leads to this machine"
    )


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
                _refuse(f"{flag}: {text!r} names local rank {int(rank)}, but this node has only {there}")


def _check_signals(args: Namespace) -> None:
    handled = [name.strip() for name in args.signals_to_handle.split(",")]
    for name in (name.strip() for name in args.forward_signals.split(",")):
        if name and name in handled:
            _refuse(
                f"--forward-signals: {name} is in --signals-to-handle too, where it stops the job: name it in only one "
                "of them"
            )


def _check_event_log_handler(name: str) -> None:
    from elastic_run.events import get_logging_handler

    try:
        get_logging_handler(name)
    except ValueError as error:
        reason = f"{name!r} is none of {', '.join(_EVENT_HANDLERS)}" if str(error).startswith("unknown") else error
        message = f"--event-log-handler: {reason}"
        raise UsageError(message) from error


# --- flags against the machine ---------------------------------------------------------------------------------------
def _check_devices(request: Request, environ: Mapping[str, str]) -> None:
    args, count = request.args, request.workers
    if args.virtual_local_rank:
        from elastic_run.cluster.devices import virtual_device

        try:
            virtual_device(count - 1, environ)
        except ValueError as error:
            _refuse(f"--virtual-local-rank: {error}; --nproc-per-node starts {count} workers")
    if args.numa_binding is not None:
        from elastic_run.cluster import numa

        try:
            options = numa.NumaOptions(numa.AffinityMode(args.numa_binding))
            numa.worker_affinities(options, count, python=own_interpreter())
        except numa.NumaError as error:
            _refuse(f"--numa-binding: {error}")


def _check_files(args: Namespace) -> None:
    if args.log_dir is not None and args.log_dir != os.devnull:
        _check_log_dir(args.log_dir)
    if args.events_file:
        _check_events_file(args.events_file)
    if args.failure_rules:
        from elastic_run.report.failure_rules import read_rules

        try:
            read_rules(args.failure_rules)
        except ValueError as error:
            _refuse(f"--failure-rules: {error}")


def _check_log_dir(log_dir: str) -> None:
    """Try it out in the directory, or in the nearest one above it that exists, and leave nothing behind.

    Permissions alone don't tell: not to root, not on a network's file system, not on a full disk.
    """
    try:
        place = os.path.abspath(log_dir)
    except FileNotFoundError:
        _refuse(f"--log-dir: {log_dir!r} is not a writable directory: this process's working directory was deleted")
    if len(os.fsencode(place)) > _LONGEST_LOG_DIR:
        _refuse(f"--log-dir: {log_dir!r} cannot be created: file name too long")
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    probe = os.path.join(place, f".elastic-run-{os.urandom(8).hex()}")
    try:
        os.mkdir(probe)
        os.rmdir(probe)
    except OSError as error:
        _refuse(f"--log-dir: {log_dir!r} is not a writable directory: {place}: {_name_reason(error)}")


def _check_events_file(path: str) -> None:
    """Open the file as the launcher will, and remove a new file again, because --explain must change nothing."""
    is_new = not os.path.lexists(path)
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY))
        if is_new:
            os.unlink(path)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a named pipe that has no reader yet
            _refuse(f"--events-file: {path!r} can't be written: {_name_reason(error)}")


def _name_reason(error: OSError) -> str:
    """Return the system's reason, as the end of a sentence."""
    return (error.strerror or str(error)).lower()


# --- the workers' program --------------------------------------------------------------------------------------------
def _check_program(args: Namespace, environ: Mapping[str, str]) -> None:
    """Refuse a program that can't be run, or flags about it that contradict each other."""
    uses_env = get_use_env(args)
    if args.no_python and not uses_env:
        _refuse("--no-python: needs --use-env with this command, which otherwise adds the argument --local-rank")
    if getattr(args, "local_rank_underscore", False) and uses_env:
        _refuse("--local-rank-underscore: cannot be combined with --use-env, which adds no local rank")
    name = args.training_script
    if args.no_python and not args.run_path:
        _check_command(name, environ, "--no-python")
        return
    if not args.run_path:
        _check_interpreter(environ)
    if args.run_path or not args.module:
        _check_script(name)
    elif os.sep in name or not name:
        _refuse(f"-m: {name!r} is not the name of a module; leave out -m to run a file")


def _check_interpreter(environ: Mapping[str, str]) -> None:
    chosen = environ.get(contract.ENV_PYTHON_EXEC)
    if not chosen:
        if not own_interpreter():
            reason = f"{sys.executable} is not a Python interpreter" if sys.executable else "sys.executable is empty"
            _refuse(f"{contract.ENV_PYTHON_EXEC}: must name the workers' interpreter: {reason}")
        return
    from elastic_run.files import find_program, name_denier

    if find_program(chosen, environ) is None:
        denier = name_denier(chosen) if os.path.dirname(chosen) else ""
        _refuse(f"{contract.ENV_PYTHON_EXEC}: {chosen!r} is not a program that can be executed{denier}")


def _check_command(name: str, environ: Mapping[str, str], flag: str) -> None:
    from elastic_run.files import find_program, is_executable

    if _has_macro(name) or find_program(name, environ) is not None:
        return
    if os.path.isdir(name):
        _refuse(f"{flag}: {name!r} is a directory")
    if os.path.dirname(name):
        why = "is not executable (chmod +x)" if _exists(name, f"{flag}: program") else "does not exist"
        _refuse(f"{flag}: program {name!r} {why}")
    here = os.path.join(os.curdir, name)
    _refuse(f"{flag}: program {name!r} is not on PATH{f', did you mean {here!r}?' if is_executable(here) else ''}")


def _check_script(name: str) -> None:
    """A directory or a zip file with a __main__.py is a script to Python; so is "-", and any pipe."""
    if name == "-" or _has_macro(name):
        return
    if not _exists(name, "script"):
        _refuse(f"script {name!r} does not exist{_script_hint(name)}")
    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "__main__.py")):
        _refuse(f"script {name!r} is a directory without a __main__.py")
    if not os.access(name, os.R_OK):
        _refuse(f"script {name!r} is not readable: no permission")
    if not name.endswith(".py") and os.path.isfile(name):
        with open(name, "rb", buffering=0) as file:
            if file.read(len(_ELF)) == _ELF:
                _refuse(f"script {name!r} is a binary program, did you mean --no-python {name}?")


def _exists(name: str, what: str) -> bool:
    """Whether there is such a file; raises UsageError where the system denies access to it."""
    try:
        os.stat(name)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        from elastic_run.files import name_denier

        _refuse(f"{what} {name!r} cannot be accessed: {_name_reason(error)}{name_denier(name)}")
    return True


def _has_macro(name: str) -> bool:
    """A name that differs from worker to worker is known only then."""
    return "${local_rank}" in name or "$local_rank" in name


def _script_hint(name: str) -> str:
    from elastic_run.cli.commands import COMMANDS
    from elastic_run.files import find_program

    if os.path.isfile(name + ".py"):
        return f", did you mean {name + '.py'!r}?"
    parts = name.split(".")
    places = [os.path.join(place or os.curdir, *parts) for place in (os.curdir, *sys.path)]
    if parts[-1] != "py" and any(os.path.isfile(place + ".py") or os.path.isdir(place) for place in places):
        return f", did you mean -m {name}?"
    if os.path.basename(name).rstrip("0123456789.") in {"python", "torchrun"}:
        return ": leave the word out, since elastic-run starts the interpreter: elastic-run [flags] SCRIPT"
    if find_program(name, os.environ) is not None:
        return f": elastic-run starts Python itself, and other programs with --no-python {name}"
    return nearest(name, COMMANDS)


# --- what the user should know ---------------------------------------------------------------------------------------
def find_notices(request: Request, environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each value without effect, or with another effect than the user may think."""
    args = request.args
    notices = [*_unused_flags(args), *_interpreter_notices(args, environ), *_token_notices(request)]
    if args.run_path and environ.get(contract.ENV_PYTHON_EXEC):
        notices.append(f"{contract.ENV_PYTHON_EXEC} is not used with --run-path: workers run {own_interpreter()}")
    if request.most == 1:
        given = (("--exclude-after", args.exclude_after), ("--exclude-exit-codes", args.exclude_exit_codes))
        notices += [f"{name}: has no effect on a job of one node" for name, value in given if value]
    if args.hang_action != "report" and args.hang_timeout is None:
        notices.append(f"--hang-action: {args.hang_action} has no effect without --hang-timeout")
    elif args.hang_action == "restart" and not args.max_restarts:
        notices.append("--hang-action: restart ends the job at the first hang, since --max-restarts is 0")
    if args.requeue is not None and ("SLURM_JOB_ID" not in environ or request.has_left_slurm):
        notices.append("--requeue: has no effect outside of a Slurm job")
    notices += compare_with_gpus(str(args.nproc_per_node), environ)
    notices += [*_misplaced_flags(args), *_tracer_notices()]
    if hasattr(args, "use_env") and "ignore" not in sys.warnoptions:
        notices.append(
            "python -m elastic_run.launch is deprecated: use elastic-run, which sets the variable LOCAL_RANK and adds "
            "no argument --local-rank (python -W ignore hides this line)"
        )
    return notices


def _unused_flags(args: Namespace) -> list[str]:
    """Name flags of the static backend that another backend ignores; torch ignores some of them silently."""
    if args.rdzv_backend == "static" and not args.standalone:
        return []
    has = "--standalone" if args.standalone else f"--rdzv-backend={args.rdzv_backend}"
    rank = args.node_rank if args.standalone else 0
    given = (("--master-port", args.master_port), ("--master-addr", args.master_addr), ("--node-rank", rank))
    return [
        f"{name}: {value} is not used: only --rdzv-backend=static uses it, and this job has {has}"
        for name, value in given
        if value not in {None, "127.0.0.1", 0, "", -1}
    ]


def _interpreter_notices(args: Namespace, environ: Mapping[str, str]) -> list[str]:
    """Compare the active environment with the interpreter that will run the workers."""
    if environ.get(contract.ENV_PYTHON_EXEC) or (args.no_python and not args.run_path):
        return []
    variable = "VIRTUAL_ENV" if environ.get("VIRTUAL_ENV") else "CONDA_PREFIX"
    active = environ.get(variable)
    if not active or os.path.realpath(active) == os.path.realpath(sys.prefix):
        return []
    told = f"{variable} is {active}, but workers run {own_interpreter()}"
    return [f"{told}; install elastic-run there, or set {contract.ENV_PYTHON_EXEC}"]


def _token_notices(request: Request) -> list[str]:
    """Warn of a short token. The store proves the token to each client that asks, and a client can then try tokens."""
    args, token = request.args, request.token
    is_local = args.standalone or (request.most == 1 and not request.names_rendezvous)
    if is_local or not token or len(token) >= _SHORTEST_TOKEN:
        return []
    source = "--rdzv-token-file" if args.rdzv_token_file else contract.ENV_RDZV_TOKEN
    told = f"{source}: a token of {len(token)} bytes can be guessed by any program that reaches the job's store"
    return [f"{told}; make a random token (openssl rand -hex 16)"]


def _misplaced_flags(args: Namespace) -> list[str]:
    """Name flags of elastic-run behind the script, which gets them, unless elastic-run was given them as well."""
    words = [word.partition("=")[0] for word in args.training_script_args]
    if not any(word.startswith("--") for word in words):
        return []
    found = [
        flag.name
        for flag in FLAGS
        if flag.name not in _COMMON_NAMES
        and any(spelling in words for spelling in flag.spellings if len(spelling) > len("-x"))
        and getattr(args, flag.dest, flag.default) == flag.default
    ]
    names = ", ".join(found)
    return [f"{names}: behind the script, so the script gets it: flags of elastic-run come before"] if found else []


def _tracer_notices() -> list[str]:
    """Say that a tracer which follows child processes by replacing `subprocess.Popen.__init__` sees no worker."""
    subprocess: Any = sys.modules.get("subprocess")
    # The globals tell: a wrapper may have copied all other attributes of the original.
    if subprocess is None or getattr(subprocess.Popen.__init__, "__globals__", None) is vars(subprocess):
        return []
    told = "subprocess.Popen is replaced in this process, as tracers do (viztracer), but workers start without it"
    return [f"{told}; to trace them: elastic-run --no-python viztracer -o '${{local_rank}}.json' SCRIPT"]
