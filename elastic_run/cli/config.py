"""From checked arguments to a LaunchConfig and the command that each worker runs."""

from __future__ import annotations

import os
import sys

from elastic_run import contract
from elastic_run.cli.flags import FLAGS
from elastic_run.cli.origins import DERIVED, VARIABLE, Origin, derive, has_left_slurm
from elastic_run.cli.threads import choose_threads
from elastic_run.cli.values import node_range
from elastic_run.core.agent.config import AgentConfig
from elastic_run.core.job.config import JobConfig
from elastic_run.core.job.node_config import NodeConfig
from elastic_run.errors import UsageError
from elastic_run.multiprocessing.process.interpreter import make_run_path_code, own_interpreter
from elastic_run.notices import say
from elastic_run.rendezvous.backend_table import BACKENDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Mapping, MutableMapping
    from typing import Any

    from elastic_run.cli.origins import Origins
    from elastic_run.cluster.numa import NumaOptions
    from elastic_run.launcher import LaunchConfig
    from elastic_run.multiprocessing.output.logs import LogsSpecs, Streams

#: Shown in place of an id that is another one at each start.
RANDOM = "(random)"
NO_PYTHON_WITH_MODULE = "--no-python: cannot be combined with -m: --no-python runs a program, -m a Python module"
#: Flags that are settings of the job, of the node or of the agent, by the same name.
_JOB_FLAGS = tuple(flag for flag in FLAGS if flag.dest in JobConfig.__match_args__)
_NODE_FLAGS = tuple(flag for flag in FLAGS if flag.dest in NodeConfig.__match_args__)
_AGENT_FLAGS = tuple(flag for flag in FLAGS if flag.dest in AgentConfig.__match_args__)
#: Bytes of a token's file; a device may have no end.
_LONGEST_TOKEN = 1 << 20
#: The plug-in `default` of torch's package: ours has the same layout, and keeps the logs of all attempts.
_TORCHS_LOGS_SPECS = "torch.distributed.elastic.multiprocessing:DefaultLogsSpecs"


def complete_arguments(args: Namespace) -> None:
    """Give a namespace from a foreign parser, such as torch's, the flags that it doesn't have."""
    for flag in FLAGS:
        if not flag.prints_text and not hasattr(args, flag.dest):
            setattr(args, flag.dest, flag.default)


def complete_from_variables(args: Namespace, environ: Mapping[str, str], origins: Origins) -> None:
    """Fill in values that no flag gives from variables that other programs use as well.

    Raises:
        UsageError: The value of a variable is not allowed.
    """
    for flag in FLAGS:
        text = environ.get(flag.other_variable) if flag.other_variable else None
        if text and getattr(args, flag.dest) is None:
            try:
                value = flag.parse(text)
            except ValueError as error:
                message = f"{flag.other_variable}: {text!r} {error}"
                raise UsageError(message) from None
            derive(args, origins, Origin(VARIABLE, flag.other_variable, text), **{flag.dest: value})


def choose_rendezvous(args: Namespace, origins: Origins) -> None:
    """Fill in the rendezvous of a job for which the user named none, and the default port of the static one.

    A job of one node needs no store. In a job of several nodes this node serves a c10d store, and prints the flags with
    which the others join. Both keep the id that the user has given, and get a random one otherwise.
    """
    most = node_range(args.nnodes)[1]
    if args.standalone or (most == 1 and not names_rendezvous(args)):
        reason = Origin(DERIVED, "--standalone" if args.standalone else "a job of one node")
        derive(
            args, origins, reason, nnodes=args.nnodes if most == 1 else "1:1", rdzv_backend="local", rdzv_endpoint=""
        )
        args.has_random_id = args.rdzv_id in ("", contract.NO_RUN_ID)
        if args.has_random_id:
            derive(args, origins, Origin(DERIVED, reason.source, RANDOM), rdzv_id=unique_id())
    elif hosts_rendezvous(args):
        reason = Origin(DERIVED, "this node serves the store")
        derive(args, origins, reason, rdzv_backend="c10d")
        if args.rdzv_id == contract.NO_RUN_ID:
            derive(args, origins, Origin(DERIVED, reason.source, RANDOM), rdzv_id=unique_id()[:8])
    if not args.master_port:
        args.master_port = contract.DEFAULT_MASTER_PORT


