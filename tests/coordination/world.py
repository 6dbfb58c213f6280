"""A simulated job: hosts, the network between them, the store of the lease, and a virtual clock.

Every choice comes from the seed, so a seed is a job that can be repeated. `agent` holds what runs on a host.

A connection has two ends, and each end learns in its own time that the other one is gone: at once from a guardian or a
reset if the network lets it pass, else after the lease. A cut works in one direction or in both; what is under way
arrives when the cut heals before either end gives up.
"""

# ruff: noqa: D102 - what a method of the simulation does, its name says
from __future__ import annotations

import heapq
import random
from typing import TYPE_CHECKING

from elastic_run.core.config import JobConfig
from elastic_run.core.job import coordination as coordinating
from elastic_run.core.job import coordinator_search as discovering
from elastic_run.core.job.coordinator_search import LEASE_STORE, REFUSES, Answer
from elastic_run.core.job.documents import RUNS, NodeState, Order, Round
from elastic_run.core.job.founding import LEASE, MAJORITY, ONLY_ONE
from elastic_run.core.job.membership import CutOff, OrderRead
from elastic_run.core.job.state import BROKEN, ENDED, SILENT, Closed, Job, Said
from elastic_run.records import replace
from tests.coordination.agent import Agent
from tests.coordination.lease_store import TIME_TO_LIVE, LeaseStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.coordination.properties import Started

#: Seconds until the guardian of a killed agent has ended the workers.
GUARDIAN = 2.0
#: Seconds until a question that nobody answers is given up.
PATIENCE = 2.0


class Link:
    """A connection of a node to a coordinator: the newest document of each side, and what is on the way."""

    def __init__(self, node: Agent, host: Agent) -> None:
        self.node = node
        self.host = host
        self.is_open_at_node = True
        self.is_open_at_host = True
        #: Documents that are written but not sent yet: only the newest of a side counts.
        self.waiting: dict[str, NodeState | Order] = {}
        self.sent: dict[str, object] = {}
        #: Documents on the way, in order.
        self.wire: dict[str, list[NodeState | Order]] = {"up": [], "down": []}
        #: Since when a side waits for the answer of the other side's loop.
        self.unanswered: dict[str, float] = {}
        self.cut_since: float | None = None


