"""This node's command line as it took effect, in the parts that the command for other nodes is made of."""

from __future__ import annotations

from elastic_run.records import dataclass


@dataclass(frozen=True, slots=True)
class JoinCommand:
    """This node's command line.

    Args:
        command: The words of the command itself, such as `elastic-run`.
        flags: The values that somebody gave, by flag, variable or file, each as one word such as `--nnodes=2`.
        program: The program of the workers, and its arguments.
    """

    command: tuple[str, ...]
    flags: tuple[str, ...]
    program: tuple[str, ...]
