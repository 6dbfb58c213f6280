"""The driver of one agent: it brings events to the pure machine of `core.agent`, and performs its commands.

`supervisor` makes the parts, feeds the machine and closes all; `round_driver` performs the commands of the rounds.
`AgentParts` is what the parts share. It knows all of them, and they know it for type checkers only (law 1).
"""

from __future__ import annotations

from elastic_run.agent.context import AgentContext

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.agent.driver.event_recorder import EventRecorder
    from elastic_run.agent.driver.job import MultiNodeJob
    from elastic_run.agent.driver.round import Round
    from elastic_run.agent.history import History


class AgentParts(AgentContext):
    """The context of an agent together with its parts, which come with the supervisor."""

    events: EventRecorder
    #: This node's part in a job of several nodes; None where the rendezvous knows rounds only, as a foreign one.
    job: MultiNodeJob | None = None
    #: The current round, or the last one, or None before the first.
    current: Round | None = None
    _history: History | None = None

    @property
    def history(self) -> History:
        """The history; its modules are imported after the first worker was started: no worker waits for them."""
        if self._history is None:
            from elastic_run.agent.history import History

            self._history = History(self)
        return self._history