class World:
    """All of a simulated job.

    Args:
        seed: Where every choice comes from.
        choice: How a coordinator is chosen, a word of `founding`; None for one by the seed.
    """

    def __init__(self, seed: int, choice: str | None = None) -> None:
        self.random = random.Random(seed)  # noqa: S311 - to be repeated
        pick = self.random
        self.choice = choice or pick.choice((MAJORITY, MAJORITY, LEASE, ONLY_ONE))
        self.hosts = pick.choice((2, 3, 3, 4, 5, 6))
        self.endpoints = pick.randint(2, min(3, self.hosts)) if self.choice == MAJORITY else 1
        self.addresses = (LEASE_STORE,) if self.choice == LEASE else tuple(f"e{i}" for i in range(self.endpoints))
        largest = max(1, self.hosts + pick.choice((-2, -1, 0, 0, 0, 1, 1)))
        self.config = JobConfig(
            min_nodes=pick.randint(1, min(largest, self.hosts)),
            max_nodes=largest,
            max_restarts=pick.choice((0, 2, 50, 50, 50)),
            max_backoff=0.0,
            join_timeout=3000.0,
            last_call_timeout=pick.choice((0.0, 5.0)),
            scale_up_delay=pick.choice((0.0, 2.0)),
            scale_up_grace=pick.choice((0.0, 3.0)),
            membership_window=None,
            has_successors=self.choice != ONLY_ONE,
        )
        self.now = 0.0
        self.count = 0
        self.events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self.serial = 0
        self.agents: dict[str, Agent] = {}
        self.living: dict[int, Agent] = {}
        self.powered = dict.fromkeys(range(self.hosts), True)
        #: From whom nothing arrives at whom.
        self.cut: set[tuple[int, int]] = set()
        self.links: list[Link] = []
        self.log: list[tuple[object, ...]] = []
        self.started: list[Started] = []
        self.second_foundings = 0
        self.seats: dict[tuple[Round, int], str] = {}
        self.lease = LeaseStore(self)
        #: When a way was disturbed the last time, and which are disturbed now.
        self.disturbed: dict[tuple[object, ...], float] = {}
        #: Called when a round is proposed or started.
        self.at_turn: Callable[[Agent], None] = lambda _: None
        self.delays = pick.choice(((0.001, 0.01, 0.3), (0.001, 0.1, 2.0), (0.001, 0.002, 0.003)))
        for host in range(self.hosts):
            self.after(pick.uniform(0.0, 3.0), self.boot, host)
        self.after(1.0, self.tick)

    # --- time --------------------------------------------------------------------------------------------------------
    def after(self, seconds: float, act: Callable[..., None], *arguments: object) -> None:
        self.serial += 1
        heapq.heappush(self.events, (self.now + seconds, self.serial, act, arguments))

    def run_until(self, end: float) -> None:
        events = self.events
        while events[0][0] <= end:
            self.now, _, act, arguments = heapq.heappop(events)
            act(*arguments)
        self.now = end

    def tick(self) -> None:
        self.watch_links()
        self.fence()
        self.after(0.5, self.tick)

    def say(self, *words: object) -> None:
        self.log.append((round(self.now, 2), *words))

    def wake(self, agent: Agent, act: Callable[[], None]) -> None:
        """Act when an agent runs: a frozen one acts later, a dead one never."""
        if not agent.is_alive:
            return
        if self.now >= agent.frozen_until:
            act()
        else:
            self.after(agent.frozen_until - self.now + 0.001, self.wake, agent, act)

    def set_timer(self, agent: Agent) -> None:
        assert agent.coordination is not None
        at = coordinating.next_at(agent.coordination, agent.clock)
        if at is not None:
            self.after(max(0.001, (at - agent.clock) / agent.rate + 0.001), self.ring, agent, agent.coordination)

    def ring(self, agent: Agent, since: Job) -> None:
        self.wake(agent, lambda: agent.coordinate([]) if agent.coordination is since else None)

    # --- hosts -------------------------------------------------------------------------------------------------------
    def boot(self, host: int) -> None:
        if host in self.living or not self.powered[host]:
            return
        self.count += 1
        name = f"h{host}_{self.count:08d}"
        agent = self.agents[name] = self.living[host] = Agent(self, host, name, self.config)
        self.say("boot", name)
        self.after(self.random.uniform(0.0, 0.1), self.wake, agent, agent.discover)

    def find(self, address: str) -> Agent | None:
        """Return the agent that listens at an address."""
        if self.choice == LEASE:
            return self.agents[address] if self.agents[address].is_alive else None
        return self.living.get(int(address[1:]))

    def host_of(self, address: str) -> int:
        return self.agents[address].host if self.choice == LEASE else int(address[1:])

    def die(self, agent: Agent, *, has_power: bool) -> None:
        if not agent.is_alive:
            return
        self.say("kill" if has_power else "power", agent.name)
        agent.had_power = has_power
        agent.is_alive = False
        del self.living[agent.host]
        if has_power:
            self.after(self.random.choice((0.0, 0.1, GUARDIAN)) * self.random.random(), self.bury, agent)
        else:
            self.powered[agent.host] = False
            self.disturbed["stands", agent.name] = self.now
            self.bury(agent)

    def bury(self, agent: Agent) -> None:
        """The guardian has ended the workers, and closes the connections; or a machine lost its power."""
        agent.runs = None
        for link in self.links:
            if link.node is agent:
                link.is_open_at_node = False
            if link.host is agent:
                link.is_open_at_host = False
        if agent.had_power:
            self.watch_links()

    def freeze(self, agent: Agent, seconds: float) -> None:
        self.say("freeze", agent.name, seconds)
        agent.frozen_until = self.now + seconds
        self.disturbed["stands", agent.name] = agent.frozen_until

    # --- the network -------------------------------------------------------------------------------------------------
    def reaches(self, one: int, other: int) -> bool:
        """Whether what the one host sends arrives at the other."""
        return (one, other) not in self.cut and self.powered[one] and self.powered[other]

    def meet(self, one: int, other: int) -> bool:
        """Whether both reach each other."""
        return self.reaches(one, other) and self.reaches(other, one)

    @staticmethod
    def way(one: int, other: int) -> tuple[object, ...]:
        return ("way", min(one, other), max(one, other))

    def add_cut(self, one: int, other: int) -> None:
        self.cut.add((one, other))
        self.disturbed[self.way(one, other)] = float("inf")

    def heal(self, pairs: set[tuple[int, int]] | None = None) -> None:
        healed = self.cut if pairs is None else pairs & self.cut
        self.cut = self.cut - healed
        for one, other in healed:
            if (other, one) not in self.cut:
                self.disturbed[self.way(one, other)] = self.now
        for link in self.links:
            for way in ("up", "down"):
                if link.wire[way]:
                    self.after(0.01, self.deliver, link, way)

    def reach_store(self, hosts: set[int]) -> None:
        for host in range(self.hosts):
            if host not in hosts:
                self.disturbed["store", host] = float("inf")
            elif host not in self.lease.reach:
                self.disturbed["store", host] = self.now
        self.lease.reach = hosts

    def was_well(self, way: tuple[object, ...], since: float) -> bool:
        """Whether nothing has disturbed a way since then."""
        return self.disturbed.get(way, -1.0) < since

    # --- connections -------------------------------------------------------------------------------------------------
    def connect(self, node: Agent, address: str) -> None:
        host = self.find(address)
        before = node.link
        if before is not None:
            before.is_open_at_node = False  # the other end reads of it later
        if host is None or not self.meet(node.host, host.host):
            self.after(self.random.choice((0.01, 1.0)), node.lose_coordinator, BROKEN)
            node.link = None
            return
        node.link = Link(node, host)
        self.links.append(node.link)
        node.lost_at = None
        node.say()

    def post(self, link: Link, way: str, document: NodeState | Order) -> None:
        """Write a document; it is sent a little later, unless a newer one takes its place."""
        is_due = way not in link.waiting
        link.waiting[way] = document
        if is_due:
            self.after(self.random.choice((0.0, 0.001, 0.05)), self.flush, link, way)

    def flush(self, link: Link, way: str) -> None:
        document = link.waiting.pop(way, None)
        sender = link.node if way == "up" else link.host
        if document is not None and sender.is_alive and (link.is_open_at_node if way == "up" else link.is_open_at_host):
            link.wire[way].append(document)
            link.unanswered.setdefault(way, self.now)
            self.after(self.random.choice(self.delays), self.deliver, link, way)

    def read_at_once(self, link: Link) -> None:
        """Let a coordinator read the state of its own node, before it answers anybody."""
        state = link.waiting.pop("up")
        assert isinstance(state, NodeState)
        self._read_state(link, state)

    def deliver(self, link: Link, way: str) -> None:
        reader, writer = (link.host, link.node) if way == "up" else (link.node, link.host)
        if not link.wire[way] or not self.reaches(writer.host, reader.host):
            return  # `heal` delivers it, or the lease ends
        if self.now < reader.frozen_until:
            self.after(reader.frozen_until - self.now + 0.001, self.deliver, link, way)
            return
        documents, link.wire[way] = link.wire[way], []
        link.unanswered.pop(way, None)
        for document in documents:
            if isinstance(document, Order):
                if link.is_open_at_node and reader.is_alive:
                    reader.feed(OrderRead(document))
            elif link.is_open_at_host and reader.is_alive:
                self._read_state(link, document)

    def _read_state(self, link: Link, state: NodeState) -> None:
        node, host = link.node, link.host
        if host.coordination is None:
            self.close_at_host(link, BROKEN)
            return
        before = host.links.get(node.name)
        host.links[node.name] = link
        is_told = before is not None and before is not link and self.random.random() < 0.5
        if before is not None and before is not link:
            before.is_open_at_host = False
        # A driver may tell of the older connection's end, or go on with the newer one.
        host.coordinate([Closed(node.name, BROKEN), Said(state)] if is_told else [Said(state)])

    def close_at_node(self, link: Link, how: str, to: str = "") -> None:
        """The node closes the connection, or sees that it is over."""
        if link.is_open_at_node:
            link.is_open_at_node = False
            if link.node.link is link:
                link.node.lose_coordinator(how, to)

    def close_at_host(self, link: Link, how: str) -> None:
        """The coordinator closes the connection, or sees that it is over."""
        if link.is_open_at_host:
            link.is_open_at_host = False
            self.wake(link.host, lambda: self._tell_closed(link, how))

    def _tell_closed(self, link: Link, how: str) -> None:
        host, name = link.host, link.node.name
        if host.links.get(name) is link:
            del host.links[name]
            host.coordinate([Closed(name, how)])

    def watch_links(self) -> None:
        """Tell each end of a connection what has become of the other one, as the kernel does."""
        for link in self.links:
            is_cut = not self.meet(link.node.host, link.host.host)
            link.cut_since = (self.now if link.cut_since is None else link.cut_since) if is_cut else None
            patience = TIME_TO_LIVE * self.random.uniform(0.9, 1.2)
            if is_cut:
                is_silent = self.now - (link.cut_since or 0.0) > patience
                if is_silent and self.random.random() < 0.7:
                    self.close_at_node(link, SILENT)
                if is_silent and self.random.random() < 0.7:
                    self.close_at_host(link, SILENT)
            else:
                self._watch_ends(link)
                if link.node is not link.host:  # an agent is a node of its own coordination without the network
                    self._watch_answers(link, patience)
        self.links = [one for one in self.links if one.is_open_at_node or one.is_open_at_host]

    def _watch_ends(self, link: Link) -> None:
        node, host = link.node, link.host
        if not link.is_open_at_host:
            # A living coordinator that closes in order looks like a guardian: its port has to refuse as well.
            has_ended = host.had_power and (not host.is_alive or self.random.random() < 0.3)
            self.close_at_node(link, ENDED if has_ended else BROKEN)
        if not link.is_open_at_node:
            # What a living agent has closed was reset, and no guardian holds it.
            is_proof = not node.is_alive and node.had_power and node.link is link
            self.close_at_host(link, ENDED if is_proof else BROKEN)

    def _watch_answers(self, link: Link, patience: float) -> None:
        for way, since in list(link.unanswered.items()):
            if self.now - since > patience:
                del link.unanswered[way]
                if way == "down":
                    self.close_at_host(link, SILENT)
                else:
                    self.close_at_node(link, SILENT)

    # --- questions ---------------------------------------------------------------------------------------------------
    def ask(self, agent: Agent, address: str) -> None:
        self.after(self.random.choice((0.001, 0.005, 0.05)), self._answer, agent, address)

    def _answer(self, agent: Agent, address: str) -> None:
        other, host = self.find(address), self.host_of(address)
        delay = self.random.choice((0.001, 0.005, 0.2))
        if not self.meet(agent.host, host) or (other is not None and not other.acts):
            answer, delay = Answer(address, SILENT), PATIENCE
        elif other is None:
            answer = Answer(address, REFUSES)
        else:
            answer = replace(discovering.make_answer(other.discovery, other.standing), endpoint=address)
        self.after(delay, self.wake, agent, lambda: agent.discover(answer))

    # --- workers -----------------------------------------------------------------------------------------------------
    def fence(self) -> None:
        """A node that is cut off for long stops its workers, if its user wants that."""
        for agent in self.living.values():
            is_cut_off = agent.lost_at is not None and self.now - agent.lost_at > TIME_TO_LIVE
            if is_cut_off and agent.is_fenced and agent.acts and agent.member.phase == RUNS:
                agent.feed(CutOff(TIME_TO_LIVE))


def phase_of(agent: Agent) -> str:
    """Return the phase of the job that an agent coordinates, for messages."""
    return "-" if agent.coordination is None else agent.coordination.phase
