"""Values that follow from the step of Slurm in which this launcher runs, unless a flag gives them.

srun starts a launcher for each task. With one launcher on each node of the step, the launchers are one job, whose
nodes, endpoint and id follow from Slurm's variables. Several launchers on a node are refused, and so are flags with
which the launchers would not become one job; the message names the remedy. --standalone asks for separate jobs.
"""

from __future__ import annotations

import os

from elastic_run.errors import UsageError
from elastic_run.schedulers.asked import Derivation, check_endpoint
from elastic_run.schedulers.slurm import StepError, count_idle_nodes, find_nodes_elsewhere, find_step

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic_run.schedulers.asked import Asked
    from elastic_run.schedulers.slurm import Step

#: The variables from which each value follows.
_VARIABLES = {
    "nnodes": ("SLURM_STEP_NUM_NODES",),
    "rdzv_backend": ("SLURM_STEP_NODELIST",),
    "rdzv_endpoint": ("SLURM_STEP_NODELIST", "SLURM_STEP_RESV_PORTS", "SLURM_NODE_ALIASES"),
    "rdzv_id": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    "node_rank": ("SLURM_NODEID",),
    "nproc_per_node": ("SLURM_STEP_GPUS", "CUDA_VISIBLE_DEVICES"),
}
_FLAGS = "--nnodes, --rdzv-backend=c10d, --rdzv-endpoint=HOST:PORT and --rdzv-id"


def derive_from_step(asked: Asked, environ: Mapping[str, str], *, has_left_slurm: bool) -> Derivation:
    """Return the values that follow from this launcher's step.

    Raises:
        UsageError: The launchers of the step would not become one job.
    """
    is_alone = asked.most == 1
    if has_left_slurm:
        notices = [] if asked.names_place else [_describe_left_over(environ, is_alone=is_alone)]
        return Derivation(notices=notices)
    # Typed into the shell of `srun --pty bash`: each node of the step has one, and one is used.
    is_task = environ.get("SLURM_TASK_PID") == str(os.getpid())
    if "SLURM_PTY_PORT" in environ and not is_task and os.isatty(0):
        nodes = environ.get("SLURM_JOB_NUM_NODES", "")
        idle = int(nodes) - 1 if is_alone and nodes.isdecimal() else 0
        return Derivation(notices=_describe_idle(idle, environ, options="--overlap "))
    hostname = os.uname().nodename
    try:
        step = find_step(environ, hostname)
    except StepError as error:
        return Derivation(notices=[_describe_lone_task(error, environ)] if is_alone else [])
    if step is None:
        return Derivation(notices=_describe_nodes(environ, hostname) if is_alone else [])
    derived: dict[str, object] = {}
    notices = []
    if step.task_count > 1:
        derived = _derive_nodes(step, asked, environ)
        if step.node_rank == 0 and "nnodes" in asked.given and not asked.names_place:
            notices = _describe_other_number(step, asked)
    unused = set() if step.addresses else {"SLURM_NODE_ALIASES"}
    variables = {dest: tuple(name for name in names if name not in unused) for dest, names in _VARIABLES.items()}
    if not environ.get("SLURM_NODEID"):
        variables["node_rank"] = ("SLURM_STEP_NODELIST",)
    return Derivation(
        "the Slurm step",
        "Slurm",
        derived,
        variables,
        # Several launchers on a node would each start a worker for each of its GPUs. A command line that says where the
        # nodes meet was written for torchrun, and has the workers that it has there.
        is_per_gpu=step.task_count == len(step.nodes) and not asked.names_place,
        is_first=step.node_rank == 0,
        notices=notices,
        location=step.location if "node_rank" not in asked.given else "",
    )


