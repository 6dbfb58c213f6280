"""One step of the agent's state machine, for those who watch."""

from __future__ import annotations

from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    from elastic_run.core.agent.machine import Agent
    from elastic_run.core.agent.messages import Command, Event
    from elastic_run.core.protocol.documents import Assignment

    #: Wall clock and monotonic clock, in seconds.
    Moment: TypeAlias = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the agent's state machine.

    Args:
        before: The agent before it.
        event: What has happened.
        after: The agent behind it.
        commands: What is done now.
        place: This node's place in the round of a job of several nodes, or None.
        halt: Why the job stops the round, in words; else "".
        sender: The process that has sent the signal which the event is about; "" where it isn't known.
    """

    before: Agent
    event: Event
    after: Agent
    commands: tuple[Command, ...]
    place: Assignment | None = None
    halt: str = ""
    sender: str = ""
