r"""Shows what the workers do: on SIGQUIT (Ctrl-\), and before SIGKILL ends workers that do not stop."""

from __future__ import annotations

from elastic_run import contract
from elastic_run.core.agent import machine
from elastic_run.multiprocessing.process.stack_pipe import is_possible

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elastic_run.agent.driver.context import AgentContext
    from elastic_run.agent.driver.round import Round
    from elastic_run.core.diagnosis.stacks import Dump
    from elastic_run.loop import Loop
    from elastic_run.multiprocessing.output.console import Console

#: Seconds in which a second SIGQUIT stops the job.
_TWICE = 2.0
#: Seconds that workers get to write their stacks for a user who waits, and before SIGKILL, which must not come late.
_WAIT_LIMIT = 3.0
_WAIT_BEFORE_KILL = 0.4
#: The same before a stop: seconds from the question to the end of the wait for a cause.
WAIT_BEFORE_STOP = 0.4


class StackReports:
    """The stacks of one agent's workers, for its user.

    Args:
        context: Where log files go.
        loop: The agent's loop.
        console: Takes the lines.
        current_round: Returns the round that runs, or None.
        find_state: Returns the state of the agent's machine.
        keep: Takes the stacks of workers that did not stop in time.
        keep_before_stop: Takes the stacks of workers that run on when another one has lost a peer.
    """

    def __init__(
        self,
        context: AgentContext,
        loop: Loop,
        console: Console,
        *,
        current_round: Callable[[], Round | None],
        find_state: Callable[[], str],
        keep: Callable[[Mapping[int, Dump]], None],
        keep_before_stop: Callable[[Mapping[int, Dump]], None],
    ) -> None:
        self._context = context
        self._loop = loop
        self._console = console
        self._current_round = current_round
        self._find_state = find_state
        self._keep = keep
        self._keep_before_stop = keep_before_stop
        self._asked_at: float | None = None

    def show_on_quit(self) -> bool:
        """Show the stacks; return False if the signal has to stop the job: at a second SIGQUIT soon after the first."""
        now, before = self._loop.now(), self._asked_at
        self._asked_at = now
        is_second = before is not None and now - before < _TWICE
        if is_second or not is_possible():
            return False
        current = self._current_round()
        if current is not None and current.workers.alive:
            current.ask_stacks(_WAIT_LIMIT, lambda dumps: self._show(self._add_silences(dumps, current)))
            return True
        if self._find_state() not in (machine.JOINING, machine.PAUSING):
            return False
        from elastic_run.report.stack_lines import no_workers

        self._console.say(no_workers(self._find_state(), _TWICE))
        return True

    def ask_before_stop(self, number: int) -> None:
        """Ask the workers that run on although another one has lost a peer: one of them may be stuck.

        Args:
            number: The round; if it is stopped by now, nobody is asked.
        """
        current = self._current_round()
        is_running = current is not None and current.number == number and self._find_state() == machine.RUNNING
        if current is not None and is_running and is_possible():
            current.ask_stacks(WAIT_BEFORE_STOP, self._keep_before_stop)

    def tell_before_kill(self) -> None:
        """Show the stacks of workers that did not stop, before the end of their grace period."""
        current = self._current_round()
        if current is not None and is_possible():
            current.ask_stacks(_WAIT_BEFORE_KILL, self._show_overdue)

    def _add_silences(self, dumps: dict[int, Dump], current: Round) -> dict[int, Dump]:
        from elastic_run.agent.driver.last_output import add_silences

        return add_silences(dumps, current, self._context.group.workers, self._loop.now())

    def _show(self, dumps: dict[int, Dump]) -> None:
        from elastic_run.report.stack_lines import closing, details, summary

        path = self.write(dumps)
        self._console.say(summary(dumps))
        if not path:
            for line in details(dumps):
                self._console.say(line)
        goes_on = self._find_state() != machine.STOPPING
        self._console.say(closing(path, _TWICE if goes_on else None))

    def _show_overdue(self, dumps: dict[int, Dump]) -> None:
        from elastic_run.report.stack_lines import overdue

        if dumps:
            self._keep(dumps)
            self._console.say(overdue(dumps, self.write(dumps)))

    def write(self, dumps: Mapping[int, Dump]) -> str:
        """Write all stacks into a file of the log directory; return its path, or "" where there is none."""
        from elastic_run.diagnosis.stack_requests import write_stacks

        directory = self._context.log_directory
        try:
            return write_stacks(directory, dumps) if directory else ""
        except OSError as error:
            self._console.say(f"{contract.STACKS_FILE} could not be written to {directory}: {error.strerror}")
            return ""
