"""A job drawn from a seed: its configuration, its nodes, its faults, and the run until every node knows the end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any

from elastic_run.core.failure.root_cause import BARE_END, LOST_RANK, OWN_EXCEPTION
from elastic_run.core.job.config import JobConfig, Window, describe_difference
from elastic_run.core.protocol.messages import DONE, FAILED
from tests.simulation.agent import Agent
from tests.simulation.clockwork import Clock, Clockwork
from tests.simulation.connection import Endpoint
from tests.simulation.faults import KNOWN_BAD, LATE_WRITES, MOVES, Faults
from tests.simulation.oracle import Oracle
from tests.simulation.store import Network, Store
from tests.support.configs import plain_config

if TYPE_CHECKING:
    from collections.abc import Callable

#: What the nodes of the job run.
SCRIPT = "train.py"
#: True seconds within which nodes start.
START = 4.0
#: True seconds after the last fault within which every job must have come to its end.
WAIT_LIMIT = 400.0
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
        known_bad: Kinds of faults that are left out.
        least_restores: How often faults restore the store from a snapshot, at least. Where it is above 0 the store does
            not move, so that it can be restored.
    """

    def __init__(
        self,
        seed: int,
        trace: Callable[[str], None] | None = None,
        *,
        known_bad: frozenset[str] = KNOWN_BAD,
        least_restores: int = 0,
    ) -> None:
        self.random = random = Random(seed)  # noqa: S311 - the same for the same seed, which is the point
        self.clockwork = Clockwork()
        self.trace = None if trace is None else lambda line: trace(f"{self.clockwork.now:9.3f} {line}")
        self.size = random.choice((1, 2, 2, 3, 3, 3, 4, 4, 5, 6)) if seed % 97 else 20
        self.config = self._draw_config(may_move=not least_restores)
        self.character = Character(
            faults=random.choice((0, 1, 2, 3, 5, 8)),
            failure=random.choice((0.0, 0.0, 0.1, 0.3)),
            work=random.choice((3.0, 12.0, 30.0)),
            horizon=random.uniform(8.0, 35.0),
        )
        # Few, so that a coordinator that was stopped finds its next slot trimmed.
        self.kept_slots = random.choice((3, 3, 8, 64))
        self.faults = Faults(self, known_bad, least_restores)
        self.network = self._draw_network()
        self.stores: list[Store] = []
        self.agents: list[Agent] = []
        self.oracle = Oracle(self)
        self.endpoints = self._draw_endpoints()
        self._enough: list[tuple[float, bool]] = []
        self.expected = 0
        for index in range(self.size):
            self.clockwork.at(random.random() * START, self.start, f"n{index}")
        self.faults.plan(self.character.faults, self.character.horizon)
        self.clockwork.at(START + 1.0, self.measure)

    def _draw_config(self, *, may_move: bool) -> JobConfig:
        random = self.random
        low = random.randint(1, self.size)
        config = plain_config(
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
            config = replace(config, membership_window=Window(random.randint(0, 2), window))
        if self.size > 1 and random.random() < 0.4 and may_move:
            config = replace(config, has_successors=True, on_split=random.choice(("stop", "continue")))
        return config

    def _draw_network(self) -> Network:
        random = self.random
        network = Network(random.choice((0.002, 0.05, 0.4)), random.choice((0.0, 0.0, 0.0, 0.02)))
        if self.faults.has(LATE_WRITES) and random.random() < 0.2:
            network.late, network.again = 0.5, random.choice((0.0, 0.02))
        return network

    def _draw_endpoints(self) -> list[Endpoint]:
        """Return a place that is always there, or one on each of several nodes."""
        if not self.config.has_successors:
            store = self._make_store()
            return [Endpoint("", store)]
        most = min(self.size, 4 if self.faults.has(MOVES) else 2)
        return [Endpoint(f"n{index}") for index in range(self.random.randint(2, most))]

    def _make_store(self, server: Agent | None = None) -> Store:
        birth = f"store {len(self.stores)}"
        oracle = self.oracle
        store = Store(
            self.clockwork,
            self.random,
            self.network,
            note_slot=oracle.note_slot,
            note_delete=oracle.note_delete,
            birth=birth,
            server=server,
        )
        store.expires_heartbeats = server is None and self.random.random() < 0.5
        self.stores.append(store)
        return store

    def serve(self, endpoint: Endpoint, server: Agent) -> None:
        """Let a node serve a store, which is empty, at an endpoint."""
        endpoint.store = self._make_store(server)
        self.say(f"{server.node} serves a store")

    def take_snapshot(self) -> Store:
        """Copy the store."""
        snapshot = self.stores[-1].copy()
        self.oracle.note_copy(self.stores[-1], snapshot)
        return snapshot

    def restore(self, snapshot: Store) -> None:
        """Put a snapshot in the place of the store."""
        self.expected -= 1
        self.stores[-1].close()
        self.stores.append(snapshot)
        self.endpoints[0].store = snapshot
        self.say("the store is restored from a snapshot")

    def start(self, host: str, config: JobConfig | None = None, *, script: str = SCRIPT) -> None:
        """Start an agent on a host."""
        if self.config.has_successors and self.agents and not self.living:
            # The store may be gone with the job that has ended: whoever comes now begins another one.
            return
        clock = Clock(self.clockwork, self.random.uniform(0.0, 1e5), self.random.uniform(0.98, 1.02))
        preferred = self.random.randrange(self.size) if self.random.random() < 0.2 else None
        node = f"{host}.{len(self.agents)}"
        agent = Agent(
            self,
            node,
            host,
            clock=clock,
            config=config or self.config,
            preferred_rank=preferred,
            script=script,
            predecessor=next((one for one in reversed(self.agents) if one.name == host and not one.is_alive), None),
        )
        self.agents.append(agent)
        self.measure()
        self.say(f"{agent.node} starts")

    def say(self, line: str) -> None:
        """Write a line of the trace."""
        if self.trace is not None:
            self.trace(line)

    def silence(self) -> None:
        """Break the waits of those whom a store can't answer any more."""
        for store in self.stores:
            store.fall_silent()

    @property
    def living(self) -> list[Agent]:
        """The nodes that are neither dead nor told to go nor through."""
        return [agent for agent in self.agents if agent.is_alive and not agent.has_left and agent.end is None]

    @property
    def able(self) -> list[Agent]:
        """The living agents that could be in a round of the job."""
        return [agent for agent in self.living if not agent.is_stalled and self.is_ours(agent)]

    @property
    def witnesses(self) -> frozenset[Agent]:
        """The able agents that have had the time to say where they stand.

        A node that stood still reads from its store at the next keep-alive interval. Only when the answer is there it
        notices a restore.
        """
        since = self.clockwork.now - self.config.keep_alive_interval - 2 * self.network.delay
        return frozenset(agent for agent in self.able if agent.stalled_until <= since)

    @property
    def last_store(self) -> Store:
        """The store in which the job's log ends."""
        return max(self.stores, key=lambda store: store.times[-1] if store.times else -1.0)

    def measure(self) -> None:
        """Note whether the job has enough nodes to go on."""
        self._enough.append((self.clockwork.now, len(self.able) >= self.config.min_nodes))

    def is_ours(self, agent: Agent) -> bool:
        """Whether a node can be in a round with those that the job began with."""
        member = agent.member
        return member.node_info.script == SCRIPT and not describe_difference(self.config, member.config)

    def was_short(self, end: float) -> bool:
        """Whether there were too few nodes at some time shortly before another, or nobody could say so."""
        store = self.last_store
        if store.network.loss or store.outages:
            return True
        window = [is_enough for time, is_enough in self._enough if end - CONVALESCENCE < time <= end]
        before = [is_enough for time, is_enough in self._enough if time <= end - CONVALESCENCE]
        return not all([*before[-1:], *window]) or not before

    def is_tidy(self, slot: int) -> bool:
        """Whether the coordinator that created a slot lived long enough to clean up, with nothing lost on the way.

        Not where the host of the store left meanwhile, and the store with it; nor where a snapshot was taken before
        that, or took the store's place.
        """
        store = self.last_store
        index, writer = next((index, node) for index, (number, node, _) in enumerate(store.slots) if number == slot)
        agent = next(agent for agent in self.agents if agent.node == writer)
        has_left = any(one.has_left and one is self.last_store.server for one in self.agents)
        is_replaced = index < store.kept_slots or (store.is_closed and not self.config.has_successors)
        return agent.is_alive and not has_left and not is_replaced and self.is_network_tidy

    @property
    def is_network_tidy(self) -> bool:
        """Whether every cleanup reached the last store: no fault was hidden and no outage happened."""
        network = self.network
        is_whole = not self.faults.has_hidden and not self.last_store.outages
        return is_whole and not network.loss and not network.late and not network.again

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
            "severity": (OWN_EXCEPTION, BARE_END, LOST_RANK)[self.random.randrange(3)],
            # Such a failure may end the job before its restarts are used.
            "is_deterministic": not self.config.max_restarts,
            "node": agent.node,
        }

    # --- the run -----------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Run until every live node knows the end, and let the oracle look at it.

        Raises:
            BrokenPropertyError: A promise was broken.
        """
        self.clockwork.run(START)
        limit = self.character.horizon + WAIT_LIMIT
        while self._goes_on and self.clockwork.now < limit:
            self.clockwork.run(self.clockwork.now + 1.0)
            self.oracle.look()
            self._run_out()
        self.oracle.judge()

    def _run_out(self) -> None:
        """Run on for some seconds: the last clean-up may be under way, or a new node after a kill."""
        if not self._goes_on:
            self.clockwork.run(self.clockwork.now + 5.0)

    @property
    def _goes_on(self) -> bool:
        return bool(self.living) or self.expected > 0 or self.clockwork.now < self.character.horizon + 16.0
