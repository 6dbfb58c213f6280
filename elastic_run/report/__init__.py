"""What the user is told: one line while the job goes on, at most 25 when it ends; each name loaded when first used."""

from __future__ import annotations

from elastic_run.lazy import lazy_names

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

__getattr__ = lazy_names(__name__, _HOMES)
