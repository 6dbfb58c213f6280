"""Which coordinator may form a round: the rules that keep two parts of a job from going on beside each other. Pure.

If only one coordinator is possible (static, one endpoint), it may always form a round. If a lease names the
coordinator (etcd, file), its holder may: nodes obey the highest term that they have promised to follow. The rules below
are for several endpoints, where any of the hosts may coordinate.

- The **base** is the newest round that has surely started: a node has started it, a proposal names it as its parent, or
  this coordinator has sent its `start`. A `start` that nobody has received yet is a start all the same: its receivers
  may be behind a cut. Without this, the coordinator forms the next round after an older one, and forks.
- A proposal that is newer than the base **may have started** if each of its members that is here has accepted it. The
  others may have accepted it as well, and run it now. Without these proposals, a coordinator that has seen only the
  round before them forks.
- A round forms with more than half of the seats of the base, and of each proposal that may have started. Two
  coordinators can't both have more than half. With half of them, both sides of a split in two go on.
- The seat of a node counts if the node is in the new round, or if it has ended in this coordinator's hands: its
  connection ended by its guardian, or it said that it goes. It has told all that it had accepted when it connected, and
  obeyed no other coordinator since then. A node that goes promises nothing to a second coordinator: it would count for
  both.
- The seat of the coordinator of a round may be left out if a node that is here has seen its connection end and its port
  refuse: it is dead. Thus a job of two nodes survives the end of its host. Two parts still can't go on: of n other
  seats, one part needs more than half without it, and so does the other, or half of them with it. Only this one seat of
  a round: with two, of five nodes 3 and 4 go on beside 0, which has dropped both, gone on with 1 and 2, and ended.
"""

from __future__ import annotations

from elastic_run.core.job.documents import shorten

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from elastic_run.core.job.documents import NodeState, Proposal, Round
    from elastic_run.core.job.state import Job

#: How one of several possible coordinators is chosen.
ONLY_ONE = "only_one"
LEASE = "lease"
MAJORITY = "majority"

_PAIR = 2


def find_base(job: Job) -> Round | None:
    """Return the newest round that has surely started, or None if none has."""
    return max(_list_started(job), key=lambda one: (one.order, one.coordinator), default=None)


def find_possible(job: Job, base: Round | None) -> tuple[Round, ...]:
    """Return the proposals that may have started after the base, in their order."""
    accepted = {
        proposal.round: proposal
        for state in _list_heard(job)
        for proposal in state.accepted
        if base is None or (proposal.round.order > base.order and proposal.round.root == base.root)
    }
    possible = [one for one, proposal in accepted.items() if _may_have_started(job, proposal)]
    return tuple(sorted(possible, key=lambda one: (one.order, one.coordinator)))


def list_needed(job: Job) -> tuple[Round, ...]:
    """Return the rounds of each of which more than half is needed: the base, and what may have started after it."""
    base = find_base(job)
    return (*(() if base is None else (base,)), *find_possible(job, base))


def may_form(job: Job, members: Container[str]) -> bool:
    """Whether a round of these members may follow all rounds that have started or may have started.

    With `--on-split=continue` the last node of a pair goes on.
    """
    if job.choice != MAJORITY:
        return True
    continues_alone = job.config is not None and job.config.on_split == "continue"
    return all(_has_majority(job, one, members, continues_alone=continues_alone) for one in list_needed(job))


def describe_majority(job: Job) -> str:
    """Say how many nodes of an earlier round are missing before another may form; "" if none are, or none count."""
    for one in list_needed(job) if job.choice == MAJORITY else ():
        if not _has_majority(job, one, job.here, continues_alone=False):
            name = "the last round's" if one == find_base(job) else "another round's"
            needed, count = _count_seats(job, one) // 2 + 1, _count_here(job, one, job.here)
            return f"{count} of {name} {one.size} nodes are here, {needed} are needed"
    return ""


def list_dead(job: Job) -> frozenset[str]:
    """Return the coordinators whose connection a node here has seen end, and whose port refuses."""
    return frozenset((job.dead, *(state.dead for state in job.here.values()))) - {""}


def _list_heard(job: Job) -> Iterator[NodeState]:
    yield from job.ended.values()
    yield from job.here.values()


def _list_started(job: Job) -> Iterator[Round]:
    yield from job.started_by
    if job.round is not None:
        yield job.round  # nobody that is here now need know of it
    if job.choice == LEASE and job.memory is not None and job.memory.round is not None:
        # The rounds that may run on nodes which are not here: no seats are counted with a lease. The memory names the
        # last round to spares, and a proposal of another coordinator counts as started. Without these, a spare or a
        # member that has not read the `start` yet takes the lease over and forms a round beside the running one.
        yield job.memory.round
    for state in _list_heard(job):
        if state.started is not None:
            yield state.started
        for proposal in state.accepted:
            if proposal.parent is not None:
                yield proposal.parent
            if job.choice == LEASE and proposal.round.coordinator != job.node:
                yield proposal.round


def _may_have_started(job: Job, proposal: Proposal) -> bool:
    if proposal.round.coordinator == job.node and proposal.round not in job.started_by:
        return False  # our own, abandoned before its start
    members = frozenset(proposal.members)
    # A node that is here says all that it has ever accepted, so a member without this proposal never gets to it now:
    # it has promised a higher term.
    return not any(
        shorten(name) in members and not state.has_seat(proposal.round) and state.promise == job.promise
        for name, state in job.here.items()
    )


def _has_majority(job: Job, one: Round, members: Container[str], *, continues_alone: bool) -> bool:
    seats, count = _count_seats(job, one), _count_here(job, one, members)
    if seats == _PAIR and count == 1:
        return continues_alone
    return 2 * count > seats


def _count_seats(job: Job, one: Round) -> int:
    is_void = one.coordinator_rank >= 0 and one.coordinator in list_dead(job)
    return one.size - is_void


def _count_here(job: Job, one: Round, members: Container[str]) -> int:
    here = sum(name in members and state.has_seat(one) for name, state in job.here.items())
    is_void = one.coordinator in list_dead(job)
    ended = [state for name, state in job.ended.items() if not (is_void and name == one.coordinator)]
    return here + sum(state.has_seat(one) for state in ended)
