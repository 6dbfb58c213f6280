"""One step of the agent's state machine, for the event log."""

from __future__ import annotations

from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    from elastic_run.core.agent.machine import Agent
    from elastic_run.core.agent.messages import Command, Event
    from elastic_run.core.job.assignment import Assignment

    #: Wall clock and monotonic clock, in seconds.
    Moment: TypeAlias = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the agent's state machine.

    Args:
        before: The agent before the step.
        event: The event that the machine was given.
        after: The agent after the step.
        commands: The commands that follow.
        place: This node's place in the round of a job of several nodes, or None.
        halt: Why the job stops the round, in words, or "".
        sender: The process that has sent the event's signal; "" if it isn't known.
    """

    before: Agent
    event: Event
    after: Agent
    commands: tuple[Command, ...]
    place: Assignment | None = None
    halt: str = ""
    sender: str = ""
