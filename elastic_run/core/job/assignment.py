"""A node's place in a round, as the node needs it to start its workers."""

from __future__ import annotations

from elastic_run.core.job.config import JobConfig, Window
from elastic_run.core.protocol.codec import register
from elastic_run.core.protocol.facts import StoreAddress  # noqa: TC001 - importing it registers it as a field
from elastic_run.records import dataclass

# The configuration is imported before the first worker starts, when nothing is read or sent yet.
register(Window)
register(JobConfig)


@register
@dataclass(frozen=True, slots=True)
class Assignment:
    """One node's place in a round; the fields are `rendezvous.session.Formed`'s.

    Args:
        round: Number of the round.
        group_rank: The node's rank among the nodes.
        group_world_size: The number of nodes.
        base_rank: Global rank of its first worker.
        world_size: The number of workers.
        role_rank: Rank of its first worker among those of its role.
        role_world_size: The number of workers of its role.
        master: Where rank 0's node listens.
        restart_count: Restarts of the whole job so far.
        hosts: The number of different host names in the round.
        news: What made the round necessary, for the user; of the first one, which nodes were unhealthy, or "".
        incarnation: The founding of its job; see `documents.Round.root`.
        round_id: The round's unique id. Its number is not: two coordinators may each form a round of one number.
        config: The job's, for a node that was told others; None for all others.
        versions: Which hosts have which version of torch; "" where all have the same.
    """

    round: int
    group_rank: int
    group_world_size: int
    base_rank: int
    world_size: int
    role_rank: int
    role_world_size: int
    master: StoreAddress
    restart_count: int
    hosts: int
    news: str = ""
    incarnation: str = ""
    round_id: str = ""
    config: JobConfig | None = None
    versions: str = ""
