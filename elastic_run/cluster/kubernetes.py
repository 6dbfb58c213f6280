"""The indexed Job of Kubernetes that this pod belongs to: the pod's index, and the names of the other pods.

Kubernetes gives each pod of an indexed Job (``completionMode: Indexed``), of a JobSet too, the variable
JOB_COMPLETION_INDEX and a host name that ends with it: ``train-2``. With a headless Service, named in the pod template
as ``subdomain``, the pods have DNS names: ``train-2.SERVICE.NAMESPACE.svc.cluster.local``; the kubelet writes the pod's
own into its /etc/hosts. No variable tells the number of pods.
https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/
"""

from __future__ import annotations

import socket

from elastic_run.contract import DEFAULT_C10D_PORT
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["IndexedPod", "PodNameError", "find_indexed_pod", "full_hostname"]

_INDEX = "JOB_COMPLETION_INDEX"
#: Pods that may serve the job's store: the loss of one of them, or of two, does not end the job.
_STORE_NODES = 3


class PodNameError(ValueError):
    """The names of the other pods don't follow from this pod's; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class IndexedPod:
    """A pod of an indexed Job.

    Attributes:
        index: Its place in the Job, from 0.
        hostname: Its name with the domain, if it has one: ``train-2.train.default.svc.cluster.local``.
    """

    index: int
    hostname: str

    @property
    def job_name(self) -> str:
        """The host names of the Job's pods, without the index.

        Raises:
            PodNameError: This pod's name doesn't end with its index.
        """
        name, _, index = self.hostname.partition(".")[0].rpartition("-")
        if not name or index != str(self.index):
            message = f"the host name {self.hostname} does not end with -{self.index}"
            raise PodNameError(message)
        return name

    @property
    def replicated_job(self) -> tuple[str, int] | None:
        """The JobSet and the number of this pod's Job in it, or None where the pod's name has another form.

        A JobSet names its pods SET-REPLICATED_JOB-NUMBER-INDEX, and the Service after itself.
        """
        name, _, domain = self.hostname.partition(".")
        jobset = domain.partition(".")[0]
        words = name.removeprefix(f"{jobset}-").split("-") if jobset and name.startswith(f"{jobset}-") else []
        is_of_set = len(words) > 2 and words[-1] == str(self.index) and words[-2].isdecimal()  # noqa: PLR2004
        return (jobset, int(words[-2])) if is_of_set else None

    def find_endpoint(self, nodes: int) -> str:
        """Return where the Job's pods can meet: at the first one, or at the next ones if that is lost.

        Args:
            nodes: Number of pods.

        Raises:
            PodNameError: The others can't be found by name.
        """
        name, domain = self.job_name, self.hostname.partition(".")[2]
        if not domain:
            message = (
                f"the host name {self.hostname} has no domain, so that other pods can't find it: create a headless "
                "Service, and name it in the pod template as subdomain"
            )
            raise PodNameError(message)
        return ",".join(f"{name}-{index}.{domain}:{DEFAULT_C10D_PORT}" for index in range(min(nodes, _STORE_NODES)))


def find_indexed_pod(environ: Mapping[str, str], hostname: str) -> IndexedPod | None:
    """Find this pod's place in its indexed Job.

    Args:
        environ: The environment.
        hostname: This pod's name; see `full_hostname`.

    Returns:
        The pod, or None outside of such a Job.
    """
    index = environ.get(_INDEX, "")
    return IndexedPod(index=int(index), hostname=hostname) if index.isdecimal() else None


def full_hostname() -> str:
    """Return this machine's host name, with its domain if /etc/hosts or a name server knows that."""
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM, flags=socket.AI_CANONNAME)
    except OSError:
        return name
    return next((canonical for _, _, _, canonical, _ in found if canonical), name)
