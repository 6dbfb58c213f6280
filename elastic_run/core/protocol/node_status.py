"""The documents that nodes of a job exchange where somebody asks: their fields, and whether a document has them.

docs/see-into-a-running-job.md says what they mean. A document of another node comes over the network: it is shown only
where each field has its type. Unknown fields are passed over, so a newer release may add some.

Each document names the round that its node runs or has run last, and the number of nodes of that round. From these the
asker knows how many answers are missing. Spares also answer, and so do nodes without which the job went on: their
documents name no round.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

_TEXT = (str,)
_COUNT = (int,)
_NUMBER = (int, float)
_NONE = type(None)
#: Types of each field; a text is shown in one line, and without what a terminal would obey.
_ROUND: Mapping[str, tuple[type, ...]] = {"round_id": _TEXT, "round_nodes": _COUNT}
_NODE: Mapping[str, tuple[type, ...]] = {
    "host": _TEXT,
    "pid": _COUNT,
    "node_rank": (*_COUNT, _NONE),
    "nodes": (*_COUNT, _NONE),
    "state": _TEXT,
    "program": _TEXT,
    "log_dir": _TEXT,
    "uptime": _NUMBER,
    "round": _COUNT,
    "round_uptime": (*_NUMBER, _NONE),
    "restart_count": _COUNT,
    "max_restarts": _COUNT,
    "news": _TEXT,
    "world_size": (*_COUNT, _NONE),
    "workers": (list,),
}
_WORKER: Mapping[str, tuple[type, ...]] = {
    "rank": _COUNT,
    "local_rank": _COUNT,
    "pid": (*_COUNT, _NONE),
    "state": _TEXT,
    "exit_code": (*_COUNT, _NONE),
    "cpu": (*_NUMBER, _NONE),
    "memory": (*_NUMBER, _NONE),
    "gpu": (*_NUMBER, _NONE),
    "gpu_memory": (*_NUMBER, _NONE),
    "silence": (*_NUMBER, _NONE),
    "last_line": _TEXT,
}
#: A number from here up is garbage, and so are nan and infinity.
_BEYOND = 1e15
#: Kinds of questions, and the fields of the documents that answer them: those of a node, and of each of its workers.
#: What a question is about may follow its kind: `drain 3 node7` names the asker's round and the node that has to leave.
STATUS = "status"
STACKS = "stacks"
DRAIN = "drain"
HANG = "hang"
_FIELDS: Mapping[str, tuple[Mapping[str, tuple[type, ...]], Mapping[str, tuple[type, ...]]]] = {
    STATUS: (_NODE, _WORKER),
    STACKS: (
        {"host": _TEXT, "pid": _COUNT, "workers": (list,)},
        {"rank": _COUNT, "text": _TEXT, "problem": _TEXT, "details": _TEXT, "silence": (*_NUMBER, _NONE)},
    ),
    DRAIN: (
        {
            "host": _TEXT,
            "pid": _COUNT,
            "asked": _TEXT,
            "node_rank": (*_COUNT, _NONE),
            "is_leaving": (bool,),
            "workers": (list,),
        },
        {},
    ),
    HANG: (
        {"host": _TEXT, "pid": _COUNT, "round": _COUNT, "timeout": _NUMBER, "age": _NUMBER, "workers": (list,)},
        {
            "rank": _COUNT,
            "pid": _COUNT,
            "local_rank": _COUNT,
            "same": _NUMBER,
            "idle": _NUMBER,
            "waits": (bool,),
            "function": _TEXT,
            "file": _TEXT,
            "line": _COUNT,
            "is_waiting": (bool,),
            "problem": _TEXT,
        },
    ),
}


def kind_of(question: str) -> str:
    """Return the kind of a question; an unknown one, of another release, is taken for one about the state."""
    kind = question.partition(" ")[0]
    return kind if kind in _FIELDS else STATUS


class MemberCount:
    """Counts how many nodes of a round have sent a document. Of several rounds, the round with most documents counts.

    Args:
        nodes: Documents to begin with, each of another node.
    """

    def __init__(self, nodes: Iterable[Mapping[str, Any]] = ()) -> None:
        self._sizes: dict[str, int] = {}
        self._answers: dict[str, int] = {}
        for node in nodes:
            self.add(node)

    def add(self, node: Mapping[str, Any], number: int = 1) -> None:
        """Count a document. A number of -1 takes back an earlier document of a node that has sent another one."""
        if node["round_id"]:
            self._sizes[node["round_id"]] = node["round_nodes"]
            self._answers[node["round_id"]] = self._answers.get(node["round_id"], 0) + number

    def total(self) -> tuple[int, int]:
        """Return the number of the round's nodes, and of those that have sent no document; 0 and 0 without a round."""
        if not self._answers:
            return 0, 0
        common = max(self._answers, key=self._answers.__getitem__)
        return self._sizes[common], max(0, self._sizes[common] - self._answers[common])


def is_sound(node: Mapping[str, Any], question: str = STATUS) -> bool:
    """Whether a document has all fields of an answer to a question, each of its type."""
    of_node, of_worker = _FIELDS[kind_of(question)]
    return (
        _fits(node, _ROUND)
        and _fits(node, of_node)
        and all(isinstance(worker, dict) and _fits(worker, of_worker) for worker in node["workers"])
    )


def _fits(document: Mapping[str, Any], types: Mapping[str, tuple[type, ...]]) -> bool:
    return all(_is_of(document.get(name, ...), allowed) for name, allowed in types.items())


def _is_of(value: object, allowed: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in allowed
    if not isinstance(value, allowed):
        return False
    return not isinstance(value, (int, float)) or abs(value) < _BEYOND
