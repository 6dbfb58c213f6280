"""The prefix of tee'd lines, from a template with `${name}` variables."""

from __future__ import annotations


def render_prefix(
    template: str, *, role_name: str, local_rank: int, rank: int, hostname: str, restart_count: int
) -> bytes:
    """Fill in a prefix template.

    Args:
        template: Text with `${role_name}`, `${local_rank}`, `${rank}`, `${hostname}`, `${restart_count}`; other
            variables stay as they are.
        role_name: Name of the role.
        local_rank: The worker's number on this node.
        rank: The worker's number in the job.
        hostname: This node's name.
        restart_count: Restarts so far.

    Returns:
        The prefix in the file system's encoding.
    """
    values = {
        "role_name": role_name,
        "local_rank": local_rank,
        "rank": rank,
        "hostname": hostname,
        "restart_count": restart_count,
    }
    for name, value in values.items():
        template = template.replace("${" + name + "}", str(value))
    return template.encode(errors="surrogateescape")
