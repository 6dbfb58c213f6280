"""Names of a job's documents in its store; the store puts the job's own prefix before each."""

from __future__ import annotations

import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.protocol.facts import Copy

#: The stream to which every agent appends.
FACTS = "facts"
#: The hint where the log stands.
HEAD = "head"
#: The nodes that are there, for waiting lines.
STATUS = "status"
#: Changed by a node that asks for the state of all nodes, and the stream of the answers; see `status_exchange`.
STATUS_REQUEST = "status_request"
STATUS_ANSWERS = "status_answers"
#: The beginning of the keys of copies of the job's state.
COPIES = "c/"
#: Where the log begins: the slots below were trimmed. In the directory of the slots, so that a watch of them brings it.
LOG_START = "d/start"


def decision_key(slot: int) -> str:
    """Return the key of a slot of the log."""
    return f"d/{slot}"


def state_key(slot: int, term: int) -> str:
    """Return the key of the job's state after the decision that this term's coordinator puts in a slot."""
    return f"s/{slot}.{term}"


def assignment_key(slot: int, term: int, node: str) -> str:
    """Return the key of a node's assignment in the round that is formed in a slot."""
    return f"a/{slot}.{term}/{node}"


def copy_key(copy: Copy) -> str:
    """Return the key of a copy of the job's state in another store; equal copies have one key."""
    log = f"{copy.incarnation}/{copy.store_id}"
    return f"{COPIES}{copy.round}.{copy.term}.{copy.slot}.{zlib.crc32(log.encode()):08x}"
