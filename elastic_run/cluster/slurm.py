"""The step of Slurm that this launcher is a task of: its nodes and tasks, and where its launchers meet.

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

__all__ = ["Step", "count_idle_nodes", "find_step"]

_NEEDED = ("SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS")
#: A variable of the step, and the one that says the same in a step but something else in a batch script.
_TWINS = (("SLURM_STEP_NUM_NODES", "SLURM_NNODES"), ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
#: Nodes that may serve the job's store: the loss of one of them, or of two, does not end the job.
_STORE_NODES = 3


@dataclass(frozen=True, slots=True)
class Step:
    """A step, each of whose tasks is a launcher.

    Attributes:
        nodes: Names of its nodes, in Slurm's order.
        node_rank: This node's place among them, from 0.
        task_count: Number of its tasks, on all nodes.
        port: A port for its launchers, which its neighbours don't take.
        run_id: A name for its job, new in each of the job's lives.
    """

    nodes: tuple[str, ...]
    node_rank: int
    task_count: int
    port: int
    run_id: str

    @property
    def endpoint(self) -> str:
        """Where its launchers can meet: on its first node, or on the next ones if that is lost."""
        return ",".join(f"{node}:{self.port}" for node in self.nodes[:_STORE_NODES])


def find_step(environ: Mapping[str, str], hostname: str) -> Step | None:
    """Find the step of Slurm of which this process is a task.

    Args:
        environ: The environment.
        hostname: This machine's name, with or without its domain.

    Returns:
        The step, or None where this process is no task of one.
    """
    if environ.get("SLURM_HET_SIZE") or not all(environ.get(name) for name in _NEEDED):
        return None
    if not all(_agree(environ, *names) for names in _TWINS):
        return None
    # Imported here: its regular expressions take longer than all else, and most launchers are no step's.
    from elastic_run.slurm_variables import find_port, parse_nodelist  # noqa: PLC0415

    try:
        nodes = parse_nodelist(environ["SLURM_STEP_NODELIST"])
        task_count = int(environ["SLURM_STEP_NUM_TASKS"])
        port = find_port(environ)
    except ValueError:
        return None
    names = [_short(node) for node in nodes]
    if _short(hostname) not in names:
        return None
    life = (environ["SLURM_JOB_ID"], environ["SLURM_STEP_ID"], environ.get("SLURM_RESTART_COUNT") or "0")
    return Step(
        nodes=nodes,
        node_rank=names.index(_short(hostname)),
        task_count=task_count,
        port=port,
        run_id=".".join(life),
    )


def count_idle_nodes(environ: Mapping[str, str], hostname: str) -> int:
    """Return how many nodes of this batch script's job a launcher on this node alone leaves idle.

    Args:
        environ: The environment.
        hostname: This machine's name, with or without its domain.

    Returns:
        0 outside of a batch script, and where the job has one node.
    """
    nodes = environ.get("SLURM_JOB_NUM_NODES", "")
    is_batch_script = environ.get("SLURM_JOB_NODELIST") and not environ.get("SLURM_STEP_ID")
    if not (is_batch_script and nodes.isdecimal() and int(nodes) > 1):
        return 0
    from elastic_run.slurm_variables import parse_nodelist  # noqa: PLC0415 - see `find_step`

    try:
        names = [_short(node) for node in parse_nodelist(environ["SLURM_JOB_NODELIST"])]
    except ValueError:
        return 0
    return int(nodes) - 1 if _short(hostname) in names else 0


def _agree(environ: Mapping[str, str], of_step: str, of_task: str) -> bool:
    return environ.get(of_task) in (None, environ.get(of_step))


def _short(name: str) -> str:
    return name.partition(".")[0]
