"""Values that follow from the step of Slurm in which this launcher runs, where no flag names them.

srun starts a launcher per task. One launcher on each node of the step: together they are one job, whose nodes, place to
meet and id follow from Slurm's variables. Several launchers on a node, or flags by which the launchers would not become
one job, are refused; the message says what to give. --standalone says that separate jobs are meant.
"""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.cli.config import names_rendezvous
from elastic_run.cli.flags import FLAGS
from elastic_run.cli.origins import SLURM, Origin
from elastic_run.cli.values import BUILT_IN_BACKENDS, node_range
from elastic_run.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping

    from elastic_run.cli.origins import Origins
    from elastic_run.cluster.slurm import Step

_GPU_DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/kfd")
#: The variables from which a value follows, of those that are set.
_SOURCES = {
    "nnodes": ("SLURM_STEP_NUM_NODES",),
    "rdzv_backend": ("SLURM_STEP_NODELIST",),
    "rdzv_endpoint": ("SLURM_STEP_NODELIST", "SLURM_STEP_RESV_PORTS"),
    "rdzv_id": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    "node_rank": ("SLURM_STEP_NODELIST",),
    "nproc_per_node": ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS"),
}
_DEFAULTS = {flag.dest: flag.default for flag in FLAGS}


def complete_from_step(args: Namespace, environ: Mapping[str, str], origins: Origins | None = None) -> list[str]:
    """Fill in what follows from this launcher's Slurm step and no flag names.

    Args:
        args: The command line; it is changed.
        environ: The environment.
        origins: Origins of the values that the user gave, to which those of the derived values are added; None where a
            program made the namespace, so that a default can't be told from a choice.

    Returns:
        What the user should know, a sentence each.

    Raises:
        UsageError: The launchers of the step would not become one job.
    """
    # A launcher inside a worker is no task of the step. A plug-in may have its own way to count nodes.
    if "SLURM_JOB_ID" not in environ or contract.ENV_RUN_ID in environ:
        return []
    if args.standalone or args.rdzv_backend not in BUILT_IN_BACKENDS or _is_typed(environ):
        return []
    from elastic_run.cluster.slurm import count_idle_nodes, find_step  # noqa: PLC0415 - most launchers run outside of Slurm

    hostname = os.uname().nodename
    step = find_step(environ, hostname)
    if step is None:
        is_alone = node_range(args.nnodes)[1] == 1
        return _describe_idle(count_idle_nodes(environ, hostname)) if is_alone else []
    derived: dict[str, object] = {}
    if step.task_count > 1:
        derived = _derive_nodes(step, args)
    is_alone_on_node = step.task_count == len(step.nodes)  # else its neighbours would start workers on the same GPUs
    if is_alone_on_node and origins is not None and "nproc_per_node" not in origins:
        derived["nproc_per_node"] = _count_gpus(environ)
    derived = {dest: value for dest, value in derived.items() if value != getattr(args, dest)}
    for dest, value in derived.items():
        setattr(args, dest, value)
        if origins is not None:
            origins[dest] = Origin(SLURM, ", ".join(name for name in _SOURCES[dest] if environ.get(name)))
    if step.node_rank > 0 or not derived:
        return []  # the step's first launcher tells it
    values = " ".join(f"--{dest.replace('_', '-')}={value}" for dest, value in derived.items())
    return [f"from the Slurm step: {values}"]


def _is_typed(environ: Mapping[str, str]) -> bool:
    """Whether this was typed into the shell of `srun --pty bash`: each node of the step has one, and one is used."""
    is_task = environ.get("SLURM_TASK_PID") == str(os.getpid())
    return "SLURM_PTY_PORT" in environ and not is_task and os.isatty(0)


def _derive_nodes(step: Step, args: Namespace) -> dict[str, object]:
    """Return how many nodes the job of a step of several tasks has, and where they meet.

    Raises:
        UsageError: See `complete_from_step`.
    """
    derived: dict[str, object] = {}
    nodes = len(step.nodes)
    is_given = args.nnodes != _DEFAULTS["nnodes"]
    least, most = node_range(args.nnodes) if is_given else (nodes, nodes)
    if step.task_count > nodes and most < step.task_count:
        where = "this node" if nodes == 1 else f"its {nodes} nodes"
        message = (
            f"--ntasks-per-node: the Slurm step has {step.task_count} tasks on {where}, and each is a launcher with "
            f"workers of its own: give srun --ntasks={nodes} --ntasks-per-node=1 for one job, or --standalone for "
            f"{step.task_count} separate jobs"
        )
        raise UsageError(message)
    if most == 1:
        message = (
            f"--nnodes: is {args.nnodes}, but the Slurm step has {nodes} nodes, and each would train a model of its "
            f"own: leave --nnodes out for one job, or give --standalone for {nodes} separate jobs"
        )
        raise UsageError(message)
    is_named = names_rendezvous(args) or args.master_addr != _DEFAULTS["master_addr"]
    if not is_named or (args.rdzv_backend == "c10d" and not args.rdzv_endpoint):
        if least > step.task_count:
            message = (
                f"--nnodes: is {args.nnodes}, but the Slurm step has {step.task_count} tasks, and no other node knows "
                "where they meet: leave --nnodes out, or name the place with --rdzv-endpoint"
            )
            raise UsageError(message)
        derived = {"rdzv_backend": "c10d", "rdzv_endpoint": step.endpoint}
        if args.rdzv_id == _DEFAULTS["rdzv_id"]:
            derived["rdzv_id"] = step.run_id
    if not is_given:
        derived = {"nnodes": str(nodes), **derived}
    if args.node_rank == _DEFAULTS["node_rank"] and step.task_count == nodes:
        derived["node_rank"] = step.node_rank
    return derived


def _count_gpus(environ: Mapping[str, str]) -> str:
    """Return the number of this node's GPUs that the step may use, and 1 where there is none."""
    if not any(map(os.path.exists, _GPU_DRIVERS)):
        return "1"
    from elastic_run.cluster.devices import DeviceError, device_count  # noqa: PLC0415 - most nodes of tests have none

    try:
        return str(device_count("gpu", environ))
    except DeviceError:
        return "1"


def _describe_idle(idle: int) -> list[str]:
    if not idle:
        return []
    others = "1 other node" if idle == 1 else f"{idle} other nodes"
    return [
        (
            f"this Slurm job has {others}, which a launcher that is started without srun doesn't use; one job on all "
            "nodes: srun --ntasks-per-node=1 elastic-run …"
        )
    ]
