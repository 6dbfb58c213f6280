"""Texts for the user: single lines while the job runs, at most 25 lines when it ends; names are loaded when first used.

| module | what it holds |
|---|---|
| `advice` | the hint of the report, for a verdict of the launcher or for the likeliest cause |
| `annotations` | the closing report in one line for GitHub Actions |
| `clock_offsets` | the times of a job's events on one clock |
| `event_file` | appends lines to the event log, in a thread of its own |
| `event_history` | reads event logs, and folds them into the history of jobs |
| `event_schema` | the events of the event log with their fields |
| `failure_json` | failure.json |
| `failure_rules` | reads rules for known failures, ours and the user's; `core.failure.diagnose` applies them |
| `failure` | the closing report |
| `hang_lines` | the lines that say that the job hangs |
| `history_page` | the page of a job's history |
| `job_history` | launchers, rounds, members and workers of a job, as its event logs tell |
| `job_result` | how a job ended: the record that report, failure.json and error file are made of |
| `lines` | the lines of the launcher while the job runs |
| `other_workers` | how the workers ended that are not the root cause |
| `node_ends` | how the workers of a node ended, as far as the other nodes have to know |
| `root_cause_document` | a root cause as a document for the other nodes, and back |
| `stack_lines` | the lines that say where the workers are |
| `status_table` | the text of `elastic-run status`: a row for each worker, and which stand out |
| `text` | printable text: width in columns, wrapping, shortening; whether a terminal shows colours |
| `trace` | the lines of a traceback that tell most |
| `wait_line` | shows on a terminal, in one line, for whom a node waits |
| `wait_notices` | when a waiting node is told which nodes are missing, and how long is left |
| `wait_texts` | the texts of `wait_line` and `wait_notices`, and the seconds between two of them |
| `wording` | words for exit codes, signals, ranks, durations and exceptions |
"""

from __future__ import annotations

from elastic_run.lazy import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.report.failure import render as render
    from elastic_run.report.failure_json import failure_document as failure_document
    from elastic_run.report.failure_json import write_failure_file as write_failure_file
    from elastic_run.report.job_result import Attempt as Attempt
    from elastic_run.report.job_result import JobResult as JobResult

_HOMES = {
    "Attempt": "job_result",
    "JobResult": "job_result",
    "failure_document": "failure_json",
    "render": "failure",
    "write_failure_file": "failure_json",
}

__all__ = [*_HOMES]  # noqa: PLE0604 - the keys are the names

__getattr__ = lazy_names(__name__, _HOMES)
