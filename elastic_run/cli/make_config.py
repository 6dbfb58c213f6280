"""From a checked request to a LaunchConfig: the workers of this node with their threads, command and output.

torchrun gives each of several workers one OpenMP thread, since the workers' libraries would otherwise take one for
every CPU of the machine each. `--omp-threads` gives more; a value in the environment always counts, as under torchrun.
"""

from __future__ import annotations

import os
import sys

from elastic_run import contract
from elastic_run.cli.flags import FLAGS
from elastic_run.cli.request import get_use_env
from elastic_run.cli.values import WORKER_COUNTS, whole_number, worker_count
from elastic_run.core.config import AgentConfig, JobConfig, NodeConfig
from elastic_run.multiprocessing.fork_exec import make_run_path_code, own_interpreter
from elastic_run.notices import UsageError, say
from elastic_run.rendezvous.api import BACKENDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Mapping, MutableMapping
    from typing import Any

    from elastic_run.cli.request import Request
    from elastic_run.launch_config import LaunchConfig
    from elastic_run.multiprocessing.logs import LogsSpecs, Streams

#: Flags that are settings of the job, of the node or of the agent, by the same name.
_JOB_FLAGS = tuple(flag.dest for flag in FLAGS if flag.dest in JobConfig.__match_args__)
_NODE_FLAGS = tuple(flag.dest for flag in FLAGS if flag.dest in NodeConfig.__match_args__)
_AGENT_FLAGS = tuple(flag.dest for flag in FLAGS if flag.dest in AgentConfig.__match_args__)
#: The plug-in `default` of torch's package: ours has the same layout, and keeps the logs of all attempts.
_TORCHS_LOGS_SPECS = "torch.distributed.elastic.multiprocessing:DefaultLogsSpecs"

_DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/kfd")
#: Variables that say which GPUs a process may use, and their values for none.
_MASKS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_HIDDEN = ("", "-1", "NoDevFiles")
_THREADS = contract.ENV_OMP_NUM_THREADS


def get_rdzv_endpoint(args: Namespace) -> str:
    """Return the endpoint; for the static backend the master's address and port stand in for it."""
    if args.rdzv_backend == "static" and not args.rdzv_endpoint:
        return f"{args.master_addr}:{args.master_port}"
    return str(args.rdzv_endpoint)


def make_config(
    request: Request, environ: MutableMapping[str, str], *, tell: Callable[[str], None] = say
) -> tuple[LaunchConfig, str, list[str]]:
    """Return the configuration, the program of the workers, and its arguments.

    OMP_NUM_THREADS is set in `environ`, as torch does, so that the workers inherit it.
    """
    from elastic_run.launch_config import LaunchConfig

    args = request.args
    threads, _, notice = choose_threads(args.omp_threads, request.workers, environ)
    if threads is not None:
        environ[contract.ENV_OMP_NUM_THREADS] = str(threads)
    # In a job of several nodes the node with rank 0 tells it, when the nodes have met.
    is_told_later = bool(notice) and request.most > 1 and args.rdzv_backend in BACKENDS
    if notice and not is_told_later:
        tell(notice)
    numa_options = None
    if args.numa_binding is not None:
        from elastic_run.cluster.numa import AffinityMode, NumaOptions

        numa_options = NumaOptions(AffinityMode(args.numa_binding))
    config = LaunchConfig(
        min_nodes=request.least,
        max_nodes=request.most,
        nproc_per_node=request.workers,
        run_id=args.rdzv_id,
        role=args.role,
        rdzv_endpoint=get_rdzv_endpoint(args),
        rdzv_backend=args.rdzv_backend,
        rdzv_configs={**request.settings, **({"rank": args.node_rank} if args.rdzv_backend == "static" else {})},
        max_restarts=args.max_restarts,
        monitor_interval=args.monitor_interval,
        start_method=args.start_method,
        log_line_prefix_template=args.log_line_prefix_template or environ.get(contract.ENV_LOG_LINE_PREFIX_TEMPLATE),
        # Workers get it as MASTER_ADDR, where an IPv6 address has no brackets.
        local_addr=args.local_addr and args.local_addr.strip("[]"),
        logs_specs=_make_logs_specs(request),
        event_log_handler=args.event_log_handler,
        numa_options=numa_options,
        signals_to_handle=args.signals_to_handle,
        duplicate_stdout_filters=args.duplicate_stdout_filters,
        duplicate_stderr_filters=args.duplicate_stderr_filters,
        virtual_local_rank=args.virtual_local_rank,
        shutdown_timeout=args.shutdown_timeout,
        forward_signals=args.forward_signals,
        job_config=JobConfig(**{name: getattr(args, name) for name in _JOB_FLAGS}),
        node_config=_make_node_config(request, environ, notice if is_told_later else ""),
        agent_config=AgentConfig(
            capture=not args.no_capture,
            folds=not args.no_fold,
            **{name: getattr(args, name) for name in _AGENT_FLAGS},
        ),
    )
    command, command_args = _make_command(request, environ)
    return config, command, command_args


