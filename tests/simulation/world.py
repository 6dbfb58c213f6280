"""A whole job drawn from a seed: its rules, its nodes, its faults, and the run until every live node knows the end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any

from elastic_run.core.messages import DONE, FAILED, Rules
from elastic_run.core.rules import describe_difference
from tests.simulation.agent import Agent
from tests.simulation.clockwork import Clock, Clockwork
from tests.simulation.oracle import Oracle
from tests.simulation.store import SPOILT, Network, Store

if TYPE_CHECKING:
    from collections.abc import Callable

#: What the nodes of the job run.
SCRIPT = "train.py"
#: True seconds within which nodes start, and after which nothing goes wrong any more.
START = 4.0
#: True seconds after the last fault within which every job must have come to its end.
PATIENCE = 400.0
#: True seconds for which a host that was told to go still serves its store.
LAST_WORDS = 1.0
#: True seconds within which enough nodes come to a round.
CONVALESCENCE = 24.0


@dataclass(frozen=True, slots=True)
class Character:
    """What kind of a run it is.

    Args:
        faults: How many faults there are.
        failure: Probability that a round's worker fails on a node.
        work: Longest duration of a round's work in seconds.
        horizon: True seconds of the last fault.
    """

    faults: int
    failure: float
    work: float
    horizon: float


class World:
    """One run.

    Args:
        seed: Of everything that is drawn.
        trace: Takes a line for each thing that happens, or None.
    """

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.random = random = Random(seed)  # noqa: S311 - the same for the same seed, which is the point
        self.clockwork = Clockwork()
        self.trace = None if trace is None else lambda line: trace(f"{self.clockwork.now:9.3f} {line}")
        self.size = random.choice((1, 2, 2, 3, 3, 3, 4, 4, 5, 6)) if seed % 97 else 20
        self.rules = self._draw_rules()
        self.character = Character(
            faults=random.choice((0, 1, 2, 3, 5, 8)),
            failure=random.choice((0.0, 0.0, 0.1, 0.3)),
            work=random.choice((3.0, 12.0, 30.0)),
            horizon=random.uniform(8.0, 35.0),
        )
        network = Network(random.choice((0.002, 0.05, 0.4)), random.choice((0.0, 0.0, 0.0, 0.02)))
        self.stores = [Store(self.clockwork, random, network)]
        if self.rules.has_successors:
            self.stores.append(Store(self.clockwork, random, network))
            self.clockwork.at(random.uniform(START, self.character.horizon), self._lose_store)
        # Of its own, so that it is the same run where nobody serves the store.
        self.fate = Random(~seed)  # noqa: S311 - the same for the same seed
        self.has_host = self.rules.has_successors and self.fate.random() < 0.6
        self.host: Agent | None = None
        self.agents: list[Agent] = []
        self.oracle = Oracle(self)
        # Few, so that a coordinator that was stopped finds its next slot trimmed.
        self.kept_slots = self.fate.choice((3, 3, 8, 64))
        self._enough: list[tuple[float, bool]] = []
        self.fatal_operation = -1
        self.is_spoilt = False
        self.expected = 0
        self._plan()

    def _draw_rules(self) -> Rules:
        random = self.random
        low = random.randint(1, self.size)
        rules = Rules(
            min_nodes=low,
            max_nodes=random.randint(low, self.size + 1),
            max_restarts=random.choice((0, 1, 2, 5)),
            join_timeout=random.choice((30.0, 60.0)),
            last_call_timeout=random.choice((0.0, 2.0, 6.0)),
            scale_up_delay=random.choice((0.0, 1.0, 3.0)),
            scale_up_grace=random.choice((0.0, 2.0)),
            max_backoff=5.0,
        )
        if random.random() < 0.1:
            window = random.choice((None, 20.0))
            rules = replace(rules, membership_count=random.randint(0, 2), membership_seconds=window)
        if random.random() < 0.15:
            rules = replace(rules, has_successors=True, split=random.choice(("stop", "continue")))
        return rules

    # --- the plan ----------------------------------------------------------------------------------------------------
    def _plan(self) -> None:
        random, at = self.random, self.clockwork.at
        for index in range(self.size):
            at(random.random() * START, self._start, f"n{index}", None)
        faults = (
            self._kill,
            self._kill,
            self._kill_coordinator,
            self._kill_coordinator,
            self._stall,
            self._stall,
            self._stall_coordinator,
            self._leave,
            self._leave_coordinator,
            self._arrive,
            self._arrive,
            self._arrive_with_other_rules,
            self._arm,
            self._spoil,
        )
        for _ in range(self.character.faults):
            time = random.random() * self.character.horizon
            if random.random() < 0.15:
                self._plan_outage(time)
            else:
                at(time, random.choice(faults))
        at(START + 1.0, self._measure)

    def _plan_outage(self, time: float) -> None:
        self.stores[0].outages.append((time, time + self.random.choice((1.0, 5.0, 12.0)) * self.random.random()))

    def _start(self, host: str, rules: Rules | None, script: str = SCRIPT) -> None:
        if self.rules.has_successors and self.agents and not self.living:
            # The store may be gone with the job that has ended: whoever comes now begins another one.
            return
        clock = Clock(self.clockwork, self.random.uniform(0.0, 1e5), self.random.uniform(0.98, 1.02))
        preferred = self.random.randrange(self.size) if self.random.random() < 0.2 else None
        node = f"{host}.{len(self.agents)}"
        is_host = self.has_host and self.host is None
        agent = Agent(
            self,
            node,
            host,
            clock=clock,
            rules=rules or self.rules,
            preferred_rank=preferred,
            serves_store=is_host,
            store=self._find_store(),
            script=script,
        )
        self.host = agent if is_host else self.host
        self.agents.append(agent)
        self._measure()
        self._say(f"{agent.node} starts")

    def _find_store(self) -> Store:
        """Return where a node that starts looks for the job: others may have moved already, or be about to."""
        first, last = self.stores[0], self.stores[-1]
        return last if first.is_lost and self.fate.random() < 0.5 else first

    def _say(self, line: str) -> None:
        if self.trace is not None:
            self.trace(line)

    @property
    def living(self) -> list[Agent]:
        """The nodes that are neither dead nor told to go nor through."""
        return [agent for agent in self.agents if agent.is_alive and not agent.has_left and agent.end is None]

    @property
    def last_store(self) -> Store:
        """The store in which the job's log ends."""
        return next(store for store in reversed(self.stores) if store.slots or store is self.stores[0])

    def _measure(self) -> None:
        """Note whether the job has enough nodes to go on."""
        now, rules = self.clockwork.now, self.rules
        able = [agent for agent in self.living if agent.stalled_until <= now and self.is_ours(agent)]
        self._enough.append((now, len(able) >= rules.min_nodes))

    def is_ours(self, agent: Agent) -> bool:
        """Whether a node can be in a round with those that the job began with."""
        member = agent.member
        return member.card.script == SCRIPT and not describe_difference(self.rules, member.rules)

    def was_short(self, end: float) -> bool:
        """Whether there were too few nodes at some time shortly before another, or nobody could say so."""
        store = self.last_store
        if store.network.loss or store.outages:
            return True
        window = [is_enough for time, is_enough in self._enough if end - CONVALESCENCE < time <= end]
        before = [is_enough for time, is_enough in self._enough if time <= end - CONVALESCENCE]
        return not all([*before[-1:], *window]) or not before

    def _lose_store(self) -> None:
        """Let the store go for good, and with it the node in whose agent it lives, for a while at least."""
        self.stores[0].go_down()
        self._say("the store is gone")
        host = self.host
        if host not in self.living:
            return
        if self.fate.random() < 0.5:
            self.kill(host)
        else:
            self._stop(host, self.fate.uniform(1.0, 30.0))

    def _go_with(self, agent: Agent) -> None:
        """Let the store go with its host, where that goes for longer than nobody notices."""
        if agent is self.host and self.agents and not self.stores[0].is_lost:
            self.stores[0].go_down()
            self._say("the store is gone")

    def _pick(self) -> Agent | None:
        return self.random.choice(self.living) if self.living else None

    def _pick_coordinator(self) -> Agent | None:
        return next((agent for agent in self.living if agent.member.is_coordinator), None)

    def _kill(self) -> None:
        self.kill(self._pick())

    def _kill_coordinator(self) -> None:
        self.kill(self._pick_coordinator())

    def kill(self, agent: Agent | None) -> None:
        """Kill an agent; its guardian may report it, and somebody may start another on its host."""
        if agent is None:
            return
        self._say(f"{agent.node} is killed")
        agent.die(has_guardian=self.random.random() < 0.4)
        self._go_with(agent)
        self._measure()
        self._maybe_replace(agent)

    def _maybe_replace(self, agent: Agent) -> None:
        if self.random.random() < 0.6:
            time = self.clockwork.now + self.random.random() * 15.0
            self.expected += 1
            self.clockwork.at(time, self._replace, agent.node.partition(".")[0])

    def _replace(self, host: str) -> None:
        self.expected -= 1
        self._start(host, None)

    def _stall(self) -> None:
        self._stop(self._pick())

    def _stall_coordinator(self) -> None:
        self._stop(self._pick_coordinator())

    def _stop(self, agent: Agent | None, seconds: float | None = None) -> None:
        if agent is not None:
            seconds = self.random.choice((2.0, 8.0, 20.0)) * self.random.random() if seconds is None else seconds
            agent.stalled_until = agent.was_stalled_at = self.clockwork.now + seconds
            if seconds > self.rules.lease / 2:
                self._go_with(agent)
            self._say(f"{agent.node} is stopped until {agent.stalled_until:.3f}")
            self._measure()
            self.clockwork.at(agent.stalled_until, self._measure)

    def _leave(self) -> None:
        self._send_away(self._pick())

    def _leave_coordinator(self) -> None:
        self._send_away(self._pick_coordinator())

    def _send_away(self, agent: Agent | None) -> None:
        if agent is not None and agent.stalled_until <= self.clockwork.now:
            self._say(f"{agent.node} is told to go")
            agent.leave()
            self.clockwork.at(self.clockwork.now + LAST_WORDS, self._go_with, agent)
            self._measure()
            self._maybe_replace(agent)

    def _arrive(self) -> None:
        self._start(f"x{len(self.agents)}", None)

    def _arrive_with_other_rules(self) -> None:
        kind = self.fate.randrange(3)
        if kind == 0:
            # It is taken in, and goes by the job's times.
            self._start(f"z{len(self.agents)}", replace(self.rules, last_call_timeout=9.0, scale_up_delay=5.0))
        elif kind == 1:
            # A second job under the same id.
            for index in range(self.fate.randint(1, 2)):
                self._start(f"w{len(self.agents)}.{index}", None, "other.py")
        else:
            self._start(f"y{len(self.agents)}", replace(self.rules, max_restarts=self.rules.max_restarts + 1))

    def _arm(self) -> None:
        """Let whoever coordinates die at its next operation but so many."""
        self.fatal_operation = self.random.randrange(12)

    def _spoil(self) -> None:
        """Write garbage over the state of the job, and kill the only one who knows it."""
        store, self.is_spoilt = self.stores[0], True
        store.values.update({key: SPOILT for key in store.values if key.startswith("s/")})
        self._say("a stranger writes garbage over the state")
        self._kill_coordinator()

    def note_operation(self, agent: Agent) -> bool:
        """Count an operation of a coordinator; returns whether it dies before its request is sent."""
        if self.fatal_operation < 0:
            return False
        self.fatal_operation -= 1
        if self.fatal_operation >= 0:
            return False
        is_before = self.random.random() < 0.5
        if is_before:
            self.kill(agent)
        else:
            self.clockwork.at(self.clockwork.now, self.kill, agent)
        return is_before

    def is_tidy(self, slot: int) -> bool:
        """Whether the coordinator that created a slot lived long enough to clean up, with nothing lost on the way."""
        writer = next(node for number, node, _ in self.last_store.slots if number == slot)
        agent = next(agent for agent in self.agents if agent.node == writer)
        network = self.last_store
        return agent.is_alive and not network.network.loss and not network.outages

    # --- workers -----------------------------------------------------------------------------------------------------
    def draw_work(self, agent: Agent) -> tuple[float, str]:
        """Return how long a node's workers run, and how that ends."""
        is_calm = self.clockwork.now > self.character.horizon
        is_failing = not is_calm and self.random.random() < self.character.failure
        del agent
        return self.random.uniform(0.1, self.character.work), FAILED if is_failing else DONE

    def draw_report(self, agent: Agent) -> dict[str, Any]:
        """Return the report of a failed round."""
        return {
            "exit_code": self.random.randint(1, 3),
            "signature": [self.random.random()],
            "uptime": self.random.uniform(0.0, 30.0),
            "severity": self.random.randrange(3),
            "node": agent.node,
        }

    # --- the run -----------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Run until every live node knows the end, and let the oracle look at it.

        Raises:
            AssertionError: A promise was broken.
        """
        self.clockwork.run(max(self.character.horizon + 16.0, START))
        limit = self.clockwork.now + PATIENCE
        while (self.living or self.expected) and self.clockwork.now < limit:
            self.clockwork.run(self.clockwork.now + 2.0)
        # What is on its way still arrives: the last clean-up.
        self.clockwork.run(self.clockwork.now + 5.0)
        self.oracle.judge()
