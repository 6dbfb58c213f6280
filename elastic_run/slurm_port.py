"""The port of a Slurm step: all its tasks find the same port without asking each other.

Both the launcher (`cluster.slurm`) and training scripts (`worker.place`) need it, so this module imports nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["find_port", "step_port"]

#: Ports for the steps of Slurm jobs: below those that Linux gives to outgoing connections (from 32768).
_FIRST_PORT, _PORTS = 10_000, 20_000
#: Ports between one job and the next: jobs of neighbouring numbers share nodes, and each has several steps.
_PORTS_OF_A_JOB = 97
_HIGHEST_PORT = 65535


def step_port(job: int, step: int) -> int:
    """Return the port for a step of a Slurm job: the same in all its tasks, another one in its neighbours.

    Steps of one job differ up to 97 of them, and so do the next 200 jobs, with 97 steps each.
    """
    return _FIRST_PORT + (job * _PORTS_OF_A_JOB + step) % _PORTS


def find_port(environ: Mapping[str, str]) -> int:
    """Return the port for the step of a Slurm job that this process belongs to.

    Args:
        environ: The environment: SLURM_STEP_RESV_PORTS (the ports of `srun --resv-ports`, which nobody else gets), else
            SLURM_JOB_ID and SLURM_STEP_ID.

    Raises:
        ValueError: The ids are no numbers, or SLURM_STEP_RESV_PORTS does not begin with a port.
    """
    reserved = environ.get("SLURM_STEP_RESV_PORTS", "")
    if reserved and reserved != "(null)":
        first = reserved.partition(",")[0].partition("-")[0]
        if first.isdecimal() and 0 < int(first) <= _HIGHEST_PORT:
            return int(first)
        message = f"SLURM_STEP_RESV_PORTS: {reserved!r} does not begin with a port from 1 to {_HIGHEST_PORT}"
        raise ValueError(message)
    return step_port(int(environ.get("SLURM_JOB_ID") or 0), int(environ.get("SLURM_STEP_ID") or 0))
