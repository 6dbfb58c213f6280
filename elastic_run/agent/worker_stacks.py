"""What `elastic-run stacks` gets of this node: the stacks of its workers, or of one of them."""

from __future__ import annotations

from elastic_run.core.diagnosis.stack_text import shorten_stacks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elastic_run.agent.agent_view import Request
    from elastic_run.core.diagnosis.stack_groups import Dump

    Document = dict[str, Any]

__all__ = ["answer_stacks"]

#: Seconds that workers get to answer: less than a client waits for.
_PATIENCE = 3.0
#: Characters of one worker's text: those of 1,000 workers fit into an answer where they are as usual.
_MOST_TEXT = 1 << 18


def answer_stacks(request: Request) -> Document | None:
    """Ask the workers that run; answer when all have answered, or have had their time."""
    current = request.view.find_round()
    if current is None or not current.workers.alive:
        return {"workers": []}
    current.ask_stacks(_PATIENCE, lambda dumps: request.reply(_describe(dumps)))
    return None


def _describe(dumps: dict[int, Dump]) -> Document:
    return {
        "workers": [
            {
                "rank": rank,
                "text": shorten_stacks(dump.text, _MOST_TEXT),
                "problem": dump.problem,
                "details": dump.details[:_MOST_TEXT],
            }
            for rank, dump in sorted(dumps.items())
        ],
    }
