"""What the user is told: one line while the job goes on, at most 25 when it ends; each name loaded when first used.

| module | what it holds |
|---|---|
| `advice` | what to do: against a verdict of the launcher's own, else against the likeliest cause |
| `annotations` | the closing report in one line for GitHub Actions |
| `event_file` | appends lines to the event log, in a thread of its own |
| `event_history` | reads event logs, and folds them into the history of jobs |
| `event_schema` | the events of the event log with their fields |
| `failure_json` | failure.json |
| `failure_rules` | rules on what helps against failures: those of elastic-run, and a file of the user's |
| `failure` | the closing report |
| `hang_lines` | the lines that say that the job hangs |
| `history_page` | the page of a job's history |
| `job_history` | launchers, rounds, members and workers of a job, as its event logs tell |
| `job_result` | how a job ended: the record that report, failure.json and error file are made of |
| `lines` | the lines of the launcher while the job runs |
| `memory` | counts what the kernel's OOM killer did while the job ran |
| `other_workers` | what became of the workers that are not the root cause |
| `root_cause` | a root cause as a document for the other nodes, and back |
| `stack_lines` | the lines that say where the workers are |
| `status_table` | the text of `elastic-run status`: a row for each worker, and which stand out |
| `text` | printable text: width in columns, wrapping, shortening |
| `trace` | the lines of a traceback that tell most |
| `wait_line` | one line on the terminal that says what a node waits for |
| `wait_notices` | when a waiting node is told which nodes are missing, and how long is left |
| `wait_texts` | the texts of `wait_line` and `wait_notices` |
| `wording` | words for exit codes, signals, ranks, durations and exceptions |
"""

from __future__ import annotations

from elastic_run.lazy import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.failure.evidence import OomKills as OomKills
    from elastic_run.report.failure import render as render
    from elastic_run.report.failure_json import failure_document as failure_document
    from elastic_run.report.failure_json import write_failure_file as write_failure_file
    from elastic_run.report.job_result import Attempt as Attempt
    from elastic_run.report.job_result import JobResult as JobResult
    from elastic_run.report.memory import read_oom_kills as read_oom_kills

_HOMES = {
    "Attempt": "job_result",
    "JobResult": "job_result",
    "OomKills": "elastic_run.core.failure.evidence",
    "failure_document": "failure_json",
    "read_oom_kills": "memory",
    "render": "failure",
    "write_failure_file": "failure_json",
}

__all__ = [*_HOMES]  # noqa: PLE0604 - the keys are the names

__getattr__ = lazy_names(__name__, _HOMES)
