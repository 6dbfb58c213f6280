"""Questions that a node asks all nodes of its job (`status`, `stacks`, drains, hang checks): both halves.

The coordinator passes a question on to each node, and sends the asker the answers together. An answer is for each asker
of the same question. A node that does not answer in the asker's time is missing from the answer.
"""

from __future__ import annotations

from elastic_run.core.job.node_status import is_sound
from elastic_run.records import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from elastic_run.loop import Loop, Timer
    from elastic_run.rendezvous.coordination.link import Link

#: Questions that are open at a time, characters of one, and seconds that an asker may wait.
_MOST = 64
_LONGEST = 256
_LONGEST_WAIT = 600.0
#: Documents in one message to the asker: each may have 256 KiB.
_PART = 16


@dataclass(slots=True)
class _Open:
    """A question that was sent to all nodes; `number` is the asking node's own."""

    asker: Link
    number: int
    question: str
    missing: set[str]  # the nodes that have yet to answer
    timer: Timer | None = None
    documents: list[dict[str, Any]] = field(default_factory=list)


class Questions:
    """The coordinator's part: the questions that wait for answers."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._open: list[_Open] = []

    def ask(self, asker: Link, message: Mapping[str, Any], nodes: Mapping[str, Link]) -> None:
        """Pass a question (`number`, `question`, and `wait` in seconds) on to all nodes."""
        number, question, wait = message.get("number"), message.get("question"), message.get("wait")
        if not isinstance(number, int) or not isinstance(question, str) or not isinstance(wait, int | float):
            return
        if len(question) > _LONGEST or len(self._open) >= _MOST:
            asker.send({"kind": "answers", "number": number, "documents": [], "is_last": True})
            return
        asked = _Open(asker, number, question, set(nodes))
        asked.timer = self._loop.call_later(min(wait, _LONGEST_WAIT), lambda: self._finish(asked))
        self._open.append(asked)
        for link in nodes.values():
            link.send({"kind": "asked", "question": question})

    def answer(self, node: str, message: Mapping[str, Any]) -> None:
        """Take a node's answer."""
        question, document = message.get("question"), message.get("document")
        if not isinstance(question, str) or not isinstance(document, dict) or not is_sound(document, question):
            return
        for asked in tuple(self._open):
            if asked.question == question and node in asked.missing:
                asked.documents.append(document)
                self._drop(asked, node)

    def lose(self, node: str) -> None:
        """Wait no longer for a node that is gone."""
        for asked in tuple(self._open):
            self._drop(asked, node)

    def clear(self) -> None:
        """Forget all questions: their askers are told nothing more here."""
        for asked in self._open:
            if asked.timer is not None:
                asked.timer.cancel()
        self._open.clear()

    def _drop(self, asked: _Open, node: str) -> None:
        asked.missing.discard(node)
        if not asked.missing:
            self._finish(asked)

    def _finish(self, asked: _Open) -> None:
        self._open.remove(asked)
        if asked.timer is not None:
            asked.timer.cancel()
        for start in range(0, max(1, len(asked.documents)), _PART):
            part = asked.documents[start : start + _PART]
            is_last = start + _PART >= len(asked.documents)
            asked.asker.send({"kind": "answers", "number": asked.number, "documents": part, "is_last": is_last})


class OwnQuestions:
    """The questions that one node has asked, in its loop."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._number = 0
        self._asked: dict[int, tuple[Callable[[list[dict[str, Any]]], None], list[dict[str, Any]]]] = {}

    def ask(self, link: Link, question: str, wait: float, deliver: Callable[[list[dict[str, Any]]], None]) -> None:
        """Ask all nodes; the answers that have come in time are delivered once."""
        self._number += 1
        number = self._number
        self._asked[number] = deliver, []
        link.send({"kind": "ask", "number": number, "question": question, "wait": wait})
        # The coordinator may be gone, or stopped.
        self._loop.call_later(wait + 1.0, lambda: self.take({"number": number, "is_last": True}))

    def take(self, message: Mapping[str, Any]) -> None:
        """Take the coordinator's message with answers."""
        number, documents = message.get("number"), message.get("documents")
        if not isinstance(number, int) or number not in self._asked:
            return
        deliver, found = self._asked[number]
        if isinstance(documents, list):
            found += [document for document in documents if isinstance(document, dict)]
        if message.get("is_last"):
            del self._asked[number]
            deliver(found)

    def give_up(self) -> None:
        """Deliver what has come: the connection is over."""
        for number in tuple(self._asked):
            self.take({"number": number, "is_last": True})
