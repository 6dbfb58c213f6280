"""Texts for the user: lines while the job runs, a report when it ends. Names are loaded when first used."""

from __future__ import annotations

from elastic_run import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.report.closing_report import render as render
    from elastic_run.report.failure_documents import failure_document as failure_document
    from elastic_run.report.failure_documents import write_failure_file as write_failure_file
    from elastic_run.report.job_result import Attempt as Attempt
    from elastic_run.report.job_result import JobResult as JobResult

_HOMES = {
    "Attempt": "job_result",
    "JobResult": "job_result",
    "failure_document": "failure_documents",
    "render": "closing_report",
    "write_failure_file": "failure_documents",
}

__all__ = [*_HOMES]  # noqa: PLE0604 - the keys are the names

__getattr__ = lazy_names(__name__, _HOMES)
