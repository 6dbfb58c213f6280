"""From one round of a job to the next: gather, propose, start, and what follows its end. Pure.

- A round forms at once when the maximum of nodes is there, or every surviving member of the last round. Only a first
  round of fewer nodes waits for the last call.
- `founding` says whether the nodes that are here may be a round. Without that, nobody may say so for two leases, and
  then the nodes look for another coordinator.
- Tensors and collectives of two versions of torch may not fit together, so an assignment also says whether the members
  have different versions.
"""

from __future__ import annotations

from types import MappingProxyType

from elastic_run.core.job.documents import Assignment, Proposal, Round, shorten
from elastic_run.core.job.founding import MAJORITY, describe_majority, find_base, list_needed, may_form
from elastic_run.core.job.node_changes import NodeChanges, forget_place
from elastic_run.core.job.ranks import (
    assign_group_ranks,
    assign_worker_ranks,
    counts_at,
    describe_dispute,
    find_disputes,
)
from elastic_run.core.job.round_ending import (
    awaited_until,
    clear_round,
    conclude,
    describe_lost,
    end_by_failure,
    end_job,
    give_up_waiting,
    watch_round,
)
from elastic_run.core.job.short_lists import fold_hosts, list_hosts
from elastic_run.core.job.state import GATHERING, HALTING, OVER, PAUSING, RUNNING, Job, Node, Proposed, Seat
from elastic_run.records import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from elastic_run.core.config import JobConfig
    from elastic_run.core.job.documents import NodeInfo

#: Leases without more than half of the seats after which the nodes look for another coordinator.
PATIENCE = 2
#: Rounds that an agent has started which it remembers.
_REMEMBERED_ROUNDS = 16
#: Hosts of a version of torch that are listed one by one; versions that are named; characters of a version.
_HOSTS = 3
_VERSIONS = 4
_VERSION_LENGTH = 30


def advance(job: Job, now: float, jitter: float) -> Job:  # noqa: PLR0911 - one branch for each phase
    """Decide what follows, by one step; return the same state if nothing does."""
    config = job.config
    if config is None or job.phase == OVER:
        return job
    job = _settle_ranks(job, config, now)
    if job.is_awaiting and (now >= awaited_until(job, config) or _awaits_silent_alone(job)):
        # The members that have not come after a change of the coordinator are lost.
        given_up = (replace(seat, is_awaited=False, is_lost=True) if seat.is_awaited else seat for seat in job.seats)
        job = replace(job, seats=tuple(given_up))
    if job.phase == OVER:
        return job
    if job.phase == GATHERING:
        return _gather(job, config, now)
    if job.phase == PAUSING:
        is_over = job.until is None or now >= job.until
        return replace(job, phase=GATHERING, since=now, until=None) if is_over else job
    if job.ending is not None:
        return end_by_failure(job, job.ending, job.ending.verdict, job.ending.detail)
    if any(not member.outcome for member in job.members) or job.is_awaiting:
        return job if job.phase == HALTING else watch_round(job, config, now)
    is_settled = job.memory is not None and job.round is not None and job.memory.settled_round == job.round.round_id
    if job.phase == HALTING and is_settled:
        # The coordinator before this one has settled the round, and has told so: its failure counts once.
        return clear_round(job, GATHERING, now)
    return conclude(job, config, now, jitter)


def _settle_ranks(job: Job, config: JobConfig, now: float) -> Job:
    """Refuse a node whose fixed rank another node has; before the first round either of them may be right."""
    due = [(node, rival) for node, rival in find_disputes(job) if now >= counts_at(node, config)]
    if not due:
        return job
    detail = describe_dispute(*due[0])
    if job.round is None:
        return end_job(job, "refused", detail)
    changes = NodeChanges(job, now)
    changes.refuse(due[0][0].node, detail, detail)
    return changes.close()


def _awaits_silent_alone(job: Job) -> bool:
    """Whether only a coordinator is missing that was silent for a lease already, and the others may go on."""
    base = job.round
    if base is None or base.coordinator != job.silent or base.coordinator in job.here:
        return False
    awaited = [rank for rank, seat in enumerate(job.seats) if seat.is_awaited]
    return awaited == [base.coordinator_rank] and may_form(job, job.here)


# --- gather ----------------------------------------------------------------------------------------------------------
def _gather(job: Job, config: JobConfig, now: float) -> Job:
    proposed = job.proposed
    if proposed is not None:
        is_accepted = all(
            job.here[name].promise == job.promise and job.here[name].has_accepted(proposed.round)
            for name in proposed.proposals
        )
        # After the lease another node may hold it, and start a round.
        if is_accepted and now < job.lease_until:
            return _start(job, proposed, now)
        if now < job.waits_since + config.join_timeout:
            return job
    has_minimum = len(job.waiting) >= config.min_nodes
    if has_minimum != (job.min_reached_at is not None):
        job = replace(job, min_reached_at=now if has_minimum else None)
    chosen = _choose(job, config) if _is_formable(job, config, now) else ()
    if chosen and proposed is None and _may_propose(job, chosen):
        return _propose(replace(job, short_since=None), chosen)
    if now >= job.waits_since + config.join_timeout:
        return give_up_waiting(job, config, describe_majority(job), has_lease=now < job.lease_until)
    is_founding = job.round is None and not job.may_found
    if job.choice == MAJORITY and not is_founding and not may_form(job, job.here):
        short_since = now if job.short_since is None else job.short_since
        return replace(job, short_since=short_since, is_over=now >= short_since + PATIENCE * config.lease)
    return replace(job, short_since=None)


def last_call_ends(job: Job, config: JobConfig) -> float | None:
    """Return when a first round is formed of the nodes that are there, or None."""
    if job.round is not None or job.min_reached_at is None:
        return None
    return job.min_reached_at + config.last_call_timeout


