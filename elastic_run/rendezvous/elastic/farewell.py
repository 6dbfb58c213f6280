"""What a guardian says when its agent died: this node is gone. So the others needn't wait for its lease to run out.

The agent writes the document beforehand (`Session.farewell`); the guardian is another process, which may import this
module when there is nothing left to hurry for.

Facts are for the coordinator's ears. So where the agent that died was the coordinator, its office is given back as
well, as it would have done itself: by an entry of its own term behind its last one, with the state as of that. It
decides nothing any more, so there are no two who could; and where another has claimed the office already, its entry
is there.
"""

from __future__ import annotations

from elastic_run.core import job_keys, messages
from elastic_run.core.codec import MessageError, decode, encode
from elastic_run.rendezvous.elastic.kinds import make_backend
from elastic_run.rendezvous.elastic.log import create_entry
from elastic_run.rendezvous.elastic.settings import read_settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from elastic_run.store.job_store import JobStore

__all__ = ["say_farewell"]

#: Seconds to reach the store. The lease runs out soon anyway.
_PATIENCE = 2.0
#: Entries after which there is no office any more, or another's.
_LAST = (messages.Claim, messages.Resign, messages.Move, messages.End)


def say_farewell(document: Mapping[str, Any]) -> None:
    """Tell a job that one of its nodes died.

    Args:
        document: What `Session.farewell` returned.

    Raises:
        StoreError: The store can't be reached.
        ValueError: The document is not one of `Session.farewell`'s.
    """
    settings = read_settings(document["backend"], document["conf"])
    secret = document["secret"]
    backend = make_backend(
        document["backend"],
        document["endpoint"],
        document["run_id"],
        settings,
        is_host=False,
        secret=None if secret is None else bytes.fromhex(secret),
    )
    leave = messages.Leave(document["node"], messages.LAST_SEQUENCE, messages.DIED)
    with backend.open(_PATIENCE) as store:
        store.append(job_keys.FACTS, messages.to_json(leave))
        _give_office_back(store, document["node"])


def _give_office_back(store: JobStore, node: str) -> None:
    raw = store.get([job_keys.HEAD])[0]
    try:
        head = messages.read_head(raw or b"")
        last = _find_last(store, node, head)
    except MessageError:
        return  # somebody wrote garbage: the lease will tell
    if last is None:
        return
    slot, state_key = last
    state = store.get([state_key])[0]
    if state is not None:
        copy = {**decode(state), "slot": slot}
        store.write({job_keys.state_key(slot, head.term): encode(copy)})
        create_entry(store, slot, messages.Resign(head.term, node))
        store.delete([state_key])


def _find_last(store: JobStore, node: str, head: messages.Head) -> tuple[int, str] | None:
    """Return the slot behind the node's last entry, and the key of the state as of that; None without an office."""
    slot, state_key = head.slot + 1, job_keys.state_key(head.state_slot, head.state_term)
    while (raw := store.get([job_keys.decision_key(slot)])[0]) is not None:
        decision = messages.read_decision(raw)
        if isinstance(decision, _LAST) or decision.term != head.term:
            return None
        slot, state_key = slot + 1, job_keys.state_key(slot, head.term)
    return (slot, state_key) if head.coordinator == node and head.state_slot >= 0 else None
