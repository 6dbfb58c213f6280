"""Values that follow from the step of Slurm in which this launcher runs, unless a flag gives them.

srun starts a launcher for each task. With one launcher on each node of the step, the launchers are one job, whose
nodes, endpoint and id follow from Slurm's variables. Several launchers on a node are refused, and so are flags with
which the launchers would not become one job, and variables that contradict each other; the message names the mend.
--standalone asks for separate jobs.
"""

from __future__ import annotations

import os

from elastic_run.cli.derivation import Derivation
from elastic_run.cli.node_gpus import count_node_gpus
from elastic_run.cli.origins import SLURM, has_left_slurm
from elastic_run.cli.values import node_range
from elastic_run.cluster.slurm import (
    StepError,
    StepVariablesError,
    count_idle_nodes,
    find_nodes_elsewhere,
    find_step,
)
from elastic_run.core.job.node_config import LaunchStep
from elastic_run.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Container, Mapping

    from elastic_run.cluster.slurm import Step


#: The variables from which each value follows.
_VARIABLES = {
    "nnodes": ("SLURM_STEP_NUM_NODES",),
    "rdzv_backend": ("SLURM_STEP_NODELIST",),
    "rdzv_endpoint": ("SLURM_STEP_NODELIST", "SLURM_STEP_RESV_PORTS", "SLURM_NODE_ALIASES"),
    "rdzv_id": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    "node_rank": ("SLURM_NODEID",),
    "nproc_per_node": ("SLURM_STEP_GPUS", "CUDA_VISIBLE_DEVICES"),
}


def derive_from_step(
    args: Namespace, environ: Mapping[str, str], given_flags: Container[str], *, names_place: bool
) -> Derivation:
    """Return the values that follow from this launcher's step.

    Args:
        args: The command line.
        environ: The environment.
        given_flags: Names of the values that the user gave.
        names_place: Whether the user said where the nodes meet.

    Raises:
        UsageError: The launchers of the step would not become one job.
    """
    is_alone = node_range(args.nnodes)[1] == 1
    if has_left_slurm(args):
        return Derivation(notices=[] if names_place else [_describe_left_over(environ, is_alone=is_alone)])
    if _is_typed(environ):
        nodes = environ.get("SLURM_JOB_NUM_NODES", "")
        idle = int(nodes) - 1 if is_alone and nodes.isdecimal() else 0
        return Derivation(notices=_describe_idle(idle, environ, options="--overlap "))
    hostname = os.uname().nodename
    try:
        step = find_step(environ, hostname)
    except StepVariablesError as error:
        if names_place and not is_alone:
            return Derivation()  # the command line says all that is needed
        message = f"{error}: start with srun, which sets it right, or give --standalone for a separate job in each task"
        raise UsageError(message) from None
    except StepError as error:
        return Derivation(notices=[_describe_lone_task(error, environ)] if is_alone else [])
    if step is None:
        return Derivation(notices=_describe_nodes(environ, hostname) if is_alone else [])
    derived: dict[str, object] = {}
    notices = [step.note] if step.note and step.task_count > 1 else []
    if step.task_count > 1:
        derived = _derive_nodes(step, args, environ, given_flags, names_place=names_place)
        if step.node_rank == 0 and "nnodes" in given_flags and not names_place:
            notices += _describe_other_number(step, args)
    # Several launchers on a node would each start a worker for each of its GPUs. A command line that says where the
    # nodes meet was written for torchrun, and has the workers that it has there.
    if step.task_count == len(step.nodes) and not names_place and "nproc_per_node" not in given_flags:
        derived["nproc_per_node"], more = count_node_gpus(environ)
        notices += more
    return Derivation(
        "the Slurm step",
        SLURM,
        derived,
        _name_variables(step, environ),
        is_first=step.node_rank == 0,
        notices=notices,
        location=step.location if "node_rank" not in given_flags else "",
        launch_step=_find_launch_step(step, args, given_flags) if names_place else None,
    )


