"""The step of Slurm that this launcher is a task of, and the values that follow from it, unless a flag gives them.

srun starts a launcher for each task. With one launcher on each node of the step, the launchers are one job, whose
nodes, endpoint and id follow from Slurm's variables. Flags and layouts with which they would not become one job are
refused; the message names the remedy. Slurm's variables leak: into a batch script that was submitted from a step, into
a tmux server that outlives its job, through ssh. So they count as this process's step only under three conditions. The
task's own variables are there. This host is one of the step's nodes. This process runs in the step by Slurm's daemon
above it or by its control group; where neither can be seen, as in a container, the variables without STEP, which sbatch
and salloc set anew, must not show a batch script or a shell. In doubt nothing is derived; but one of several tasks
whose step can't be used raises `StepError`, since each of the tasks would train alone.
"""

from __future__ import annotations

import os

from elastic_run.notices import UsageError
from elastic_run.records import dataclass
from elastic_run.schedulers.derivation import Derivation, check_endpoint
from elastic_run.schedulers.slurm_variables import BATCH_STEP_ID, find_port, parse_nodelist, read_running_step

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic_run.schedulers.derivation import Asked

_NEEDED = ("SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS")
_NUMBERS = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS")
#: A variable of the step, and the variable that has the same value in a step, and the job's value in a batch script, in
#: the shell of salloc, and in a step of `srun --preserve-env`.
_TWINS = (("SLURM_STEP_NUM_NODES", "SLURM_NNODES"), ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
#: Nodes that may serve the job's store: the loss of one of them, or of two, does not end the job.
_STORE_NODES = 3
#: The name of a step that has one, by its number (SLURM_INTERACTIVE_STEP of slurm.h; -6 since Slurm 26.05).
_NAMED_STEPS = {"4294967290": "interactive", "-6": "interactive"}
#: The variables from which each value follows.
_VARIABLES = {
    "nnodes": ("SLURM_STEP_NUM_NODES",),
    "rdzv_backend": ("SLURM_STEP_NODELIST",),
    "rdzv_endpoint": ("SLURM_STEP_NODELIST", "SLURM_STEP_RESV_PORTS"),
    "rdzv_id": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    "nproc_per_node": ("SLURM_STEP_GPUS", "CUDA_VISIBLE_DEVICES"),
}
_FLAGS = "--nnodes, --rdzv-backend=c10d, --rdzv-endpoint=HOST:PORT and --rdzv-id"


#: The most components of a heterogeneous job; Slurm allows 128 (MAX_HET_JOB_COMPS of slurm.h).
_MOST_COMPONENTS = 128


class StepError(ValueError):
    """This process is one of several tasks, but the nodes of their step can't be told; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step, each of whose tasks is a launcher."""

    #: In the order of SLURM_STEP_NODELIST, which is sorted, also with a host file and --distribution=arbitrary (26.05)
    nodes: tuple[str, ...]
    node_rank: int
    task_count: int
    port: int  # Which neighbouring steps don't take
    run_id: str  # New each time Slurm starts the job
    location: str = ""  # The switches above this node and its place in the step: sorts near nodes side by side

    @property
    def endpoint(self) -> str:
        """The endpoint of its launchers: on its first node, or on the next ones if the first is lost."""
        return ",".join(f"{node}:{self.port}" for node in self.nodes[:_STORE_NODES])


def find_step(environ: Mapping[str, str], hostname: str) -> Step | None:
    """Return the step of which this process is a task, or None where it is no task of one, or its only task."""
    has_all = all(environ.get(name) for name in _NEEDED)
    if not (has_all and _has_step(environ) and _is_in_step(environ)):
        return None
    try:
        return _read_step(environ, hostname)
    except ValueError as error:
        # Numbers count the tasks of all components of a heterogeneous job, SLURM_STEP_NUM_TASKS those of one.
        if (environ["SLURM_PROCID"], environ["SLURM_STEP_NUM_TASKS"]) == ("0", "1"):
            return None
        raise StepError(str(error)) from None


def _read_step(environ: Mapping[str, str], hostname: str) -> Step:
    """Read the step from its variables; ValueError says why that is not possible."""
    for name in _NUMBERS:
        if not environ[name].isdecimal() and environ[name] not in _NAMED_STEPS:
            message = f"{name}={environ[name]!r} is not a number"
            raise ValueError(message)
    nodes = parse_nodelist(environ["SLURM_STEP_NODELIST"])
    # The variables of a heterogeneous job may describe a part of the step.
    if environ.get("SLURM_HET_SIZE") and set(nodes) != _find_component_nodes(environ):
        message = "the job is heterogeneous, and Slurm's variables name the nodes of one component only"
        raise ValueError(message)
    job = environ.get("SLURM_JOB_NODELIST")
    if job and not set(nodes) <= set(parse_nodelist(job)):  # perhaps of another job's step
        message = f"the step's nodes, {environ['SLURM_STEP_NODELIST']}, are not all among the job's nodes, {job}"
        raise ValueError(message)
    node_rank = _find_node(nodes, environ, hostname)
    tasks = int(environ["SLURM_STEP_NUM_TASKS"])
    count = environ.get("SLURM_STEP_NUM_NODES") or str(len(nodes))
    if tasks < len(nodes) or count != str(len(nodes)):
        message = (
            f"SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']} does not have the {tasks} tasks and {count} nodes "
            "of SLURM_STEP_NUM_TASKS and SLURM_STEP_NUM_NODES"
        )
        raise ValueError(message)
    # SLURM_TOPOLOGY_ADDR is ``s0.s4.node7`` where the pattern is ``switch.switch.node``.
    levels = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").count(".")
    switches = environ.get("SLURM_TOPOLOGY_ADDR", "").split(".", levels)[:levels]
    life = (environ["SLURM_JOB_ID"], environ["SLURM_STEP_ID"], environ.get("SLURM_RESTART_COUNT") or "0")
    return Step(
        nodes=nodes,
        node_rank=node_rank,
        task_count=tasks,
        port=find_port(environ) if tasks > 1 else 0,
        run_id=".".join(life),
        location=f"{'.'.join(switches)}/{node_rank:07}" if switches and all(switches) else "",
    )


def _find_component_nodes(environ: Mapping[str, str]) -> set[str]:
    """Return the nodes of all components of a heterogeneous job, none where a list is missing."""
    size = min(int(environ["SLURM_HET_SIZE"]), _MOST_COMPONENTS)
    lists = [environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{group}", "") for group in range(size)]
    return {node for text in lists for node in parse_nodelist(text)} if all(lists) else set()


def _find_node(nodes: tuple[str, ...], environ: Mapping[str, str], hostname: str) -> int:
    """Return this node's place in the step; ValueError says why it has none.

    Slurm may know a node by another name than the host's own (NodeName and NodeHostname of slurm.conf). Its name for it
    counts where Slurm has started this process or its parent, so that the variable can't have come through ssh.
    """
    names = [_short(node) for node in nodes]
    if _short(hostname) in names:
        return names.index(_short(hostname))
    known_as = environ.get("SLURMD_NODENAME")
    if known_as in nodes and is_started_by_slurm(environ):
        return nodes.index(known_as)
    message = f"this host, {hostname}, is none of the step's nodes, {environ['SLURM_STEP_NODELIST']}"
    raise ValueError(message)


def is_started_by_slurm(environ: Mapping[str, str]) -> bool:
    """Whether Slurm has started this process or its parent, so that its variables can't have come through ssh."""
    return environ.get("SLURM_TASK_PID") in {str(os.getpid()), str(os.getppid())}


def is_left_over(environ: Mapping[str, str]) -> bool:
    """Whether the variables are of a step in which this process is seen not to run, as in a shell that outlived it."""
    running = read_running_step()
    if running is None or not all(environ.get(name) for name in _NEEDED) or _is_of_new_job(environ):
        return False
    return not _is_running(environ) and running != f"{environ['SLURM_JOB_ID']}.batch"


# --- whose variables they are ----------------------------------------------------------------------------------------


def _has_step(environ: Mapping[str, str]) -> bool:
    return environ.get("SLURM_STEP_ID", "") not in {"", BATCH_STEP_ID}


def _is_in_step(environ: Mapping[str, str]) -> bool:
    """Whether the variables of a step are this process's, and not left over in a batch script or a shell."""
    return _is_running(environ) or (read_running_step() is None and not _is_of_new_job(environ))


def _is_of_new_job(environ: Mapping[str, str]) -> bool:
    """Whether the variables without STEP are those of a newer job, which a task has requested by sbatch or salloc."""
    differ = any(environ.get(of_task) not in {None, environ.get(of_step)} for of_step, of_task in _TWINS)
    return differ and environ.get("SLURM_NNODES") == environ.get("SLURM_JOB_NUM_NODES")


def _is_running(environ: Mapping[str, str]) -> bool:
    """Whether Slurm's daemon says that this process runs in the step of these variables."""
    job, _, step = (read_running_step() or "").partition(".")
    number = environ.get("SLURM_STEP_ID", "")
    if step.partition("+")[0] not in {number, _NAMED_STEPS.get(number)}:
        return False
    # SLURM_JOB_ID is that of a heterogeneous job's first component, while each component has a job of its own.
    return bool(environ.get("SLURM_HET_SIZE")) or job in {environ.get("SLURM_JOB_ID"), environ.get("SLURM_JOB_SLUID")}


def _short(name: str) -> str:
    return name.partition(".")[0]


# --- what follows from the step --------------------------------------------------------------------------------------


def derive_from_step(asked: Asked, environ: Mapping[str, str], *, has_left_slurm: bool) -> Derivation:
    """Return the values that follow from this launcher's step; UsageError if its launchers would not become one job."""
    is_alone = asked.most == 1
    if has_left_slurm:
        notices = [] if asked.names_place else [_describe_left_over(environ, is_alone=is_alone)]
        return Derivation(notices=notices)
    # Typed into the shell of `srun --pty bash`: each node of the step has one, and one is used.
    is_task = environ.get("SLURM_TASK_PID") == str(os.getpid())
    if "SLURM_PTY_PORT" in environ and not is_task and os.isatty(0):
        nodes = environ.get("SLURM_JOB_NUM_NODES", "")
        idle = int(nodes) - 1 if is_alone and nodes.isdecimal() else 0
        return Derivation(notices=_describe_idle(idle, "--overlap "))
    hostname = os.uname().nodename
    try:
        step = find_step(environ, hostname)
    except StepError as error:
        return Derivation(notices=[_describe_lone_task(error, environ)] if is_alone else [])
    if step is None:
        return Derivation(notices=_describe_nodes(environ, hostname) if is_alone else [])
    derived = _derive_nodes(step, asked) if step.task_count > 1 else {}
    place = "SLURM_NODEID" if environ.get("SLURM_NODEID") else "SLURM_STEP_NODELIST"
    return Derivation(
        "the Slurm step",
        "Slurm",
        derived,
        {**_VARIABLES, "node_rank": (place,)},
        # Several launchers on a node would each start a worker for each of its GPUs. A command line that says where the
        # nodes meet was written for torchrun, and has the workers that it has there.
        is_per_gpu=step.task_count == len(step.nodes) and not asked.names_place,
        is_first=step.node_rank == 0,
        location=step.location if "node_rank" not in asked.given else "",
    )


def _derive_nodes(step: Step, asked: Asked) -> dict[str, object]:
    """Return how many nodes the job of a step of several tasks has, and where they meet."""
    derived: dict[str, object] = {}
    nodes, tasks = len(step.nodes), step.task_count
    is_given = "nnodes" in asked.given
    least, most = (asked.least, asked.most) if is_given else (nodes, nodes)
    if tasks > nodes and most < tasks:
        where = "this node" if nodes == 1 else f"its {nodes} nodes"
        message = (
            f"--ntasks-per-node: the Slurm step has {tasks} tasks on {where}, and each is a launcher with "
            f"workers of its own: give srun --ntasks={nodes} --ntasks-per-node=1 for one job, or --standalone "
            f"for {tasks} separate jobs"
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


# --- notices ---------------------------------------------------------------------------------------------------------


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
    nodes, number = environ.get("SLURM_JOB_NODELIST", ""), environ.get("SLURM_JOB_NUM_NODES", "")
    try:
        is_one_of_them = _short(hostname) in map(_short, parse_nodelist(nodes))
    except ValueError:
        return []
    if is_one_of_them:
        has_step = _has_step(environ) and _is_in_step(environ)
        return _describe_idle(int(number) - 1 if number.isdecimal() and not has_step else 0)
    # A shell of salloc on another host, such as a login node, has no variable of a task; a batch script has one.
    if environ.get("SLURM_PROCID") or environ.get("SLURM_STEP_ID"):
        return []
    notice = (
        f"this host, {hostname}, is none of this Slurm job's nodes, {nodes}, and the training runs here; one job "
        "on the nodes: srun --ntasks-per-node=1 elastic-run …"
    )
    return [notice]


def _describe_idle(idle: int, options: str = "") -> list[str]:
    if not idle:
        return []
    others = "1 other node" if idle == 1 else f"{idle} other nodes"
    notice = (
        f"this Slurm job has {others}, which a launcher that is started without srun doesn't use; one job on all "
        f"nodes: srun {options}--ntasks-per-node=1 elastic-run …"
    )
    return [notice]
