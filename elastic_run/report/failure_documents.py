"""Failures as documents: failure.json for programs, and what a node has to know of the failures on other nodes.

Version 1 of failure.json holds the keys that `failure_document` returns. A key is never renamed and never changes its
meaning within a version; new keys may be added. Times are seconds since the epoch (`ended_at`), with the same moment in
UTC beside them, and durations are seconds. Text of workers is cut to the sizes below, at both ends.

Of a document of another node a new field is ignored. Long texts are cut before they are sent, because each node of the
job reads them.
"""

from __future__ import annotations

import os
import time
from collections import Counter

from elastic_run import contract
from elastic_run.core.failure.diagnose import has_failed, is_stuck
from elastic_run.core.failure.root_cause import (
    STDERR_TAIL_LINES,
    ExceptionText,
    OomKills,
    WorkerEnd,
    compute_error_number,
    has_lost_rank,
    severity,
)
from elastic_run.core.failure.stacks import Place
from elastic_run.core.job.codec import MessageError, from_document, register, to_document
from elastic_run.core.job.documents import MOST_ERRORS, MOST_STUCK, ErrorCount, NodeEnds, StuckRank
from elastic_run.files import replace_file
from elastic_run.report.lines import failed
from elastic_run.report.text import signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from elastic_run.core.failure.job_result import Attempt, JobResult
    from elastic_run.core.job.restart_policy import Failure

VERSION = 1
#: Characters of a message and of any other text that the file holds.
_MESSAGE_LIMIT = 16 * 1024
_LINE_LIMIT = 2 * 1024
_LONG = frozenset(("message", "detail"))
#: Fields of the result that stand there as they are.
_AS_THEY_ARE = (
    *("verdict", "exit_code", "detail", "advice", "entrypoint", "role", "run_id"),
    *("world_size", "nnodes", "restarts_used", "max_restarts", "log_dir"),
)
#: Fields of a worker's end that stand there in another form, or not at all.
_UNWRITTEN = frozenset(("exitcode", "is_unmoved", "oom_kills"))


def failure_document(result: JobResult) -> dict[str, Any]:
    """Return the result of a job as a document for JSON, version 1."""
    kills = None if result.root is None else result.root.oom_kills
    document: dict[str, Any] = _cut(
        {
            "version": VERSION,
            **{name: getattr(result, name) for name in _AS_THEY_ARE},
            "signal": _signal(result.signal),
            **_moment("ended_at", result.ended_at),
            "root_cause": _worker(result.root),
            "equal_errors": None if result.equal_errors is None else to_document(result.equal_errors),
            "causes": [to_document(cause) for cause in result.causes],
            "workers": [_worker(end) for end in result.ends],
            "attempts": [_attempt(attempt) for attempt in result.attempts],
            "unkillable": [{"pid": pid, "wait_channel": channel} for pid, channel in result.survivors],
            "oom_kills": None if kills is None else to_document(kills),
        }
    )
    return document


def write_failure_file(result: JobResult, directory: str, say: Callable[[str], None] | None = None) -> str:
    """Write failure.json into a directory: the whole file, or none; return its path, or "" for none."""
    import json

    path = os.path.join(directory, contract.FAILURE_FILE)
    text = json.dumps(failure_document(result), indent=2) + "\n"
    try:
        replace_file(path, text.encode("ascii"))
    except OSError as error:
        if say is not None:
            say(f"failure.json could not be written to {directory}: {error.strerror or error}")
        return ""
    return path


def _worker(end: WorkerEnd | None) -> dict[str, Any] | None:
    if end is None:
        return None
    return {
        **{name: value for name, value in to_document(end).items() if name not in _UNWRITTEN},
        "exit_code": end.exitcode if end.exitcode >= 0 else None,
        "signal": _signal(-end.exitcode if end.exitcode < 0 else None),
        **_moment("ended_at", end.ended_at),
        "is_consequence": end.exitcode != 0 and has_lost_rank(end),
    }


