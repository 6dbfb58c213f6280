"""failure.json: the report for programs.

Version 1 holds the keys that `failure_document` returns. A key is never renamed and never changes its meaning within a
version; new keys may be added. Times are seconds since the epoch (`ended_at`), with the same moment in UTC beside them,
and durations are seconds. Text of workers is cut to the sizes below, at both ends, so that the file stays small.
"""

from __future__ import annotations

import os
import time

from elastic_run import contract
from elastic_run.core.failure.root_cause import has_lost_rank
from elastic_run.core.protocol.codec import to_document
from elastic_run.new_files import replace_file
from elastic_run.report.advice import advice
from elastic_run.report.wording import signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.core.diagnosis.stacks import Place
    from elastic_run.core.failure.diagnose import Cause
    from elastic_run.core.failure.root_cause import ExceptionText, WorkerEnd
    from elastic_run.report.job_result import Attempt, JobResult

VERSION = 1
#: Characters of a message and of a line that the file holds.
_MESSAGE_LIMIT = 16 * 1024
_LINE_LIMIT = 2 * 1024


def failure_document(result: JobResult) -> dict[str, Any]:
    """Return the result of a job as a document for JSON.

    Returns:
        The document, version 1.
    """
    return {
        "version": VERSION,
        "verdict": result.verdict,
        "exit_code": result.exit_code,
        "detail": _cut(result.detail, _MESSAGE_LIMIT),
        "advice": advice(result),
        "signal": _signal(result.signal),
        "ended_at": result.ended_at,
        "ended_at_utc": _utc(result.ended_at),
        "entrypoint": result.entrypoint,
        "role": result.role,
        "run_id": result.run_id,
        "world_size": result.world_size,
        "nnodes": result.nnodes,
        "restarts_used": result.restarts_used,
        "max_restarts": result.max_restarts,
        "log_dir": result.log_dir,
        "root_cause": None if result.root is None else _worker(result.root),
        "equal_errors": None if result.equal_errors is None else to_document(result.equal_errors),
        "causes": [_cause(cause) for cause in result.causes],
        "workers": [_worker(end) for end in result.ends],
        "attempts": [_attempt(attempt) for attempt in result.attempts],
        "unkillable": [{"pid": pid, "wait_channel": channel} for pid, channel in result.survivors],
        "oom_kills": _oom_kills(result),
    }


def write_failure_file(result: JobResult, directory: str, say: Callable[[str], None] | None = None) -> str:
    """Write failure.json into a directory: the whole file, or none.

    Returns:
        Its path, or "" where it could not be written.
    """
    import json

    path = os.path.join(directory, contract.FAILURE_FILE)
    text = json.dumps(failure_document(result), indent=2) + "\n"
    try:
        replace_file(path, text.encode("ascii"))
    except OSError as error:
        if say is not None:
            from elastic_run.report.lines import failure_file_not_written

            say(failure_file_not_written(directory, error.strerror or str(error)))
        return ""
    return path


def _worker(end: WorkerEnd) -> dict[str, Any]:
    return {
        "rank": end.rank,
        "local_rank": end.local_rank,
        "role": end.role,
        "host": end.host,
        "pid": end.pid,
        "exit_code": end.exitcode if end.exitcode >= 0 else None,
        "signal": _signal(-end.exitcode if end.exitcode < 0 else None),
        "ended_at": end.ended_at,
        "ended_at_utc": _utc(end.ended_at),
        "uptime": end.uptime,
        "restart_count": end.restart_count,
        "was_stopped": end.was_stopped,
        "stuck_at": None if end.stuck_at is None else _place(end.stuck_at),
        "is_consequence": end.exitcode != 0 and has_lost_rank(end),
        "exception": None if end.exception is None else _exception(end.exception),
        "remark": end.remark,
        "last_words": end.last_words,
        "kernel_line": _cut(end.kernel_line, _LINE_LIMIT),
        "error_file": end.error_file,
        "log_file": end.log_file,
        "stderr_target": end.stderr_target,
        "stderr_tail": [_cut(line, _LINE_LIMIT) for line in end.stderr_tail],
    }


def _place(place: Place) -> dict[str, Any]:
    return {
        "function": place.function,
        "file": place.file,
        "line": place.line,
        "is_waiting": place.is_waiting,
        "problem": place.problem,
    }


def _cause(cause: Cause) -> dict[str, Any]:
    return {
        "kind": cause.kind,
        "ranks": list(cause.ranks),
        "confidence": cause.confidence,
        "why": list(cause.why),
        "help": cause.help,
    }


def _exception(exception: ExceptionText) -> dict[str, Any]:
    return {
        "type": exception.type,
        "message": _cut(exception.message, _MESSAGE_LIMIT),
        "where": exception.where,
        "cause": _cut(exception.cause, _LINE_LIMIT),
        "lines": [_cut(line, _LINE_LIMIT) for line in exception.lines],
        "is_certain": exception.is_certain,
    }


def _attempt(attempt: Attempt) -> dict[str, Any]:
    return {
        "restart_count": attempt.restart_count,
        "started_at": attempt.started_at,
        "started_at_utc": _utc(attempt.started_at),
        "uptime": attempt.uptime,
        "root_cause": None if attempt.root is None else _worker(attempt.root),
    }


def _oom_kills(result: JobResult) -> dict[str, int | None] | None:
    kills = None if result.root is None else result.root.oom_kills
    return None if kills is None else {"group": kills.group, "machine": kills.machine}


def _signal(number: int | None) -> dict[str, Any] | None:
    return None if number is None else {"number": number, "name": signal_name(number)}


def _utc(seconds: float) -> str:
    milliseconds = int(seconds * 1000 + 0.5)
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1000))
    return f"{moment}.{milliseconds % 1000:03d}Z"


def _cut(text: str, limit: int) -> str:
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]} ... {text[-half:]}"
