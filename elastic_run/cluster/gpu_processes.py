"""The processes that hold GPU memory: the command that lists them, and its output."""

from __future__ import annotations

from elastic_run import contract
from elastic_run.cluster.programs import find_program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_PROGRAM = "nvidia-smi"
_QUERY = ("--query-compute-apps=pid", "--format=csv,noheader")


def find_query(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the command that lists the processes with GPU memory, or None if workers use no such GPU."""
    if environ.get(contract.ENV_CUDA_VISIBLE_DEVICES) in ("", "-1"):
        return None
    program = find_program(_PROGRAM, environ)
    return None if program is None else (program, *_QUERY)


def read_pids(output: str) -> frozenset[int]:
    """Return the pids that the command has listed; a line that is no number is a message."""
    lines = (line.strip() for line in output.splitlines())
    return frozenset(int(line) for line in lines if line.isdecimal())
