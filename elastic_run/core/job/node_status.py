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
    from typing import Any, TypeAlias

    _Types: TypeAlias = Mapping[str, tuple[type, ...]]


def _make_types(
    *, texts: str = "", counts: str = "", numbers: str = "", flags: str = "", lists: str = "", nullable: str = ""
) -> _Types:
    """Return the types of each field, from names with spaces between them; a nullable field may be None as well."""
    types: dict[str, tuple[type, ...]] = dict.fromkeys(texts.split(), (str,))
    types |= dict.fromkeys(counts.split(), (int,))
    types |= dict.fromkeys(numbers.split(), (int, float))
    types |= dict.fromkeys(flags.split(), (bool,))
    types |= dict.fromkeys(lists.split(), (list,))
    return types | {name: (*types[name], type(None)) for name in nullable.split()}


#: A number from here up is garbage, and so are nan and infinity.
_BEYOND = 1e15
#: Kinds of questions, and the fields of the documents that answer them: those of a node, and of each of its workers.
#: What a question is about may follow its kind: `drain 3 node7` names the asker's round and the node that has to leave.
STATUS = "status"
STACKS = "stacks"
DRAIN = "drain"
HANG = "hang"
_ROUND = _make_types(texts="round_id", counts="round_nodes")
_FIELDS: Mapping[str, tuple[_Types, _Types]] = {
    STATUS: (
        _make_types(
            texts="host state program log_dir news",
            counts="pid node_rank nodes round restart_count max_restarts world_size",
            numbers="uptime round_uptime",
            lists="workers",
            nullable="node_rank nodes round_uptime world_size",
        ),
        _make_types(
            texts="state last_line",
            counts="rank local_rank pid exit_code",
            numbers="cpu memory gpu gpu_memory silence",
            nullable="pid exit_code cpu memory gpu gpu_memory silence",
        ),
    ),
    STACKS: (
        _make_types(texts="host", counts="pid", lists="workers"),
        _make_types(texts="text problem details", counts="rank", numbers="silence", nullable="silence"),
    ),
    DRAIN: (
        _make_types(
            texts="host asked", counts="pid node_rank", flags="is_leaving", lists="workers", nullable="node_rank"
        ),
        {},
    ),
    HANG: (
        _make_types(texts="host", counts="pid round", numbers="timeout age", lists="workers"),
        _make_types(
            texts="function file problem",
            counts="rank pid local_rank line",
            numbers="same idle",
            flags="waits is_waiting",
        ),
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


def _fits(document: Mapping[str, Any], types: _Types) -> bool:
    return all(_is_of(document.get(name, ...), allowed) for name, allowed in types.items())


def _is_of(value: object, allowed: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in allowed
    if not isinstance(value, allowed):
        return False
    return not isinstance(value, (int, float)) or abs(value) < _BEYOND