def _make_node_config(request: Request, environ: Mapping[str, str], notice: str) -> NodeConfig:
    args, stops_in_time, end_time = request.args, False, 0.0
    if args.requeue is not None:
        from elastic_run.schedulers.actions import has_requeues_left

        stops_in_time = has_requeues_left(environ, args.requeue)
    # Newer releases of Slurm say when they end the job; a time that is over is another job's.
    text = environ.get("SLURM_JOB_END_TIME", "")
    if "SLURM_JOB_ID" in environ and text.isdecimal() and not request.has_left_slurm:
        import time

        end_time = float(text) if int(text) > time.time() else 0.0
    return NodeConfig(
        notice=notice,
        # 0 is the default on every node, so only a higher number is a preference.
        preferred_rank=max(args.node_rank, 0) or None,
        token=request.token,
        location=request.location,
        end_time=end_time,
        stops_in_time=stops_in_time,
        **{name: getattr(args, name) for name in _NODE_FLAGS},
    )


# --- how many workers, and how many threads each ---------------------------------------------------------------------


def count_workers(nproc_per_node: str, environ: Mapping[str, str]) -> int:
    """Return the number of workers that a value of --nproc-per-node means on this node, at least 1."""
    try:
        return whole_number(nproc_per_node, least=1, allowed="a number")
    except ValueError:
        pass
    try:
        word = worker_count(nproc_per_node)
    except ValueError as error:
        message = f"--nproc-per-node: {nproc_per_node!r} {error}"
        raise UsageError(message) from None
    from elastic_run.cluster.devices import DeviceError, UnknownDeviceError, device_count

    try:
        return device_count(word, environ, python=own_interpreter())
    except UnknownDeviceError:
        message = f"--nproc-per-node: {word!r} is not {WORKER_COUNTS}, nor a device that a package adds to torch"
    except DeviceError as error:
        message = f"--nproc-per-node: {word!r}, but {error}"
    raise UsageError(message)


