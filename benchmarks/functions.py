"""Functions as workers: from the call of `elastic_launch` to its values, beside torch's `elastic_launch`.

Four workers return their rank. The programs differ in the import alone; what they import themselves is not counted in
the launching program, but is in its workers, where spawn imports it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.figures import Bar, Comparison, compared, interleave
from benchmarks.job import Job

if TYPE_CHECKING:
    from benchmarks.figures import Figure
    from benchmarks.installation import Effort, Installation

_WORKERS = 4
#: Start method, and what the program imports at its top.
_KINDS = (("spawn", ""), ("spawn", "torch"), ("fork", "torch"), ("forkserver", "torch"))


def measure(installation: Installation, effort: Effort) -> list[Figure]:
    """Measure each start method in turns."""
    figures = []
    for method, imports in _KINDS:
        launches = compare(installation, method, imports, rounds=effort.pairs)
        name = f"{_WORKERS} functions by {method}" + (f", in a program that imports {imports}" if imports else "")
        figures.append(
            compared(
                launches,
                benchmark="functions",
                name=name,
                unit="ms",
                bar=Bar(1.0, "torchrun"),
            )
        )
    return figures


def compare(installation: Installation, method: str, imports: str, *, rounds: int) -> Comparison:
    """Launch in turns."""
    return interleave(
        {
            "elastic-run": lambda: launch_functions(installation, "elastic-run", method, imports),
            "torchrun": lambda: launch_functions(installation, "torchrun", method, imports),
        },
        rounds=rounds,
    )


def launch_functions(installation: Installation, launcher: str, method: str, imports: str = "") -> float:
    """Run a program that launches functions once; return the milliseconds of the launch."""
    script = installation.worker("launch_functions")
    command = [installation.python, script, launcher, method, str(_WORKERS), *([imports] if imports else [])]
    with Job(command, directory=installation.directory) as job:
        ((milliseconds,),) = job.wait_lines(1)
        job.wait_end()
        return float(milliseconds)
