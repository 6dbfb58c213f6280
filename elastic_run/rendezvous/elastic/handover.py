"""The last duty of a node that serves the store and goes before the job ends: the others must not find out alone.

It was told to stop, or it was refused: the rules of another node, which was first, hold.

It says where the store goes on (or that it doesn't), waits until the coordinator has told all of it, and keeps serving
until the others have hung up.
"""

from __future__ import annotations

import time

from elastic_run.core.protocol import job_keys, messages
from elastic_run.rendezvous.elastic.addresses import written
from elastic_run.rendezvous.elastic.session import Notice
from elastic_run.store.errors import StoreError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.rendezvous.elastic.affairs import Affairs

__all__ = ["describe_consequence", "hand_over"]

#: Seconds for the coordinator to tell the others; when it left with this node, the next one must be elected first.
_TELL = 2.0
#: Seconds for the others to hang up.
_HANG_UP = 1.0


def describe_consequence(affairs: Affairs) -> str:
    """Say what becomes of the job when this node, which was refused, goes; "" where it doesn't serve the store."""
    if not affairs.backend.is_host:
        return ""
    successors = affairs.backend.successors
    what = f"the store moves to {written(*successors[0])}" if successors else "the job of the other nodes ends with it"
    return f"; this node serves the job's store: {what}"


def hand_over(affairs: Affairs, deadline: float, *, is_refused: bool = False) -> None:
    """Hand the store over.

    Args:
        affairs: What the session's threads share.
        deadline: Monotonic seconds.
        is_refused: Whether this node goes because it was refused, and not because it was told to stop.
    """
    hosted = affairs.backend.hosted
    if hosted is None or hosted.wait_alone(affairs.open_links, 0.0):
        return  # nobody is left to be told
    successors = affairs.backend.successors
    endpoint = written(*successors[0]) if successors else ""
    host, name = affairs.card.host, affairs.backend.name
    why = "was not taken into the job" if is_refused else "was told to stop"
    detail = f"the node that served the store at {name} ({host}) {why}"
    if not endpoint:
        detail += ", and the job ends with it: the endpoint lists no successor (--rdzv-endpoint=a,b,c)"
        affairs.deliver(Notice("this node serves the job's store: the job ends with it"))
    try:
        with affairs.backend.open(affairs.answer_timeout) as store:
            store.append(job_keys.FACTS, messages.to_json(messages.Moving(endpoint, detail)))
    except StoreError:
        return
    now = time.monotonic()
    affairs.has_moved.wait(max(0.0, min(_TELL, deadline - now)))
    hosted.wait_alone(affairs.open_links, max(0.0, min(_HANG_UP, deadline - time.monotonic())))
