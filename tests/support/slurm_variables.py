"""A task of Slurm without Slurm: its variables, those of its batch script, and a parent with the daemon's title."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from elastic_run.cli import scheduler_values
from elastic_run.schedulers.slurm_variables import step_port

if TYPE_CHECKING:
    from argparse import Namespace

    from elastic_run.cli.request import Origins

HOST = os.uname().nodename.partition(".")[0]
#: What a task of `srun` on three nodes sees, this host being the second.
STEP = {
    "SLURM_JOB_ID": "41",
    "SLURM_JOB_NUM_NODES": "5",
    "SLURM_NNODES": "3",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": f"a7,{HOST},c",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_TASKS_PER_NODE": "1(x3)",
}
CROWDED = {"SLURM_STEP_NUM_TASKS": "12", "SLURM_STEP_TASKS_PER_NODE": "4(x3)", "SLURM_TASKS_PER_NODE": "4(x3)"}
TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
ONE_NODE = {
    "SLURM_NNODES": "1",
    "SLURM_STEP_NODELIST": HOST,
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURM_TASKS_PER_NODE": "4",
}
PORT = step_port(41, 2)
PLACE = f"a7:{PORT},{HOST}:{PORT},c:{PORT}"
MEETING = f"--rdzv-backend=c10d --rdzv-endpoint={PLACE} --rdzv-id=41.2.0"
BATCH = {
    "SLURM_JOB_ID": "41",
    "SLURM_JOB_NODELIST": f"a7,{HOST},c",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_PROCID": "0",
}


__all__ = ["task_of"]

_PARENT = """exec -a "slurmstepd: [$0]" bash -c '"$@"; exit $?' slurmstepd "$@" """


def task_of(step: str) -> tuple[str, ...]:
    """Return the words in front of a command that make it a task of a step, such as ``4.0``."""
    return ("bash", "-c", _PARENT, step)


def complete_from_cluster(args: Namespace, environ: dict[str, str], origins: Origins | None = None) -> list[str]:
    """Fill in what follows from the scheduler, and return the notices."""
    return scheduler_values.complete_from_cluster(args, environ, origins).notices
