"""How a job ended, as programs that launch see it: torch's states, exceptions, and record of each failed worker.

Torch knows the exception that a worker recorded, or else its exit code. Our agent also has the worker's stderr, and
knows which timer ended the worker.
"""

from __future__ import annotations

import sys
from enum import Enum

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.failure.job_result import JobResult
    from elastic_run.core.failure.root_cause import WorkerEnd
    from elastic_run.multiprocessing.errors import ProcessFailure


class WorkerState(str, Enum):
    """State of a worker group; the workers of a group change it together."""

    UNKNOWN = "UNKNOWN"
    INIT = "INIT"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Whether workers in this state are processes that live."""
        return state in (WorkerState.HEALTHY, WorkerState.UNHEALTHY)


def raise_unless_worker_failed(
    job_result: JobResult, *, rendezvous_error: Exception | None, start_error: Exception | None
) -> None:
    """Raise torch's exception for a job that ended neither by success nor by the failure of a worker."""
    if job_result.signal is not None:
        import os
        import signal

        from elastic_run.multiprocessing.api import SignalException

        name = signal.Signals(job_result.signal)
        message = f"Process {os.getpid()} got signal: {int(name)} ({name.name}); its workers are stopped"
        raise SignalException(message, name)
    if job_result.verdict == "rendezvous":
        from elastic_run.rendezvous.api import RendezvousError

        raise rendezvous_error or RendezvousError(job_result.detail)
    if job_result.root is None:
        words = job_result.detail or job_result.verdict
        number = start_error.errno if isinstance(start_error, OSError) else None
        raise OSError(number, words) if number else OSError(words)


def describe_failure(end: WorkerEnd) -> ProcessFailure:
    """Return a worker's failure: the error that it recorded, its exception from stderr in that form, or a sentence."""
    from elastic_run.contract import TIMER_EXPIRED
    from elastic_run.multiprocessing.errors.error_file import compose_error
    from elastic_run.multiprocessing.errors.error_handler import NOT_AVAILABLE
    from elastic_run.multiprocessing.errors.failures import ProcessFailure

    failure = ProcessFailure(end.local_rank, end.pid, end.exitcode, end.error_file)
    if end.exception is not None and end.exception.type == TIMER_EXPIRED:
        failure.message = f"timer {end.exception.message}; {failure.message}"
    elif failure.error_file == NOT_AVAILABLE and end.exitcode > 0:
        if end.exception is not None:
            failure.message = compose_error(end)["message"]
        elif last := next((line.strip() for line in reversed(end.stderr_tail) if line.strip()), ""):
            failure.message = f"exit code {end.exitcode}; its stderr ends with: {last}"
    return failure


def add_timer(failure: ProcessFailure) -> ProcessFailure:
    """Name the timer that ended the worker in the failure's message. A second call finds none."""
    if "elastic_run.timer.timer_file" in sys.modules:
        from elastic_run.timer.timer_file import pop_expiry

        if text := pop_expiry(failure.pid):
            failure.message = f"timer {text}; {failure.message}"
    return failure
