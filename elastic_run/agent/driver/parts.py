"""What the parts of one agent share: its loop and console, the state of its machine, its rounds so far."""

from __future__ import annotations

import time

from elastic_run.core.agent import machine, messages
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.agent.driver.context import AgentContext
    from elastic_run.agent.driver.event_recorder import EventRecorder, Moment
    from elastic_run.agent.driver.job import MultiNodeJob
    from elastic_run.agent.driver.round import Round
    from elastic_run.agent.driver.round_join import RoundJoin
    from elastic_run.agent.history import History
    from elastic_run.agent.senders import Senders
    from elastic_run.core.agent.machine import Agent
    from elastic_run.core.agent.messages import Event
    from elastic_run.loop import Loop
    from elastic_run.multiprocessing.output.console import Console


@dataclass(slots=True)
class AgentParts:
    """The parts of one agent; the supervisor makes them.

    Args:
        senders: The senders of the signals that came.
        job: This node's part in a job of several nodes, or None.
        feed: Takes the machine's events.
        agent: The state machine as it is now.
        started: Monotonic seconds when the agent began.
        current: The current round, or the last one, or None before the first.
    """

    context: AgentContext
    loop: Loop
    console: Console
    senders: Senders
    observation: Observation
    round_join: RoundJoin
    job: MultiNodeJob | None
    feed: Callable[[Event], None]
    agent: Agent
    started: float
    current: Round | None = None
    _history: History | None = None

    def say(self, text: str) -> None:
        """Write one line for the user."""
        self.console.say(text)

    @property
    def history(self) -> History:
        """The history; its modules are imported after the first worker was started: no worker waits for them."""
        if self._history is None:
            from elastic_run.agent.history import History

            self._history = History(self.context, self.senders, self.console.say)
        return self._history

    def feed_exit(self, current: Round, local_rank: int, exitcode: int) -> None:
        """Tell the machine that a worker has ended, and whether it seems to have lost a peer."""
        # If other workers still run, or other nodes, one of them may have the root cause.
        agent = self.agent
        has_others = self.job is not None or agent.running != {local_rank}
        is_asked = exitcode != 0 and has_others and agent.state == machine.RUNNING
        self.feed(
            messages.WorkerExited(
                current.number,
                local_rank=local_rank,
                exitcode=exitcode,
                is_secondary=is_asked and current.is_secondary(local_rank),
            )
        )

    def find_silences(self) -> dict[int, float]:
        """Return seconds since the last output of each worker that runs, by global rank."""
        return {} if self.current is None else self.current.find_silences()

    def is_running(self, number: int | None) -> bool:
        """Whether this round runs, and is not being stopped."""
        return self.agent.state == machine.RUNNING and self.agent.round == number


class Observation:
    """Passes the events of one agent to the event log and the metrics, if there is either.

    Their modules are imported after the first worker was started (law 1). Events before that are kept until then.

    Attributes:
        is_written: Whether there is an event log.
    """

    def __init__(self, context: AgentContext, loop: Loop, say: Callable[[str], None]) -> None:
        self._context = context
        self._loop = loop
        self._say = say
        self._recorder: EventRecorder | None = None
        self._waiting: list[tuple[Callable[[EventRecorder, Moment], None], Moment]] = []
        self.is_written = not context.has_temporary_logs or bool(context.options.agent_config.events_file)
        self._is_wanted = self.is_written or context.metrics_port is not None

    def record(self, record: Callable[[EventRecorder, Moment], None]) -> None:
        """Call a method of the recorder with the moment, now or later: the data of the call must not change."""
        if not self._is_wanted:
            return
        moment = (time.time(), self._loop.now())
        if self._recorder is None:
            self._waiting.append((record, moment))
        else:
            record(self._recorder, moment)

    def begin(self) -> None:
        """Begin to write, when the first workers run, or when it is certain that none will."""
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
        for record, moment in waiting:
            record(self._recorder, moment)

    def close(self) -> None:
        """Write the events that wait."""
        if self._recorder is not None:
            self._recorder.close()
