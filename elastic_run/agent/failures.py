"""Failed workers as torch's results have them, for programs that launch, with more than the exit code.

Torch knows the exception that a worker recorded, or else its exit code. Our agent also has the worker's stderr, and
knows which timer ended the worker.
"""

from __future__ import annotations

import sys

from elastic_run import contract
from elastic_run.multiprocessing.errors.error_file import compose_error
from elastic_run.multiprocessing.errors.failures import NOT_AVAILABLE, ProcessFailure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.failure.root_cause import WorkerEnd


def describe_failure(end: WorkerEnd) -> ProcessFailure:
    """Return a worker's failure.

    Returns:
        The failure. Its message is the error that the worker recorded, or its exception from stderr in the same form,
        or a sentence.
    """
    failure = ProcessFailure(end.local_rank, end.pid, end.exitcode, end.error_file)
    if end.exception is not None and end.exception.type == contract.TIMER_EXPIRED:
        failure.message = f"timer {end.exception.message}; {failure.message}"
    elif failure.error_file == NOT_AVAILABLE and end.exitcode > 0:
        failure.message = _say(end) or failure.message
    return failure


def _say(end: WorkerEnd) -> object:
    if end.exception is not None:
        return compose_error(end)["message"]
    last = next((line.strip() for line in reversed(end.stderr_tail) if line.strip()), "")
    return last and f"exit code {end.exitcode}; its stderr ends with: {last}"


def add_timer(failure: ProcessFailure) -> ProcessFailure:
    """Name the timer that ended the worker in the failure's message. A second call finds none."""
    if "elastic_run.timer.expiries" in sys.modules:
        from elastic_run.timer import expiries  # noqa: PLC0415 - only where timers are used

        text = expiries.take(failure.pid)
        if text:
            failure.message = f"timer {text}; {failure.message}"
    return failure
