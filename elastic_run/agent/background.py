"""Processes that workers with exit code 0 left running in the background.

They live on once the whole job has succeeded. Until then, in a job of several nodes, the round may still fail on
another node. In that case the agent ends them before the next round begins, and before the launcher ends.
"""

from __future__ import annotations

from elastic_run.core.agent import messages
from elastic_run.signals import SIGTERM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.agent.context import AgentContext
    from elastic_run.agent.driver.round import Round
    from elastic_run.core.agent.messages import Event
    from elastic_run.multiprocessing.workers import Workers


class Background:
    """The background processes of one agent's last round."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._workers: Workers | None = None
        self._ending: Workers | None = None
        self._waiting: list[Event] = []

    @property
    def is_ending(self) -> bool:
        """Whether some are being stopped."""
        return self._ending is not None

    def keep(self, ended: Round) -> None:
        """Leave a round's background processes alone for now."""
        self._workers = ended.workers
        try:
            own = ended.output.leave(is_exec=self._context.guardian.is_exec)
            self._context.guardian.own_sessions.update(own)
        except OSError as error:
            self._context.say(f"the output of background processes is lost from now on: {error.strerror}")

    def takes(self, event: Event) -> bool:
        """Whether an event waits until the background processes have ended; no round begins before that."""
        if isinstance(event, messages.RoundFormed) and self._workers is not None:
            self._end()
        if self._ending is None or isinstance(event, (messages.Signalled, messages.JobOver)):
            return False
        self._waiting.append(event)
        return True

    def conclude(self, *, is_success: bool) -> None:
        """Let them live on after a success, and name them; end them otherwise."""
        if self._workers is None or not is_success:
            self._end()
            return
        # First: from now on they live, also if the launcher is killed.
        self._context.guardian.spare_all()
        if pids := self._workers.find_survivors():
            from elastic_run.report import lines

            self._context.say(lines.background([(pid, _read_command(pid)) for pid in sorted(pids)]))

    def hurry(self) -> None:
        """Kill the processes that are being stopped."""
        if self._ending is not None:
            self._ending.hurry()

    def _end(self) -> None:
        if self._workers is not None:
            self._ending, self._workers = self._workers, None
            self._ending.stop(SIGTERM, self._context.options.shutdown_timeout, lambda _: self._on_ended())

    def _on_ended(self) -> None:
        self._ending = None
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            self._context.feed(event)


def _read_command(pid: int) -> str:
    import psutil

    try:
        return " ".join(psutil.Process(pid).cmdline())[:400]
    except (psutil.Error, OSError):
        return ""