def keep_static_place(args: Namespace, origins: Mapping[str, Origin]) -> None:
    """Take torch's default port if several nodes are told their ranks or the master's address, even by a default value.

    Without this, `--node-rank=0` would serve a store of its own while `--node-rank=1` waits at the default address.
    """
    is_told = any(name in origins and origins[name].is_given for name in ("node_rank", "master_addr"))
    if is_told and not args.standalone and node_range(args.nnodes)[1] > 1 and not names_rendezvous(args):
        args.master_port = contract.DEFAULT_MASTER_PORT


def hosts_rendezvous(args: Namespace) -> bool:
    """Whether this node serves the place where several nodes meet, since the user named none."""
    is_first = not args.node_rank and args.master_addr == "127.0.0.1"
    return is_first and node_range(args.nnodes)[1] > 1 and not names_rendezvous(args)


def names_rendezvous(args: Namespace) -> bool:
    """Whether the user said how, or where, the nodes meet."""
    return bool(args.rdzv_backend != "static" or args.rdzv_endpoint or args.master_port)


def unique_id() -> str:
    """Make a random id in the form of a version 4 UUID, without importing uuid."""
    digits = list(os.urandom(16).hex())
    digits[12] = "4"
    digits[16] = "89ab"[int(digits[16], 16) & 3]
    text = "".join(digits)
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def get_rdzv_endpoint(args: Namespace) -> str:
    """Return the endpoint; for the static backend the master's address and port stand in for it."""
    if args.rdzv_backend == "static" and not args.rdzv_endpoint:
        return f"{args.master_addr}:{args.master_port}"
    return str(args.rdzv_endpoint)


def get_use_env(args: Namespace) -> bool:
    """Whether workers get their local rank from the environment only, as they do except under the legacy launcher."""
    return bool(getattr(args, "use_env", True))


def make_config(
    args: Namespace, workers: int, environ: MutableMapping[str, str], *, tell: Callable[[str], None] = say
) -> tuple[LaunchConfig, str, list[str]]:
    """Turn arguments into a configuration and the command of the workers.

    Args:
        args: The command line.
        workers: Workers on this node.
        environ: The environment; OMP_NUM_THREADS is set in it, as torch does, so that the workers inherit it.
        tell: Tells the user a line.

    Returns:
        The configuration, the program, and its arguments.

    Raises:
        UsageError: No plug-in has the name that was given.
    """
    from elastic_run.launcher import LaunchConfig

    least, most = node_range(args.nnodes)
    notice = _limit_threads(args.omp_threads, workers, environ)
    # In a job of several nodes the node with rank 0 tells it, when the nodes have met.
    is_told_later = bool(notice) and most > 1 and args.rdzv_backend in BACKENDS
    if notice and not is_told_later:
        tell(notice)
    config = LaunchConfig(
        min_nodes=least,
        max_nodes=most,
        nproc_per_node=workers,
        run_id=args.rdzv_id,
        role=args.role,
        rdzv_endpoint=get_rdzv_endpoint(args),
        rdzv_backend=args.rdzv_backend,
        rdzv_configs=_rdzv_configs(args),
        max_restarts=args.max_restarts,
        monitor_interval=args.monitor_interval,
        start_method=args.start_method,
        log_line_prefix_template=args.log_line_prefix_template or environ.get(contract.ENV_LOG_LINE_PREFIX_TEMPLATE),
        # Workers get it as MASTER_ADDR, where an IPv6 address has no brackets.
        local_addr=args.local_addr and args.local_addr.strip("[]"),
        logs_specs=_logs_specs(args),
        event_log_handler=args.event_log_handler,
        numa_options=_numa_options(args),
        signals_to_handle=args.signals_to_handle,
        duplicate_stdout_filters=args.duplicate_stdout_filters,
        duplicate_stderr_filters=args.duplicate_stderr_filters,
        virtual_local_rank=args.virtual_local_rank,
        shutdown_timeout=args.shutdown_timeout,
        forward_signals=args.forward_signals,
        job_config=JobConfig(**{flag.dest: getattr(args, flag.dest) for flag in _JOB_FLAGS}),
        node_config=_make_node_config(args, environ, notice if is_told_later else ""),
        agent_config=AgentConfig(
            capture=not args.no_capture, **{flag.dest: getattr(args, flag.dest) for flag in _AGENT_FLAGS}
        ),
    )
    command, command_args = make_command(args, environ)
    return config, command, command_args


