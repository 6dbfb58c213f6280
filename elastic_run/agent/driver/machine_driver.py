"""Feeds events to `core.agent.machine`, and has its commands performed.

One event at a time, in order: an event that arises while commands are performed waits until they are done.
"""

from __future__ import annotations

import os
from collections import deque

from elastic_run.core.agent import machine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.core.agent.messages import Command, Event
    from elastic_run.loop import Loop


class MachineDriver:
    """The state machine of one agent, and its events.

    Args:
        agent: The machine before its first event.
        loop: The agent's loop, which has the clock.
        perform: Performs a command.
        observe: Called after each step, before its commands are performed: with the machine before it, the event, the
            machine after it, and the commands.

    Attributes:
        agent: The machine as it is now.
    """

    def __init__(
        self,
        agent: machine.Agent,
        loop: Loop,
        *,
        perform: Callable[[Command], None],
        observe: Callable[[machine.Agent, Event, machine.Agent, tuple[Command, ...]], None],
    ) -> None:
        self.agent = agent
        self._loop = loop
        self._perform = perform
        self._observe = observe
        self._events: deque[Event] = deque()
        self._is_feeding = False
        self._is_closed = False

    def begin(self) -> None:
        """Perform the first commands."""
        self.agent, commands = machine.begin(self.agent)
        self._perform_all(commands)

    def feed(self, event: Event) -> None:
        """Take an event, and perform what it leads to."""
        self._events.append(event)
        if self._is_feeding or self._is_closed:
            return
        self._is_feeding = True
        try:
            while self._events:
                jitter = int.from_bytes(os.urandom(2), "big") / 65536
                before, event = self.agent, self._events.popleft()
                self.agent, commands = machine.decide(before, event, self._loop.now(), jitter)
                self._observe(before, event, self.agent, commands)
                self._perform_all(commands)
        finally:
            self._is_feeding = False

    def close(self) -> None:
        """Leave all events that come from now on alone."""
        self._is_closed = True

    def _perform_all(self, commands: tuple[Command, ...]) -> None:
        for command in commands:
            self._perform(command)
