"""Passes the events of one agent to the event log and the metrics, if there is either.

Their modules are imported after the first worker was started (law 1). Events before that are kept until then.
"""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.agent.driver.context import AgentContext
    from elastic_run.agent.driver.event_recorder import EventRecorder
    from elastic_run.agent.driver.step import Moment
    from elastic_run.loop import Loop


class Observation:
    """The observers of one agent: event log and metrics.

    Args:
        context: The state that all rounds of the agent share.
        loop: The agent's loop.
        say: Tells the user something in one line.

    Attributes:
        is_written: Whether there is an event log.
    """

    def __init__(self, context: AgentContext, loop: Loop, say: Callable[[str], None]) -> None:
        self._context = context
        self._loop = loop
        self._say = say
        self._recorder: EventRecorder | None = None
        self._waiting: list[tuple[Callable[[EventRecorder, Moment], None], Moment]] = []
        has_directory = not getattr(context.logs_specs, "is_temporary", False)
        self.is_written = has_directory or bool(context.options.agent_config.events_file)
        self._is_wanted = self.is_written or context.metrics_port is not None

    def tell(self, tell: Callable[[EventRecorder, Moment], None]) -> None:
        """Record an event.

        Args:
            tell: Calls a method of the recorder with the moment. The call may come later, so its data must not change.
        """
        if not self._is_wanted:
            return
        moment = (time.time(), self._loop.now())
        if self._recorder is None:
            self._waiting.append((tell, moment))
        else:
            tell(self._recorder, moment)

    def begin(self) -> None:
        """Begin to write; call it when the first workers run, or when it is certain that none will."""
        if not self._is_wanted or self._recorder is not None:
            return
        from elastic_run.agent.driver.event_recorder import open_recorder

        self._recorder = open_recorder(self._context, self._loop, self._say)
        if notice := getattr(self._context.logs_specs, "notice", ""):
            self._say(notice)
        waiting, self._waiting = self._waiting, []
        if self._recorder is None:
            self._is_wanted = False
            return
        for tell, moment in waiting:
            tell(self._recorder, moment)

    def close(self) -> None:
        """Write the events that wait."""
        if self._recorder is not None:
            self._recorder.close()
