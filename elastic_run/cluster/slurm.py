"""The step of Slurm that this launcher shares with others: how many nodes and launchers it has, where they could meet.

Slurm's variables leak: into a batch script that was submitted from a step, into a tmux server that outlives its job,
through ssh. So they count as this process's step only where everything agrees: the task's own variables are there, this
host is one of the step's nodes, and the variables without STEP, which sbatch sets anew, say the same as those with it.
In doubt there is no step, for a job that would have run must not be refused. A heterogeneous job (SLURM_HET_SIZE) has
no step here: its variables describe one of its components.
"""

from __future__ import annotations

from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Step", "find_shared_step"]

_NEEDED = ("SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS")
#: A variable of the step, and the one that says the same in a step but something else in a batch script.
_TWINS = (("SLURM_STEP_NUM_NODES", "SLURM_NNODES"), ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))


@dataclass(frozen=True, slots=True)
class Step:
    """A step of several tasks, each of which is a launcher.

    Attributes:
        nodes: Names of its nodes, in Slurm's order.
        task_count: Number of its tasks, on all nodes.
        port: A port for its launchers, which its neighbours don't take.
        run_id: A name for its job, new in each of the job's lives.
    """

    nodes: tuple[str, ...]
    task_count: int
    port: int
    run_id: str

    @property
    def endpoint(self) -> str:
        """Where its launchers can meet: on its first node."""
        return f"{self.nodes[0]}:{self.port}"


def find_shared_step(environ: Mapping[str, str], hostname: str) -> Step | None:
    """Find the step of Slurm in which this process is one of several tasks.

    Args:
        environ: The environment.
        hostname: This machine's name, with or without its domain.

    Returns:
        The step, or None where this process is no task of one, or its only task.
    """
    if environ.get("SLURM_HET_SIZE") or not all(environ.get(name) for name in _NEEDED):
        return None
    if environ["SLURM_STEP_NUM_TASKS"] == "1" or not all(_agree(environ, *names) for names in _TWINS):
        return None
    # Imported here: its regular expressions take longer than all else, and most launchers are no step's or alone in it.
    from elastic_run.slurm_variables import parse_nodelist, step_port  # noqa: PLC0415

    try:
        nodes = parse_nodelist(environ["SLURM_STEP_NODELIST"])
        task_count = int(environ["SLURM_STEP_NUM_TASKS"])
        port = step_port(int(environ["SLURM_JOB_ID"]), int(environ["SLURM_STEP_ID"]))
    except ValueError:
        return None
    if _short(hostname) not in map(_short, nodes):
        return None
    run_id = f"{environ['SLURM_JOB_ID']}.{environ.get('SLURM_RESTART_COUNT') or 0}"
    return Step(nodes=nodes, task_count=task_count, port=port, run_id=run_id)


def _agree(environ: Mapping[str, str], of_step: str, of_task: str) -> bool:
    return environ.get(of_task) in (None, environ.get(of_step))


def _short(name: str) -> str:
    return name.partition(".")[0]
