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


def count_members(nodes: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """Return how many nodes a round has, and how many of them have sent no document; 0 and 0 without a round.

    Of several rounds, the round with most documents counts.
    """
    rounds = [(node["round_id"], node["round_nodes"]) for node in nodes if node["round_id"]]
    if not rounds:
        return 0, 0
    name, size = max(rounds, key=rounds.count)
    return size, max(0, size - sum(one == name for one, _ in rounds))


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
