"""The line of a node that waits alone: the place where it waits, and launchers that came there for another job.

Launchers with different --rdzv-id, ports or hosts wait for each other in vain. The store keeps jobs apart, so each lone
node writes its id under a name that no job has, and reads the ids of other lone nodes there. The node that serves the
store writes the id of its job there, too: a node may come late, when no other node waits any more.
"""

from __future__ import annotations

from elastic_run.rendezvous.addresses import names_loopback
from elastic_run.store.connecting import format_endpoint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_run.store.jobstore.api import JobStore

__all__ = ["PLACE", "describe_launchers", "describe_place", "exchange_ids", "find_visitor", "leave_id"]

#: The id of no job, since the id of a job has no line break: under it, nodes of all jobs leave the ids of their jobs.
PLACE = "waiting\nalone"
_KEY = "last"
_SERVING_KEY = "serving"
#: Characters that are shown of a host's name or an id which another node has written.
_LONGEST = 80


def leave_id(store: JobStore, host: str, run_id: str) -> None:
    """Leave the id of the job whose node serves the store; the arguments are those of `exchange_ids`."""
    store.write({_SERVING_KEY: _join(host, run_id)})


def exchange_ids(store: JobStore, host: str, run_id: str) -> str:
    """Leave this job's id, and return a remark on another job's that was left there; "" where there is none.

    Args:
        store: Opened with `PLACE` as the job.
        host: This machine's name.
        run_id: This job.

    Raises:
        StoreConnectionError: The store can't be reached.
    """
    last, serving = store.get([_KEY, _SERVING_KEY])
    own = _join(host, run_id)
    if last != own:
        store.write({_KEY: own})
    return _describe_other(serving, f"serves the store at {store.name}", run_id) or _describe_visitor(last, run_id)


def find_visitor(store: JobStore, run_id: str) -> str:
    """Return a remark on the id of another job, which a waiting node has left last; "" if there is none.

    Args:
        store: Opened with `PLACE` as the job.
        run_id: This job.

    Raises:
        StoreConnectionError: The store can't be reached.
    """
    return _describe_visitor(store.get([_KEY])[0], run_id)


def describe_place(kind: str, endpoints: Sequence[tuple[str, int]], run_id: str) -> str:
    """Return what other nodes have to give to come to the store that this node serves.

    Args:
        kind: `c10d` or `static`.
        endpoints: Host and port of the store and of its successors.
        run_id: This job.
    """
    host, port = endpoints[0]
    where = f"--rdzv-endpoint={','.join(format_endpoint(*endpoint) for endpoint in endpoints)}"
    if kind == "static":
        where = f"--master-addr={host} --master-port={port}"
    limit = f" (on this machine only: no other machine reaches {host} here)" if names_loopback(host) else ""
    return f"other nodes need {where} --rdzv-id={run_id}{limit}"


def describe_launchers(own: str, other: str) -> str:
    """Return what two launchers of one step have to agree on, a sentence.

    Args:
        own: Host, id, place and store's id of this launcher, a line each.
        other: Those of the other one.
    """
    _, run_id, place, _ = own.split("\n")
    host, other_id, other_place, _ = (*map(_make_plain, other.split("\n")), "", "", "")[:4]
    flag, here, there = "--rdzv-endpoint", place, other_place
    if run_id != other_id:
        flag, here, there = "--rdzv-id", run_id, other_id
    return (
        f"{flag}: is {here} here and {there} on {host} of the same Slurm step, so that the nodes never meet: give all "
        "of them the same, or leave it out"
    )


def _describe_visitor(last: bytes | None, run_id: str) -> str:
    return _describe_other(last, "came to this store", run_id)


def _describe_other(other: bytes | None, verb: str, run_id: str) -> str:
    host, _, other_id = (other or b"").decode(errors="replace").partition("\n")
    if other is None or other_id == run_id:
        return ""
    return f"{_make_plain(host)} {verb} with --rdzv-id={_make_plain(other_id)}, and this job has --rdzv-id={run_id}"


def _join(host: str, run_id: str) -> bytes:
    return f"{host}\n{run_id}".encode()


def _make_plain(text: str) -> str:
    return "".join(sign if sign.isprintable() else "?" for sign in text[:_LONGEST])
