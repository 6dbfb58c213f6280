"""A simulated job: agents on hosts, the connections between them, and a virtual clock.

Every choice comes from the seed, so a seed is a job that can be repeated. The agents run the real decisions of
`core.job`: `coordination`, `membership` and `succession`. The rest of an agent is imitated here as simply as possible:
it looks for a coordinator, connects, sends its newest document, runs workers, and dies.
"""

# ruff: noqa: D102 - what a method of the simulation does, its name says
from __future__ import annotations

import heapq
import random
from typing import TYPE_CHECKING, NamedTuple

from elastic_run.core.job import coordination as coordinating
from elastic_run.core.job import coordination_state, membership
from elastic_run.core.job.config import JobConfig
from elastic_run.core.job.coordination import BROKEN, ENDED, SILENT, Closed, Coordination, MayFound, Said
from elastic_run.core.job.documents import IDLE, RUNS, NodeState, Order, Promise, Round
from elastic_run.core.job.membership import Member, OrderRead, Search
from elastic_run.core.job.state import ENDED as JOB_ENDED
from elastic_run.core.job.state import RUNNING
from elastic_run.core.job.succession import LEASE, MAJORITY, ONLY_ONE, find_base, find_possible
from elastic_run.core.node.messages import CutOff, Ended, Formed, Halted, Refused, WorkersFailing, WorkersGone
from elastic_run.core.protocol.facts import NodeInfo, StoreAddress
from elastic_run.core.protocol.outcomes import DONE, FAILED, STOPPED
from elastic_run.records import replace

if TYPE_CHECKING:
    from collections.abc import Callable

LEASE_SECONDS = 6.0
#: Seconds until the guardian of a killed agent has ended the workers.
GUARDIAN = 2.0
#: Seconds between two attempts to reach a coordinator.
RETRY = 0.5


class BrokenPropertyError(AssertionError):
    """Something that must hold in every job does not."""


class Started(NamedTuple):
    """A round that a coordinator has started, and what it knew when it proposed it."""

    round: Round
    members: tuple[str, ...]
    base: Round | None
    possible: tuple[Round, ...]
    at: float


class Link:
    """A connection of a node to a coordinator: the newest document of each side, and what is on the way."""

    def __init__(self, node: Agent, host: Agent) -> None:
        self.node = node
        self.host = host
        self.is_open = True
        self.has_said = False
        #: Documents that are written but not sent yet: only the newest of a side counts.
        self.waiting: dict[str, NodeState | Order] = {}
        self.sent: dict[str, object] = {}
        #: Documents on the way, in order.
        self.wire: dict[str, list[NodeState | Order]] = {"up": [], "down": []}
        #: Since when a side waits for the answer of the other side's loop.
        self.unanswered: dict[str, float] = {}
        self.cut_since: float | None = None
        #: The agent that is dead, whose end the other side has yet to hear of.
        self.buried: Agent | None = None


