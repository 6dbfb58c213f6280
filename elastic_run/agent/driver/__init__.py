"""The driver of one agent: it brings events to the pure machine of `core.agent`, and performs its commands.

`supervisor` makes the parts, feeds the machine and closes all; `round_driver` performs the commands of the rounds.
`AgentParts` is what the parts share. It knows all of them, and they know it for type checkers only (law 1).
"""

from __future__ import annotations

from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.agent.context import AgentContext
    from elastic_run.agent.driver.event_recorder import EventRecorder
    from elastic_run.agent.driver.job import MultiNodeJob
    from elastic_run.agent.driver.round import Round
    from elastic_run.agent.history import History


@dataclass(slots=True)
class AgentParts:
    """The parts of one agent, in the order in which they are made."""

    context: AgentContext
    events: EventRecorder
    #: This node's part in a job of several nodes, where the rendezvous knows one; a foreign handler has rounds only.
    job: MultiNodeJob | None
    #: The current round, or the last one, or None before the first.
    current: Round | None = None
    _history: History | None = None

    @property
    def history(self) -> History:
        """The history; its modules are imported after the first worker was started: no worker waits for them."""
        if self._history is None:
            from elastic_run.agent.history import History

            self._history = History(self.context)
        return self._history