def _name_variables(step: Step, environ: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the variables from which each value follows in this step."""
    unused = set() if step.addresses else {"SLURM_NODE_ALIASES"}
    named = {dest: tuple(name for name in names if name not in unused) for dest, names in _VARIABLES.items()}
    is_by_id = environ.get("SLURM_NODEID") == str(step.node_rank)
    return {**named, "node_rank": ("SLURM_NODEID" if is_by_id else "SLURM_STEP_NODELIST",)}


def _find_launch_step(step: Step, args: Namespace, given_flags: Container[str]) -> LaunchStep | None:
    """Return the step for jobs that need all its launchers; a step may also be shared by several smaller jobs."""
    is_whole = "nnodes" not in given_flags or node_range(args.nnodes)[1] >= step.task_count
    return LaunchStep(step.run_id, step.nodes[0]) if is_whole and len(step.nodes) > 1 else None


def _is_typed(environ: Mapping[str, str]) -> bool:
    """Whether this was typed into the shell of `srun --pty bash`: each node of the step has one, and one is used."""
    is_task = environ.get("SLURM_TASK_PID") == str(os.getpid())
    return "SLURM_PTY_PORT" in environ and not is_task and os.isatty(0)


def _has_gpus_per_task(environ: Mapping[str, str]) -> bool:
    """Whether a launcher alone on its node would get the GPUs of one task only: --gpus-per-task, --tres-per-task."""
    return "SLURM_GPUS_PER_TASK" in environ or "gres/gpu" in environ.get("SLURM_TRES_PER_TASK", "")  # since 23.11


def _derive_nodes(
    step: Step, args: Namespace, environ: Mapping[str, str], given_flags: Container[str], *, names_place: bool
) -> dict[str, object]:
    """Return how many nodes the job of a step of several tasks has, and where they meet.

    Raises:
        UsageError: See `derive_from_step`.
    """
    derived: dict[str, object] = {}
    nodes = len(step.nodes)
    is_given = "nnodes" in given_flags
    least, most = node_range(args.nnodes) if is_given else (nodes, nodes)
    if step.task_count > nodes and most < step.task_count:
        where = "this node" if nodes == 1 else f"its {nodes} nodes"
        gpus = (
            " (one job also needs --gpus-per-node in place of --gpus-per-task)" if _has_gpus_per_task(environ) else ""
        )
        message = (
            f"--ntasks-per-node: the Slurm step has {step.task_count} tasks on {where}, and each is a launcher with "
            f"workers of its own: give srun --ntasks={nodes} --ntasks-per-node=1 for one job, or --standalone "
            f"for {step.task_count} separate jobs{gpus}"
        )
        raise UsageError(message)
    if most == 1:
        message = (
            f"--nnodes: is {args.nnodes}, but the Slurm step has {nodes} nodes, and each would train a model of its "
            f"own: leave --nnodes out for one job, or give --standalone for {nodes} separate jobs"
        )
        raise UsageError(message)
    if names_place:
        _check_endpoint(step, args, given_flags)
    else:
        if least > step.task_count:
            message = (
                f"--nnodes: is {args.nnodes}, but the Slurm step has {step.task_count} tasks, and no other node knows "
                "where they meet: leave --nnodes out, or name the place with --rdzv-endpoint"
            )
            raise UsageError(message)
        derived = {"rdzv_backend": "c10d", "rdzv_endpoint": step.endpoint}
        if "rdzv_id" not in given_flags:
            derived["rdzv_id"] = step.run_id
    if not is_given:
        derived = {"nnodes": str(nodes), **derived}
    # Where switches are known, the coordinator gives ranks by location, but not those of a static job.
    is_by_location = step.location and not (names_place and args.rdzv_backend == "static")
    if "node_rank" not in given_flags and step.task_count == nodes and not is_by_location:
        derived["node_rank"] = step.node_rank
    return derived


def _describe_other_number(step: Step, args: Namespace) -> list[str]:
    """Say what a number of nodes means that the user gave, and that is not the step's."""
    most, launchers = node_range(args.nnodes)[1], step.task_count
    if most == launchers:
        return []
    told = f"--nnodes: {args.nnodes} applies, although the Slurm step has {launchers} launchers"
    if most > launchers:
        return [f"{told}: the job begins with them after the last_call_timeout, if no others come"]
    return [f"{told}: {launchers - most} of them {'is a spare' if launchers - most == 1 else 'are spares'}"]


def _check_endpoint(step: Step, args: Namespace, given_flags: Container[str]) -> None:
    """Refuse an endpoint, given by the user, by which the launchers of a step can't find each other."""
    if len(step.nodes) == 1:
        return
    from elastic_run.cli.endpoint_checks import check_endpoint, check_first_master

    check_endpoint(args, "node of the Slurm step", step.nodes[0])
    if "node_rank" not in given_flags and step.task_count == len(step.nodes):
        check_first_master(args, step.nodes)


def _describe_left_over(environ: Mapping[str, str], *, is_alone: bool) -> str:
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST")
    told = (
        f"{', '.join(f'{name}={environ[name]}' for name in names)} and others are left over from a Slurm step in which "
        "this process does not run, so they are not used"
    )
    if not is_alone:
        return told
    return (
        f"{told}, and this host trains alone; for one job of several nodes, use srun, or give each of them --nnodes, "
        "--rdzv-backend=c10d, --rdzv-endpoint=HOST:PORT and --rdzv-id"
    )


def _describe_lone_task(error: Exception, environ: Mapping[str, str]) -> str:
    task, step = environ["SLURM_PROCID"], f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
    return (
        f"task {task} of the Slurm step {step} runs a job of its own: {error}; for one job of all tasks, give each of "
        "them --nnodes, --rdzv-backend=c10d, --rdzv-endpoint=HOST:PORT and --rdzv-id"
    )


def _describe_nodes(environ: Mapping[str, str], hostname: str) -> list[str]:
    """Say which nodes of the job a launcher outside of a step does not use."""
    if nodes := find_nodes_elsewhere(environ, hostname):
        return [
            (
                f"this host, {hostname}, is none of this Slurm job's nodes, {nodes}, and the training runs here; one "
                "job on the nodes: srun --ntasks-per-node=1 elastic-run …"
            )
        ]
    return _describe_idle(count_idle_nodes(environ, hostname), environ)


def _describe_idle(idle: int, environ: Mapping[str, str], *, options: str = "") -> list[str]:
    if not idle:
        return []
    size = environ.get("SLURM_HET_SIZE", "")
    options += f"--het-group={','.join(map(str, range(int(size))))} " if size else ""
    others = "1 other node" if idle == 1 else f"{idle} other nodes"
    return [
        (
            f"this Slurm job has {others}, which a launcher that is started without srun doesn't use; one job on all "
            f"nodes: srun {options}--ntasks-per-node=1 elastic-run …"
        )
    ]
