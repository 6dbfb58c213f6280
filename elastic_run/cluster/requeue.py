"""Asks Slurm to run a job again that a signal has stopped before it was done (`--requeue`).

Slurm warns a job before its time is over, or before another takes its place (``#SBATCH --signal=TERM@120``). While it
only warns, it says that the job runs: then the job is requeued. In any other state Slurm has decided already: the job
was cancelled, or Slurm requeues it itself.
"""

from __future__ import annotations

import re

from elastic_run.cluster.paths import find_program
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Requeue", "has_requeues_left", "requeue_job"]

#: Seconds for each command of Slurm, which asks its controller.
_TIMEOUT = 20.0


@dataclass(frozen=True, slots=True)
class Requeue:
    """The result of a request to requeue the job.

    Attributes:
        is_wanted: Whether the job is to be run again, even if this process could not arrange it.
        text: A sentence for the user, or "".
    """

    is_wanted: bool
    text: str = ""


def requeue_job(environ: Mapping[str, str], limit: int) -> Requeue:
    """Requeue the Slurm job of this process. Of a step's tasks only the first one asks.

    Args:
        environ: The environment.
        limit: Number of times that the job may be requeued in all.

    Returns:
        The result.
    """
    job = environ.get("SLURM_JOB_ID", "")
    if not job or (environ.get("SLURM_PROCID") or "0") != "0":
        return Requeue(is_wanted=False)
    count = environ.get("SLURM_RESTART_COUNT") or "0"
    if not has_requeues_left(environ, limit):
        text = (
            f"the Slurm job {job} is not requeued: SLURM_RESTART_COUNT is {count}, and --requeue={limit} allows no more"
        )
        return Requeue(is_wanted=False, text=text)
    is_wanted, text = _ask_slurm(job, environ)
    if not text:
        return Requeue(is_wanted=True, text=f"the Slurm job {job} is requeued ({int(count) + 1} of {limit})")
    return Requeue(is_wanted=is_wanted, text=f"the Slurm job {job} is not requeued: {text}")


def has_requeues_left(environ: Mapping[str, str], limit: int) -> bool:
    """Whether the job was started anew by Slurm fewer times than the limit."""
    count = environ.get("SLURM_RESTART_COUNT") or "0"
    return count.isdecimal() and int(count) < limit


def _ask_slurm(job: str, environ: Mapping[str, str]) -> tuple[bool, str]:
    """Requeue a job; returns whether it is to run again, and why that is not arranged for, or ""."""
    scontrol = find_program("scontrol", environ)
    if scontrol is None:
        return True, f"there is no scontrol here; run: scontrol requeue {job}"
    answer, is_answered = _run(scontrol, "show", "job", "--oneliner", job)
    facts = dict(re.findall(r"(JobState|Requeue)=(\S+)", answer)) if is_answered else {}
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
