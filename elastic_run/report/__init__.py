"""What the user is told: one line while the job goes on, at most 25 when it ends; each name loaded when first used."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.report.document import failure_document as failure_document
    from elastic_run.report.document import write_failure_file as write_failure_file
    from elastic_run.report.ending import Attempt as Attempt
    from elastic_run.report.ending import Ending as Ending
    from elastic_run.report.failure import render as render
    from elastic_run.report.memory import OomKills as OomKills
    from elastic_run.report.memory import read_oom_kills as read_oom_kills

_HOMES = {
    "Attempt": "ending",
    "Ending": "ending",
    "OomKills": "memory",
    "failure_document": "document",
    "read_oom_kills": "memory",
    "render": "failure",
    "write_failure_file": "document",
}

__all__ = [*_HOMES]  # noqa: PLE0604 - the keys are the names


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    import importlib  # noqa: PLC0415 - only when there is something to report

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
