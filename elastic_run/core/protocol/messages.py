"""What the agents of a job say to each other through its store: facts, decisions, assignments.

- Every message is a JSON object with the `protocol` that its sender speaks and its `kind`.
- Facts are what agents saw; each carries its node and a number that grows per node, so that a fact that was said
  twice, since a reply was lost, counts once. Decisions are what the coordinator made of them; each carries the
  coordinator's term.
- A node is known by an id that is unique per agent run. Host names and addresses are shown and dialled, never compared.
- Nothing here says what follows from a message: that is `job.machine` (facts) and `node.machine` (decisions).
"""

from __future__ import annotations

from elastic_run.core.protocol.codec import Document, MessageError, decode, encode, from_document, to_document
from elastic_run.core.protocol.decisions import (
    FAILURE,
    JOIN,
    LEAVE,
    LOSS,
    Claim,
    Decision,
    End,
    Failover,
    Form,
    Halt,
    Prepare,
    Recovered,
    Refuse,
    Resign,
    Resync,
    Warn,
)
from elastic_run.core.protocol.documents import (
    Assignment,
    Head,
    LogStart,
    Note,
    Status,
)
from elastic_run.core.protocol.facts import (
    LAST_SEQUENCE,
    SEAT_CONFIRMED,
    SEAT_RUNNING,
    SEAT_UNTOLD,
    Copy,
    Fact,
    Failing,
    FailoverRequest,
    Foreign,
    Join,
    Leave,
    NodeEnds,
    NodeInfo,
    PreviousRound,
    Ready,
    SeatDead,
    StoreAddress,
    StuckRank,
    is_related,
    read_term,
)
from elastic_run.core.protocol.outcomes import (
    BY_SIGNAL,
    CANNOT_START,
    DIED,
    DONE,
    EXCLUDED,
    FAILED,
    OUTCOMES,
    STOPPED,
    UNHEALTHY,
    UNKILLABLE,
    UNREACHABLE,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeVar

    Message = TypeVar("Message")

__all__ = [
    "BY_SIGNAL",
    "CANNOT_START",
    "DIED",
    "DONE",
    "EXCLUDED",
    "FAILED",
    "FAILURE",
    "JOIN",
    "LAST_SEQUENCE",
    "LEAVE",
    "LOSS",
    "OUTCOMES",
    "PROTOCOL",
    "SEAT_CONFIRMED",
    "SEAT_RUNNING",
    "SEAT_UNTOLD",
    "STOPPED",
    "UNHEALTHY",
    "UNKILLABLE",
    "UNREACHABLE",
    "Assignment",
    "Claim",
    "Copy",
    "Decision",
    "End",
    "Fact",
    "Failing",
    "Failover",
    "FailoverRequest",
    "Foreign",
    "Form",
    "Halt",
    "Head",
    "Join",
    "Leave",
    "LogStart",
    "MessageError",
    "NodeEnds",
    "NodeInfo",
    "Note",
    "Prepare",
    "PreviousRound",
    "Ready",
    "Recovered",
    "Refuse",
    "Resign",
    "Resync",
    "SeatDead",
    "Status",
    "StoreAddress",
    "StuckRank",
    "UnknownProtocolError",
    "Warn",
    "is_related",
    "is_spoken",
    "read_assignment",
    "read_decision",
    "read_fact",
    "read_head",
    "read_log_start",
    "read_status",
    "read_term",
    "to_json",
]


#: Raised by one with each change of what a message means. A release speaks its own protocol, and understands that of
#: the one before and of the one after it, so that a job can be upgraded node by node: what a neighbour can't do
#: without takes two steps.
PROTOCOL = 1

_FACTS: Mapping[str, type[Join | Failing | Ready | Leave | SeatDead | FailoverRequest]] = {
    "join": Join,
    "failing": Failing,
    "ready": Ready,
    "leave": Leave,
    "seat_dead": SeatDead,
    "failover_request": FailoverRequest,
}
_DECISIONS: Mapping[str, type[Decision]] = {
    "claim": Claim,
    "resign": Resign,
    "prepare": Prepare,
    "form": Form,
    "warn": Warn,
    "halt": Halt,
    "refuse": Refuse,
    "resync": Resync,
    "recovered": Recovered,
    "failover": Failover,
    "end": End,
}
_NOTES: Mapping[str, type[Note]] = {
    "assignment": Assignment,
    "head": Head,
    "log_start": LogStart,
    "status": Status,
}
_KINDS: Mapping[type, str] = {kind: name for table in (_FACTS, _DECISIONS, _NOTES) for name, kind in table.items()}


def is_spoken(protocol: object) -> bool:
    """Tell whether this release understands a protocol: its own, or a neighbour's."""
    return isinstance(protocol, int) and not isinstance(protocol, bool) and abs(protocol - PROTOCOL) <= 1


class UnknownProtocolError(MessageError):
    """A message in a protocol that this release doesn't speak.

    Args:
        protocol: The protocol.
    """

    def __init__(self, protocol: int) -> None:
        super().__init__(
            f"the job uses protocol {protocol}, this node {PROTOCOL}: install the same release of elastic-run"
        )
        self.protocol = protocol


def to_json(message: Fact | SeatDead | FailoverRequest | Decision | Note) -> bytes:
    """Return a message as it is stored: JSON, and equal bytes for equal messages."""
    return encode({"protocol": PROTOCOL, "kind": _KINDS[type(message)], **to_document(message)})


def read_fact(data: bytes) -> Fact | SeatDead | FailoverRequest:
    """Read a fact.

    Returns:
        The fact; `Foreign` where its node speaks another protocol.

    Raises:
        MessageError: It is garbage.
    """
    try:
        document = _open(data)
    except UnknownProtocolError as error:
        return from_document(Foreign, {**decode(data), "protocol": error.protocol})
    return from_document(_kind(_FACTS, document), document)


def read_decision(data: bytes) -> Decision:
    """Read a decision.

    Raises:
        UnknownProtocolError: It was made by a release that speaks another protocol.
        MessageError: It is garbage.
    """
    document = _open(data)
    return from_document(_kind(_DECISIONS, document), document)


def read_assignment(data: bytes) -> Assignment:
    """Read an assignment; raises `MessageError` as `read_decision`."""
    return from_document(Assignment, _open(data))


def read_head(data: bytes) -> Head:
    """Read the hint where the log stands; raises `MessageError` as `read_decision`."""
    return from_document(Head, _open(data))


def read_log_start(data: bytes) -> LogStart:
    """Read where the log begins; raises `MessageError` as `read_decision`."""
    return from_document(LogStart, _open(data))


def read_status(data: bytes) -> Status:
    """Read which nodes are there; raises `MessageError` as `read_decision` does."""
    return from_document(Status, _open(data))


def _open(data: bytes) -> Document:
    document = decode(data)
    protocol = document.get("protocol")
    if not isinstance(protocol, int) or isinstance(protocol, bool):
        message = f"a message without a protocol: {data[:80]!r}"
        raise MessageError(message)
    if not is_spoken(protocol):
        raise UnknownProtocolError(protocol)
    return document


def _kind(table: Mapping[str, type[Message]], document: Document) -> type[Message]:
    kind = table.get(str(document.get("kind")))
    if kind is None:
        message = f"kind {document.get('kind')!r} is none of {', '.join(table)}"
        raise MessageError(message)
    return kind
