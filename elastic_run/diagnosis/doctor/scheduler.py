"""Variables of Slurm and Kubernetes: they agree with each other and with this host."""

from __future__ import annotations

from elastic_run.cluster.slurm import StepError, count_idle_nodes, find_step, is_left_over
from elastic_run.diagnosis.doctor.finding import problem, warning

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic_run.diagnosis.doctor.finding import Finding, Subject


#: A longer number can't be meant, and Python reads no more than 4,300 digits.
_MOST_DIGITS = 18


def check(subject: Subject) -> list[Finding]:
    """Return the findings about the variables of this job's scheduler."""
    environ = subject.environ
    if "SLURM_JOB_ID" in environ:
        return judge_slurm(environ, subject.hostname)
    return judge_kubernetes(environ, subject.hostname) if "JOB_COMPLETION_INDEX" in environ else []


def judge_slurm(environ: Mapping[str, str], hostname: str) -> list[Finding]:
    """Return the findings about Slurm's variables on a host of this name."""
    evidence = f"Slurm job {environ['SLURM_JOB_ID']}"
    if is_left_over(environ):
        what = "the variables of a Slurm step are left over: this process does not run in it, and they are not used"
        return [warning(what, evidence, "srun --ntasks-per-node=1 elastic-run ...; elsewhere unset them")]
    try:
        step = find_step(environ, hostname)
    except StepError as error:
        what = f"the variables of Slurm contradict each other: {error}"
        remedy = "start with srun --ntasks-per-node=1, or without these variables: env -u SLURM_JOB_ID ..."
        return [problem(what, evidence, remedy)]
    if step is not None and step.task_count > len(step.nodes):
        what = f"the Slurm step has {step.task_count} tasks on {len(step.nodes)} nodes, and each would be a launcher"
        remedy = f"srun --ntasks={len(step.nodes)} --ntasks-per-node=1"
        return [problem(what, evidence, remedy)]
    idle = count_idle_nodes(environ, hostname)
    if idle:
        what = f"the Slurm job has {idle} more nodes, which a launcher without srun does not use"
        return [warning(what, evidence, "srun --ntasks-per-node=1 elastic-run ...")]
    return []


def judge_kubernetes(environ: Mapping[str, str], hostname: str) -> list[Finding]:
    """Judge variables of an indexed Job in a pod of this name."""
    index, nodes = environ["JOB_COMPLETION_INDEX"], environ.get("PET_NNODES", "")
    evidence = f"JOB_COMPLETION_INDEX={index}"
    if not index.isdecimal() or len(index) > _MOST_DIGITS:
        what = f"JOB_COMPLETION_INDEX={index} is not a number"
        return [problem(what, evidence, "completionMode: Indexed sets it; remove it from the pod template's env")]
    if not nodes:
        what = "this is a pod of an indexed Job, and nothing says how many pods it has"
        return [problem(what, evidence, "set PET_NNODES to the Job's completions in the pod template's env")]
    most = nodes.rpartition(":")[2]
    if most.isdecimal() and len(most) <= _MOST_DIGITS and int(index) >= int(most):
        what = f"PET_NNODES={nodes}, but this is pod {index} of the Job, counted from 0"
        return [problem(what, evidence, "set PET_NNODES to the Job's completions")]
    if "." not in hostname and not hostname.endswith(f"-{index}"):
        what = f"the host name {hostname} does not end with -{index}, so the other pods' names can't be told"
        return [problem(what, evidence, "remove hostname from the pod template, or give --rdzv-endpoint=HOST:PORT")]
    return []
