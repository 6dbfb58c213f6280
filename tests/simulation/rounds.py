"""What nodes were told of rounds, and what must hold of it.

A round is known by its incarnation, its number and its unique id: after the loss of a store two rounds may have one
number, of which at most one can ever run, since the other lacks a member.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.simulation.properties import ASSIGNMENTS, BUDGET, ONE_HISTORY, ONE_ROUND, WORKERS_STORE, require

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TypeAlias

    from elastic_run.core.job.config import JobConfig
    from elastic_run.core.protocol.messages import Assignment
    from tests.simulation.agent import Agent

    #: Lineage, number, unique id.
    Name: TypeAlias = tuple[str, int, str]

#: What must be the same for all members of a round.
_SHARED = ("group_world_size", "world_size", "master", "restart_count", "hosts")


@dataclass(slots=True)
class Round:
    """One round.

    Attributes:
        name: By which it is known.
        formed_at: True seconds at which it was formed.
        size: The number of its members.
        restarts: Restarts of the job until then.
        places: The assignment of each node that was told one.
        configs: The configurations by which its members went when they were told: they may go on in another job.
        done: Nodes whose workers all ended with 0.
        has_failed: Whether a worker failed by itself.
    """

    name: Name
    formed_at: float
    size: int
    restarts: int
    places: dict[Agent, Assignment] = field(default_factory=dict)
    configs: set[JobConfig] = field(default_factory=set)
    done: set[Agent] = field(default_factory=set)
    has_failed: bool = False

    @property
    def number(self) -> int:
        """Its number."""
        return self.name[1]

    @property
    def incarnation(self) -> str:
        """The job that it belongs to."""
        return self.name[0]

    @property
    def is_whole(self) -> bool:
        """Whether each of its members was told its place."""
        return len(self.places) == self.size

    @property
    def is_running(self) -> bool:
        """Whether each of its members runs it, and does not stand still."""
        return self.is_whole and all(
            agent.is_alive and not agent.is_stalled and agent.running is place for agent, place in self.places.items()
        )

    @property
    def is_alive(self) -> bool:
        """Whether each of its members was told its place, and lives."""
        return self.is_whole and all(agent.is_alive and not agent.has_left for agent in self.places)


def name_round(place: Assignment) -> Name:
    """Return the name of the round of an assignment."""
    return place.incarnation, place.round, place.round_id


class Rounds:
    """All rounds of a run.

    Args:
        has_majority: Whether a round is formed only with more than half of the last one. Elsewhere a round all of whose
            members stood still runs for a moment beside its successor.
        may_split: Whether the user said that each of two nodes goes on alone.
    """

    def __init__(self, *, has_majority: bool, may_split: bool) -> None:
        self.is_judged = has_majority and not may_split
        self.may_split = may_split
        self._rounds: dict[Name, Round] = {}
        self._stores: dict[tuple[str, int], Name] = {}
        self._formed_at: dict[Name, float] = {}
        #: The last round of each incarnation that any log formed: its number, and its members.
        self.last_formed: dict[str, tuple[int, set[str]]] = {}
        #: The newest round of each incarnation that was whole.
        self.newest: dict[str, Round] = {}
        self.former_ids: dict[Name, str] = {}  # which round each one follows in its log
        #: Rounds that were formed when all members of the round that they follow were gone.
        self._after_gone: set[Name] = set()
        #: Rounds that were formed in a restored store, or after the state was lost. For each, the nodes that could have
        #: told of a newer round than the store knew.
        self._witnesses: dict[Name, frozenset[Agent]] = {}
        #: The rounds that were formed in a restored store.
        self._restored: set[Name] = set()
        #: Rounds whose rank 0 was dead when they were formed: they can't run.
        self._headless: set[Name] = set()
        #: The rounds in which each node was, in order.
        self._histories: dict[Agent, list[Round]] = defaultdict(list)

    def find(self, place: Assignment) -> Round:
        """Return the round of an assignment."""
        return self._rounds[name_round(place)]

    def find_all(self, incarnation: str, number: int) -> list[Round]:
        """Return the rounds of one number, of which at most one can run."""
        return [round_ for round_ in self._rounds.values() if round_.name[:2] == (incarnation, number)]

    def find_last(self, agent: Agent) -> Round | None:
        """Return the last round in which a node was, or None."""
        return self._histories[agent][-1] if self._histories[agent] else None

    @property
    def failed(self) -> int:
        """The number of rounds in which a worker failed by itself."""
        return sum(round_.has_failed for round_ in self._rounds.values())

    def note_form(
        self,
        name: Name,
        members: set[str],
        now: float,
        *,
        is_headless: bool,
        witnesses: frozenset[Agent] | None,
        is_restored: bool,
    ) -> None:
        """A round was written into a log, of which its members are yet to hear."""
        if witnesses is not None:
            self._witnesses[name] = witnesses
        if is_restored:
            self._restored.add(name)
        self._formed_at[name] = now
        if is_headless:
            self._headless.add(name)
        former = self._find_members(self.former_ids[name])
        if all(not agent.is_alive or agent.has_left for agent in former):
            self._after_gone.add(name)
        last = self.last_formed.get(name[0])
        if last is None or name[1] >= last[0]:
            self.last_formed[name[0]] = name[1], members

    def note_formed(self, agent: Agent, place: Assignment) -> None:
        """A node was told its place."""
        name = name_round(place)
        formed_at = self._formed_at.get(name, agent.clockwork.now)
        fresh = Round(name, formed_at, place.group_world_size, place.restart_count)
        round_ = self._rounds.setdefault(name, fresh)
        require(place.incarnation, ASSIGNMENTS, "a round that can't be told from another job's")
        require(0 <= place.group_rank < place.group_world_size, ASSIGNMENTS, f"rank {place.group_rank}")
        address = (place.master.host, place.master.port)
        there = self._stores.setdefault(address, name)
        # A first fact of a dead node that arrives once more after the state was lost names a store that is gone.
        has_forgotten = name in self._restored and self.has_forgotten(there, name)
        is_free = there == name or name in self._headless or has_forgotten
        require(is_free, WORKERS_STORE, f"{there} and {name} use the workers' store at {address}")
        for other in round_.places.values():
            require(other.group_rank != place.group_rank, ASSIGNMENTS, f"rank {place.group_rank} of {name} twice")
            for shared in _SHARED:
                is_same = getattr(other, shared) == getattr(place, shared)
                require(is_same, ASSIGNMENTS, f"two values of {shared} in round {name}")
        self._compare_with_last(agent, place, name)
        round_.places[agent] = place
        round_.configs.add(agent.member.config)
        self._histories[agent].append(round_)
        if round_.is_whole:
            self._note_whole(round_)

    def _compare_with_last(self, agent: Agent, place: Assignment, name: Name) -> None:
        last = self.find_last(agent)
        if last is None or last.incarnation != place.incarnation:
            return
        require(place.round > last.number, ONE_ROUND, f"{agent.node} was told {name} after {last.name}")
        require(place.restart_count >= last.restarts, BUDGET, f"{name} has fewer restarts than {last.name}")
        rank = last.places[agent].group_rank
        is_next = self.former_ids.get(name) == last.name[2] and last.is_whole
        if is_next and rank < place.group_world_size:
            require(place.group_rank == rank, ASSIGNMENTS, f"{agent.node} lost its rank {rank} after {last.name}")

    def _note_whole(self, round_: Round) -> None:
        newest = self.newest.get(round_.incarnation)
        if newest is not None and self.has_forgotten(newest.name, round_.name):
            newest = None
        if newest is not None and not self.may_split and newest.formed_at < round_.formed_at:
            is_of_spares = self._are_both_of_spares(round_, newest)
            is_later = round_.number > newest.number or is_of_spares
            require(is_later, ONE_ROUND, f"all members were told {round_.name} after {newest.name}")
            # Neither of two lines of spares knows of the other: each counts its own restarts, and those before.
            before = self._find_before(round_) if is_of_spares else [newest]
            for one in before:
                require(round_.restarts >= one.restarts, BUDGET, f"{round_.name} forgot restarts of {one.name}")
            former = self.former_ids.get(round_.name, "")
            is_next = newest.name[2] == former or newest.number < int(former.partition("/")[0] or 0)
            is_next = is_next or is_of_spares
            require(is_next, ONE_HISTORY, f"{round_.name} follows {former}, not {newest.name}")
        if newest is not None and not self.may_split and newest.formed_at > round_.formed_at:
            # The last member was told late: what all were told before must have followed this round.
            is_former = any(former == round_.name[2] for former, _ in self._find_line(newest))
            is_former = is_former or self._are_both_of_spares(round_, newest)
            require(is_former, ONE_HISTORY, f"{round_.name} is told late, and {newest.name} does not follow it")
        if newest is None or newest.formed_at < round_.formed_at:
            self.newest[round_.incarnation] = round_

    def has_forgotten(self, lost: Name, name: Name) -> bool:
        """Whether round `lost` was lost: when round `name` was formed later, no member of `lost` could tell of it."""
        former, witnesses = self._rounds.get(lost), self._witnesses.get(name)
        if former is None or witnesses is None:
            return False
        return former.formed_at < self._formed_at[name] and witnesses.isdisjoint(former.places)

    def find_told(self, name: Name) -> set[Agent]:
        """Return the nodes that were told of a round."""
        return set(self._rounds[name].places) if name in self._rounds else set()

    def _are_both_of_spares(self, one: Round, other: Round) -> bool:
        """Whether the lines of two rounds part after a round of which neither goes on with a member: all are gone."""
        lines = [dict(self._find_line(round_)) for round_ in (one, other)]
        former = next((former for former in lines[0] if former in lines[1]), None)
        if former is None or lines[0][former] == lines[1][former]:
            return False
        followers = [self._rounds[line[former]] for line in lines if line[former] in self._rounds]
        gone = self._find_members(former)
        is_gone = all(line[former] in self._after_gone for line in lines)
        return is_gone and not any(agent in round_.places for agent in gone for round_ in followers)

    def _find_members(self, round_id: str) -> set[Agent]:
        """Return the nodes that were told of a round."""
        return {agent for round_ in self._rounds.values() if round_.name[2] == round_id for agent in round_.places}

    def _find_line(self, round_: Round) -> Iterator[tuple[str, Name]]:
        """Return the unique id of each round before one, the latest first, with the round that follows it."""
        name: Name | None = round_.name
        while name is not None and (former := self.former_ids.get(name)):
            yield former, name
            name = next((one for one in self.former_ids if one[2] == former), None)

    def _find_before(self, round_: Round) -> list[Round]:
        """Return the rounds before one of which a node was told."""
        line = {former for former, _ in self._find_line(round_)}
        return [one for one in self._rounds.values() if one.name[2] in line]

    def look(self, *, may_be_hidden: bool) -> None:
        """Judge what must hold at any time: a round that was left lacks a member."""
        if not self.is_judged:
            return
        rounds = [round_ for round_ in self._rounds.values() if round_.is_running]
        running = [round_.name for round_ in rounds if not any(self._are_both_of_spares(round_, one) for one in rounds)]
        # Who starts alone, and can't see the others, can't know of their job.
        incarnations = {name[0] for name in running} if may_be_hidden else ()
        require(len(running) <= max(1, len(incarnations)), ONE_ROUND, f"all their members run {running}")

    def judge(self) -> None:
        """Judge what can only be judged when all members were told."""
        for round_ in self._rounds.values():
            self._judge_members(round_)
            if round_.is_whole:
                self._judge_ranks(round_)

    def _judge_members(self, round_: Round) -> None:
        # Where a node with another configuration came first, the job goes by those.
        require(len(round_.configs) == 1, ASSIGNMENTS, f"two configurations in {round_.name}")
        scripts = {agent.member.node_info.script for agent in round_.places}
        require(len(scripts) == 1, ASSIGNMENTS, f"two scripts in {round_.name}")
        (config,) = round_.configs
        most = max(config.max_restarts, self._count_inherited(round_))
        require(round_.restarts <= most, BUDGET, f"restart {round_.restarts} of {most} in {round_.name}")

    def _count_inherited(self, round_: Round) -> int:
        """Return the restarts of another job with which the job of a round has begun, 0 for none.

        The state of the other job was lost, and so were all nodes of its last round. The next node has heard of these
        restarts, and may have come with a smaller --max-restarts.
        """
        rounds = sorted(self._rounds.values(), key=lambda one: one.formed_at)
        index = next(index for index, one in enumerate(rounds) if one.incarnation == round_.incarnation)
        most = max((one.restarts for one in rounds[:index]), default=0)
        return rounds[index].restarts if rounds[index].restarts <= most else 0

    def _judge_ranks(self, round_: Round) -> None:
        ordered = sorted(round_.places.items(), key=lambda item: item[1].group_rank)
        ranks = [place.group_rank for _, place in ordered]
        require(ranks == list(range(round_.size)), ASSIGNMENTS, f"ranks {ranks} in {round_.name}")
        base = 0
        for agent, place in ordered:
            require(place.base_rank == base, ASSIGNMENTS, f"base rank of {agent.node} in {round_.name}")
            base += agent.member.node_info.local_world_size
        require(base == ordered[0][1].world_size, ASSIGNMENTS, f"world size of {round_.name}")
