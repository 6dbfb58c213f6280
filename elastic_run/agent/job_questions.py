"""Questions to all nodes of a job: this node's answer, and the answers of all, through the coordinator."""

from __future__ import annotations

import os

from elastic_run.agent.worker_stacks import WAIT_LIMIT, take_stacks
from elastic_run.agent.worker_status import measure
from elastic_run.control.wire import ControlError
from elastic_run.core.protocol.node_status import DRAIN, HANG, STACKS, STATUS, count_members, kind_of
from elastic_run.signals import SIGTERM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.agent.agent_view import AgentView, Request

    Document = dict[str, Any]

__all__ = ["answer_drain", "answer_job_stacks", "answer_nodes", "answer_question"]

#: Seconds that other nodes get to answer: they measure for a moment.
_WAIT_LIMIT = {STATUS: 2.0, STACKS: WAIT_LIMIT + 2.0, DRAIN: 2.0, HANG: 2.0}
#: Characters of a node's name.
_LONGEST_NAME = 200


def answer_question(view: AgentView, question: str, deliver: Callable[[Document], None]) -> None:
    """Give this node's answer to a question to a function, now or a moment later, in the loop."""
    kind, _, words = question.partition(" ")
    of_round = {"round_id": "", "round_nodes": 0} if view.job is None else view.job.describe_round()

    def deliver_of_round(document: Document) -> None:
        deliver({**document, **of_round})

    if kind == DRAIN:
        deliver_of_round({"asked": question, **_leave_if_named(view, words)})
    elif kind == HANG:
        deliver_of_round({"host": view.context.hostname, "pid": os.getpid(), **view.describe_hang()})
    else:
        (take_stacks if kind == STACKS else measure)(view, deliver_of_round)


def _leave_if_named(view: AgentView, words: str) -> Document:
    """Leave the job, as at SIGTERM, if this node is the named one: the others go on without it.

    A node rank means a node of the round in which it was asked: once that node has left, its rank is another node's,
    which may see the question only then.
    """
    asked_in, _, name = words.partition(" ")
    round_number, own_rank = _find_place(view)
    host, node_rank = view.context.hostname, own_rank if asked_in == str(round_number) else None
    is_leaving = name == host or (node_rank is not None and name == str(node_rank))
    if is_leaving and not view.memory.get(DRAIN):
        view.memory[DRAIN] = True
        view.loop.call_soon(lambda: view.stop(SIGTERM, "elastic-run drain"))
    return {"host": host, "pid": os.getpid(), "node_rank": node_rank, "is_leaving": is_leaving, "workers": []}


def _find_place(view: AgentView) -> tuple[int, int | None]:
    """Return the newest round that this node was given, and its node rank there.

    The agent's machine hears of a round only when the warm workers are ready: its round may be older than the group's
    rank.
    """
    if view.job is not None and view.job.place is not None:
        return view.job.place.round, view.job.place.group_rank
    return view.find_agent().round, view.context.group.group_rank


def answer_nodes(request: Request) -> None:
    """Tell the state of all nodes of the job, as far as they answer in time."""
    _gather(request, STATUS)


def answer_job_stacks(request: Request) -> None:
    """Tell the stacks of all nodes of the job, as far as they answer in time."""
    _gather(request, STACKS)


def answer_drain(request: Request) -> None:
    """Let one node of the job leave, and tell all nodes.

    Raises:
        ControlError: The name is none.
    """
    name = request.arguments.get("node")
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= _LONGEST_NAME:
        message = "this is not the name of a node"
        raise ControlError(message)
    words = f"{_find_place(request.view)[0]} {name}"
    own = _leave_if_named(request.view, words)
    if own["is_leaving"]:  # its session may end before the others have answered
        request.reply({"nodes": [own], "members": 1, "missing": 0})
    else:
        _gather(request, f"{DRAIN} {words}")


def _gather(request: Request, question: str) -> None:
    """Ask this node and the others at the same time; reply when both are there."""
    view, job = request.view, request.view.job
    parts: dict[str, list[Document]] = {}

    def take(part: str, found: list[Document]) -> None:
        parts[part] = found
        if len(parts) == len(("own", "others")):
            (own,) = parts["own"]
            key = (own["host"], own["pid"])
            nodes = [own, *(node for node in parts["others"] if (node["host"], node["pid"]) != key)]
            members, missing = count_members(nodes)
            request.reply({"nodes": nodes, "members": members, "missing": missing})

    answer_question(view, question, lambda own: take("own", [own]))
    if job is None:
        take("others", [])
    else:
        job.gather_status(question, _WAIT_LIMIT[kind_of(question)], lambda others: take("others", others))
