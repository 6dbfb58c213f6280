"""The document beside each decision: the job's state after that decision, for the next coordinator.

It was read from a store that strangers may write to, so it may be garbage. No agent dies of that (`read_state` raises):
the workers run on, every node is asked to say again where it stands, and the log recovers from that (`view_change`).
Restarts count on: every node remembers how many it has heard of. What only the state knew is lost, unless the store has
an older state: the causes of earlier attempts, when restarts and changes of membership were, and so how many of them
fall into a window.
"""

from __future__ import annotations

from elastic_run.core.job.job_document import job_from_document, job_to_document
from elastic_run.core.protocol.codec import Document, MessageError, decode, encode, from_document, register, to_document
from elastic_run.core.protocol.job_keys import state_key
from elastic_run.core.protocol.messages import PROTOCOL, Claim, Copy, is_spoken, read_decision, read_term
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import TypeAlias

    from elastic_run.core.job.state import Job

    Read: TypeAlias = "tuple[State, Job]"


@register
@dataclass(frozen=True, slots=True)
class Formation:
    """Where a round was formed, whose assignments lie there, and the restarts of the job until then."""

    slot: int
    term: int
    nodes: tuple[str, ...]
    restart_count: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """The state document.

    Args:
        term: Of its writer.
        slot: Of the decision.
        position: Of the stream: all facts up to here are in.
        oldest: The oldest slot that may still be there.
        formations: Those whose assignments are kept, the latest last.
        wait_limit: Leases for which nodes that know of a round may come before a job is founded.
        garbage_keys: Keys that its writer was to delete after this: the state before it among them.
        job: See `job_document.job_to_document`.
        gone: As long as the log has no round, the deaths and farewells that were heard before `position`.
        former: The job's state before the log asked all nodes anew, or None.
    """

    term: int
    slot: int
    position: int
    oldest: int
    formations: tuple[Formation, ...]
    job: Document
    wait_limit: int = 0
    garbage_keys: tuple[str, ...] = ()
    gone: tuple[Document, ...] = ()
    former: Document | None = None


def read_state(data: bytes, now: float) -> Read:
    """Read what a coordinator before left.

    Args:
        data: The document, or garbage.
        now: Monotonic seconds of this node.

    Returns:
        The document, and the job's state in it.

    Raises:
        MessageError: It is garbage.
    """
    if not data:
        message = "nothing is there"
        raise MessageError(message)
    document = decode(data)
    if not is_spoken(document.get("protocol")):
        message = f"the state of the job is in protocol {document.get('protocol')}, this node speaks {PROTOCOL}"
        raise MessageError(message)
    state = from_document(State, document)
    return state, job_from_document(state.job, now)


def find_newest_state(entries: Iterable[tuple[int, bytes | None]]) -> str:
    """Return the key of the newest state that lies beside entries of the log; no document has it where there is none.

    Args:
        entries: What is in the last slots, in their order, each with the number of its slot; None for nothing.
    """
    term, newest = 0, (-1, 0)
    for slot, entry in entries:
        try:
            decision = read_decision(entry or b"")
        except MessageError:
            continue
        if decision.term < term:
            continue
        term = decision.term
        if not isinstance(decision, Claim):
            newest = slot, term
    return state_key(*newest)


def identify(data: bytes) -> Copy:
    """Return which copy of the state a document is.

    Raises:
        MessageError: It is garbage.
    """
    document = decode(data)
    job = document.get("job")
    if not isinstance(job, dict):
        message = f"the state of a job was expected, not {type(job).__name__}"
        raise MessageError(message)
    formed_term = read_term(str(job.get("round_id")))
    named = {**job, "term": document.get("term"), "slot": document.get("slot"), "formed_term": formed_term}
    return from_document(Copy, named)


def write_state(state: State) -> bytes:
    """Return a state document as it is stored."""
    return encode({"protocol": PROTOCOL, **to_document(state)})


def make_state(
    job: Job,
    now: float,
    *,
    position: int,
    oldest: int,
    formations: tuple[Formation, ...],
    wait_limit: int = 0,
    garbage_keys: tuple[str, ...] = (),
) -> State:
    """Return the document of a decision that goes into the job's slot; see `State`."""
    return State(job.term, job.slot, position, oldest, formations, job_to_document(job, now), wait_limit, garbage_keys)
