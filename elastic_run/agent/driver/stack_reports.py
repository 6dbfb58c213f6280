r"""Shows what the workers do: on SIGQUIT (Ctrl-\), and before SIGKILL ends workers that do not stop."""

from __future__ import annotations

from elastic_run import contract
from elastic_run.core.agent import machine
from elastic_run.multiprocessing.process.fork_exec import can_ask_for_stacks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic_run.agent.driver.parts import AgentParts
    from elastic_run.agent.driver.round import Round
    from elastic_run.core.failure.stacks import Dump

#: Seconds in which a second SIGQUIT stops the job.
_TWICE = 2.0
#: Seconds that workers get to write their stacks for a user who waits, and before SIGKILL, which must not come late.
_WAIT_LIMIT = 3.0
_WAIT_BEFORE_KILL = 0.4
#: The same before a stop: seconds from the question to the end of the wait for a cause.
WAIT_BEFORE_STOP = 0.4


class StackReports:
    """The stacks of one agent's workers, for its user."""

    def __init__(self, parts: AgentParts) -> None:
        self._parts = parts
        self._asked_at: float | None = None

    def show_on_quit(self) -> bool:
        """Show the stacks; return False if the signal has to stop the job: at a second SIGQUIT soon after the first."""
        now, before = self._parts.loop.now(), self._asked_at
        self._asked_at = now
        is_second = before is not None and now - before < _TWICE
        if is_second or not can_ask_for_stacks():
            return False
        current = self._parts.current
        if current is not None and current.workers.alive:
            current.ask_stacks(_WAIT_LIMIT, lambda dumps: self._show(dumps, current))
            return True
        if self._parts.agent.state not in (machine.JOINING, machine.PAUSING):
            return False
        from elastic_run.report.stack_lines import no_workers

        self._parts.say(no_workers(self._parts.agent.state, _TWICE))
        return True

    def ask_before_stop(self, number: int) -> None:
        """Ask the workers of a round that run on although another one has lost a peer: one of them may be stuck."""
        current = self._parts.current
        if current is not None and self._parts.is_running(number) and can_ask_for_stacks():
            current.ask_stacks(WAIT_BEFORE_STOP, self._parts.history.keep_before_stop)

    def tell_before_kill(self) -> None:
        """Show the stacks of workers that did not stop, before the end of their grace period."""
        current = self._parts.current
        if current is not None and can_ask_for_stacks():
            current.ask_stacks(_WAIT_BEFORE_KILL, self._show_overdue)

    def _show(self, dumps: dict[int, Dump], current: Round) -> None:
        from elastic_run.agent.driver.worker_readings import add_silences
        from elastic_run.report.stack_lines import closing, details, summary

        dumps = add_silences(dumps, current, self._parts.loop.now())
        path = self.write(dumps)
        self._parts.say(summary(dumps))
        if not path:
            for line in details(dumps):
                self._parts.say(line)
        goes_on = self._parts.agent.state != machine.STOPPING
        self._parts.say(closing(path, _TWICE if goes_on else None))

    def _show_overdue(self, dumps: dict[int, Dump]) -> None:
        from elastic_run.report.stack_lines import overdue

        if dumps:
            self._parts.history.keep_overdue(dumps)
            self._parts.say(overdue(dumps, self.write(dumps)))

    def write(self, dumps: Mapping[int, Dump]) -> str:
        """Write all stacks into a file of the log directory; return its path, or "" where there is none."""
        from elastic_run.diagnosis.stack_requests import write_stacks

        directory = self._parts.context.log_directory
        try:
            return write_stacks(directory, dumps) if directory else ""
        except OSError as error:
            self._parts.say(f"{contract.STACKS_FILE} could not be written to {directory}: {error.strerror}")
            return ""
