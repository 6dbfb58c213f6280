"""How many OpenMP threads each worker gets: `OMP_NUM_THREADS`, unless the user has set it.

torchrun gives each of several workers one thread, since the workers' libraries would otherwise take one for every CPU
of the machine each. `--omp-threads` gives more; a value in the environment always counts, as under torchrun.
"""

from __future__ import annotations

from elastic_run import contract
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

#: The value of --omp-threads that divides the cores of this node among its workers.
AUTO = "auto"
_NAME = contract.ENV_OMP_NUM_THREADS


@dataclass(frozen=True, slots=True)
class Threads:
    """The number of threads of each worker, with its reason.

    Args:
        count: The value to set, or None to leave the environment as it is.
        reason: Where the value comes from, a clause; "" for the flag.
        notice: A line for the user, or "".
    """

    count: int | None
    reason: str = ""
    notice: str = ""


def choose_threads(flag: int | str | None, workers: int, environ: Mapping[str, str]) -> Threads:
    """Choose the number of threads of each worker.

    Args:
        flag: The value of --omp-threads, or None.
        workers: Workers on this node.
        environ: The environment.

    Returns:
        The number, and a line about it.
    """
    if (given := environ.get(_NAME)) is not None:
        unused = f"--omp-threads: {flag} is not used, since {_NAME}={given} is set"
        return Threads(None, notice=unused if flag is not None and str(flag) != given else "")
    if flag == AUTO:
        from elastic_run.cluster.limits import core_count

        cores = core_count()
        count = max(1, cores // workers)
        reason = f"{cores} core{'s' * (cores != 1)} for {workers} worker{'s' * (workers != 1)}"
        return Threads(count, reason, f"{_NAME}={count} for each worker ({reason})")
    if flag is not None:
        return Threads(int(flag), notice=f"{_NAME}={flag} for each worker")
    if workers == 1:
        return Threads(None)
    notice = f"{_NAME} is not set: each of the {workers} workers gets 1 thread (--omp-threads=auto divides the cores)"
    return Threads(1, "several workers on this node", notice)
