"""Reads a worker's error.json without trusting it, and writes it as torch does.

A worker's file may be missing, incomplete, a directory, or gigabytes long. Reading never raises; a problem with the
file becomes one short clause for the report.

A launcher may itself run under a program that reads TORCHELASTIC_ERROR_FILE. torch copies the root cause's error.json
there with `errorCode` put in, and writes nothing if the root cause left no error.json. elastic-run copies it too, and
otherwise writes the same structure from stderr or the exit code: a scheduler that reads the file needs the cause.
"""

from __future__ import annotations

import os
import stat

from elastic_run.contract import ENV_ERROR_FILE
from elastic_run.core.failure.root_cause import LAST_EXCEPTION, ExceptionText
from elastic_run.core.failure.traceback_text import parse_exception
from elastic_run.files import open_own
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from elastic_run.core.failure.root_cause import WorkerEnd

#: Bytes of an error.json that are read; our own `record` writes no larger one.
_LIMIT = 4 * 1024 * 1024


@dataclass(slots=True)
class ErrorFile:
    """The content of an error.json."""

    #: Its contents, with a key `message`, or None where it can't be used.
    data: dict[str, Any] | None = None
    exception: ExceptionText | None = None
    #: Whole seconds since the epoch at which it was recorded, or None.
    timestamp: int | None = None
    #: A clause that says what is wrong with it, or "".
    problem: str = ""


def read_error_file(path: str) -> ErrorFile:
    """Read a worker's error.json; the result is empty, and without a problem, if there is no file."""
    if not path:
        return ErrorFile()
    import json

    try:
        data = json.loads(_read(path))
    except FileNotFoundError:
        return ErrorFile()
    except OSError as error:
        return ErrorFile(problem=f"its error.json can't be read: {error.strerror or error}")
    except (ValueError, RecursionError):
        return ErrorFile(problem="its error.json is not valid JSON")
    if not isinstance(data, dict) or "message" not in data:
        return ErrorFile(problem="its error.json has no message")
    return ErrorFile(data, _exception(data["message"]), _timestamp(data))


def find_exception(error_file: str, stderr: str, exitcode: int, *, was_stopped: bool) -> ErrorFile:
    """Find the exception that ended a worker: in its error.json if it left one, else at the end of its stderr.

    `exitcode` may be minus a signal's number. A worker that was stopped may have been going down by an exception.
    """
    file = read_error_file(error_file)
    if file.exception is None and stderr:
        is_ended_by_stop = was_stopped and exitcode < 0
        file.exception = parse_exception(stderr, exitcode=None if is_ended_by_stop else exitcode)
        if file.exception is not None and is_ended_by_stop:
            file.exception.is_certain = False
    return file


def write_parent_error_file(root: WorkerEnd, environ: Mapping[str, str]) -> None:
    """Tell a launcher above this one about the root cause, if it asked by TORCHELASTIC_ERROR_FILE."""
    path = environ.get(ENV_ERROR_FILE)
    if not path:
        return
    import json

    data = read_error_file(root.error_file).data or compose_error(root)
    if isinstance(data["message"], dict) and root.exitcode:
        data["message"]["errorCode"] = root.exitcode
    try:
        # A named pipe that nobody reads is an error, and does not block.
        with open(open_own(path, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK), "w", encoding="utf-8") as file:
            json.dump(data, file)
    except OSError:
        return  # it is a courtesy to the launcher above; our own report has told everything


def compose_error(root: WorkerEnd) -> dict[str, Any]:
    """Return the content of an error.json for a worker that left none."""
    exception = root.exception
    if exception is not None:
        said = f"{exception.name}: {exception.message}"
        if not exception.is_certain:
            said = f"exit code {root.exitcode}; {LAST_EXCEPTION}: {said}"
        callstack = "\n".join(["Traceback (most recent call last):", *exception.lines, ""])
    else:
        said = f"exit code {root.exitcode}" if root.exitcode >= 0 else f"signal {-root.exitcode}"
        said = f"rank {root.rank} ended with {said}"
        callstack = "\n".join(root.stderr_tail)
    extra = {"py_callstack": callstack, "timestamp": str(int(root.ended_at))}
    return {"message": {"message": said, "extraInfo": extra}}


def _read(path: str) -> str:
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(21, "it is a directory")
    if not stat.S_ISREG(status.st_mode):
        raise OSError(22, "it is not a file")  # a pipe would block us
    if status.st_size > _LIMIT:
        raise OSError(27, f"it has {status.st_size} bytes")
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(_LIMIT)


def _exception(message: object) -> ExceptionText | None:
    """Return the exception of an error.json's message: its callstack is a whole traceback."""
    if isinstance(message, str):
        return _from_summary(message)
    if not isinstance(message, dict):
        return None
    extra = message.get("extraInfo")
    callstack = extra.get("py_callstack") if isinstance(extra, dict) else None
    summary = message.get("message")
    exception = parse_exception(callstack) if isinstance(callstack, str) else None
    if exception is None and isinstance(summary, str):
        return _from_summary(summary)
    return exception


def _from_summary(summary: str) -> ExceptionText | None:
    name, colon, message = summary.partition(": ")
    if colon and name.replace(".", "").isidentifier():
        return ExceptionText(name, message, (summary,))
    return ExceptionText("error", summary, (summary,)) if summary.strip() else None


def _timestamp(data: dict[str, Any]) -> int | None:
    message = data["message"]
    extra = message.get("extraInfo") if isinstance(message, dict) else data
    try:
        return int(extra["timestamp"]) if isinstance(extra, dict) else None
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
