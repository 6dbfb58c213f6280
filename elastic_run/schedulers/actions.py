"""What a scheduler is asked for: to run a stopped job again (`--requeue`), or to take a machine out of use.

Slurm warns a job before its time is over, or before another takes its place (``#SBATCH --signal=TERM@120``). While it
only warns, it says that the job runs: then the job is requeued. In any other state Slurm has decided already: the job
was cancelled, or Slurm requeues it itself.
"""

from __future__ import annotations

import os

from elastic_run.schedulers.slurm import is_started_by_slurm

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

#: Seconds for each command of Slurm, which asks its controller.
_TIMEOUT = 20.0
#: Characters of a reason; scontrol cuts longer ones.
_REASON = 100


def requeue_job(environ: Mapping[str, str], limit: int) -> tuple[bool, str]:
    """Requeue the Slurm job of this process, at most `limit` times in all. Of a step's tasks only the first one asks.

    Returns whether the job is to be run again, even if this process could not arrange it; and a sentence for the user.
    """
    job = environ.get("SLURM_JOB_ID", "")
    if not job or (environ.get("SLURM_PROCID") or "0") != "0":
        return False, ""
    count = environ.get("SLURM_RESTART_COUNT") or "0"
    refusal = f"the Slurm job {job} is not requeued: "
    if not has_requeues_left(environ, limit):
        return False, f"{refusal}SLURM_RESTART_COUNT is {count}, and --requeue={limit} allows no more"
    is_wanted, reason = _ask_slurm(job, environ)
    if reason:
        return is_wanted, f"{refusal}{reason}"
    return True, f"the Slurm job {job} is requeued ({int(count) + 1} of {limit})"


def has_requeues_left(environ: Mapping[str, str], limit: int) -> bool:
    """Whether the job was started anew by Slurm fewer times than the limit."""
    count = environ.get("SLURM_RESTART_COUNT") or "0"
    return count.isdecimal() and int(count) < limit


def _ask_slurm(job: str, environ: Mapping[str, str]) -> tuple[bool, str]:
    """Requeue a job; returns whether it is to run again, and why that is not arranged for, or ""."""
    from elastic_run.files import find_program

    scontrol = find_program("scontrol", environ)
    if scontrol is None:
        return True, f"there is no scontrol here; run: scontrol requeue {job}"
    answer, is_answered = _run(scontrol, "show", "job", "--oneliner", job)
    facts = dict(word.split("=", 1) for word in answer.split() if "=" in word) if is_answered else {}
    state = facts.get("JobState", "")
    if state not in {"", "RUNNING"}:
        return False, f"Slurm says that it is {state}, so it was cancelled or is over"
    if facts.get("Requeue") == "0":  # scontrol would say nothing of it, and do nothing
        return True, "its submission does not allow that (sbatch --requeue does)"
    if state:
        answer, is_answered = _run(scontrol, "requeue", job)
    return True, "" if state and is_answered else f"scontrol says: {answer}"


def _run(*command: str) -> tuple[str, bool]:
    """Run a command of Slurm; return its output in one line, and whether it has succeeded."""
    import subprocess

    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=_TIMEOUT,
            check=False,
            start_new_session=True,  # signals for this process group don't stop it
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error), False
    return " ".join(done.stdout.decode(errors="replace").split()), done.returncode == 0


def find_machine_name(environ: Mapping[str, str]) -> str:
    """Return the scheduler's name of this machine; "" without one.

    Slurm's variables leak, through ssh and tmux. Two machines of one name would be excluded together, so Slurm's name
    counts only if it is this host's, or if Slurm has started this process or its parent.
    """
    name = environ.get("SLURMD_NODENAME", "")
    if environ.get("SLURM_JOB_ID") and name:
        is_own = name.partition(".")[0] == os.uname().nodename.partition(".")[0]
        return name if is_own or is_started_by_slurm(environ) else ""
    # NODE_NAME is set in a pod by the downward API (fieldRef: spec.nodeName). Other programs use the name too.
    return environ.get("NODE_NAME", "") if environ.get("KUBERNETES_SERVICE_HOST") else ""


def describe_drain(environ: Mapping[str, str], reason: str) -> str:
    """Return how this machine is taken out of use: by Slurm's or by Kubernetes' command; "" outside of both."""
    name = find_machine_name(environ)
    if not name:
        return ""
    if environ.get("SLURM_JOB_ID"):
        plain = "".join(sign if sign.isalnum() or sign in " .,:-_/()" else " " for sign in reason)
        told = " ".join(plain.split())[:_REASON].strip()
        return f"to take this node out of use: scontrol update nodename={name} state=drain reason='elastic-run: {told}'"
    return f"this pod ran on the node {name}; to take it out of use: kubectl cordon {name}"
