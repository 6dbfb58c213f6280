"""A command as a task of a Slurm step, without Slurm: below a process that has the title of Slurm's daemon."""

from __future__ import annotations

__all__ = ["task_of"]

_PARENT = """exec -a "slurmstepd: [$0]" bash -c '"$@"; exit $?' slurmstepd "$@" """


def task_of(step: str) -> tuple[str, ...]:
    """Return the words in front of a command that make it a task of a step, such as ``4.0``."""
    return ("bash", "-c", _PARENT, step)
