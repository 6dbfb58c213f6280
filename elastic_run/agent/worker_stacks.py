"""This node's answer to `elastic-run stacks`: the stacks of its workers."""

from __future__ import annotations

import os

from elastic_run.agent.driver.last_output import add_silences
from elastic_run.core.diagnosis.stacks import shorten_stacks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.agent.agent_view import AgentView, Request
    from elastic_run.core.diagnosis.stacks import Dump

    Document = dict[str, Any]

__all__ = ["WAIT_LIMIT", "answer_stacks", "take_stacks"]

#: Seconds that workers get to answer; a client waits longer.
WAIT_LIMIT = 3.0
#: Characters of one worker's text. Most stacks are much shorter, so the stacks of 1,000 workers fit into an answer.
_MOST_TEXT = 1 << 18


def answer_stacks(request: Request) -> None:
    """Ask the workers that run for their stacks; answer when all have answered, or when their time is over."""
    take_stacks(request.view, request.reply)


def take_stacks(view: AgentView, deliver: Callable[[Document], None]) -> None:
    """Give the document of this node's stacks to a function, once and in the loop."""
    node = {"host": view.context.hostname, "pid": os.getpid(), "state": view.find_agent().state}
    current = view.find_round()
    if current is None or not current.workers.alive:
        deliver({**node, "workers": []})
    else:
        workers = view.context.group.workers
        current.ask_stacks(
            WAIT_LIMIT,
            lambda dumps: deliver(
                {**node, "workers": _describe(add_silences(dumps, current, workers, view.loop.now()))}
            ),
        )


def _describe(dumps: dict[int, Dump]) -> list[Document]:
    return [
        {
            "rank": rank,
            "text": shorten_stacks(dump.text, _MOST_TEXT),
            "problem": dump.problem,
            "details": dump.details[:_MOST_TEXT],
            "silence": dump.silence,
        }
        for rank, dump in sorted(dumps.items())
    ]
