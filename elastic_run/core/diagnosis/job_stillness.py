"""How long the ranks of all nodes of a job have been still: each node's document, and all of them together.

Pure. A node reports what its last look has shown; each rank is measured on its own node's clock, in seconds, so no two
clocks are compared. The job is not judged before all nodes of the round have answered.
"""

from __future__ import annotations

from elastic_run.core.diagnosis.hang import Stillness, count_seconds
from elastic_run.core.diagnosis.stack_groups import Place
from elastic_run.records import dataclass, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    Document = Mapping[str, Any]

#: Seconds after which a node of a large job takes it that no other node asks the nodes for their ranks, and the seconds
#: that each further node waits for those before it.
_ABSENCE = 45.0
_TURN = 0.1
#: The timeout of a node that detects no hangs, and of one that can't tell yet.
NO_DETECTION = -1
NOT_YET = -2


@dataclass(frozen=True, slots=True)
class Owner:
    """The worker that has a rank: its node's name, its pid, and its number on the node."""

    host: str
    pid: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class JobStillness:
    """The ranks of all nodes.

    Args:
        seconds: For how long no rank has made progress; 0 where that is not known of all nodes.
        timeout: The longest timeout of all nodes, in seconds.
        ranks: How long each rank has been still, by global rank.
        owners: The worker of each rank.
        left: Seconds until `seconds` may reach the timeout, at the earliest; below 0 where a node's next look is due.
        without: Names of nodes that detect no hangs.
    """

    seconds: float
    timeout: float
    ranks: Mapping[int, Stillness]
    owners: Mapping[int, Owner]
    left: float = 0.0
    without: tuple[str, ...] = ()


def count_wait(group_rank: int, *, over_for: float, unasked_for: float) -> float:
    """Return the seconds until a node of a large job asks all nodes itself; 0 or less if it is its turn.

    If each of 1,000 nodes asked all nodes, there would be a million answers. The node with rank 0 asks at once, unless
    its workers have ended. Then it never asks, and the next node gets its turn a moment later.

    Args:
        group_rank: This node's rank.
        over_for: Seconds since the timeout in which no rank of this node has made progress.
        unasked_for: Seconds since a node has asked.
    """
    turn = group_rank * _TURN
    return 0.0 if group_rank == 0 else max(turn - over_for, _ABSENCE + turn - unasked_for)


def describe_rank(rank: int, still: Stillness, *, pid: int, local_rank: int) -> dict[str, Any]:
    """Return what a node tells of one of its ranks; `core.protocol.node_status` has the types."""
    place = still.place
    return {
        "rank": rank,
        "pid": pid,
        "local_rank": local_rank,
        "same": still.same,
        "idle": still.idle,
        "waits": still.waits,
        "function": place.function,
        "file": place.file,
        "line": place.line,
        "is_waiting": place.is_waiting,
        "problem": place.problem,
    }


def join_nodes(documents: Sequence[Document], *, expected: int, round_number: int) -> JobStillness:
    """Put the answers of the nodes together.

    Args:
        documents: Those that have come, with sound fields, at most one of each node.
        expected: Nodes in the round.
        round_number: The round; a node that is in another one makes progress.
    """
    ranks, owners, now = {}, {}, {}
    for document in documents:
        for worker in document["workers"]:
            ranks[worker["rank"]] = still = _read_rank(worker)
            now[worker["rank"]] = replace(still, same=still.same + document["age"], idle=still.idle + document["age"])
            owners[worker["rank"]] = Owner(document["host"], worker["pid"], worker["local_rank"])
    timeouts = [document["timeout"] for document in documents]
    timeout, is_complete = max(timeouts, default=0.0), len(documents) == expected
    is_judged = min(timeouts, default=NOT_YET) >= 0 and all(one["round"] == round_number for one in documents)
    return JobStillness(
        seconds=count_seconds(ranks) if is_complete and is_judged else 0.0,
        timeout=timeout,
        ranks=ranks,
        owners=owners,
        left=(timeout - count_seconds(now) if is_judged else timeout) if is_complete else 0.0,
        without=tuple(document["host"] for document in documents if document["timeout"] == NO_DETECTION),
    )


def _read_rank(worker: Document) -> Stillness:
    place = Place(worker["function"], worker["file"], worker["line"], worker["is_waiting"], worker["problem"])
    return Stillness(place, worker["waits"], worker["same"], worker["idle"])
