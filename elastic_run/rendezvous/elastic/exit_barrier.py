"""The wait at the end of a job, until the other nodes have read the verdict.

Each agent appends its name to a stream when it knows the verdict. The agent that serves the store, or that has to
remove the job from another program's store, waits until all nodes that lived at the end of the job are in that stream.
It does not wait for a node whose heartbeats stop meanwhile. After a moment a line tells the user about the wait.

torch's exit barrier begins earlier: a node whose workers have succeeded waits for the workers of other nodes. Here the
agent reports its success (`ReportReady` of `core.agent`) and waits for the verdict, which comes before this wait.
"""

from __future__ import annotations

import json
import logging
import time

from elastic_run.contract import LONGEST_WAIT
from elastic_run.core.job.host_lists import list_hosts
from elastic_run.core.protocol import job_keys, liveness, messages
from elastic_run.rendezvous.elastic.heartbeats import HeartbeatReader
from elastic_run.rendezvous.session import Notice
from elastic_run.store.connecting import format_endpoint
from elastic_run.store.errors import StoreError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.rendezvous.elastic.backend.hosting import HostedStore
    from elastic_run.rendezvous.elastic.context import SessionContext
    from elastic_run.store.jobstore.api import JobStore

__all__ = [
    "EXIT_BARRIER",
    "EXIT_BARRIER_NODES",
    "pass_exit_barrier",
    "stay_for_store",
    "wait_exit_barrier",
    "wait_sent",
]

_log = logging.getLogger(__name__)

#: Seconds after which a node says that it stays for others.
_MOMENT = 1.0

#: Seconds for the coordinator to tell the others; when it left with this node, the next one must be elected first.
_TELL = 2.0
#: Seconds after which a connection is another node's, and no look at the store.
_GLANCE = 0.5
#: Seconds for the others to hang up.
_HANG_UP = 1.0

#: Key: the nodes that lived at the end of the job. The coordinator writes it before it ends the job.
EXIT_BARRIER_NODES = "exit_barrier_nodes"
#: Stream: the nodes that know the verdict.
EXIT_BARRIER = "exit_barrier"


def pass_exit_barrier(store: JobStore, node: str) -> None:
    """Say that a node knows the verdict.

    Raises:
        StoreConnectionError: The store can't be reached.
    """
    store.append(EXIT_BARRIER, node.encode())


def wait_sent(context: SessionContext, deadline: float) -> None:
    """Wait until the store has confirmed all that this node had to say.

    Args:
        context: The data that the session's threads share.
        deadline: Monotonic seconds.
    """
    while True:
        # Cleared before it is asked, so that what is confirmed in between is seen.
        context.signals.has_sent.clear()
        left = deadline - time.monotonic()
        if not context.has_unsent or left <= 0 or not context.signals.has_sent.wait(left):
            return


def wait_exit_barrier(context: SessionContext, deadline: float, *, removes_job: bool) -> None:
    """Wait until every node that lived when the job ended knows how.

    Args:
        context: The data that the session's threads share.
        deadline: Monotonic seconds.
        removes_job: Whether to remove the job from the store then.
    """
    try:
        with context.backend.open(context.answer_timeout) as store:
            _wait(store, context, deadline)
            if removes_job:
                store.remove_job()
    except StoreError:
        return  # the store has gone already: no node can read anything there


def _wait(store: JobStore, context: SessionContext, deadline: float) -> None:
    missing = set(_read_nodes(store)) - {context.node}
    leases = liveness.watch(liveness.Leases(context.config.lease), missing, time.monotonic())
    reader = HeartbeatReader()
    position = 0
    tell_at = time.monotonic() + _MOMENT
    while missing:
        now = time.monotonic()
        if now >= deadline:
            return
        if now >= tell_at:
            tell_at = deadline
            _log.warning("%s", _describe_stay(missing, deadline - now))
        pause = min(context.config.keep_alive_interval, min(deadline, tell_at) - now)
        entries, position = store.read(EXIT_BARRIER, position, pause)
        missing -= {entry.decode(errors="replace") for entry in entries}
        leases, silent = liveness.observe(leases, reader.read(store, sorted(missing)), time.monotonic())
        missing -= set(silent)


