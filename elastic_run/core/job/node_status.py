"""The documents that nodes of a job exchange where somebody asks: their fields, and whether a document has them.

docs/see-into-a-running-job.md says what they mean. A document of another node comes over the network: it is shown only
where each field has its type. Each names the round that its node runs or has run last, and the number of nodes of that
round, so that the asker knows how many answers are missing. Spares also answer; their documents name no round.
"""

from __future__ import annotations

from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any, TypeAlias

    _Types: TypeAlias = Mapping[str, tuple[type, ...]]


_KINDS: _Types = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,), "list": (list,)}


def _make_types(fields: str) -> _Types:
    """Return the types of each field, from texts such as `pid:int`; a field with `?` may be None as well."""
    pairs = (field.split(":") for field in fields.split())
    return {name: (*_KINDS[kind.rstrip("?")], *([type(None)] if "?" in kind else [])) for name, kind in pairs}


#: A number from here up is garbage, and so are nan and infinity.
_BEYOND = 1e15
#: Kinds of questions, and the fields of the documents that answer them: those of a node, and of each of its workers.
#: Words may follow the kind. `drain 3 node7` names the asker's round and the node that has to leave. `waits 4096` says
#: how many collectives the asker takes. `slow 5 23%` names the slow rank and what it costs, and asks for the reason.
STATUS = "status"
STACKS = "stacks"
DRAIN = "drain"
HANG = "hang"
WAITS = "waits"
SLOW = "slow"
_ROUND = _make_types("round_id:str round_nodes:int")
_FIELDS: Mapping[str, tuple[_Types, _Types]] = {
    STATUS: (
        _make_types(
            "host:str pid:int state:str program:str log_dir:str news:str node_rank:int? nodes:int? world_size:int? "
            "round:int restart_count:int max_restarts:int uptime:float round_uptime:float? workers:list"
        ),
        _make_types(
            "rank:int local_rank:int pid:int? state:str exit_code:int? last_line:str "
            "cpu:float? memory:float? gpu:float? gpu_memory:float? silence:float?"
        ),
    ),
    STACKS: (
        _make_types("host:str pid:int workers:list"),
        _make_types("rank:int text:str problem:str details:str silence:float?"),
    ),
    DRAIN: (_make_types("host:str pid:int node_rank:int? asked:str is_leaving:bool workers:list"), {}),
    HANG: (
        _make_types("host:str pid:int round:int timeout:float age:float workers:list"),
        _make_types(
            "rank:int pid:int local_rank:int function:str file:str line:int problem:str "
            "same:float idle:float waits:bool is_waiting:bool"
        ),
    ),
    WAITS: (_make_types("host:str pid:int groups:list workers:list"), {}),
    SLOW: (_make_types("host:str pid:int workers:list"), _make_types("rank:int reason:str")),
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


@dataclass(frozen=True, slots=True)
class WaitStatus:
    """Which nodes are there, for the lines of a node that waits."""

    phase: str  # Of the job
    round: int  # The last round that was formed, 0 for none
    min_nodes: int
    max_nodes: int
    present: int  # The number of nodes there
    hosts: tuple[str, ...]  # Their host names, or ranges of them, while nodes are waited for; otherwise none
    lost: tuple[str, ...]  # What happened to those that are missing, or why they were refused, a clause each
    #: Until the job ends for want of nodes, or starts with those that are there; None if neither
    seconds_left: float | None
    #: How many nodes of an earlier round, or which fixed node ranks, are needed before a round may form; "" if no node
    #: in particular is
    missing: str = ""
    starts: bool = False  # Whether the job starts after `seconds_left`
