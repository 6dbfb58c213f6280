"""Values that follow from the indexed Job of Kubernetes in which this launcher runs, unless a flag gives them.

Kubernetes gives each pod of an indexed Job (``completionMode: Indexed``), of a JobSet too, the variable
JOB_COMPLETION_INDEX and a host name that ends with it: ``train-2``. With a headless Service, named in the pod template
as ``subdomain``, the pods have DNS names: ``train-2.SERVICE.NAMESPACE.svc.cluster.local``; the kubelet writes the pod's
own into its /etc/hosts. Each pod runs a launcher. Together they are one job, whose endpoints, id and node ranks follow
from the pods' names and indexes. No variable tells the number of pods, so --nnodes or PET_NNODES has to give it.
https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/
"""

from __future__ import annotations

import socket

from elastic_run.contract import DEFAULT_C10D_PORT
from elastic_run.notices import UsageError
from elastic_run.records import dataclass
from elastic_run.schedulers.derivation import Derivation, check_endpoint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic_run.schedulers.derivation import Asked

#: Pods that may serve the job's store: the loss of one of them, or of two, does not end the job.
_STORE_NODES = 3
#: The variables from which each value follows; the host name's stands for the name itself.
_VARIABLES = {
    "rdzv_backend": ("JOB_COMPLETION_INDEX",),
    "rdzv_endpoint": ("HOSTNAME",),
    "rdzv_id": ("HOSTNAME",),
    "node_rank": ("JOB_COMPLETION_INDEX",),
    "nproc_per_node": ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"),
}


class PodNameError(ValueError):
    """The names of the other pods don't follow from this pod's; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class _Pod:
    """A pod of an indexed Job: its place in the Job, from 0, and its host name, with the domain if it has one."""

    index: int
    hostname: str

    @property
    def job_name(self) -> str:
        """The host names of the Job's pods, without the index."""
        name, _, index = self.hostname.partition(".")[0].rpartition("-")
        if not name or index != str(self.index):
            message = f"the host name {self.hostname} does not end with -{self.index}"
            raise PodNameError(message)
        return name

    def find_endpoint(self, nodes: int) -> str:
        """Return where the Job's pods can meet: at the first one, or at the next ones if that is lost."""
        name, domain = self.job_name, self.hostname.partition(".")[2]
        if not domain:
            message = (
                f"the host name {self.hostname} has no domain, so that other pods can't find it: create a headless "
                "Service, and name it in the pod template as subdomain"
            )
            raise PodNameError(message)
        return ",".join(f"{name}-{index}.{domain}:{DEFAULT_C10D_PORT}" for index in range(min(nodes, _STORE_NODES)))


def derive_from_indexed_job(asked: Asked, environ: Mapping[str, str]) -> Derivation:
    """Return the values that follow from this pod's Job; UsageError if its launchers would not become one job."""
    index = environ["JOB_COMPLETION_INDEX"]
    if index and not index.isdecimal() and not asked.names_place and asked.most > 1:
        message = (
            f"JOB_COMPLETION_INDEX: {index!r} is not a whole number from 0 up: remove it from the pod template's env, "
            "since Kubernetes sets it in an indexed Job, or say where the pods meet with --rdzv-endpoint"
        )
        raise UsageError(message)
    if not index.isdecimal() or (asked.names_place and "nnodes" not in asked.given):
        return Derivation()
    pod = _Pod(int(index), full_hostname())
    if "nnodes" not in asked.given:
        message = (
            f"--nnodes: this is pod {pod.index} of an indexed Job (JOB_COMPLETION_INDEX), and Kubernetes does not say "
            "how many pods that Job has: set PET_NNODES to the Job's completions, or give --standalone for a separate "
            "job in each pod"
        )
        raise UsageError(message)
    if not asked.names_place and "rdzv_id" not in asked.given:
        _check_jobset(pod)
    return Derivation(
        "the Kubernetes Job",
        "Kubernetes",
        _derive_nodes(pod, asked),
        _VARIABLES,
        is_per_gpu=not asked.names_place,
        is_first=pod.index == 0,
    )


def full_hostname() -> str:
    """Return this machine's host name, with its domain if /etc/hosts or a name server knows that."""
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM, flags=socket.AI_CANONNAME)
    except OSError:
        return name
    return next((canonical for _, _, _, canonical, _ in found if canonical), name)


def _derive_nodes(pod: _Pod, asked: Asked) -> dict[str, object]:
    """Return where the nodes of a job of several meet, and this one's rank."""
    if asked.most == 1:
        return {}
    if pod.index >= asked.most:
        message = (
            f"--nnodes: is {asked.nnodes}, but this is pod {pod.index} of its Job (JOB_COMPLETION_INDEX, from 0): give "
            "the number of the Job's completions"
        )
        raise UsageError(message)
    derived: dict[str, object] = {}
    if asked.names_place:
        try:
            first = pod.find_endpoint(1).rpartition(":")[0]
        except PodNameError:
            first = ""  # other pods can't find it
        check_endpoint(asked, "pod of the Job", first)
    else:
        try:
            derived = {"rdzv_backend": "c10d", "rdzv_endpoint": pod.find_endpoint(asked.most)}
            if "rdzv_id" not in asked.given:
                derived["rdzv_id"] = pod.job_name
        except PodNameError as error:
            message = (
                f"JOB_COMPLETION_INDEX={pod.index}: {error}; or give --rdzv-backend=c10d and --rdzv-endpoint=HOST:PORT"
            )
            raise UsageError(message) from None
    if "node_rank" not in asked.given:
        derived["node_rank"] = pod.index
    return derived


def _check_jobset(pod: _Pod) -> None:
    """Refuse a pod of a second or later Job of a JobSet's replicated job: each Job would train a model of its own.

    A JobSet names its pods SET-REPLICATED_JOB-NUMBER-INDEX, and the Service after itself.
    """
    name, _, domain = pod.hostname.partition(".")
    jobset = domain.partition(".")[0]
    words = name.removeprefix(f"{jobset}-").rsplit("-", 2) if jobset and name.startswith(f"{jobset}-") else []
    number = words[1] if words[2:] == [str(pod.index)] else ""
    if number.isdecimal() and int(number):
        message = (
            f"--nnodes: this pod is of Job {number} of a replicated job of the JobSet {jobset}, and each Job would "
            "train a model of its own: set replicas to 1 and completions to the number of nodes, or give "
            f"--rdzv-id={pod.job_name} for separate jobs"
        )
        raise UsageError(message)
