"""Tells a job of several nodes what became of this node's rounds.

It performs the machine's commands ReportFailing, ReportReady and Leave.
"""

from __future__ import annotations

from elastic_run.core.agent import messages
from elastic_run.core.job.restart_policy import CAUSE_WAIT
from elastic_run.core.protocol.outcomes import FAILED, STOPPED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.agent.driver.job import MultiNodeJob
    from elastic_run.agent.driver.parts import AgentParts
    from elastic_run.core.job.restart_policy import Failure


class JobReports:
    """Reports of one agent to its job.

    Args:
        parts: The parts of the agent.
        job: The job of several nodes.
        find_failure: Returns the last round's failure, or None.
        check_first: Calls a function when the checks before the next round hold.
    """

    def __init__(
        self,
        parts: AgentParts,
        job: MultiNodeJob,
        *,
        find_failure: Callable[[], Failure | None],
        check_first: Callable[[int, Callable[[], None]], None],
    ) -> None:
        self._parts = parts
        self._job = job
        self._find_failure = find_failure
        self._check_first = check_first

    def leave(self, command: messages.Leave) -> None:
        """Leave the job."""
        self._job.leave(command.reason, command.detail)

    def report_failing(self, command: messages.ReportFailing) -> None:
        """Report that a worker of the round has failed, while others may still run."""
        self._job.report_failing(is_secondary=command.is_secondary)
        if command.is_secondary and not self._parts.find_agent().running and self._job.has_others:
            # All of this node have failed: the worker that has the cause is on another, which is not stopped yet.
            self._parts.find_history().tell_awaiting_cause(CAUSE_WAIT)

    def report_ready(self, command: messages.ReportReady) -> None:
        """Report how the round ended on this node, which is then ready for the next round."""
        if command.outcome in (FAILED, STOPPED):
            self._check_first(self._parts.find_agent().round, lambda: self._send_ready(command))
        else:
            self._send_ready(command)

    def _send_ready(self, command: messages.ReportReady) -> None:
        try:
            history = self._parts.find_history()
            document = history.root_cause_document(self._find_failure())
            self._job.report_ready(command, document, history.describe_ends())
        except OSError as error:
            finish = messages.Finish("cannot_start", detail=str(error))
            self._parts.feed(messages.JobOver(finish))
