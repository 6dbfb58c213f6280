"""Whether the nodes of a round have different versions of torch: tensors and collectives of two may not fit. Pure."""

from __future__ import annotations

from elastic_run.core.job.host_lists import fold_hosts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from elastic_run.core.protocol.facts import NodeInfo

#: Hosts of a version that are listed one by one; versions that are named.
_HOSTS = 3
_VERSIONS = 4
#: Characters of a version, which comes from the node.
_LENGTH = 30


def describe_versions(nodes: Iterable[NodeInfo]) -> str:
    """Return which hosts have which version of torch, the fewest hosts first; "" where all have the same.

    Args:
        nodes: The members of a round; a node that does not tell its version counts for none.
    """
    hosts: dict[str, list[str]] = {}
    for node in nodes:
        if node.torch:
            hosts.setdefault(node.torch[:_LENGTH], []).append(node.host)
    if len(hosts) < 2:  # noqa: PLR2004 - two versions differ
        return ""
    rare_first = sorted(hosts.items(), key=lambda item: len(item[1]))
    return "; ".join(f"torch {version} on {_list(names)}" for version, names in rare_first[:_VERSIONS])


def _list(hosts: list[str]) -> str:
    return ", ".join(hosts if len(hosts) <= _HOSTS else fold_hosts(hosts))
