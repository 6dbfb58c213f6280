"""Flags against the step of Slurm in which this launcher runs.

srun starts a launcher per task. Launchers that are told of one node, the default, don't know of each other: each trains
a model of its own, as rank 0, and all end with 0. So that is refused, and the message says what has to be added for one
job. --standalone says that separate jobs are meant.
"""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.cli.config import hosts_rendezvous
from elastic_run.cli.values import BUILT_IN_BACKENDS, node_range
from elastic_run.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping

    from elastic_run.cluster.slurm import Step


def check_step(args: Namespace, environ: Mapping[str, str]) -> None:
    """Refuse flags by which the launchers of one step would not become one job."""
    # A launcher inside a worker is no task of the step. A plug-in may have its own way to count nodes.
    if contract.ENV_RUN_ID in environ or args.standalone or args.rdzv_backend not in BUILT_IN_BACKENDS:
        return
    if "SLURM_PROCID" not in environ or _is_typed(environ):
        return
    from elastic_run.cluster.slurm import find_shared_step  # noqa: PLC0415 - most launchers run outside of Slurm

    step = find_shared_step(environ, os.uname().nodename)
    if step is not None:
        _check_shared(step, args)


def _is_typed(environ: Mapping[str, str]) -> bool:
    """Whether this was typed into the shell of `srun --pty bash`: each node of the step has one, and one is used."""
    is_task = environ.get("SLURM_TASK_PID") == str(os.getpid())
    return "SLURM_PTY_PORT" in environ and not is_task and os.isatty(0)


def _check_shared(step: Step, args: Namespace) -> None:
    least, most = node_range(args.nnodes)
    given = str(most) if least == most else args.nnodes
    nodes = len(step.nodes)
    is_crowded = most < step.task_count and step.task_count > nodes
    if is_crowded:
        where = "this node" if nodes == 1 else f"its {nodes} nodes"
        message = (
            f"--nnodes: is {given}, but the Slurm step has {step.task_count} tasks on {where}, and each is a "
            f"launcher with workers of its own: {_one_job(step, args, is_crowded=True)}, or --standalone for "
            f"{step.task_count} separate jobs"
        )
        raise UsageError(message)
    if most == 1:
        message = (
            f"--nnodes: is {given}, but the Slurm step has {nodes} nodes, and each would train a model of its "
            f"own: {_one_job(step, args)}, or --standalone for {nodes} separate jobs"
        )
        raise UsageError(message)
    if hosts_rendezvous(args):
        message = (
            f"--rdzv-endpoint: is needed in a Slurm step of {step.task_count} tasks, or each launcher would wait for "
            f"the others at an address of its own: {_one_job(step, args)}"
        )
        raise UsageError(message)


def _one_job(step: Step, args: Namespace, *, is_crowded: bool = False) -> str:
    """Say what has to be given, ready to be pasted, for one job with one launcher on each node."""
    nodes = len(step.nodes)
    parts = [f"srun --ntasks={nodes} --ntasks-per-node=1"] if is_crowded else []
    if nodes > 1 or not is_crowded:
        size = args.nnodes if node_range(args.nnodes)[1] > 1 and not is_crowded else nodes
        meeting = f"--rdzv-backend=c10d --rdzv-endpoint={step.endpoint} --rdzv-id={step.run_id}"
        parts.append(f"elastic-run --nnodes={size} {meeting}" if is_crowded else f"--nnodes={size} {meeting}")
    return f"give {' '.join(parts)} for one job"
