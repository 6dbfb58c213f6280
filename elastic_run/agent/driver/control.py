"""The control socket of one agent: `elastic-run status`, `stacks` and other commands ask it."""

from __future__ import annotations

import os

from elastic_run.agent.agent_view import AgentView
from elastic_run.agent.control_server import ControlServer
from elastic_run.agent.job_questions import answer_question
from elastic_run.core.agent import messages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.agent.driver.parts import AgentParts
    from elastic_run.agent.driver.round_driver import RoundDriver


def open_control(parts: AgentParts, rounds: RoundDriver, *, started: float) -> ControlServer | None:
    """Open the control socket; None if it can't be opened: the job goes on, and commands don't find it."""

    def stop(number: int, sender: str) -> None:
        parts.senders.name(number, sender)
        parts.feed(messages.Signalled(number))

    view = AgentView(
        loop=parts.loop,
        context=parts.context,
        job=parts.job,
        find_agent=parts.find_agent,
        find_round=lambda: rounds.current,
        stop=stop,
        started=started,
        describe_hang=rounds.watches.describe_hang,
    )
    if parts.job is not None:
        parts.job.answer = lambda question, deliver: answer_question(view, question, deliver)
        for question, deliver in parts.job.unanswered:
            parts.job.answer(question, deliver)
    server = ControlServer(parts.loop, view)
    try:
        server.open(os.environ)
    except OSError:
        return None
    return server
