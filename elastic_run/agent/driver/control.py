"""The control socket of one agent: `elastic-run status`, `stacks` and other commands ask it."""

from __future__ import annotations

import os

from elastic_run.agent.control_server import ControlServer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.agent.agent_view import AgentView
    from elastic_run.agent.driver.parts import AgentParts
    from elastic_run.agent.driver.round_driver import RoundDriver


def open_control(parts: AgentParts, rounds: RoundDriver, *, started: float) -> ControlServer:
    """Open the control socket. If it can't be opened, the job goes on, and commands don't find it."""

    def stop(number: int, sender: str) -> None:
        from elastic_run.core.agent.messages import Signalled

        parts.senders.name(number, sender)
        parts.feed(Signalled(number))

    def make_view() -> AgentView:
        from elastic_run.agent.agent_view import AgentView

        return AgentView(
            loop=parts.loop,
            context=parts.context,
            job=parts.job,
            find_agent=parts.find_agent,
            find_round=lambda: rounds.current,
            stop=stop,
            started=started,
            describe_hang=rounds.watches.describe_hang,
        )

    server = ControlServer(parts.loop, make_view)
    try:
        server.open(os.environ)
    except OSError:
        pass
    return server


def serve_control(parts: AgentParts, server: ControlServer) -> None:
    """Import what answers, watch the socket, and answer the questions of other nodes, also those that came before."""
    import elastic_run.agent.control_connection  # noqa: F401 - the workers come first
    from elastic_run.agent.job_questions import answer_question

    server.watch(os.environ)
    if parts.job is not None:
        parts.job.answer = lambda question, deliver: answer_question(server.view, question, deliver)
        for question, deliver in parts.job.unanswered:
            parts.job.answer(question, deliver)
