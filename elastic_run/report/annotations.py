"""The closing report in one line for GitHub Actions, which shows it beside the code (`::error file=…,line=…::…`).

Source: "Workflow commands for GitHub Actions" in GitHub's documentation. The runner takes commands from both streams.
"""

from __future__ import annotations

import os

from elastic_run.report.failure import ending_sentence
from elastic_run.report.lines import failed
from elastic_run.report.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic_run.report.job_result import JobResult


def find_annotation(result: JobResult, environ: Mapping[str, str]) -> str:
    """Return the line for GitHub Actions.

    Args:
        result: The end of the job.
        environ: The variables of this process.

    Returns:
        One line, or an empty string anywhere else and after a success or a stop by signal.
    """
    if environ.get("GITHUB_ACTIONS") != "true" or result.verdict == "success" or result.signal is not None:
        return ""
    properties = {"title": ending_sentence(result)}
    if result.root is not None and result.root.exception is not None:
        from elastic_run.report.trace import find_own_place

        place = find_own_place(result.root.exception)
        if place is not None:
            file, line = place
            properties = {"file": _inside(file, environ.get("GITHUB_WORKSPACE", "")), "line": line, **properties}
    message = failed(result.root, result.root.host) if result.root is not None else printable(result.detail)
    text = ",".join(f"{name}={_escape(value, ':,')}" for name, value in properties.items())
    return f"::error {text}::{_escape(message)}"


def _inside(path: str, directory: str) -> str:
    """Return a path relative to the checked-out repository, as GitHub wants it, if the file is in there."""
    path = os.path.abspath(path)
    return path.removeprefix(directory.rstrip(os.sep) + os.sep) if directory else path


def _escape(text: str, more: str = "") -> str:
    for character in f"%\r\n{more}":
        text = text.replace(character, f"%{ord(character):02X}")
    return text
