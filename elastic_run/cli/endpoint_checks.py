"""Refuses an endpoint, or a master's address, by which the launchers of a scheduler's job can't find each other.

srun and an indexed Job give all launchers one command line. If it names this machine (localhost), every launcher comes
to a store of its own: an elastic job would silently become as many jobs as it has nodes, any other waits in vain.
"""

from __future__ import annotations

from elastic_run import contract
from elastic_run.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

__all__ = ["check_endpoint", "check_first_master"]

#: Backends whose store one of the nodes serves. An etcd at localhost may be a proxy on each node.
_SERVED_BY_NODES = ("c10d", "static")


def check_endpoint(args: Namespace, launchers: str, first: str) -> None:
    """Refuse an endpoint that leads each launcher to its own machine.

    Args:
        args: The command line.
        launchers: What each launcher runs on: ``node of the Slurm step``.
        first: Name of the first machine, "" if not known.

    Raises:
        UsageError: No launcher would find another one.
    """
    flag, hosts = _read_endpoint(args)
    port = args.rdzv_endpoint.rpartition(":")[2]
    from elastic_run.rendezvous.addresses import names_loopback

    if not hosts or not all(map(names_loopback, hosts)):
        return
    mend = (
        f"give {flag}={first or 'HOST, the name of the first one'}"
        if flag == "--master-addr"
        else "leave --rdzv-endpoint out"
    )
    if flag != "--master-addr" and first:
        mend += f", or give --rdzv-endpoint={first}:{port if port.isdecimal() else contract.DEFAULT_C10D_PORT}"
    message = f"{flag}: {hosts[0]} leads each {launchers} to itself, so that they never meet: {mend}"
    raise UsageError(message)


def check_first_master(args: Namespace, nodes: Sequence[str]) -> None:
    """Refuse a master that is another node of the step than the first one, which has rank 0.

    Args:
        args: The command line; no rank is given in it.
        nodes: The nodes of the step, by rank.

    Raises:
        UsageError: The node of rank 0 could not serve there.
    """
    flag, hosts = _read_endpoint(args)
    names = [node.partition(".")[0] for node in nodes]
    host = hosts[0].partition(".")[0] if args.rdzv_backend == "static" and hosts else ""
    if host not in names[1:]:
        return
    message = (
        f"{flag}: is {hosts[0]}, but rank 0 of the Slurm step is on {nodes[0]}: give {flag}={nodes[0]}, or each node "
        "its --node-rank"
    )
    raise UsageError(message)


def _read_endpoint(args: Namespace) -> tuple[str, list[str]]:
    """Return the flag that names the endpoint, and its hosts; none where a store of the site is named."""
    if args.rdzv_backend not in _SERVED_BY_NODES or (args.rdzv_backend == "c10d" and not args.rdzv_endpoint):
        return "", []
    if not args.rdzv_endpoint:
        return "--master-addr", [args.master_addr]
    from elastic_run.rendezvous.utils import parse_rendezvous_endpoint

    if "store_type=file" in args.rdzv_conf.replace(" ", ""):
        return "", []
    try:
        endpoints = [parse_rendezvous_endpoint(one, default_port=0) for one in args.rdzv_endpoint.split(",")]
    except ValueError:
        return "", []  # another check names it
    return "--rdzv-endpoint", [host for host, _ in endpoints]
