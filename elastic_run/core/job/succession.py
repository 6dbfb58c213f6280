"""Which coordinator may form a round: the rules that keep two parts of a job from going on beside each other. Pure.

If only one coordinator is possible (static, one endpoint), it may always form a round. If a lease names the
coordinator (etcd, file), its holder may: nodes obey the highest term that they have promised to follow, and
`Coordination.knowledge` lists the rounds that the holder knows. The rules below are for several endpoints, where any of
the hosts may coordinate.

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
  obeyed no other coordinator since then.
- The seat of the coordinator of a round may be left out if a node that is here has seen its connection end and its port
  refuse: it is dead. Thus a job of two nodes survives the end of its host. Two parts still can't go on: of n other
  seats, one part needs more than half without it, and so does the other, or half of them with it. Only this one seat of
  a round: with two, of five nodes 3 and 4 go on beside 0, which has dropped both, gone on with 1 and 2, and ended.
"""

from __future__ import annotations

from elastic_run.core.job.documents import shorten
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping

    from elastic_run.core.job.documents import NodeState, Promise, Proposal, Round

#: How one of several possible coordinators is chosen.
ONLY_ONE = "only_one"
LEASE = "lease"
MAJORITY = "majority"

_PAIR = 2


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What a coordinator knows of the rounds of its job.

    Args:
        promise: The coordinator's own.
        here: The newest states of the nodes that are connected, by node.
        ended: The last states of the nodes that have ended in this coordinator's hands, by node.
        started_by: The rounds whose `start` this agent has sent, as a coordinator in whatever term, and the last round
            of which it has heard.
        dead: The coordinators whose connection a node here has seen end, and whose port refuses.
    """

    promise: Promise
    here: Mapping[str, NodeState]
    ended: Mapping[str, NodeState]
    started_by: tuple[Round, ...] = ()
    dead: frozenset[str] = frozenset()

    def heard(self) -> Iterator[NodeState]:
        """Return the states of all nodes that count."""
        yield from self.ended.values()
        yield from self.here.values()


def find_base(known: Knowledge) -> Round | None:
    """Return the newest round that has surely started, or None if none has."""
    return max(_list_started(known), key=lambda one: (one.order, one.coordinator), default=None)


def find_possible(known: Knowledge, base: Round | None) -> tuple[Round, ...]:
    """Return the proposals that may have started after the base, in their order."""
    accepted = {
        proposal.round: proposal
        for state in known.heard()
        for proposal in state.accepted
        if base is None or (proposal.round.order > base.order and proposal.round.root == base.root)
    }
    possible = [one for one, proposal in accepted.items() if _may_have_started(known, proposal)]
    return tuple(sorted(possible, key=lambda one: (one.order, one.coordinator)))


def list_needed(known: Knowledge) -> tuple[Round, ...]:
    """Return the rounds of each of which more than half is needed: the base, and what may have started after it."""
    base = find_base(known)
    return (*(() if base is None else (base,)), *find_possible(known, base))


def may_form(known: Knowledge, members: Container[str], *, continues_alone: bool = False) -> bool:
    """Whether a round of these members may follow all rounds that have started or may have started.

    With `--on-split=continue` the last node of a pair goes on (`continues_alone`).
    """
    needed = list_needed(known)
    return all(_has_majority(known, one, members, continues_alone=continues_alone) for one in needed)


def describe_majority(known: Knowledge, members: Container[str]) -> str:
    """Say how many nodes of an earlier round are missing before another may form; "" if none are."""
    for one in list_needed(known):
        if not _has_majority(known, one, members, continues_alone=False):
            seats = _count_seats(known, one)
            name = "the last round's" if one == find_base(known) else "another round's"
            count = _count_here(known, one, members)
            return f"{count} of {name} {one.size} nodes are here, {seats // 2 + 1} are needed"
    return ""


def _list_started(known: Knowledge) -> Iterator[Round]:
    yield from known.started_by
    for state in known.heard():
        if state.started is not None:
            yield state.started
        yield from _list_parents(state.accepted)


def _list_parents(proposals: Iterable[Proposal]) -> Iterator[Round]:
    return (proposal.parent for proposal in proposals if proposal.parent is not None)


def _may_have_started(known: Knowledge, proposal: Proposal) -> bool:
    if proposal.round.coordinator == known.promise.coordinator and proposal.round not in known.started_by:
        return False  # our own, abandoned before its start
    members = frozenset(proposal.members)
    # A node that is here says all that it has ever accepted, so a member without this proposal never gets to it now:
    # it has promised a higher term.
    return not any(
        shorten(name) in members and not state.has_seat(proposal.round) and state.promise == known.promise
        for name, state in known.here.items()
    )


def _has_majority(known: Knowledge, one: Round, members: Container[str], *, continues_alone: bool) -> bool:
    seats, count = _count_seats(known, one), _count_here(known, one, members)
    if seats == _PAIR and count == 1:
        return continues_alone
    return 2 * count > seats


def _count_seats(known: Knowledge, one: Round) -> int:
    is_void = one.coordinator_rank >= 0 and one.coordinator in known.dead
    return one.size - is_void


def _count_here(known: Knowledge, one: Round, members: Container[str]) -> int:
    here = sum(name in members and state.has_seat(one) for name, state in known.here.items())
    is_void = one.coordinator in known.dead
    ended = [state for name, state in known.ended.items() if not (is_void and name == one.coordinator)]
    return here + sum(state.has_seat(one) for state in ended)
