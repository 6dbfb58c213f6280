"""The command line with which this node was started, in the parts that the command for other nodes is made of."""

from __future__ import annotations

from elastic_run.records import dataclass


@dataclass(frozen=True, slots=True)
class JoinCommand:
    """This node's command line.

    Args:
        variables: The variables that stand in for flags (`PET_NNODES`), as NAME=VALUE.
        command: The words of the command itself, such as `elastic-run`.
        flags: Its flags, as typed.
        program: The program of the workers, and its arguments.
    """

    variables: tuple[str, ...]
    command: tuple[str, ...]
    flags: tuple[str, ...]
    program: tuple[str, ...]