def count_node_gpus(environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return the number of GPUs that this launcher may use, or 1 if there is none, and notices for the user.

    If the node has a driver and no variable hides its GPUs, none at all is an error.
    """
    if not any(map(os.path.exists, _DRIVERS)) or any(environ.get(name) in _HIDDEN for name in _MASKS):
        return "1", []
    from elastic_run.cluster.devices import DeviceError, device_count, torch_build

    try:
        return str(device_count("gpu", environ)), []
    except DeviceError as error:
        reason = str(error).partition(";")[0]
        build = torch_build(environ)
        if build is not None and not build & {"cuda", "hip"}:
            return "1", [f"this node has a GPU driver, but its worker gets no GPU: {reason}"]
        message = (
            f"--nproc-per-node: this node has a GPU driver, but {reason}: give --nproc-per-node=1 to train without GPUs"
        )
        raise UsageError(message) from None


def compare_with_gpus(nproc_per_node: str, environ: Mapping[str, str]) -> list[str]:
    """Return a notice where there are more workers than visible GPUs, or one worker and several GPUs.

    More workers may be meant to train on CPUs, and one worker may use several GPUs. Only a number is compared.
    """
    if not nproc_per_node.isdecimal() or not any(map(os.path.exists, _DRIVERS)):
        return []
    from elastic_run.cluster.devices import torch_build, visible_gpus

    workers, build = int(nproc_per_node), torch_build(environ)
    # A notice is not worth the seconds of nvidia-smi.
    gpus = len(visible_gpus(environ, asks_program=False)) if build is not None and build & {"cuda", "hip"} else 0
    if workers == 1 < gpus:
        idle = gpus - 1
        told = f"{idle} GPU{'s are' if idle > 1 else ' is'} idle"
        return [f"{told}: --nproc-per-node=gpu starts a worker for each GPU (a script may also use several by itself)"]
    if not 0 < gpus < workers:
        return []
    seen = f"{gpus} GPU{'s' * (gpus != 1)}"
    mask = next((f" ({name}={environ[name]})" for name in _MASKS if environ.get(name)), "")
    notice = (
        f"--nproc-per-node: {workers} workers see {seen}{mask}: a script that uses the GPU with the number "
        f"LOCAL_RANK fails in {workers - gpus} of them; --nproc-per-node=gpu starts a worker for each GPU"
    )
    return [notice]


def choose_threads(flag: int | str | None, workers: int, environ: Mapping[str, str]) -> tuple[int | None, str, str]:
    """Return the threads of each worker, or None to leave the environment as it is; the reason; a line for the user."""
    given = environ.get(_THREADS)
    if given is not None:
        unused = f"--omp-threads: {flag} is not used, since {_THREADS}={given} is set"
        return None, "", unused if flag is not None and str(flag) != given else ""
    if flag == "auto":
        from elastic_run.cluster.limits import core_count

        cores = core_count()
        count = max(1, cores // workers)
        reason = f"{cores} core{'s' * (cores != 1)} for {workers} worker{'s' * (workers != 1)}"
        return count, reason, f"{_THREADS}={count} for each worker ({reason})"
    if flag is not None:
        return int(flag), "", f"{_THREADS}={flag} for each worker"
    if workers == 1:
        return None, "", ""
    notice = (
        f"{_THREADS} is not set: each of the {workers} workers gets 1 thread (--omp-threads=auto divides the cores)"
    )
    return 1, "several workers on this node", notice


# --- the workers' command --------------------------------------------------------------------------------------------


def _make_command(request: Request, environ: Mapping[str, str]) -> tuple[str, list[str]]:
    args, rest = request.args, list(request.args.training_script_args)
    if not get_use_env(args):
        # torch 1 wrote it with an underscore; argparse in a script takes only the spelling that it was told.
        name = "--local_rank" if getattr(args, "local_rank_underscore", False) else "--local-rank"
        rest.insert(0, f"{name}=${{local_rank}}")
    own_python = own_interpreter() or sys.executable
    if args.run_path:
        return own_python, ["-u", "-c", make_run_path_code(), args.training_script, *rest]
    if args.no_python:
        return args.training_script, rest
    python = environ.get(contract.ENV_PYTHON_EXEC) or own_python
    return python, ["-u", *(["-m"] if args.module else []), args.training_script, *rest]


# --- where the output goes -------------------------------------------------------------------------------------------


def _make_logs_specs(request: Request) -> LogsSpecs:
    from elastic_run.multiprocessing.logs import DefaultLogsSpecs

    args, redirects, tee = request.args, request.redirects, request.tee
    ranks = {int(rank) for rank in args.local_ranks_filter.split(",")} if args.local_ranks_filter else None
    specs_class: type[LogsSpecs] = DefaultLogsSpecs
    if args.logs_specs is not None:
        specs_class = _load_logs_specs(args.logs_specs)
        redirects, tee = _as_known_to(specs_class, redirects), _as_known_to(specs_class, tee)
    try:
        specs = specs_class(log_dir=args.log_dir, redirects=redirects, tee=tee, local_ranks_filter=ranks)
    except OSError as error:
        message = f"--log-dir: {args.log_dir!r} cannot be created: {(error.strerror or str(error)).lower()}"
        raise UsageError(message) from error
    if isinstance(specs, DefaultLogsSpecs) and request.has_random_id:
        specs.program = os.path.basename(args.training_script.rstrip("/")).removesuffix(".py")
    return specs


def _as_known_to(specs_class: type[LogsSpecs], streams: Streams) -> Streams:
    """Return streams as the `Std` that a plug-in's class knows: torch's where its base is torch's `LogsSpecs`."""
    homes = [base.__module__ for base in specs_class.__mro__ if base.__name__ == "LogsSpecs"]
    home = "elastic_run.multiprocessing" if not homes or homes[0].startswith("elastic_run.") else homes[0]
    std: Any = sys.modules[home].Std
    return std(streams) if isinstance(streams, int) else {rank: std(value) for rank, value in streams.items()}


def _load_logs_specs(name: str) -> type[LogsSpecs]:
    from importlib.metadata import entry_points

    from elastic_run.multiprocessing.logs import DefaultLogsSpecs

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
