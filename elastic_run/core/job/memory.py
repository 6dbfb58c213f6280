"""The memory of a job: what the next coordinator goes on with. It travels with each order, so it is small. Pure."""

from __future__ import annotations

from elastic_run.core.job.documents import JobMemory
from elastic_run.core.job.state import REMEMBERED
from elastic_run.core.protocol.codec import encode, to_message
from elastic_run.records import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.job.documents import Round
    from elastic_run.core.job.state import Job

#: Bytes of a memory as JSON: each of its nodes gets it with each order.
LARGEST_MEMORY = 16 * 1024


def write_memory(job: Job, started: Round, *, edition: int, settled_round: str, now: float) -> JobMemory:
    """Return the memory of a job whose last round has started.

    Where it is too long, the oldest causes of attempts are left out, then incidents and failures.
    """
    memory = JobMemory(
        term=job.term,
        edition=edition,
        round=started,
        settled_round=settled_round,
        restart_count=job.restart_count,
        restart_times=tuple(now - at for at in job.restart_times),
        changes=tuple(now - at for at in job.changes),
        failures=job.failures[-REMEMBERED:],
        attempts=job.attempts,
        scripts=job.scripts,
        incidents=tuple(replace(one, at=now - one.at) for one in job.incidents),
        exclusions=tuple(replace(one, at=now - one.at) for one in job.exclusions),
    )
    for name in ("attempts", "incidents", "failures"):
        while getattr(memory, name) and len(encode(to_message(memory))) > LARGEST_MEMORY:
            memory = replace(memory, **{name: getattr(memory, name)[1 + len(getattr(memory, name)) // 2 :]})
    return memory


def take_memory(job: Job, memory: JobMemory, now: float) -> Job:
    """Return the state of a job that goes on with the memory of an earlier coordinator."""
    return replace(
        job,
        restart_count=max(job.restart_count, memory.restart_count),
        restart_times=tuple(now - age - memory.age for age in memory.restart_times),
        changes=tuple(now - age - memory.age for age in memory.changes),
        failures=memory.failures,
        attempts=memory.attempts,
        scripts=memory.scripts,
        incidents=tuple(replace(one, at=now - one.at - memory.age) for one in memory.incidents),
        exclusions=tuple(replace(one, at=now - one.at - memory.age) for one in memory.exclusions),
    )