def _attempt(attempt: Attempt) -> dict[str, Any]:
    return {
        "restart_count": attempt.restart_count,
        **_moment("started_at", attempt.started_at),
        "uptime": attempt.uptime,
        "kept_state": attempt.kept_state,
        "root_cause": _worker(attempt.root),
    }


def _signal(number: int | None) -> dict[str, Any] | None:
    return None if number is None else {"number": number, "name": signal_name(number)}


def _moment(name: str, seconds: float) -> dict[str, Any]:
    milliseconds = int(seconds * 1000 + 0.5)
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1000))
    return {name: seconds, f"{name}_utc": f"{moment}.{milliseconds % 1000:03d}Z"}


def _cut(value: Any, limit: int = _LINE_LIMIT) -> Any:
    """Return a document with its long texts cut in the middle; a message may be longer than other texts."""
    if isinstance(value, dict):
        return {name: _cut(part, _MESSAGE_LIMIT if name in _LONG else _LINE_LIMIT) for name, part in value.items()}
    if isinstance(value, list):
        return [_cut(part) for part in value]
    if not isinstance(value, str) or len(value) <= limit:
        return value
    return f"{value[: limit // 2]} ... {value[-limit // 2 :]}"


# --- to the other nodes -----------------------------------------------------------------------------------------------
#: Characters of each line of stderr and of a traceback that are sent, and of any other text.
_LINE_LENGTH = 400
_MESSAGE_LENGTH = 2000
#: Fields of a worker's end that only its own node knows.
_UNSENT = frozenset(("was_stopped", "stuck_at", "is_unmoved", "last_words"))


register(ExceptionText)
register(OomKills)


def encode_root_cause(root: WorkerEnd, failure: Failure) -> dict[str, Any]:
    """Return the root cause of a failed round: the failure's fields, and the whole end of the worker under `end`."""
    return {
        **to_document(failure),
        "severity": severity(root),
        "error": compute_error_number(root),
        "summary": failed(root, host=root.host),
        "end": {name: _shorten(value) for name, value in to_document(root).items() if name not in _UNSENT},
    }


def _shorten(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shorten(part) for name, part in value.items()}
    if isinstance(value, list):
        return [line[:_LINE_LENGTH] for line in value[-STDERR_TAIL_LINES:]]
    return value[:_MESSAGE_LENGTH] if isinstance(value, str) else value


def decode_root_cause(document: Mapping[str, Any] | None) -> WorkerEnd | None:
    """Return the worker's end in a document of `encode_root_cause`, or None where there is none, or garbage."""
    end = document.get("end") if document is not None else None
    if not isinstance(end, dict):
        return None
    try:
        return from_document(WorkerEnd, {name: value for name, value in end.items() if name not in _UNSENT})
    except MessageError:
        return None


#: Characters of a path, or of another text.
_LONGEST = 400


def describe_ends(ends: Sequence[WorkerEnd]) -> NodeEnds | None:
    """Return what the job has to know of a node's workers; None if all of them obeyed the stop."""
    found = sorted(filter(is_stuck, ends), key=lambda end: not end.is_unmoved)
    stuck = [
        StuckRank(end.rank, at.function[:_LONGEST], at.file[-_LONGEST:], at.line, at.problem[:_LONGEST])
        for end in found[:MOST_STUCK]
        if (at := end.stuck_at) is not None
    ]
    failed = sum(map(has_failed, ends))
    unmoved = sum(end.is_unmoved for end in found)
    numbers = Counter(number for number in map(compute_error_number, ends) if number is not None)
    errors = tuple(ErrorCount(*each) for each in numbers.most_common(MOST_ERRORS))
    return NodeEnds(failed, len(found), tuple(stuck), unmoved, errors) if stuck or failed or errors else None


def read_places(stuck: Sequence[StuckRank]) -> dict[int, Place]:
    """Return the places of ranks that did not stop, by global rank."""
    return {each.rank: Place(each.function, each.file, each.line, problem=each.problem) for each in stuck}