def _read_nodes(store: JobStore) -> list[str]:
    raw = store.get([EXIT_BARRIER_NODES])[0]
    try:
        found = json.loads(raw) if raw is not None else []
    except ValueError:
        return []
    return [node for node in found if isinstance(node, str)] if isinstance(found, list) else []


def _describe_stay(missing: set[str], left: float) -> str:
    # A node's id begins with its host's name (`handler.open_session`).
    hosts = sorted(node.rsplit("_", 2)[0] for node in missing)
    names = ", ".join(list_hosts(hosts))
    return f"elastic-run: the job is over; waiting up to {left:.0f} s for nodes that do not know it yet: {names}"


# --- the host of the store goes before the end --------------------------------------------------------------------
def describe_failover(context: SessionContext) -> str:
    """Say what becomes of the job when this node, which was refused, goes; "" where it doesn't serve the store."""
    if not context.backend.is_host:
        return ""
    successors = context.backend.successors
    if not successors:
        return "; this node serves the job's store: the job of the other nodes ends with it"
    return f"; this node serves the job's store: the store moves to {format_endpoint(*successors[0])}"


def stay_for_store(context: SessionContext, come_by: float) -> None:
    """Serve the job's only store until no other node is connected to it.

    Args:
        context: The data that the session's threads share. This node has left, and its agent runs no worker.
        come_by: Monotonic seconds until which it waits for a first one.
    """
    hosted = context.backend.hosted
    if hosted is None or not _wait_others(context, hosted, come_by):
        return
    text = (
        "this node serves the job's store, so it stays without workers until the other nodes have ended; a signal ends "
        "it, and the job with it"
    )
    context.events.deliver(Notice(text))
    hosted.wait_alone(context.count_connections, LONGEST_WAIT)


def _wait_others(context: SessionContext, hosted: HostedStore, come_by: float) -> bool:
    """Wait until another node is connected; return whether there is one."""
    if not hosted.wait_alone(context.count_connections, 0.0):
        return True
    left = come_by - time.monotonic()
    if left > 0:
        text = (
            f"this node serves the job's store for {left:.0f} s more, so that new nodes learn why it has left the job"
        )
        context.events.deliver(Notice(text))
    while left > 0 and hosted.wait_others(context.count_connections, left):
        # A connection of this node's own is counted a moment before this node knows of it.
        if not hosted.wait_alone(context.count_connections, _GLANCE):
            return True
        left = come_by - time.monotonic()
    return False


def fail_over(context: SessionContext, deadline: float, *, is_refused: bool) -> None:
    """Hand the store over.

    Args:
        context: The data that the session's threads share.
        deadline: Monotonic seconds.
        is_refused: Whether this node goes because it was refused, and not because it was told to stop.
    """
    hosted = context.backend.hosted
    if hosted is None or hosted.wait_alone(context.count_connections, 0.0):
        return  # no node is left that has to read it
    successors = context.backend.successors
    endpoint = format_endpoint(*successors[0]) if successors else ""
    host, name = context.node_info.host, context.backend.name
    why = "was not taken into the job" if is_refused else "was told to stop"
    detail = f"the node that served the store at {name} ({host}) {why}"
    if not endpoint:
        detail += ", and the job ends with it: the endpoint lists no successor (--rdzv-endpoint=a,b,c)"
        context.events.deliver(Notice("this node serves the job's store: the job ends with it"))
    try:
        with context.backend.open(context.answer_timeout) as store:
            store.append(job_keys.FACTS, messages.to_json(messages.FailoverRequest(endpoint, detail)))
    except StoreError:
        return
    # If all others were told to stop as well, no coordinator is left that could decide it.
    hosted.set_when_alone(context.signals.has_failed_over, context.count_connections)
    context.signals.has_failed_over.wait(max(0.0, min(_TELL, deadline - time.monotonic())))
    hosted.wait_alone(context.count_connections, max(0.0, min(_HANG_UP, deadline - time.monotonic())))
