"""The log of decisions in a job store: its slots, and where it begins.

Rules
- A slot is read and created together with the start of the log, and counts only above it (`core.protocol.log_start`).
- A node that has created a slot below the start withdraws its entry. Every reader passes over it in any case. In a
  store that was restored meanwhile, the slot may hold the entry of another node, or the log may begin before the slot:
  then the entry stays.
- The start is only ever raised, by compare-and-set, and before slots are deleted.
"""

from __future__ import annotations

from elastic_run.core.job.coordinator_state import KEPT_SLOTS
from elastic_run.core.job.snapshot import find_newest_state
from elastic_run.core.node.messages import EntryRead, EntryTrimmed, HeadRead
from elastic_run.core.protocol import job_keys, messages
from elastic_run.core.protocol.log_start import find_restart, find_start, is_raised_by, is_trimmed
from elastic_run.store.errors import StoreForgedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    from elastic_run.core.node.state import LogPosition
    from elastic_run.core.protocol.messages import Decision, LogStart
    from elastic_run.store.jobstore.api import JobStore

    Entry: TypeAlias = EntryRead | EntryTrimmed

__all__ = [
    "FORGED",
    "create_entry",
    "get_document",
    "make_head",
    "raise_start",
    "read_head",
    "read_newest_state",
    "restart_log",
    "wait_entry",
]

#: What stands for a value whose signature is wrong: no message, so void for every reader.
FORGED = b"forged"


def create_entry(store: JobStore, slot: int, decision: Decision) -> Entry:
    """Put a decision into a slot, unless there is one.

    Args:
        store: The job's store.
        slot: The slot.
        decision: The decision.

    Returns:
        The entry that the slot holds now; `EntryTrimmed` if the log begins behind the slot.

    Raises:
        StoreConnectionError: The store can't be reached; whether the slot was created is unknown.
    """
    key, value = job_keys.decision_key(slot), messages.to_json(decision)
    try:
        winner, start = store.create_beside(key, value, job_keys.LOG_START)
    except StoreForgedError:
        return EntryRead(slot, FORGED)
    if not is_trimmed(slot, start):
        return EntryRead(slot, winner, start)
    if winner == value and start is not None:
        store.delete_where([key], {key: value, job_keys.LOG_START: start})
    return EntryTrimmed(slot)


def wait_entry(store: JobStore, slot: int, timeout: float) -> Entry | None:
    """Wait until a slot holds an entry.

    Args:
        store: The job's store.
        slot: The slot.
        timeout: Seconds; 0 to look without waiting.

    Returns:
        The entry; `EntryTrimmed` if the log begins behind the slot; None if the slot is still empty.

    Raises:
        StoreConnectionError: The store can't be reached.
    """
    try:
        value, start = store.wait_beside(job_keys.decision_key(slot), job_keys.LOG_START, timeout)
    except StoreForgedError:
        return EntryRead(slot, FORGED)
    if is_trimmed(slot, start):
        return EntryTrimmed(slot)
    return None if value is None else EntryRead(slot, value, start)


def raise_start(store: JobStore, start: LogStart) -> bytes:
    """Let the log begin at a slot, if it begins before that slot, and was not begun anew in a later term.

    Args:
        store: The job's store.
        start: Where it begins.

    Returns:
        The present value of `job_keys.LOG_START`.

    Raises:
        StoreConnectionError: The store can't be reached; whether the start was raised is unknown.
    """
    value = messages.to_json(start)
    there = store.get([job_keys.LOG_START])[0]
    while there is None or is_raised_by(start, there):
        try:
            now = store.replace(job_keys.LOG_START, there, value)
        except StoreForgedError:
            # A stranger's value hides the start, so nobody knows what to compare with.
            store.write({job_keys.LOG_START: value})
            return value
        there = now
    return there


def restart_log(store: JobStore, known: LogPosition) -> LogStart | None:
    """Raise the start of the log if the store was restored, and has lost entries that this node has read.

    Args:
        store: The job's store.
        known: How far this node had followed the log.

    Returns:
        Where the log begins anew, or None if this node has lost nothing.

    Raises:
        StoreConnectionError: The store can't be reached.
    """
    slot, read = known.next_slot or 0, (known.former_entry, known.last_entry)
    there = [_look_at_slot(store, before) for before in (slot - 2, slot - 1)]
    raw = store.get([job_keys.LOG_START])[0]
    start = find_restart(known.next_slot, known.term, read, known.restart, there=there, raw=raw)
    return None if start is None else find_start(raise_start(store, start))


def _look_at_slot(store: JobStore, slot: int) -> bytes | None:
    """Return what a slot holds, as a reader of the log takes it, wherever the log begins."""
    try:
        return store.wait(job_keys.decision_key(slot), 0.0)
    except StoreForgedError:
        return FORGED


def read_head(store: JobStore) -> HeadRead:
    """Read where the log stands and where it begins.

    Raises:
        StoreConnectionError: The store can't be reached.
    """
    head, start = store.get([job_keys.HEAD, job_keys.LOG_START])
    return make_head(store, head, start)


def make_head(store: JobStore, head: bytes | None, start: bytes | None) -> HeadRead:
    """Return what was read of a store as an event: a value with a wrong signature is garbage, and not missing."""
    if head is None and store.is_forged(job_keys.HEAD):
        head = FORGED
    if start is None and store.is_forged(job_keys.LOG_START):
        start = FORGED
    return HeadRead(head, start)


def read_newest_state(store: JobStore, end: int) -> bytes | None:
    """Return the newest state in a store, wherever the log begins by now; None for none, or a forged one.

    Args:
        store: The job's store.
        end: The slot before which it is looked for.

    Raises:
        StoreConnectionError: The store can't be reached.
    """
    slots = range(max(0, end - KEPT_SLOTS), end)
    entries = store.get([job_keys.decision_key(slot) for slot in slots])
    return store.get([find_newest_state(zip(slots, entries, strict=True))])[0]


def get_document(store: JobStore, key: str) -> bytes | None:
    """Return what lies at a key; None where there is nothing, or its signature is wrong.

    Raises:
        StoreConnectionError: The store can't be reached.
    """
    try:
        return store.get([key])[0]
    except StoreForgedError:
        return None
