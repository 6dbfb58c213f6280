"""The machine under this launcher, as its scheduler knows it, and how a person takes it out of use."""

from __future__ import annotations

import os

from elastic_run.cluster.slurm import is_started_by_slurm

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_SLURM_NAME = "SLURMD_NODENAME"
#: Set in a pod by the downward API (fieldRef: spec.nodeName). Other programs use the name too.
_KUBERNETES_NAME = "NODE_NAME"
#: Characters of a reason; scontrol cuts longer ones.
_REASON = 100


def find_machine_name(environ: Mapping[str, str]) -> str:
    """Return the scheduler's name of this machine; "" without one.

    Slurm's variables leak, through ssh and tmux. Two machines of one name would be excluded together, so Slurm's name
    counts only if it is this host's, or if Slurm has started this process or its parent.
    """
    name = environ.get(_SLURM_NAME, "")
    if environ.get("SLURM_JOB_ID") and name:
        is_own = name.partition(".")[0] == os.uname().nodename.partition(".")[0]
        return name if is_own or is_started_by_slurm(environ) else ""
    return environ.get(_KUBERNETES_NAME, "") if environ.get("KUBERNETES_SERVICE_HOST") else ""


def describe_drain(environ: Mapping[str, str], reason: str) -> str:
    """Say how this machine is taken out of use.

    Args:
        environ: The environment.
        reason: Why.

    Returns:
        The command of Slurm, or the name of Kubernetes' node; "" outside of both.
    """
    name = find_machine_name(environ)
    if not name:
        return ""
    if environ.get("SLURM_JOB_ID"):
        plain = "".join(sign if sign.isalnum() or sign in " .,:-_/()" else " " for sign in reason)
        told = " ".join(plain.split())[:_REASON].strip()
        return f"to take this node out of use: scontrol update nodename={name} state=drain reason='elastic-run: {told}'"
    return f"this pod ran on the node {name}; to take it out of use: kubectl cordon {name}"
