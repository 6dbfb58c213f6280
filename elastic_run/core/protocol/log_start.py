"""Where the log begins: how a slot that was trimmed is kept from being decided a second time.

Rules
- A coordinator raises the document at `job_keys.LOG_START` before it deletes slots. The slot in it never
  decreases. A coordinator of an earlier term does not overwrite a start with which the log was begun anew, since that
  start makes its own decisions void.
- Every reader and every writer of a slot reads the document together with the slot, or after it. A slot below the start
  is void: it was decided once, and its second entry comes from a node that was stopped meanwhile.
- So a coordinator that slept through a trim decides nothing: its own read shows it, and so does every reader's.
- A store that was restored from a backup may have lost slots. A node that has lost one of the last two slots that it
  has read raises the start to the slot for which it waits. Nodes that know less may have claimed terms below that slot
  since the backup. Each claim takes a slot, so the node can choose a term above all of theirs for the start, and their
  decisions are void. Where the log begins anew already, they may have claimed in the term of that start: the new term
  is above this one, too. Where that start is lost or unreadable, a claim may have as high a term all the same, and two
  nodes may hold one term. Then the first of them that finds a decision of the other ends its term.
- Such a start counts for every reader of a lower term, be it at a later slot by now: that node reads on from the start,
  since a slot behind it may hold a claim of a newer term.
- Garbage at that key counts as nothing, since without a token any stranger can write it. The coordinator writes the
  document again when it next trims.
"""

from __future__ import annotations

from elastic_run.core.protocol.codec import MessageError
from elastic_run.core.protocol.messages import LogStart, read_log_start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["find_restart", "find_start", "is_raised_by", "is_trimmed"]


def find_start(raw: bytes | None) -> LogStart | None:
    """Return where the log begins.

    Args:
        raw: What lies at `job_keys.LOG_START`, or None.

    Returns:
        The document; None if nothing was trimmed yet, or the value is garbage.
    """
    if raw is None:
        return None
    try:
        return read_log_start(raw)
    except MessageError:
        return None


def is_raised_by(start: LogStart, raw: bytes | None) -> bool:
    """Tell whether a start is to overwrite the value of the key `job_keys.LOG_START`.

    Args:
        start: The start.
        raw: The value, or None.
    """
    there = find_start(raw)
    return there is None or (there.slot < start.slot and not (there.is_restart and there.term > start.term))


def is_trimmed(slot: int, raw: bytes | None) -> bool:
    """Tell whether a slot was decided and trimmed before.

    Args:
        slot: Its number.
        raw: What lies at `job_keys.LOG_START`, or None; read with the slot or after it.
    """
    start = find_start(raw)
    return start is not None and slot < start.slot


def find_restart(
    next_slot: int | None,
    term: int,
    read: tuple[bytes, bytes],
    restart: int,
    *,
    there: Sequence[bytes | None],
    raw: bytes | None,
) -> LogStart | None:
    """Return where the log is to begin in a store that was restored from a backup; None if this node has lost nothing.

    Args:
        next_slot: The slot for which the node waits, or None.
        term: The term of the log up to there.
        read: The entries that the node has read in the two slots before; b"" for each that it has not read.
        restart: Where the log began anew, as far as the node knows; 0 if it did not.
        there: The entries that are in these two slots now, None where there is none.
        raw: The value of `job_keys.LOG_START`, or None.
    """
    if next_slot is None:
        return None
    start = find_start(raw)
    if start is not None and start.slot >= next_slot:
        return start  # another node has lost as much
    begins_at, begins_in = (0, 0) if start is None else (start.slot, start.term)
    # An entry that was written once more, late, is there again without those before it, and without the start.
    is_former_there = not read[0] or next_slot - 2 < begins_at or read[0] == there[0]
    is_whole = read[1] == there[1] and is_former_there and begins_at >= restart
    if is_whole or not read[1]:
        return None
    return LogStart(next_slot, max(term, begins_in) + next_slot + 1, is_restart=True)
