"""A root cause as a document for the other nodes: a worker's end to a document, and back.

Another agent wrote the document, perhaps of another release: a field of the wrong kind counts as missing, a field that
is too long is cut. Long texts are cut before they are sent, because each node of the job reads them.
"""

from __future__ import annotations

from elastic_run.core.failure.root_cause import (
    STDERR_TAIL_LINES,
    ExceptionText,
    OomKills,
    WorkerEnd,
    compute_error_number,
    severity,
)
from elastic_run.core.protocol.codec import to_document
from elastic_run.report.lines import failed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from elastic_run.core.job.restart_policy import Failure

#: Characters of each line of stderr and of a traceback that travel.
_LINE_LENGTH = 400
_MESSAGE_LENGTH = 2000
#: Fields that travel as they are.
_PLAIN = (
    *("rank", "local_rank", "pid", "exitcode", "restart_count"),
    *("ended_at", "uptime"),
    *("role", "host", "error_file", "log_file", "remark", "stderr_target", "kernel_line"),
)


def encode_root_cause(root: WorkerEnd, failure: Failure) -> dict[str, Any]:
    """Return the root cause of a failed round on this node as a document.

    Returns:
        A JSON-able document: the failure's fields, and the whole end under `end`.
    """
    exception = root.exception
    end: dict[str, Any] = {name: getattr(root, name) for name in _PLAIN}
    end["stderr_tail"] = _cut(root.stderr_tail)
    if root.oom_kills is not None:
        end["oom_kills"] = {"group": root.oom_kills.group, "machine": root.oom_kills.machine}
    if exception is not None:
        end["exception"] = {
            "type": exception.type,
            "message": exception.message[:_MESSAGE_LENGTH],
            "lines": _cut(exception.lines),
            "where": exception.where,
            "cause": exception.cause[:_MESSAGE_LENGTH],
            "is_certain": exception.is_certain,
        }
    return {
        **to_document(failure),
        "severity": severity(root),
        "error": compute_error_number(root),
        "summary": failed(root, host=root.host),
        "end": end,
    }


def decode_root_cause(document: Mapping[str, Any] | None) -> WorkerEnd | None:
    """Return the worker's end in a document of `encode_root_cause`, or None where there is none."""
    end = document.get("end") if document is not None else None
    if not isinstance(end, dict):
        return None
    return WorkerEnd(
        rank=_number(end.get("rank")),
        local_rank=_number(end.get("local_rank")),
        pid=_number(end.get("pid")),
        exitcode=_number(end.get("exitcode")),
        restart_count=_number(end.get("restart_count")),
        ended_at=_time(end.get("ended_at")),
        uptime=_time(end.get("uptime")),
        role=_text(end.get("role")),
        host=_text(end.get("host")),
        error_file=_text(end.get("error_file")),
        log_file=_text(end.get("log_file")),
        remark=_text(end.get("remark")),
        stderr_target=_text(end.get("stderr_target")),
        kernel_line=_text(end.get("kernel_line")),
        oom_kills=_oom_kills(end.get("oom_kills")),
        exception=_exception(end.get("exception")),
        stderr_tail=_lines(end.get("stderr_tail")),
    )


def _cut(lines: tuple[str, ...]) -> list[str]:
    return [line[:_LINE_LENGTH] for line in lines[-STDERR_TAIL_LINES:]]


def _exception(value: object) -> ExceptionText | None:
    if not isinstance(value, dict):
        return None
    return ExceptionText(
        _text(value.get("type")) or "Exception",
        _text(value.get("message")),
        _lines(value.get("lines")),
        _text(value.get("where")),
        _text(value.get("cause")),
        is_certain=value.get("is_certain") is not False,
    )


def _oom_kills(value: object) -> OomKills | None:
    if not isinstance(value, dict):
        return None
    group, machine = (count if isinstance(count, int) else None for count in map(value.get, ("group", "machine")))
    return OomKills(group, machine)


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _time(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _text(value: object) -> str:
    return value[:_MESSAGE_LENGTH] if isinstance(value, str) else ""


def _lines(value: object) -> tuple[str, ...]:
    return tuple(_text(line)[:_LINE_LENGTH] for line in value[-STDERR_TAIL_LINES:]) if isinstance(value, list) else ()
