"""The parts of one agent that several modules of the driver need: one record, made by the supervisor."""

from __future__ import annotations

from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.agent.driver.context import AgentContext
    from elastic_run.agent.driver.job import MultiNodeJob
    from elastic_run.agent.driver.observation import Observation
    from elastic_run.agent.driver.round_join import RoundJoin
    from elastic_run.agent.history import History
    from elastic_run.agent.senders import Senders
    from elastic_run.core.agent.machine import Agent
    from elastic_run.core.agent.messages import Event
    from elastic_run.loop import Loop
    from elastic_run.multiprocessing.output.console import Console


@dataclass(frozen=True, slots=True)
class AgentParts:
    """The parts that the modules which perform the machine's commands share.

    Args:
        context: The workers and the user's settings.
        loop: The agent's loop.
        console: Takes the lines for the user.
        senders: The senders of the signals that came.
        observation: Passes events to the event log and the metrics.
        round_join: Offers this node's worker store, and takes part in the rendezvous.
        job: This node's part in a job of several nodes, or None.
        feed: Takes the machine's events.
        find_agent: Returns the state machine as it is now.
        find_history: Returns the agent's history. The first call imports its modules.
    """

    context: AgentContext
    loop: Loop
    console: Console
    senders: Senders
    observation: Observation
    round_join: RoundJoin
    job: MultiNodeJob | None
    feed: Callable[[Event], None]
    find_agent: Callable[[], Agent]
    find_history: Callable[[], History]