def make_command(args: Namespace, environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return the program of the workers and its arguments.

    Raises:
        UsageError: --no-python and -m are both given.
    """
    rest = [*_local_rank_argument(args), *args.training_script_args]
    if args.run_path:
        return _own_python(), ["-u", "-c", make_run_path_code(), args.training_script, *rest]
    if args.no_python:
        if args.module:
            raise UsageError(NO_PYTHON_WITH_MODULE)
        return args.training_script, rest
    python = environ.get(contract.ENV_PYTHON_EXEC) or _own_python()
    return python, ["-u", *(["-m"] if args.module else []), args.training_script, *rest]


def _own_python() -> str:
    return own_interpreter() or sys.executable


def _local_rank_argument(args: Namespace) -> list[str]:
    """Return the argument that the legacy launcher adds in front of the script's arguments."""
    if get_use_env(args):
        return []
    # torch 1 wrote it with an underscore; argparse in a script takes only the spelling that it was told.
    name = "--local_rank" if getattr(args, "local_rank_underscore", False) else "--local-rank"
    return [f"{name}=${{local_rank}}"]


def _limit_threads(flag: int | str | None, workers: int, environ: MutableMapping[str, str]) -> str:
    """Set the workers' number of OpenMP threads unless the user has, and return a line that says so."""
    threads = choose_threads(flag, workers, environ)
    if threads.count is not None:
        environ[contract.ENV_OMP_NUM_THREADS] = str(threads.count)
    return threads.notice


def _rdzv_configs(args: Namespace) -> dict[str, Any]:
    configs: dict[str, Any] = {}
    if args.rdzv_conf:
        from elastic_run.rendezvous.utils import parse_rendezvous_config

        configs.update(parse_rendezvous_config(args.rdzv_conf))
    if args.rdzv_backend == "static":
        configs["rank"] = args.node_rank
    return configs


def read_token(path: str | None, environ: Mapping[str, str]) -> bytes | None:
    """Return the secret that the nodes of the job share: None where the user says nothing, empty for none at all.

    Args:
        path: The file that holds it, or None to look into the environment.
        environ: The environment.

    Raises:
        UsageError: The file can't be read, or there is nothing in it.
    """
    if path is None:
        token = environ.get(contract.ENV_RDZV_TOKEN)
        return None if token is None else token.encode(errors="surrogateescape")
    from elastic_run.user_file import read_user_file

    try:
        content = read_user_file(path, _LONGEST_TOKEN + 1).strip()
    except OSError as error:
        message = f"--rdzv-token-file: {path!r} can't be read: {(error.strerror or str(error)).lower()}"
        raise UsageError(message) from None
    if len(content) > _LONGEST_TOKEN:
        message = f"--rdzv-token-file: {path!r} is longer than {_LONGEST_TOKEN >> 10} KiB"
        raise UsageError(message)
    if not content:
        message = f"--rdzv-token-file: {path!r} is empty"
        raise UsageError(message)
    return content


def _make_node_config(args: Namespace, environ: Mapping[str, str], notice: str) -> NodeConfig:
    return NodeConfig(
        notice=notice,
        # 0 is the default on every node, so only a higher number is a preference.
        preferred_rank=max(args.node_rank, 0) or None,
        token=read_token(args.rdzv_token_file, environ),
        location=getattr(args, "location", ""),
        launch_address=environ.get("SLURM_LAUNCH_NODE_IPADDR", "") if "SLURM_STEP_ID" in environ else "",
        launch_step=getattr(args, "launch_step", None),
        end_time=0.0 if has_left_slurm(args) else _find_end_time(environ),
        stops_in_time=_will_requeue(args, environ),
        **{flag.dest: getattr(args, flag.dest) for flag in _NODE_FLAGS},
    )


def _will_requeue(args: Namespace, environ: Mapping[str, str]) -> bool:
    """Whether --requeue allows another run of this job."""
    if args.requeue is None:
        return False
    from elastic_run.cluster.requeue import has_requeues_left

    return has_requeues_left(environ, args.requeue)


def _find_end_time(environ: Mapping[str, str]) -> float:
    """Return when Slurm ends this job, as its newer releases say, or 0; a time that is over is another job's."""
    text = environ.get("SLURM_JOB_END_TIME", "")
    if "SLURM_JOB_ID" not in environ or not text.isdecimal():
        return 0.0
    import time

    return float(text) if int(text) > time.time() else 0.0


def _logs_specs(args: Namespace) -> LogsSpecs:
    from elastic_run.multiprocessing.output.logs import DefaultLogsSpecs, parse_streams

    ranks = {int(rank) for rank in args.local_ranks_filter.split(",")} if args.local_ranks_filter else None
    redirects: Streams = parse_streams(args.redirects)
    tee: Streams = parse_streams(args.tee)
    specs_class: type[LogsSpecs] = DefaultLogsSpecs
    if args.logs_specs is not None:
        specs_class = _load_logs_specs(args.logs_specs)
        redirects, tee = _as_known_to(specs_class, redirects), _as_known_to(specs_class, tee)
    try:
        specs = specs_class(log_dir=args.log_dir, redirects=redirects, tee=tee, local_ranks_filter=ranks)
    except OSError as error:
        message = f"--log-dir: {args.log_dir!r} cannot be created: {(error.strerror or str(error)).lower()}"
        raise UsageError(message) from error
    if isinstance(specs, DefaultLogsSpecs) and getattr(args, "has_random_id", False):
        specs.program = os.path.basename(args.training_script.rstrip("/")).removesuffix(".py")
    return specs


def _as_known_to(specs_class: type[LogsSpecs], streams: Streams) -> Streams:
    """Return streams as the `Std` that a plug-in's class knows: torch's where its base is torch's `LogsSpecs`."""
    homes = [base.__module__ for base in specs_class.__mro__ if base.__name__ == "LogsSpecs"]
    home = "elastic_run.multiprocessing" if not homes or homes[0].startswith("elastic_run.") else homes[0]
    std = getattr(sys.modules[home], "Std")  # noqa: B009 - of any module
    return std(streams) if isinstance(streams, int) else {rank: std(value) for rank, value in streams.items()}


def _load_logs_specs(name: str) -> type[LogsSpecs]:
    from importlib.metadata import entry_points

    from elastic_run.multiprocessing.output.logs import DefaultLogsSpecs

    plugins = entry_points(group=contract.LOGS_SPECS_ENTRY_POINTS)
    for plugin in plugins:
        if plugin.name == name:
            if plugin.value == _TORCHS_LOGS_SPECS:
                return DefaultLogsSpecs
            try:
                specs_class: type[LogsSpecs] = plugin.load()
            except Exception as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
                message = f"--logs-specs: plug-in {name!r} ({plugin.value}) can't be loaded: {reason}"
                raise UsageError(message) from error
            return specs_class
    names = ", ".join(sorted(plugins.names))
    known = f"installed: {names}" if names else "none is installed"
    message = f"--logs-specs: {name!r} is not a plug-in of the group {contract.LOGS_SPECS_ENTRY_POINTS} ({known})"
    raise UsageError(message)


def _numa_options(args: Namespace) -> NumaOptions | None:
    if args.numa_binding is None:
        return None
    from elastic_run.cluster.numa import AffinityMode, NumaOptions

    return NumaOptions(AffinityMode(args.numa_binding))
