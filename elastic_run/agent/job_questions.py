"""Questions to all nodes of a job: this node's answer, and the answers of all, through the job's store."""

from __future__ import annotations

from elastic_run.agent.worker_stacks import PATIENCE, take_stacks
from elastic_run.agent.worker_status import measure
from elastic_run.core.protocol.node_status import STACKS, STATUS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.agent.agent_view import AgentView, Request

    Document = dict[str, Any]

__all__ = ["answer_job_stacks", "answer_nodes", "answer_question"]

#: Seconds that other nodes get to answer: they look for questions some times a second, and measure for a moment.
_PATIENCE = {STATUS: 2.0, STACKS: PATIENCE + 2.0}


def answer_question(view: AgentView, question: str, deliver: Callable[[Document], None]) -> None:
    """Give this node's answer to a question to a function, now or a moment later, in the loop."""
    (take_stacks if question == STACKS else measure)(view, deliver)


def answer_nodes(request: Request) -> None:
    """Tell the state of all nodes of the job, as far as they answer in time."""
    _gather(request, STATUS)


def answer_job_stacks(request: Request) -> None:
    """Tell the stacks of all nodes of the job, as far as they answer in time."""
    _gather(request, STACKS)


def _gather(request: Request, question: str) -> None:
    """Ask this node and the others at the same time; reply when both are there."""
    view, job = request.view, request.view.job
    expected = view.context.group.group_world_size or 1
    parts: dict[str, list[Document]] = {}

    def take(part: str, found: list[Document]) -> None:
        parts[part] = found
        if len(parts) == len(("own", "others")):
            (own,) = parts["own"]
            key = (own["host"], own["pid"])
            nodes = [own, *(node for node in parts["others"] if (node["host"], node["pid"]) != key)]
            request.reply({"nodes": nodes, "expected": expected})

    answer_question(view, question, lambda own: take("own", [own]))
    if job is None:
        take("others", [])
    else:
        job.gather_status(question, _PATIENCE[question], lambda others: take("others", others))
