"""The last duty of a node that serves the store and was told to go: the others must not find out by themselves.

It says where the store goes on (or that it doesn't), waits until the coordinator has told all of it, and keeps serving
until the others have hung up.
"""

from __future__ import annotations

import time

from elastic_run.core import job_keys, messages
from elastic_run.rendezvous.elastic.addresses import written
from elastic_run.rendezvous.elastic.session import Notice
from elastic_run.store.errors import StoreError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.rendezvous.elastic.affairs import Affairs

__all__ = ["hand_over"]

#: Seconds for the coordinator to tell the others; when it left with this node, the next one must be elected first.
_TELL = 2.0
#: Seconds for the others to hang up.
_HANG_UP = 1.0


def hand_over(affairs: Affairs, deadline: float) -> None:
    """Hand the store over.

    Args:
        affairs: What the session's threads share.
        deadline: Monotonic seconds.
    """
    hosted = affairs.backend.hosted
    if hosted is None or hosted.wait_alone(affairs.open_links, 0.0):
        return  # nobody is left to be told
    successors = affairs.backend.successors
    endpoint = written(*successors[0]) if successors else ""
    host, name = affairs.card.host, affairs.backend.name
    detail = f"the node that served the store at {name} ({host}) was told to stop"
    if not endpoint:
        detail += ", and the job ends with it: the endpoint lists no successor"
        affairs.deliver(Notice("this node serves the job's store: the job ends with it"))
    try:
        with affairs.backend.open(affairs.answer_timeout) as store:
            store.append(job_keys.FACTS, messages.to_json(messages.Moving(endpoint, detail)))
    except StoreError:
        return
    now = time.monotonic()
    affairs.has_moved.wait(max(0.0, min(_TELL, deadline - now)))
    hosted.wait_alone(affairs.open_links, max(0.0, min(_HANG_UP, deadline - time.monotonic())))
