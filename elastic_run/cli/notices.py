"""Notices on values with which the job can run, but not as the user may think: flags without effect, and the like."""

from __future__ import annotations

import os
import sys

from elastic_run import contract
from elastic_run.cli.flags import FLAGS
from elastic_run.cli.workers import compare_with_gpus
from elastic_run.multiprocessing.process.interpreter import own_interpreter
from elastic_run.rendezvous.backend_table import BACKENDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping

    from elastic_run.cli.request import Request

#: Bytes of a token: half of 16 random bytes in hexadecimal form, which still can't be guessed.
_SHORTEST_TOKEN = 16
#: Flags whose names many scripts have for flags of their own.
_COMMON_NAMES = frozenset(
    (
        *("--config", "--explain", "--help", "--log-dir", "--module", "--preload", "--role", "--start-method"),
        *("--local-addr", "--master-addr", "--master-port", "--health-port", "--metrics-port", "--version"),
    )
)
#: Words with a meaning for a shell; `find` expects some of them too.
_SHELL_WORDS = (";", "&&", "||", "|", "&", ">", ">>", "<", "2>&1")


def find_notices(request: Request, environ: Mapping[str, str]) -> list[str]:
    """Return the notices, a sentence each."""
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
    notices += _settings_notices(request)
    notices += _filter_notices(request)
    notices += _shell_notices(request)
    notices += compare_with_gpus(str(args.nproc_per_node), environ)
    notices += _misplaced_flags(args)
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
    backend = "--standalone" if args.standalone else f"--rdzv-backend={args.rdzv_backend}"
    given = (
        ("--master-port", args.master_port, None),
        ("--master-addr", args.master_addr, "127.0.0.1"),
        ("--node-rank", args.node_rank if args.standalone else 0, 0),
    )
    return [
        f"{name}: {value} is not used: only --rdzv-backend=static uses it, and this job has {backend}"
        for name, value, default in given
        if value not in {default, "", -1}
    ]


def _interpreter_notices(args: Namespace, environ: Mapping[str, str]) -> list[str]:
    """Compare the active environment with the interpreter that will run the workers."""
    if environ.get(contract.ENV_PYTHON_EXEC) or (args.no_python and not args.run_path):
        return []
    variable = "VIRTUAL_ENV" if environ.get("VIRTUAL_ENV") else "CONDA_PREFIX"
    active = environ.get(variable)
    if not active or os.path.realpath(active) == os.path.realpath(sys.prefix):
        return []
    notice = (
        f"{variable} is {active}, but workers run {own_interpreter()}; "
        f"install elastic-run there, or set {contract.ENV_PYTHON_EXEC}"
    )
    return [notice]


def _token_notices(request: Request) -> list[str]:
    """Warn of a short token. The store proves the token to each client that asks, and a client can then try tokens."""
    args, token = request.args, request.token
    is_local = args.standalone or (request.most == 1 and not request.names_rendezvous)
    if is_local or not token or len(token) >= _SHORTEST_TOKEN:
        return []
    source = "--rdzv-token-file" if args.rdzv_token_file else contract.ENV_RDZV_TOKEN
    notice = (
        f"{source}: a token of {len(token)} bytes can be guessed by any program that reaches the job's store; "
        "make a random token (openssl rand -hex 16)"
    )
    return [notice]


def _settings_notices(request: Request) -> list[str]:
    """Name keys of --rdzv-conf that are flags of their own; the backend of a plug-in may read them."""
    if "rdzv_" not in request.args.rdzv_conf or request.args.rdzv_backend not in BACKENDS:
        return []
    from elastic_run.rendezvous.backend_table import NAMES_OF_FLAGS

    given = [name for name in NAMES_OF_FLAGS if name in request.settings]
    flags = ", ".join("--" + name.replace("_", "-") for name in given)
    verb = "has" if len(given) == 1 else "have"
    return [f"--rdzv-conf: {', '.join(given)} {verb} no effect there: give {flags}"] if given else []


def _filter_notices(request: Request) -> list[str]:
    """Name filters of a stream that --tee shows for no rank; a plug-in may show it. torch makes an empty file, too."""
    args, tee = request.args, request.tee
    streams = (("stdout", 1, args.duplicate_stdout_filters), ("stderr", 2, args.duplicate_stderr_filters))
    shown = {tee} if isinstance(tee, int) else set(tee.values())
    return [
        f"--duplicate-{name}-filters: has no effect without --tee={stream} or --tee=3: it copies only lines that --tee "
        "shows"
        for name, stream, filters in streams
        if filters and args.logs_specs is None and not any(value & stream for value in shown)
    ]


def _shell_notices(request: Request) -> list[str]:
    """Name words of a shell in --health-check: a check may succeed though a part of it was never run."""
    program, arguments = request.health_check[:1], request.health_check[1:]
    found = next((word for word in arguments if word in _SHELL_WORDS or word[1:].endswith(";")), "")
    if not found or os.path.basename(program[0]) == "find":
        return []
    notice = (
        f"--health-check: no shell reads the command, so {program[0]} gets {found!r} as an argument; a shell runs "
        "with --health-check=\"sh -c '…'\""
    )
    return [notice]


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
    if not found:
        return []
    they, stand, go = ("it", "stands", "goes") if len(found) == 1 else ("they", "stand", "go")
    return [
        f"{', '.join(found)} {stand} behind the script, so {they} {go} to the script: elastic-run's flags come before"
    ]
