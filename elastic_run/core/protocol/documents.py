"""The documents that the coordinator writes beside the log: assignments, the log's head, the nodes that are there."""

from __future__ import annotations

from elastic_run.core.protocol.facts import Copy, StoreAddress  # noqa: TC001 - importing them registers them as fields
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    from elastic_run.core.job.config import JobConfig


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
        incarnation: Of the job; see `facts.is_related`.
        round_id: The round's unique id. Its number is not: two logs may each form a round of one number.
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


@dataclass(frozen=True, slots=True)
class Head:
    """The end of the log: a hint for nodes that come late or missed a trim.

    Args:
        slot: The newest slot, whose entry is valid.
        term: Of the coordinator that wrote this.
        coordinator: The node that does.
        round: The last round that was formed, 0 for none.
        form_slot: The slot in which it was, -1 for none.
        form_term: The term in which it was.
        is_running: Whether it was neither halted nor ended since.
        state_slot: The slot whose state document is the newest, -1 for none.
        state_term: Its term.
        restart_count: Restarts of the whole job when that round was formed, or that are known where it isn't.
        incarnation: Of the job, "" before its first round; see `facts.is_related`.
        round_id: The unique id of that round.
        prepared: The state beside the newest `Prepare` for the next round, or None.
        known: See `decisions.Prepare`.
    """

    slot: int
    term: int
    coordinator: str
    round: int
    form_slot: int
    form_term: int
    is_running: bool
    state_slot: int
    state_term: int
    restart_count: int = 0
    incarnation: str = ""
    round_id: str = ""
    prepared: Copy | None = None
    known: tuple[Copy, ...] = ()


@dataclass(frozen=True, slots=True)
class LogStart:
    """Where the log begins. The document is raised before slots are deleted, and is never lowered.

    A slot below it was decided once and trimmed: an entry that appears there later is void.

    Args:
        slot: The oldest slot that may still be there.
        term: Of the coordinator that wrote this. Entries of older terms count for nothing to a reader who begins here.
        is_restart: Whether the store was restored from a backup, and the log begins anew at the slot: nothing of older
            terms counts from there on, whoever reads it.
    """

    slot: int
    term: int
    is_restart: bool = False


@dataclass(frozen=True, slots=True)
class Status:
    """The nodes that are there, for the line that waiting agents show.

    Args:
        phase: Of the job.
        round: The last round that was formed, 0 for none.
        min_nodes: Of the configuration.
        max_nodes: Of the configuration.
        present: The number of nodes there.
        hosts: Their host names, or ranges of them (`core.job.host_lists`), while nodes are waited for; otherwise none.
        lost: What happened to those that are missing, or why they were refused, a clause each.
        seconds_left: Until the job ends for want of nodes, or starts with those that are there; None if neither.
        missing: Which nodes of the last round, or which fixed node ranks, are needed before a round may form; "" if no
            node in particular is.
        starts: Whether the job starts after `seconds_left`.
    """

    phase: str
    round: int
    min_nodes: int
    max_nodes: int
    present: int
    hosts: tuple[str, ...]
    lost: tuple[str, ...]
    seconds_left: float | None
    missing: str = ""
    starts: bool = False


Note: TypeAlias = Assignment | Head | LogStart | Status
