"""The requests that commands may make of a running agent, through its control socket.

To add a request, write a function that takes a `Request`, and add its row to `REQUESTS`. The function runs in the
agent's loop: it returns the answer, a document for JSON, or returns None and calls `Request.reply` later from the loop.
It raises `ControlError` with one line where the request can't be answered. The client's side is
`control.client.ask(path, Call(name, arguments))`.
"""

from __future__ import annotations

import os
import time

from elastic_run import __version__
from elastic_run.agent.driver.exit_codes import program_name
from elastic_run.control.wire import ControlError
from elastic_run.records import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.agent.driver.context import AgentContext
    from elastic_run.agent.driver.job import MultiNodeJob
    from elastic_run.agent.driver.round import Round
    from elastic_run.control.wire import Call
    from elastic_run.core.agent.machine import Agent
    from elastic_run.loop import Loop

    Document = dict[str, Any]

__all__ = ["REQUESTS", "AgentView", "Request", "perform"]


@dataclass(frozen=True, slots=True)
class AgentView:
    """What requests see of the agent.

    Args:
        loop: Its loop, in which every request runs.
        context: Its workers and options.
        job: Its part in a job of several nodes, or None.
        find_agent: Returns the state machine as it is now.
        find_round: Returns the current round, or the last one, or None before the first.
        stop: Stops the job as if this signal had come.
        started_at: Wall clock when the agent began, seconds since the epoch, for display.
        memory: What requests keep until the next one, by request, such as the last measured CPU times.
    """

    loop: Loop
    context: AgentContext
    job: MultiNodeJob | None
    find_agent: Callable[[], Agent]
    find_round: Callable[[], Round | None]
    stop: Callable[[int], None]
    started_at: float = field(default_factory=time.time)
    memory: dict[str, Any] = field(default_factory=dict)


class Request:
    """One request while it is answered.

    Args:
        view: What it may see of the agent.
        reply: Sends the answer; harmless when the client has gone.

    Attributes:
        arguments: The client's, unchecked.
    """

    __slots__ = ("arguments", "reply", "view")

    def __init__(self, view: AgentView, reply: Callable[[Document], None]) -> None:
        self.view = view
        self.reply = reply
        self.arguments: Document = {}


def perform(request: Request, call: Call) -> None:
    """Answer a request now, or begin to.

    Raises:
        ControlError: It can't be answered.
    """
    answer = REQUESTS.get(call.name)
    if answer is None:
        message = f"this agent, elastic-run {__version__}, has no request {call.name!r}"
        raise ControlError(message)
    request.arguments = call.arguments
    document = answer(request)
    if document is not None:
        request.reply(document)


def identify(request: Request) -> Document:
    """Say which job the agent runs."""
    view = request.view
    spec, options = view.context.group.spec, view.context.options
    return {
        "run_id": view.context.run_id,
        "pid": os.getpid(),
        "host": view.context.hostname,
        "version": __version__,
        "program": program_name(spec.entrypoint, spec.args),
        "log_dir": view.context.log_directory,
        "state": view.find_agent().state,
        "started_at": view.started_at,
        "max_nodes": options.job_config.max_nodes,
    }


REQUESTS: dict[str, Callable[[Request], Document | None]] = {
    "identify": identify,
}