class Agent:
    """A launcher on a host."""

    def __init__(self, world: World, host: int, name: str, config: JobConfig) -> None:
        self.world = world
        self.host = host
        self.name = name
        self.is_alive = True
        self.had_power = True
        self.frozen_until = 0.0
        self.rate = world.random.uniform(0.93, 1.07)
        self.offset = world.random.uniform(0.0, 1000.0)
        self.stores = 0
        self.is_fenced = world.random.random() < 0.5
        info = NodeInfo(f"host{host}", world.count, 1)
        self.member = Member(name, info, config, self.open_store())
        self.link: Link | None = None
        self.links: dict[str, Link] = {}
        self.coordination: Coordination | None = None
        self.started_by: tuple[Round, ...] = ()
        self.considered: tuple[Round, Round | None, tuple[Round, ...]] | None = None
        self.cursor = 0
        self.dead = ""
        self.lost_at: float | None = None
        self.verdict: str | None = None
        self.runs: Round | None = None
        self.ran: set[Round] = set()

    @property
    def clock(self) -> float:
        """Its own monotonic seconds: no two agents' clocks agree or run equally fast."""
        return self.offset + self.world.now * self.rate

    @property
    def acts(self) -> bool:
        return self.is_alive and self.world.now >= self.frozen_until

    @property
    def endpoint(self) -> int | None:
        """The endpoint that its host serves, or None."""
        return self.host if self.host < self.world.endpoints else None

    def has_done(self, started: Round) -> bool:
        """Whether its workers of a round have all succeeded."""
        end = self.member.ended
        return self.member.started == started and end is not None and end.outcome == DONE

    def open_store(self) -> StoreAddress:
        self.stores += 1
        return StoreAddress(f"{self.name}", self.stores)

    # --- the node's side ---------------------------------------------------------------------------------------------
    def feed(self, event: membership.Event) -> None:
        before = self.member
        self.member, commands = membership.decide(self.member, event, self.clock)
        for command in commands:
            self.perform(command)
        if self.member != before or isinstance(event, OrderRead):
            self.say()

    def perform(self, command: membership.Command) -> None:
        world, started = self.world, self.member.started
        if isinstance(command, Formed):
            assert started is not None
            world.check_start(self, started, command.assignment)
            self.runs = started
            self.ran.add(started)
            world.train(self, started)
        elif isinstance(command, Halted):
            world.after(world.random.choice((0.01, 0.1, 1.0, 5.0)), self.stop_workers, self.runs, STOPPED)
        elif isinstance(command, Ended):
            self.verdict = command.end.verdict
            world.say("end", self.name, command.end.verdict)
            self.runs = None
        elif isinstance(command, Refused):
            self.verdict = "refused"
            self.runs = None
        elif isinstance(command, Search):
            self.hang_up()

    def stop_workers(self, started: Round | None, outcome: str) -> None:
        """The workers of a round have ended."""
        if not self.is_alive or started is None or self.runs != started:
            return
        self.runs = None
        self.world.wake(self, lambda: self._tell_gone(started, outcome))

    def _tell_gone(self, started: Round, outcome: str) -> None:
        report = {"exit_code": 1, "severity": 0, "signature": "boom", "uptime": 100.0} if outcome == FAILED else None
        self.feed(WorkersGone(started.number, outcome, self.open_store(), report))

    def say(self) -> None:
        """Send the newest state, if it differs from the last one that was sent on this connection."""
        link = self.link
        if link is None or not link.is_open or self.member.is_over:
            return
        state = membership.make_state(self.member, self.clock, is_first=not link.has_said)
        if link.has_said and link.sent.get("up") == state:
            return
        link.has_said = True
        link.sent["up"] = replace(state, memory=None)
        self.world.post(link, "up", state)

    def hang_up(self) -> None:
        if self.link is not None and self.link.is_open:
            self.world.close(self.link, at_node="", at_host=BROKEN)

    # --- the coordinator's side --------------------------------------------------------------------------------------
    def coordinate(self, events: list[coordination_state.Event]) -> None:
        before = self.coordination
        if before is None or not self.acts:
            return
        after = coordinating.decide(before, events, now=self.clock, jitter=self.world.random.random())
        self.coordination = after
        self.started_by = after.started_by
        if after.proposed is not None and (before.proposed is None or before.proposed.round != after.proposed.round):
            base = find_base(after.knowledge)
            self.considered = (after.proposed.round, base, find_possible(after.knowledge, base))
        if after.round is not None and after.round in after.started_by and after.round not in before.started_by:
            self.world.note_start(self, after)
        if after.proposed is not before.proposed or after.round is not before.round or after.promise != before.promise:
            self.world.at_turn()
        for link in list(self.links.values()):
            order = coordinating.make_order(after, link.node.name)
            if link.sent.get("down") != order and (link.sent.get("down") or link.node.name in self.heard_from(link)):
                link.sent["down"] = order
                self.world.post(link, "down", order)
        if after.is_over:
            self.stop_coordinating()
        else:
            self.world.set_timer(self)

    def heard_from(self, link: Link) -> set[str]:
        """Return the node of a connection once it has said what it is: no order comes before that."""
        assert self.coordination is not None
        return (
            {link.node.name} & set(self.coordination.here)
            | set(self.coordination.ended)
            | {one.node for one in self.coordination.job.refusals}
        )

    def stop_coordinating(self) -> None:
        self.world.say("no coordinator", self.name)
        self.coordination = None
        for link in list(self.links.values()):
            self.world.after(0.2, self.world.close, link, "", "")


