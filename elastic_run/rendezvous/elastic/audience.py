"""Who has to hear the verdict before the store goes: waiting for the others, and saying that one has heard.

Each agent puts its name into a stream once it knows the verdict. The agent that serves the store, or that is to remove
the job from a store of somebody else's, waits until all who lived when the job ended are in it; those whose beats stop
meanwhile are not waited for. Who waits for longer than a moment says so: its user sees an agent that doesn't end.
"""

from __future__ import annotations

import json
import logging
import time

from elastic_run.core.protocol import liveness
from elastic_run.rendezvous.elastic.beats import BeatReader
from elastic_run.store.errors import StoreError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.rendezvous.elastic.affairs import Affairs
    from elastic_run.store.job_store import JobStore

__all__ = ["AUDIENCE", "HEARD", "say_heard", "wait_until_heard", "wait_until_said"]

_log = logging.getLogger(__name__)

#: Seconds after which a node says that it stays for others, and how many of them it names.
_MOMENT = 1.0
_NAMED = 4

#: Key: who lived when the job ended. Its coordinator writes it before it ends the job.
AUDIENCE = "audience"
#: Stream: who knows the verdict.
HEARD = "heard"


def say_heard(store: JobStore, node: str) -> None:
    """Say that a node knows the verdict.

    Args:
        store: The job's store.
        node: The node.

    Raises:
        StoreConnectionError: The store can't be reached.
    """
    store.append(HEARD, node.encode())


def wait_until_said(affairs: Affairs, deadline: float) -> None:
    """Wait until the store has confirmed all that this node had to say.

    Args:
        affairs: What the session's threads share.
        deadline: Monotonic seconds.
    """
    while True:
        # Cleared before it is asked, so that what is confirmed in between is seen.
        affairs.has_spoken.clear()
        if not affairs.has_more_to_say:
            return
        affairs.wake.set()
        left = deadline - time.monotonic()
        if left <= 0 or not affairs.has_spoken.wait(left):
            return


def wait_until_heard(affairs: Affairs, deadline: float, *, removes_job: bool) -> None:
    """Wait until every node that lived when the job ended knows how.

    Args:
        affairs: What the session's threads share.
        deadline: Monotonic seconds.
        removes_job: Whether to remove the job from the store then.
    """
    try:
        with affairs.backend.open(affairs.answer_timeout) as store:
            _wait(store, affairs, deadline)
            if removes_job:
                store.remove_job()
    except StoreError:
        return  # it has gone already: nobody can hear anything there


def _wait(store: JobStore, affairs: Affairs, deadline: float) -> None:
    missing = set(_read_audience(store)) - {affairs.node}
    leases = liveness.watch(liveness.Leases(affairs.settings.lease), missing, time.monotonic())
    reader = BeatReader()
    position = 0
    tell_at = time.monotonic() + _MOMENT
    while missing:
        now = time.monotonic()
        if now >= deadline:
            return
        if now >= tell_at:
            tell_at = deadline
            _log.warning("%s", _describe_stay(missing, deadline - now))
        pause = min(affairs.settings.keep_alive_interval, min(deadline, tell_at) - now)
        entries, position = store.read(HEARD, position, pause)
        missing -= {entry.decode(errors="replace") for entry in entries}
        leases, silent = liveness.observe(leases, reader.read(store, sorted(missing)), time.monotonic())
        missing -= set(silent)


def _read_audience(store: JobStore) -> list[str]:
    raw = store.get([AUDIENCE])[0]
    try:
        found = json.loads(raw) if raw is not None else []
    except ValueError:
        return []
    return [node for node in found if isinstance(node, str)] if isinstance(found, list) else []


def _describe_stay(missing: set[str], left: float) -> str:
    # A node's id begins with its host's name (`opening`).
    hosts = sorted(node.rsplit("_", 2)[0] for node in missing)
    names = ", ".join(hosts[:_NAMED]) + (" …" if len(hosts) > _NAMED else "")
    return f"elastic-run: the job is over; staying up to {left:.0f} s for those who have not heard it yet: {names}"
