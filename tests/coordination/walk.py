"""A job without a clock: its messages arrive, and its faults come, in an order drawn at random.

Where seats decide, no delay may make two rounds go on beside each other. So this search needs no time, and no search
for a coordinator: nodes meet at a coordinator and exchange documents for a while, then others meet elsewhere. Documents
that are on the way between are late or lost. Most forks need that nodes go just when a round is proposed or started, so
many meetings end there. Each job draws which kinds of other faults it has, and how often. Most of its histories are
those that a rule is for. What depends on time is searched in `world` alone: who coordinates, founding, leases, and
whether a job forms again.
"""

# ruff: noqa: D102 - what a method of the walk does, its name says
from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_run.core.config import JobConfig
from elastic_run.core.job import coordination as coordinating
from elastic_run.core.job.documents import RUNS
from elastic_run.core.job.founding import MAJORITY
from elastic_run.core.job.membership import Connected, Leaving
from elastic_run.core.job.state import BROKEN, SILENT, MayFound, StepDown
from elastic_run.records import replace
from tests.coordination.agent import Agent
from tests.coordination.world import Link, World

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.core.job.coordinator_search import Fact
    from elastic_run.core.job.documents import NodeState, Order
    from elastic_run.core.job.state import Event, Job

#: Exchanges in which the first round has to form; meetings after it, and the most exchanges of each.
_CALM = 40
_MEETINGS = 40
_LONGEST = 14
#: How often a meeting ends when a round is proposed or started.
_DANGER = 0.6
#: Agents that a job has, one after another.
_MOST_AGENTS = 12


class Walker(Agent):
    """An agent that goes where the walk leads it, and decides about many documents at a time."""

    world: Walk

    def __init__(self, world: Walk, host: int, name: str, config: JobConfig) -> None:
        super().__init__(world, host, name, config)
        self.read: list[Event] = []

    @property
    def is_able(self) -> bool:
        return self.is_alive and bool(self.discovery.own) and not self.member.leaving

    def discover(self, fact: Fact = None) -> None:
        """Do nothing."""

    def coordinate(self, events: list[Event]) -> None:
        self.read += events

    def decide(self, *events: Event) -> None:
        read, self.read = [*self.read, *events], []
        super().coordinate(read)

    def begin(self, dead: str = "", silent: str = "") -> None:
        super().begin(dead or self.discovery.dead, silent)
        self.decide()

    def lose_coordinator(self, _how: str, _to: str = "") -> None:
        host = None if self.link is None else self.link.host
        if host is not None and not host.is_alive and host.had_power and self.world.random.random() < 0.8:
            self.discovery = replace(self.discovery, dead=host.name)  # its port refuses
        self.link = None