def _derive_nodes(step: Step, asked: Asked, environ: Mapping[str, str]) -> dict[str, object]:
    """Return how many nodes the job of a step of several tasks has, and where they meet."""
    derived: dict[str, object] = {}
    nodes, tasks = len(step.nodes), step.task_count
    is_given = "nnodes" in asked.given
    least, most = (asked.least, asked.most) if is_given else (nodes, nodes)
    if tasks > nodes and most < tasks:
        where = "this node" if nodes == 1 else f"its {nodes} nodes"
        # A launcher alone on its node would get the GPUs of one task only; --tres-per-task is there since Slurm 23.11.
        is_per_task = "SLURM_GPUS_PER_TASK" in environ or "gres/gpu" in environ.get("SLURM_TRES_PER_TASK", "")
        gpus = " (one job also needs --gpus-per-node in place of --gpus-per-task)" if is_per_task else ""
        message = (
            f"--ntasks-per-node: the Slurm step has {tasks} tasks on {where}, and each is a launcher with "
            f"workers of its own: give srun --ntasks={nodes} --ntasks-per-node=1 for one job, or --standalone "
            f"for {tasks} separate jobs{gpus}"
        )
        raise UsageError(message)
    if most == 1:
        message = (
            f"--nnodes: is {asked.nnodes}, but the Slurm step has {nodes} nodes, and each would train a model of its "
            f"own: leave --nnodes out for one job, or give --standalone for {nodes} separate jobs"
        )
        raise UsageError(message)
    if asked.names_place and nodes > 1:
        check_endpoint(asked, "node of the Slurm step", step.nodes[0])
        if "node_rank" not in asked.given and tasks == nodes:
            _check_first_master(step, asked)
    if not asked.names_place:
        if least > tasks:
            message = (
                f"--nnodes: is {asked.nnodes}, but the Slurm step has {tasks} tasks, and no other node knows "
                "where they meet: leave --nnodes out, or name the place with --rdzv-endpoint"
            )
            raise UsageError(message)
        derived = {"rdzv_backend": "c10d", "rdzv_endpoint": step.endpoint}
        if "rdzv_id" not in asked.given:
            derived["rdzv_id"] = step.run_id
    if not is_given:
        derived = {"nnodes": str(nodes), **derived}
    # Where switches are known, the coordinator gives ranks by location, but not those of a static job.
    is_by_location = step.location and not (asked.names_place and asked.backend == "static")
    if "node_rank" not in asked.given and tasks == nodes and not is_by_location:
        derived["node_rank"] = step.node_rank
    return derived


def _check_first_master(step: Step, asked: Asked) -> None:
    """Refuse a master that is another node of the step than the first one, which has rank 0."""
    names = [node.partition(".")[0] for node in step.nodes]
    host = asked.hosts[0].partition(".")[0] if asked.backend == "static" and asked.hosts else ""
    if host in names[1:]:
        flag, first = asked.place_flag, step.nodes[0]
        message = (
            f"{flag}: is {asked.hosts[0]}, but rank 0 of the Slurm step is on {first}: give {flag}={first}, or each "
            "node its --node-rank"
        )
        raise UsageError(message)


# --- notices ---------------------------------------------------------------------------------------------------------


def _describe_other_number(step: Step, asked: Asked) -> list[str]:
    """Say what a number of nodes means that the user gave, and that is not the step's."""
    spares = step.task_count - asked.most
    if not spares:
        return []
    told = f"--nnodes: {asked.nnodes} applies, although the Slurm step has {step.task_count} launchers"
    if spares < 0:
        return [f"{told}: the job begins with them after the last_call_timeout, if no others come"]
    return [f"{told}: {spares} of them {'is a spare' if spares == 1 else 'are spares'}"]


def _describe_left_over(environ: Mapping[str, str], *, is_alone: bool) -> str:
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST")
    told = (
        f"{', '.join(f'{name}={environ[name]}' for name in names)} and others are left over from a Slurm step in which "
        "this process does not run, so they are not used"
    )
    if not is_alone:
        return told
    return f"{told}, and this host trains alone; for one job of several nodes, use srun, or give each of them {_FLAGS}"


def _describe_lone_task(error: Exception, environ: Mapping[str, str]) -> str:
    task, step = environ["SLURM_PROCID"], f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
    return (
        f"task {task} of the Slurm step {step} runs a job of its own: {error}; for one job of all tasks, give each of "
        f"them {_FLAGS}"
    )


def _describe_nodes(environ: Mapping[str, str], hostname: str) -> list[str]:
    """Say which nodes of the job a launcher outside of a step does not use."""
    if nodes := find_nodes_elsewhere(environ, hostname):
        notice = (
            f"this host, {hostname}, is none of this Slurm job's nodes, {nodes}, and the training runs here; one job "
            "on the nodes: srun --ntasks-per-node=1 elastic-run …"
        )
        return [notice]
    return _describe_idle(count_idle_nodes(environ, hostname), environ)


def _describe_idle(idle: int, environ: Mapping[str, str], *, options: str = "") -> list[str]:
    if not idle:
        return []
    size = environ.get("SLURM_HET_SIZE", "")
    options += f"--het-group={','.join(map(str, range(int(size))))} " if size else ""
    others = "1 other node" if idle == 1 else f"{idle} other nodes"
    notice = (
        f"this Slurm job has {others}, which a launcher that is started without srun doesn't use; one job on all "
        f"nodes: srun {options}--ntasks-per-node=1 elastic-run …"
    )
    return [notice]
