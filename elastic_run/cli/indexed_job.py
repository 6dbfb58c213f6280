"""Values that follow from the indexed Job of Kubernetes in which this launcher runs, unless a flag gives them.

Each pod of the Job runs a launcher. Together they are one job, whose endpoints, id and node ranks follow from the pods'
names and indexes. Kubernetes does not tell a pod the number of pods, so --nnodes or PET_NNODES has to give it.
"""

from __future__ import annotations

from elastic_run.cli.derivation import Derivation
from elastic_run.cli.node_gpus import count_node_gpus
from elastic_run.cli.origins import KUBERNETES
from elastic_run.cli.values import node_range
from elastic_run.cluster.kubernetes import PodNameError, find_indexed_pod, full_hostname
from elastic_run.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Container, Mapping

    from elastic_run.cluster.kubernetes import IndexedPod


#: The variables from which each value follows; the host name's stands for the name itself.
_VARIABLES = {
    "rdzv_backend": ("JOB_COMPLETION_INDEX",),
    "rdzv_endpoint": ("HOSTNAME",),
    "rdzv_id": ("HOSTNAME",),
    "node_rank": ("JOB_COMPLETION_INDEX",),
    "nproc_per_node": ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"),
}


def derive_from_indexed_job(
    args: Namespace, environ: Mapping[str, str], given_flags: Container[str], *, names_place: bool
) -> Derivation:
    """Return the values that follow from this pod's Job.

    Args:
        args: The command line.
        environ: The environment.
        given_flags: Names of the values that the user gave.
        names_place: Whether the user said where the nodes meet.

    Raises:
        UsageError: The pods' launchers would not become one job.
    """
    index = environ["JOB_COMPLETION_INDEX"]
    if index and not index.isdecimal() and not names_place and node_range(args.nnodes)[1] > 1:
        message = (
            f"JOB_COMPLETION_INDEX: {index!r} is not a whole number from 0 up: remove it from the pod template's env, "
            "since Kubernetes sets it in an indexed Job, or say where the pods meet with --rdzv-endpoint"
        )
        raise UsageError(message)
    pod = find_indexed_pod(environ, full_hostname())
    if pod is None or (names_place and "nnodes" not in given_flags):
        return Derivation()
    if "nnodes" not in given_flags:
        message = (
            f"--nnodes: this is pod {pod.index} of an indexed Job (JOB_COMPLETION_INDEX), and Kubernetes does not say "
            "how many pods that Job has: set PET_NNODES to the Job's completions, or give --standalone for a separate "
            "job in each pod"
        )
        raise UsageError(message)
    derived = _derive_nodes(pod, args, given_flags, names_place=names_place)
    notices = [] if names_place or "rdzv_id" in given_flags else _describe_jobset(pod)
    if not names_place and "nproc_per_node" not in given_flags:
        derived["nproc_per_node"], more = count_node_gpus(environ)
        notices += more
    return Derivation("the Kubernetes Job", KUBERNETES, derived, _VARIABLES, is_first=pod.index == 0, notices=notices)


def _describe_jobset(pod: IndexedPod) -> list[str]:
    """Return a notice for the user of a JobSet: each of its Jobs is a job of its own.

    Raises:
        UsageError: This is not the first Job of a replicated job, so that several would train side by side.
    """
    found = pod.replicated_job
    if found is None:
        # With spec.network.subdomain the pods of a JobSet look like pods of an indexed Job with a number in its name.
        is_like_one = pod.index == 0 and pod.job_name.rpartition("-")[2].isdecimal()
        return [f"this job has the pods of {pod.job_name}, and not those of other Jobs of a JobSet"] * is_like_one
    jobset, number = found
    if number:
        message = (
            f"--nnodes: this pod is of Job {number} of a replicated job of the JobSet {jobset}, and each Job would "
            "train a model of its own: set replicas to 1 and completions to the number of nodes, or give "
            f"--rdzv-id={pod.job_name} for separate jobs"
        )
        raise UsageError(message)
    return [f"of the JobSet {jobset}, this job has the pods of {pod.job_name} only"] if pod.index == 0 else []


def _name_first(pod: IndexedPod) -> str:
    """Return the name of the Job's first pod; "" if other pods can't find it."""
    try:
        return pod.find_endpoint(1).rpartition(":")[0]
    except PodNameError:
        return ""


def _derive_nodes(
    pod: IndexedPod, args: Namespace, given_flags: Container[str], *, names_place: bool
) -> dict[str, object]:
    """Return where the nodes of a job of several meet, and this one's rank.

    Raises:
        UsageError: See `derive_from_indexed_job`.
    """
    most = node_range(args.nnodes)[1]
    if most == 1:
        return {}
    if pod.index >= most:
        message = (
            f"--nnodes: is {args.nnodes}, but this is pod {pod.index} of its Job (JOB_COMPLETION_INDEX, from 0): give "
            "the number of the Job's completions"
        )
        raise UsageError(message)
    derived: dict[str, object] = {}
    if names_place:
        from elastic_run.cli.endpoint_checks import check_endpoint

        check_endpoint(args, "pod of the Job", _name_first(pod))
    else:
        try:
            derived = {"rdzv_backend": "c10d", "rdzv_endpoint": pod.find_endpoint(most)}
            if "rdzv_id" not in given_flags:
                derived["rdzv_id"] = pod.job_name
        except PodNameError as error:
            message = (
                f"JOB_COMPLETION_INDEX={pod.index}: {error}; or give --rdzv-backend=c10d and --rdzv-endpoint=HOST:PORT"
            )
            raise UsageError(message) from None
    if "node_rank" not in given_flags:
        derived["node_rank"] = pod.index
    return derived