class Walk(World):
    """One job; every choice comes from the seed."""

    living: dict[int, Walker]  # type: ignore[assignment] # all are of this class

    def __init__(self, seed: int) -> None:
        self.pending: list[tuple[Callable[..., None], tuple[object, ...]]] = []
        super().__init__(seed, MAJORITY)
        pick = self.random
        self.hosts = pick.choice((3, 4, 4, 4, 5))
        self.endpoints = pick.choice((2, 3, 3, self.hosts))
        self.addresses = tuple(f"e{host}" for host in range(self.endpoints))
        self.config = JobConfig(
            min_nodes=pick.randint(1, 2),
            max_nodes=pick.choice((2, 3, 3, 3, self.hosts)),
            max_restarts=1000,
            max_backoff=0.0,
            join_timeout=1e9,
            last_call_timeout=0.0,
            scale_up_delay=0.0,
            scale_up_grace=0.0,
            membership_window=None,
            has_successors=True,
        )
        self.faults = (self._move, self._cut, self._step_down, self._fail, self._kill, self._leave, self._jump)
        self.weights = [pick.choice((0, 0, 1, 3)) for _ in self.faults]
        self.danger = pick.choice((0.0, 0.1, 0.3)) if any(self.weights) else 0.0
        #: How often a newer document takes the place of one that is not sent yet; how often an agent hears itself; how
        #: soon a coordinator goes to another one, beside a node.
        self.replaces = pick.choice((0.0, 0.5, 1.0))
        self.hears_itself = pick.choice((0.9, 0.9, 0.3))
        self.yields = pick.choice((0.1, 0.3))
        self.promises_at_once = pick.random() < 0.5

    def run(self) -> None:
        """Let the first round form, and then let nodes meet."""
        self.pending.clear()
        for host in self.random.sample(range(self.hosts), self.hosts):
            self.boot(host)
        first = next(one for one in self.living.values() if one.is_able)
        first.begin()
        first.decide(MayFound())
        for agent in self.living.values():
            if agent is not first:
                self.connect(agent, first.address)
        for _ in range(_CALM):
            if not self.started:
                self._exchange(first)
        for _ in range(_MEETINGS if self.started else 0):
            self._meet()

    def _meet(self) -> None:
        """Let some of the nodes come to a coordinator, and let them go on for a while."""
        pick = self.random
        able = [one for one in self.living.values() if one.is_able]
        if not able:
            return
        host, share = pick.choice(able), pick.choice((0.4, 0.7, 1.0))
        if host.coordination is None:
            host.begin()
        for agent in list(self.living.values()):
            is_there = agent is host or (agent.link is not None and agent.link.host is host)
            if not (is_there or agent.member.is_over) and pick.random() < share * (
                1.0 if agent.coordination is None else self.yields
            ):
                agent.decide(StepDown())
                self.connect(agent, host.address)
        for _ in range(pick.randint(1, _LONGEST)):
            before = host.coordination
            if before is None:
                return
            self._exchange(host, pick.choice((0.6, 1.0, 1.0)))
            if _is_turn(before, host.coordination) and pick.random() < _DANGER:
                if pick.random() < 0.5:
                    self._exchange(host, 0.4)
                return
            if pick.random() < self.danger:
                pick.choices(self.faults, self.weights)[0]()

    def _exchange(self, host: Walker, share: float = 1.0) -> None:
        """Let agents act, let a share of a coordinator's nodes exchange documents with it, and let it decide."""
        pick = self.random
        self._act()
        for link in [one for one in self.links if one.host is host]:
            likely = self.hears_itself if link.node is host else share
            if pick.random() < likely:
                self.deliver(link, "down")
            if pick.random() < likely:
                self.deliver(link, "up")
                self._watch_ends(link)  # a guardian's end comes after all that its agent has sent
        if host.read:
            host.decide()
        elif pick.random() < 0.8:
            self._pass_time(host)
            if self.started:
                self._fail()
        self.links = [one for one in self.links if one.is_open_at_node or one.is_open_at_host]

    def _act(self) -> None:
        """Let agents do what they have to: look for a coordinator, stop workers, go once they have said so."""
        pick = self.random
        pending, self.pending = self.pending, []
        for act, arguments in pending:
            if pick.random() < 0.7:
                act(*arguments)
            else:
                self.pending.append((act, arguments))
        for agent in list(self.living.values()):
            if agent.link is None:
                if not agent.member.is_over and pick.random() < 0.1:
                    self._find(agent)
            elif agent.member.leaving and not agent.link.wire["up"] and pick.random() < 0.05 and len(self.living) > 1:
                self.die(agent, has_power=True)
        if self.count < _MOST_AGENTS and len(self.living) < self.hosts and pick.random() < 0.1:
            self.boot(pick.randrange(self.hosts))

    # --- in the place of what has a clock ----------------------------------------------------------------------------
    def after(self, seconds: float, act: Callable[..., None], *arguments: object) -> None:
        if seconds < 60.0 and act != self.deliver:
            self.pending.append((act, arguments))

    def set_timer(self, agent: Agent) -> None:
        """Do nothing."""

    def watch_links(self) -> None:
        """Do nothing."""

    def boot(self, host: int) -> None:
        if host not in self.living:
            self.powered[host] = True
            self.count += 1
            name = f"h{host}_{self.count:08d}"
            self.agents[name] = self.living[host] = Walker(self, host, name, self.config)

    def connect(self, node: Agent, address: str) -> None:
        host = self.find(address)
        assert host is not None
        assert host.coordination is not None
        if node.link is not None:
            node.link.is_open_at_node = False
        node.link = Link(node, host)
        self.links.append(node.link)
        if self.promises_at_once:
            node.feed(Connected(host.coordination.promise))
        node.say()

    def post(self, link: Link, way: str, document: NodeState | Order) -> None:
        wire = link.wire[way]
        # The first state tells more than those after it.
        if len(wire) > (way == "up") and self.random.random() < self.replaces:
            wire.pop()
        wire.append(document)

    def read_at_once(self, link: Link) -> None:
        self.deliver(link, "up")

    # --- faults ------------------------------------------------------------------------------------------------------
    def _find(self, node: Walker) -> None:
        """Let a node find a coordinator, or become it."""
        others = [one for one in self.living.values() if one.coordination is not None and one is not node]
        if node.is_able and (not others or self.random.random() < 0.1):
            node.begin()
        elif others:
            self.connect(node, self.random.choice(others).address)

    def _choose(self) -> Walker:
        return self.random.choice(list(self.living.values()))

    def _move(self) -> None:
        node = self._choose()
        if node.coordination is None and not node.member.is_over:
            self._find(node)

    def _cut(self) -> None:
        """Let a coordinator give up a connection."""
        links = [one for one in self.links if one.is_open_at_host and one.node is not one.host]
        if links:
            self.close_at_host(self.random.choice(links), self.random.choice((BROKEN, SILENT)))

    def _step_down(self) -> None:
        self._choose().decide(StepDown())

    def _jump(self) -> None:
        self._pass_time(self._choose())

    def _pass_time(self, host: Walker) -> None:
        """Let a coordinator's clock go on to the time for which it waits."""
        at = None if host.coordination is None else coordinating.next_at(host.coordination, host.clock)
        if at is not None and at < self.config.join_timeout:
            host.offset += max(0.0, at - host.clock) + 0.001
            host.decide()

    def _fail(self) -> None:
        """Let workers fail."""
        # A node that has read the end of the job keeps its phase, and has no workers.
        busy = [one for one in self.living.values() if one.member.phase == RUNS and not one.member.is_over]
        if busy:
            node = self.random.choice(busy)
            assert node.runs is not None
            node.fail(node.runs)

    def _kill(self) -> None:
        """Kill an agent, whose guardian lives or not."""
        if len(self.living) > 2:
            self.die(self._choose(), has_power=self.random.random() < 0.6)

    def _leave(self) -> None:
        """Let a node say that it goes."""
        node = self._choose()
        if not node.member.leaving and node.link is not None:
            self.say("leave", node.name)
            node.feed(Leaving("signal"))


def _is_turn(before: Job, after: Job | None) -> bool:
    """Whether a round was just proposed or started."""
    return after is not None and (after.round != before.round or after.proposed not in (None, before.proposed))


def run_walk(seed: int, *, log: list[tuple[object, ...]] | None = None) -> tuple[str, Walk]:
    """Walk through one job.

    Raises:
        BrokenPropertyError: A property does not hold.
    """
    walk = Walk(seed)
    walk.log = walk.log if log is None else log
    walk.run()
    return "walked", walk