class World:
    """All of a simulated job.

    Args:
        seed: Where every choice comes from.
        choice: How a coordinator is chosen, a word of `succession`; None for one by the seed.
    """

    def __init__(self, seed: int, choice: str | None = None) -> None:
        self.random = random.Random(seed)  # noqa: S311 - to be repeated
        pick = self.random
        self.choice = choice or pick.choice((MAJORITY, MAJORITY, LEASE, ONLY_ONE))
        self.hosts = pick.choice((2, 3, 3, 4, 5, 6))
        self.endpoints = pick.randint(2, min(3, self.hosts)) if self.choice == MAJORITY else 1
        self.config = JobConfig(
            min_nodes=pick.randint(1, self.hosts),
            max_nodes=self.hosts + pick.randint(0, 1),
            max_restarts=pick.choice((0, 2, 50, 50, 50)),
            max_backoff=0.0,
            join_timeout=3000.0,
            last_call_timeout=pick.choice((0.0, 5.0)),
            scale_up_delay=pick.choice((0.0, 2.0)),
            scale_up_grace=pick.choice((0.0, 3.0)),
            membership_window=None,
            has_successors=self.choice == MAJORITY,
        )
        self.now = 0.0
        self.count = 0
        self.events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self.serial = 0
        self.agents: dict[str, Agent] = {}
        self.powered = dict.fromkeys(range(self.hosts), True)
        self.cut: set[frozenset[int]] = set()
        self.log: list[tuple[object, ...]] = []
        self.started: list[Started] = []
        self.second_foundings = 0
        self.places: dict[tuple[Round, int], str] = {}
        self.lease: tuple[int, str, float] = (0, "", 0.0)
        self.lease_round: Round | None = None
        self.lease_reach: set[int] = set(range(self.hosts))
        #: Called when something is proposed, started or abandoned, and when a term begins.
        self.at_turn: Callable[[], None] = lambda: None
        self.delays = pick.choice(((0.001, 0.01, 0.3), (0.001, 0.1, 2.0), (0.001, 0.002, 0.003)))
        for host in range(self.hosts):
            self.after(pick.uniform(0.0, 3.0), self.boot, host)

    # --- time --------------------------------------------------------------------------------------------------------
    def after(self, seconds: float, act: Callable[..., None], *arguments: object) -> None:
        self.serial += 1
        heapq.heappush(self.events, (self.now + seconds, self.serial, act, arguments))

    def run_until(self, end: float) -> None:
        while self.events and self.events[0][0] <= end:
            self.now, _, act, arguments = heapq.heappop(self.events)
            act(*arguments)
        self.now = end

    def say(self, *words: object) -> None:
        self.log.append((round(self.now, 2), *words))

    def wake(self, agent: Agent, act: Callable[[], None]) -> None:
        """Act when an agent runs: a frozen one acts later, a dead one never."""
        if not agent.is_alive:
            return
        if agent.acts:
            act()
        else:
            self.after(agent.frozen_until - self.now + 0.001, self.wake, agent, act)

    def set_timer(self, agent: Agent) -> None:
        assert agent.coordination is not None
        at = coordinating.next_at(agent.coordination, agent.clock)
        if at is not None:
            self.after(max(0.001, (at - agent.clock) / agent.rate + 0.001), self.ring, agent, agent.coordination)

    def ring(self, agent: Agent, since: Coordination) -> None:
        self.wake(agent, lambda: agent.coordinate([]) if agent.coordination is since else None)

    # --- hosts and the network ---------------------------------------------------------------------------------------
    def boot(self, host: int) -> None:
        if self.find(host) is not None or not self.powered[host]:
            return
        self.count += 1
        name = f"h{host}_{self.count:08d}"
        agent = self.agents[name] = Agent(self, host, name, self.config)
        self.say("boot", name)
        self.after(self.random.uniform(0.0, 0.1), self.search, agent)

    def find(self, host: int) -> Agent | None:
        return next((one for one in self.agents.values() if one.host == host and one.is_alive), None)

    def reaches(self, one: int, other: int) -> bool:
        return frozenset((one, other)) not in self.cut and self.powered[one] and self.powered[other]

    def post(self, link: Link, way: str, document: NodeState | Order) -> None:
        """Write a document; it is sent a little later, unless a newer one takes its place."""
        is_due = way not in link.waiting
        link.waiting[way] = document
        if is_due:
            self.after(self.random.choice((0.0, 0.001, 0.05)), self.flush, link, way)

    def flush(self, link: Link, way: str) -> None:
        document = link.waiting.pop(way, None)
        if document is None or not link.is_open:
            return
        link.wire[way].append(document)
        link.unanswered.setdefault(way, self.now)
        self.after(self.random.choice(self.delays), self.deliver, link, way)

    def deliver(self, link: Link, way: str) -> None:
        if not link.is_open or not link.wire[way]:
            return
        reader = link.host if way == "up" else link.node
        if not self.reaches(link.node.host, link.host.host):
            return  # `heal` delivers it, or the lease ends
        if not reader.acts:
            if reader.is_alive:
                self.after(reader.frozen_until - self.now + 0.001, self.deliver, link, way)
            return
        documents, link.wire[way] = link.wire[way], []
        link.unanswered.pop(way, None)
        for document in documents:
            if isinstance(document, NodeState):
                reader.coordinate([Said(document)])
            else:
                reader.feed(OrderRead(document))

    def close(self, link: Link, at_node: str, at_host: str) -> None:
        """End a connection.

        Args:
            link: The connection.
            at_node: `dead` if the node learns that the coordinator's process has ended; "" for any other end.
            at_host: How the coordinator sees it, or "" if it does not.
        """
        if not link.is_open:
            return
        link.is_open = False
        node, host = link.node, link.host
        if host.links.get(node.name) is link:
            del host.links[node.name]
            if at_host:
                self.wake(host, lambda: host.coordinate([Closed(node.name, at_host)]))
        if node.link is link:
            node.link = None
            node.lost_at = self.now
            if at_node == "dead":
                node.dead = host.name
            if node.is_alive and node.verdict is None:
                self.after(self.random.uniform(0.01, RETRY), self.search, node)

    def watch_links(self) -> None:
        """End connections on which a side has had no answer for a lease, as the kernel or the agent's loop does."""
        for agent in list(self.agents.values()):
            link = agent.link
            if link is None or not link.is_open:
                continue
            is_cut = not self.reaches(link.node.host, link.host.host)
            link.cut_since = (link.cut_since or self.now) if is_cut else None
            if not is_cut and link.buried is not None:
                self._end_buried(link)
                continue
            if link.cut_since is not None and self.now - link.cut_since > LEASE_SECONDS:
                self.close(link, "", SILENT)
                continue
            for way, since in list(link.unanswered.items()):
                if self.now - since > LEASE_SECONDS and not is_cut:
                    self.close(link, "", SILENT if way == "down" else BROKEN)

    # --- looking for a coordinator -----------------------------------------------------------------------------------
    def search(self, agent: Agent) -> None:
        self.wake(agent, lambda: self._search(agent))

    def _search(self, agent: Agent) -> None:
        if agent.link is not None or agent.verdict is not None or not agent.is_alive:
            return
        if self.choice == LEASE:
            self._search_lease(agent)
        else:
            self._search_endpoints(agent)
        if agent.link is None:
            self.after(RETRY * self.random.uniform(0.5, 1.5), self.search, agent)

    def _search_endpoints(self, agent: Agent) -> None:
        index = agent.cursor % self.endpoints
        agent.cursor += 1
        if index == agent.endpoint:
            if agent.coordination is None:
                self.begin(agent, agent.member.promise.term + 1)
            self.connect(agent, agent)
            return
        host = self.find(index)
        if host is None or not self.reaches(agent.host, index) or not host.acts:
            return
        if host.coordination is not None and host.link is not None and host.link.host is host:
            self.connect(agent, host)
        elif host.link is not None and host.link.host is not host:
            target = host.link.host
            if target.acts and self.reaches(agent.host, target.host) and target.coordination is not None:
                self.connect(agent, target)

    def _search_lease(self, agent: Agent) -> None:
        if agent.host not in self.lease_reach:
            return
        term, holder, until = self.lease
        if self.now >= until:
            self.lease = (term + 1, agent.name, self.now + LEASE_SECONDS)
            self.begin(agent, term + 1)
            self.connect(agent, agent)
            for name in [] if self.lease_round is None else list(self.agents):
                other = self.agents[name]  # it dials the members of the last round, so that they leave the one before
                if other is not agent and other.acts and self.reaches(agent.host, other.host):
                    other.hang_up()
            return
        host = self.agents[holder]
        if host.acts and host.coordination is not None and self.reaches(agent.host, host.host):
            self.connect(agent, host)

    def renew_leases(self) -> None:
        """Each coordinator that reaches the store renews its lease, or learns that it has lost it."""
        for agent in [one for one in self.agents.values() if one.coordination is not None and one.acts]:
            term, holder, until = self.lease
            if self.choice != LEASE or agent.host not in self.lease_reach:
                continue
            if holder == agent.name and self.now < until:
                self.lease = (term, holder, self.now + LEASE_SECONDS)
                self.lease_round = (agent.coordination and agent.coordination.round) or self.lease_round
            else:
                agent.stop_coordinating()

    def begin(self, agent: Agent, term: int) -> None:
        self.say("candidate", agent.name, term)
        known = () if self.choice != LEASE or self.lease_round is None else (self.lease_round,)
        agent.coordination = coordinating.begin(
            Promise(term, agent.name), self.choice, agent.clock, dead=agent.dead, started_by=(*known, *agent.started_by)
        )
        if self.choice == MAJORITY:
            self.after(0.1, self.look_around, agent, self.now)

    def look_around(self, agent: Agent, since: float) -> None:
        """A candidate asks the other endpoints: it leaves for one before its own, and learns whether it may found."""
        if not agent.is_alive or agent.coordination is None:
            return
        if agent.acts and agent.coordination.round is None:
            others = [(index, self.find(index)) for index in range(self.endpoints) if index != agent.endpoint]
            assert agent.endpoint is not None
            for index, other in others:
                if other is None or other.coordination is None or not other.acts:
                    continue
                if not self.reaches(agent.host, index):
                    continue
                if index < agent.endpoint or other.coordination.round is not None:
                    agent.stop_coordinating()
                    return
            is_known = all(self.reaches(agent.host, index) for index, _ in others)
            if (is_known and agent.endpoint == 0) or self.now - since > 2 * LEASE_SECONDS:
                agent.coordinate([MayFound()])
        self.after(1.0, self.look_around, agent, since)

    def connect(self, node: Agent, host: Agent) -> None:
        link = node.link = host.links[node.name] = Link(node, host)
        node.lost_at = None
        del link
        node.say()

    # --- training ----------------------------------------------------------------------------------------------------
    def train(self, agent: Agent, started: Round) -> None:
        pick = self.random
        if pick.random() < 0.2:
            self.after(pick.uniform(0.1, 20.0), self.fail, agent, started)
        elif pick.random() < 0.02:
            self.after(pick.uniform(1.0, 60.0), agent.stop_workers, started, DONE)

    def fail(self, agent: Agent, started: Round) -> None:
        if agent.is_alive and agent.runs == started:
            self.wake(agent, lambda: agent.feed(WorkersFailing(started.number)))
            self.after(0.05, agent.stop_workers, started, FAILED)

    def fence(self) -> None:
        """A node that is cut off for long stops its workers, if its user wants that."""
        for agent in self.agents.values():
            is_cut_off = agent.lost_at is not None and self.now - agent.lost_at > LEASE_SECONDS
            if agent.acts and is_cut_off and agent.is_fenced and agent.member.phase == RUNS:
                agent.feed(CutOff(LEASE_SECONDS))

    # --- faults ------------------------------------------------------------------------------------------------------
    def die(self, agent: Agent, *, has_power: bool) -> None:
        if not agent.is_alive:
            return
        self.say("kill" if has_power else "power", agent.name)
        agent.had_power = has_power
        agent.is_alive = False
        if not has_power:
            self.powered[agent.host] = False
            agent.runs = None
            for link in [one for one in (agent.link, *agent.links.values()) if one is not None]:
                link.buried = agent
            return  # no other host is told; `watch_links` finds it
        self.after(self.random.uniform(0.0, GUARDIAN), self._bury, agent)

    def _bury(self, agent: Agent) -> None:
        """The guardian has ended the workers, and closes the connections."""
        agent.runs = None
        for link in [one for one in (agent.link, *agent.links.values()) if one is not None and one.is_open]:
            link.buried = agent
            if link.node is link.host:
                link.is_open = False
            elif self.reaches(link.node.host, link.host.host):
                self._end_buried(link)

    def _end_buried(self, link: Link) -> None:
        """The other side hears of the end: from the guardian, or from a machine that has started again."""
        had_power = link.buried is not None and link.buried.had_power
        if link.buried is link.node:
            self.close(link, "", ENDED if had_power else BROKEN)
        else:
            self.close(link, "dead" if had_power else "", "")

    # --- what must hold ----------------------------------------------------------------------------------------------
    def note_start(self, agent: Agent, coordination: Coordination) -> None:
        started = coordination.round
        assert started is not None
        assert agent.considered is not None
        considered, base, possible = agent.considered
        assert considered == started
        members = tuple(sorted(coordination.assignments))
        self.say("START", agent.name, started.round_id, members, "after", base and base.round_id)
        last = next((one for one in reversed(self.started) if one.round.root == started.root), None)
        if last is None and self.started:
            self.second_foundings += 1
        if self.choice == MAJORITY and last is not None and last.round != base and last.round not in possible:
            message = f"fork: {started.round_id} {members} does not know {last.round.round_id} {last.members}"
            raise BrokenPropertyError(message)
        if last is not None and started.restart_count < last.round.restart_count and last.round == base:
            message = f"budget: {started.round_id} has {started.restart_count} restarts, {last.round} more"
            raise BrokenPropertyError(message)
        if started.restart_count > self.config.max_restarts:
            message = f"budget: {started.restart_count} restarts, {self.config.max_restarts} are allowed"
            raise BrokenPropertyError(message)
        self.started.append(Started(started, members, base, possible, self.now))

    def check_start(self, agent: Agent, started: Round, assignment: object) -> None:
        if agent.runs is not None:
            message = f"two rounds: {agent.name} starts {started.round_id} beside {agent.runs.round_id}"
            raise BrokenPropertyError(message)
        if started in agent.ran:
            message = f"twice: {agent.name} starts {started.round_id} again"
            raise BrokenPropertyError(message)
        rank = getattr(assignment, "group_rank", -1)
        if self.places.setdefault((started, rank), agent.name) != agent.name:
            message = f"ranks: {agent.name} and {self.places[started, rank]} are both {rank} of {started.round_id}"
            raise BrokenPropertyError(message)

    def is_settled(self) -> bool:
        """Whether a round runs on all its members, or the job has ended for all that live."""
        living = [one for one in self.agents.values() if one.is_alive]
        if living and all(one.verdict is not None for one in living):
            return True
        for agent in living:
            coordination = agent.coordination
            if coordination is None or coordination.round is None or coordination.job.phase != RUNNING:
                continue
            members = [one for one in living if one.runs == coordination.round or one.has_done(coordination.round)]
            if len(members) == coordination.round.size and not coordination.job.has_lost:
                return True
        return False

    def can_form(self) -> bool:
        """Whether the nodes that live could form a round by the rules, if all of them met."""
        living = [one for one in self.agents.values() if one.is_alive and one.verdict is None]
        if len(living) < self.config.min_nodes or not any(one.endpoint is not None for one in living):
            return False
        if any(one.verdict is not None for one in self.agents.values()):
            return False  # the job has ended, for some; nobody can tell the others
        if self.choice != MAJORITY:
            return True
        states = [membership.make_state(one.member, 0.0, is_first=False) for one in living]
        sure = [one.started for one in states if one.started is not None]
        sure += [proposal.parent for one in states for proposal in one.accepted if proposal.parent is not None]
        base = max(sure, key=lambda one: one.order, default=None)
        later = {
            proposal.round
            for one in states
            for proposal in one.accepted
            if base is None or proposal.round.order > base.order
        }
        needed = [*([] if base is None else [base]), *later]
        return all(2 * sum(state.has_seat(one) for state in states) > one.size for one in needed)


def phase_of(agent: Agent) -> str:
    """Return the phase of the job that an agent coordinates, for messages."""
    return "-" if agent.coordination is None else agent.coordination.job.phase


__all__ = ["IDLE", "JOB_ENDED", "Agent", "BrokenPropertyError", "World", "phase_of"]