def _is_formable(job: Job, config: JobConfig, now: float) -> bool:
    """Whether enough nodes wait, nobody may come who was a member before, and the last call is over."""
    count = len(job.waiting)
    if count < config.min_nodes or job.is_awaiting or (job.round is None and find_disputes(job)):
        return False
    if job.round is not None or count >= config.max_nodes:
        return True
    ends = last_call_ends(job, config)
    return ends is not None and now >= ends


def _choose(job: Job, config: JobConfig) -> tuple[str, ...]:
    """Choose the nodes of the next round, in order of joining: those first whose seats are needed, then survivors."""
    needed = list_needed(job) if job.choice == MAJORITY else ()
    seats = {name: sum(state.has_seat(one) for one in needed) for name, state in job.here.items()}
    waiting = sorted(job.waiting, key=lambda one: (-seats[one.node], one.rank is None, one.arrived))
    return tuple(one.node for one in sorted(waiting[: config.max_nodes], key=lambda one: one.arrived))


def _may_propose(job: Job, chosen: Sequence[str]) -> bool:
    """Whether the chosen nodes may be the next round."""
    if any(state.promise != job.promise for state in job.here.values()):
        return False  # what a node that has not promised yet may still accept elsewhere is unknown
    return (job.round is not None or job.may_found) and may_form(job, set(chosen))


# --- propose ---------------------------------------------------------------------------------------------------------
def _propose(job: Job, chosen: Sequence[str]) -> Job:
    number = max(job.number, job.highest_round) + 1
    # A first round that may have started is named as if it had: nodes that know of this proposal alone would else go on
    # without it.
    parent = find_base(job) or next(reversed(list_needed(job)), None)
    term = job.promise.term
    root = f"{term}/{number}/{job.node}" if parent is None else parent.root
    ranks = assign_group_ranks([job.nodes[name] for name in chosen])
    one = Round(term, number, job.node, root, len(chosen), ranks.get(job.node, -1), job.restart_count)
    # Only another coordinator that counts seats has to know the members.
    members = tuple(sorted(map(shorten, chosen))) if job.choice == MAJORITY else ()
    proposals = {name: Proposal(one, rank, parent, members) for name, rank in ranks.items()}
    proposed = Proposed(one, MappingProxyType(proposals), MappingProxyType(_assign(job, one, ranks)))
    return replace(job, proposed=proposed, highest_round=number)


def _assign(job: Job, proposed: Round, ranks: Mapping[str, int]) -> dict[str, Assignment]:
    """Return what each member of a proposed round needs to know, by node, in order of rank."""
    members = [job.nodes[name] for name in ranks]
    sizes = [(member.node_info.role, member.node_info.local_world_size) for member in members]
    world_size = sum(size for _, size in sizes)
    versions = describe_versions(member.node_info for member in members)
    hosts = len({member.node_info.host for member in members})
    news = _describe_news(job, sorted((node for node in members if node.rank is None), key=lambda node: node.arrived))
    return {
        member.node: Assignment(
            round=proposed.number,
            group_rank=rank,
            group_world_size=len(members),
            base_rank=place.base_rank,
            world_size=world_size,
            role_rank=place.role_rank,
            role_world_size=place.role_world_size,
            master=members[0].store_address,
            restart_count=job.restart_count,
            hosts=hosts,
            news=news,
            incarnation=proposed.root,
            round_id=proposed.round_id,
            config=job.config if member.has_other_config else None,
            versions=versions,
        )
        for rank, (member, place) in enumerate(zip(members, assign_worker_ranks(sizes), strict=True))
    }


def _describe_news(job: Job, newcomers: Sequence[Node]) -> str:
    """Say what is new since the last round."""
    lost = ", ".join(describe_lost(job))
    if job.round is None:
        return f"without {lost}" if lost else ""  # nodes that were unhealthy
    new = ", ".join(list_hosts([node.node_info.host for node in newcomers]))
    told = (job.news, f"without {lost}" if lost else "", f"with {new}" if new else "")
    return "; ".join(text for text in told if text)


def describe_versions(nodes: Iterable[NodeInfo]) -> str:
    """Return which hosts have which version of torch, the fewest hosts first; "" where at most one is told."""
    hosts: dict[str, list[str]] = {}
    for node in nodes:
        if node.torch:
            hosts.setdefault(node.torch[:_VERSION_LENGTH], []).append(node.host)
    rare_first = sorted(hosts.items(), key=lambda item: len(item[1]))[:_VERSIONS]
    told = [
        f"torch {version} on {', '.join(names if len(names) <= _HOSTS else fold_hosts(names))}"
        for version, names in rare_first
    ]
    return "; ".join(told) if len(hosts) > 1 else ""


# --- start -----------------------------------------------------------------------------------------------------------
def _start(job: Job, proposed: Proposed, now: float) -> Job:
    """Return the job whose round has just started: its `start` is sent from now on."""
    places = proposed.assignments

    def place(node: Node) -> Node:
        rank = places[node.node].group_rank if node.node in places else None
        return replace(node, rank=rank, is_member=rank is not None, failing=None, outcome="", is_suspecting=False)

    return replace(
        job,
        phase=RUNNING,
        nodes=MappingProxyType({name: place(node) for name, node in job.nodes.items()}),
        gone=MappingProxyType({name: forget_place(gone) for name, gone in job.gone.items()}),
        round=proposed.round,
        proposed=None,
        started_by=(*job.started_by, proposed.round)[-_REMEMBERED_ROUNDS:],
        seats=tuple(Seat(name, is_awaited=False) for name in places),
        since=now,
        few_since=None,
        min_reached_at=None,
        until=None,
        news=next(iter(places.values())).news,
        root=None,
        hidden=None,
        halt=None,
    )
