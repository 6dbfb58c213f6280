"""The document that lies beside each decision: the job's state after it, for whoever succeeds the coordinator.

It was read from a store that strangers may write to, so it may be garbage. No agent dies of that (`read_state` raises,
and `recalled` begins anew): the workers run on, every node is asked to say again where it stands, and a round that
still runs is adopted from those who run it. Restarts count on: every node remembers how many it has heard of. What only
the state knew is lost: the causes of earlier attempts, when restarts and changes of membership were, and so how many of
them fall into a window.
"""

from __future__ import annotations

from elastic_run.core.codec import Document, MessageError, decode, encode, from_document, register, to_document
from elastic_run.core.job_state import ROUND_GAP, Job, job_from_document, job_to_document
from elastic_run.core.messages import PROTOCOL, is_spoken
from elastic_run.records import dataclass, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

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
        job: See `job_state.job_to_document`.
    """

    term: int
    slot: int
    position: int
    oldest: int
    formations: tuple[Formation, ...]
    job: Document


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


def write_state(state: State) -> bytes:
    """Return a state document as it is stored."""
    return encode({"protocol": PROTOCOL, **to_document(state)})


def make_state(job: Job, now: float, *, position: int, oldest: int, formations: tuple[Formation, ...]) -> State:
    """Return the document of a decision that goes into the job's slot.

    Args:
        job: The state after the decision.
        now: Monotonic seconds.
        position: Of the stream of facts.
        oldest: The oldest slot that may still be there.
        formations: Those whose assignments are kept, the latest last.

    Returns:
        The document.
    """
    return State(job.term, job.slot, position, oldest, formations, job_to_document(job, now))


def recalled(job: Job, now: float, floor: int) -> Job:
    """Return the state of a job whose state is lost, while its nodes are asked where they stand.

    Args:
        job: The state of a job of which nobody has heard.
        now: Monotonic seconds.
        floor: The newest round that this node has heard of.

    Returns:
        The state: no round is formed before those who run one had a lease to say so.
    """
    return replace(job, gap=floor + ROUND_GAP, awaited=1, since=now)
