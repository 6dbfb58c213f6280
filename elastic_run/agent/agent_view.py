"""The parts of the agent that a request on the control socket may read, and the request while it is answered."""

from __future__ import annotations

from elastic_run.records import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.agent.driver.context import AgentContext
    from elastic_run.agent.driver.job import MultiNodeJob
    from elastic_run.agent.driver.round import Round
    from elastic_run.core.agent.machine import Agent
    from elastic_run.loop import Loop

    Document = dict[str, Any]

__all__ = ["AgentView", "Request"]


@dataclass(frozen=True, slots=True)
class AgentView:
    """The parts of an agent that requests may read.

    Args:
        loop: The agent's loop, in which every request runs.
        context: The agent's workers and options.
        job: The agent's part in a job of several nodes, or None.
        find_agent: Returns the state machine as it is now.
        find_round: Returns the current round, or the last one, or None before the first.
        stop: Stops the job as if this signal had come; the second argument names the sender.
        started: Monotonic seconds when the agent began.
        describe_hang: Returns what other nodes need to know of this node's ranks to judge whether the job hangs.
        memory: Values that a request keeps for the next request of its name, such as the last measured CPU times.
    """

    loop: Loop
    context: AgentContext
    job: MultiNodeJob | None
    find_agent: Callable[[], Agent]
    find_round: Callable[[], Round | None]
    stop: Callable[[int, str], None]
    started: float
    describe_hang: Callable[[], Document] = dict
    memory: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Request:
    """One request while it is answered.

    Args:
        view: The parts of the agent that it may read.
        reply: Sends the answer; harmless when the client has gone.

    Attributes:
        arguments: The client's arguments, unchecked.
    """

    view: AgentView
    reply: Callable[[Document], None]
    arguments: Document = field(default_factory=dict, init=False)
