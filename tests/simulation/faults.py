"""What goes wrong in a run: processes that are killed or stand still, clocks, cables, and stores that go back in time.

Faults don't wait until the job has recovered from those before.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.simulation.agent import Proof
from tests.simulation.restores import Restores
from tests.simulation.store import SPOILT

if TYPE_CHECKING:
    from tests.simulation.agent import Agent
    from tests.simulation.store import Store
    from tests.simulation.world import World

# Kinds that can be switched off.
EMPTY_STORES = "hosts that come back with an empty store"
MOVES = "several moves of the store"
ROLLBACK = "stores that are restored from a snapshot"
SUSPEND = "clocks that stand still"
LATE_WRITES = "writes that are carried out late, or again"
CUTS = "partitions"
PROOFS = "proofs of death that are late, repeated, or in the wrong store"
BURSTS = "kills in a row"
OFFERS = "agents that die after they have offered themselves for another round, before they are told of it"
FORMING = "partitions while a round forms with other nodes"
WANDERING = "nodes that go from one part's store to the other's and back while a round forms"
#: What the core does not hold yet: these kinds are left out of every run.
KNOWN_BAD: frozenset[str] = frozenset()

#: Seconds until somebody starts another agent where one was killed; else at most `_LATER`.
_SOON = (0.0, 0.5, 3.0, 10.0)
_LATER = 15.0
#: Longest seconds until a guardian that is late tells the death of its agent.
_LATE_PROOF = 15.0
#: Longest seconds between kills in a row.
_BURST = 2.5
#: Longest seconds for which a doomed agent lives after it has offered itself.
_OFFERED = 1.0
#: Seconds until the first node wanders, when the other part has a store; and longest seconds between two moves.
_WANDERS_AFTER = (5.0, 14.0)
_STAYS = 7.0
#: Probability that a node that wanders is told to go at the end.
_LEAVES = 0.2
#: Probability that a store is restored in a run, where one can be.
_RESTORED = 0.3
#: What the scripts of two jobs under one id are.
_OTHER_SCRIPT = "other.py"


class Faults:
    """The faults of one run.

    Args:
        world: The run.
        known_bad: Kinds that are left out.
        least_restores: How often the store is restored at least, as far as the run lasts.
    """

    def __init__(self, world: World, known_bad: frozenset[str], least_restores: int) -> None:
        self._world = world
        self._random = world.random
        self._known_bad = known_bad
        self._fatal_operation = -1
        self._late_operation = -1
        self._dividing_slot = -1
        self._wanderers = 0
        self._restores = Restores(world, self, least_restores)
        self.is_spoilt = False
        self.has_strangers = False
        self.has_hidden = False
        self.ended_at = 0.0

    def has(self, kind: str) -> bool:
        """Whether a kind of faults is not switched off."""
        return kind not in self._known_bad

    def plan(self, count: int, horizon: float) -> None:
        """Draw faults, and when they happen.

        Args:
            count: How many.
            horizon: True seconds of the last.
        """
        everywhere = [
            self._kill,
            self._kill,
            self._kill_coordinator,
            self._kill_coordinator,
            self.stall,
            self.stall,
            self.stall_coordinator,
            self._leave,
            self._leave_coordinator,
            self._arrive,
            self._arrive,
            self._arrive_with_another_config,
            self._arm,
            self._arm_pause,
            self._arm_pause,
            self._spoil,
        ]
        everywhere += [self._suspend, self.suspend_coordinator] if self.has(SUSPEND) else []
        everywhere += [self._kill_some] if self.has(BURSTS) else []
        if self._world.config.has_successors:
            everywhere += [self._doom_some, self._doom_some, self._divide_and_doom] if self.has(OFFERS) else []
            everywhere += [self._arm_division, self._arm_wandering] if self.has(FORMING) else []
            everywhere += [self._kill_server, self._stall_server, self._kill_server]
            everywhere += [self._cut, self._cut, self._cut_off] if self.has(CUTS) else []
        elif self.has(ROLLBACK) and (self._random.random() < _RESTORED or self._restores.least):
            everywhere += self._restores.plan(horizon)
        for _ in range(count):
            time = self._random.random() * horizon
            if self._random.random() < 0.15 and not self._world.config.has_successors:
                self._plan_outage(time)
            else:
                self._world.clockwork.at(time, self._random.choice(everywhere))

    def note(self, until: float = 0.0) -> None:
        """Note that something is wrong until a time."""
        self.ended_at = max(self.ended_at, self._world.clockwork.now, until)

    def _plan_outage(self, time: float) -> None:
        store = self._world.stores[0]
        end = time + self._random.choice((1.0, 5.0, 12.0)) * self._random.random()
        store.outages.append((time, end))
        self.note(end)

    # --- who is hit --------------------------------------------------------------------------------------------------
    def _pick(self) -> Agent | None:
        living = self._world.living
        return self._random.choice(living) if living else None

    def _pick_coordinator(self) -> Agent | None:
        return next((agent for agent in self._world.living if agent.member.coordination.is_coordinator), None)

    def _pick_server(self) -> Agent | None:
        servers = [agent for agent in self._world.living if agent.connection.serves_store]
        return self._random.choice(servers) if servers else None

    # --- kills -------------------------------------------------------------------------------------------------------
    def _kill(self) -> None:
        self.kill(self._pick())

    def _kill_coordinator(self) -> None:
        self.kill(self._pick_coordinator())

    def _kill_server(self) -> None:
        self.kill(self._pick_server())

    def _kill_some(self) -> None:
        """Kill a few one after another, the server first."""
        self._kill_server()
        for _ in range(self._random.randint(1, 2)):
            self._world.clockwork.at(self._world.clockwork.now + self._random.random() * _BURST, self._kill)

    def _doom_some(self) -> None:
        """Kill the server of the store, and some of the others when they next offer themselves."""
        self._kill_server()
        living = self._world.living
        for agent in self._random.sample(living, min(len(living), self._random.randint(1, 2))):
            agent.is_doomed = True

    def _divide_and_doom(self) -> None:
        """Kill the server, divide the others into two parts with an endpoint each, and doom some of one part."""
        world, random = self._world, self._random
        self._kill_server()
        hosts = sorted({agent.name for agent in world.living})
        endpoints = [endpoint.host for endpoint in world.endpoints if endpoint.host in hosts]
        if len(endpoints) < 2:
            return
        one, other = random.sample(endpoints, 2)
        some = {one, *(host for host in hosts if host not in (one, other) and random.random() < 0.6)}
        pairs = {(here, there) for here in hosts for there in hosts if (here in some) != (there in some)}
        self._pull(pairs, random.uniform(5.0, 25.0))
        doomed = [agent for agent in world.living if agent.name in some and agent.name != one]
        for agent in random.sample(doomed, min(len(doomed), random.randint(1, 2))):
            agent.is_doomed = True

    def note_offer(self, agent: Agent) -> None:
        """Kill a doomed agent at this moment or soon: it is about to offer itself for another round."""
        if agent.is_doomed:
            agent.is_doomed = False
            delay = self._random.choice((0.0, self._random.random() * _OFFERED))
            self._world.clockwork.at(self._world.clockwork.now + delay, self.kill, agent, Proof((0.0,), is_heard=True))

    def kill(self, agent: Agent | None, proof: Proof | None = None) -> None:
        """Kill an agent; its guardian may report it, and somebody may start another on its host."""
        if agent is None or not agent.is_alive:
            return
        proof = proof or self._draw_proof()
        # Who starts anew on the host of a store, before the others have left that, finds nobody.
        self.has_hidden = self.has_hidden or agent.connection.serves_store
        self._world.say(f"{agent.node} is killed, {proof}")
        agent.die(proof)
        self.note(self._world.clockwork.now + max(proof.delays, default=0.0))
        self._world.measure()
        self._maybe_replace(agent)

    def _draw_proof(self) -> Proof:
        random = self._random
        if random.random() > 0.5:
            return Proof()
        if not self.has(PROOFS) or random.random() < 0.5:
            return Proof((0.0,))
        delays = random.choice(((random.uniform(0.0, _LATE_PROOF),), (0.0, random.uniform(0.0, _LATE_PROOF))))
        return Proof(delays, is_misled=random.random() < 0.5)

    def _maybe_replace(self, agent: Agent) -> None:
        """Start another agent on the host, or not; where it served a store the new one has an empty one there."""
        random, world = self._random, self._world
        is_server = any(endpoint.host == agent.name for endpoint in world.endpoints)
        if random.random() < 0.6 and (self.has(EMPTY_STORES) or not is_server):
            delay = random.choice(_SOON) if random.random() < 0.5 else random.random() * _LATER
            self.note(world.clockwork.now + delay)
            world.expected += 1
            world.clockwork.at(world.clockwork.now + delay, self._replace, agent.name)

    def _replace(self, host: str) -> None:
        self._world.expected -= 1
        self._world.start(host)

    # --- standing still ----------------------------------------------------------------------------------------------
    def stall(self) -> None:
        """Let an agent stand still for a while."""
        self.stop(self._pick())

    def stall_coordinator(self) -> None:
        """Let the coordinator stand still for a while."""
        self.stop(self._pick_coordinator())

    def _stall_server(self) -> None:
        self.stop(self._pick_server())

    def _suspend(self) -> None:
        self.stop(self._pick(), is_suspended=True)

    def suspend_coordinator(self) -> None:
        """Suspend the coordinator for a while."""
        self.stop(self._pick_coordinator(), is_suspended=True)

    def stop(self, agent: Agent | None, *, is_suspended: bool = False) -> float:
        """Let an agent stand still for a while, its clock too if it is suspended; returns for how many true seconds."""
        world = self._world
        if agent is None or agent.is_stalled:
            return 0.0
        seconds = self._random.choice((2.0, 8.0, 20.0)) * self._random.random()
        agent.stalled_until = world.clockwork.now + seconds
        if is_suspended:
            agent.clock.freeze(seconds)
        verb = "suspended" if is_suspended else "stopped"
        world.say(f"{agent.node} is {verb} until {agent.stalled_until:.3f}")
        self.has_hidden = True
        self.note(agent.stalled_until)
        world.silence()
        world.measure()
        world.clockwork.at(agent.stalled_until, world.measure)
        return seconds

    # --- coming and going --------------------------------------------------------------------------------------------
    def _leave(self) -> None:
        self._send_away(self._pick())

    def _leave_coordinator(self) -> None:
        self._send_away(self._pick_coordinator())

    def _send_away(self, agent: Agent | None) -> None:
        if agent is not None and not agent.is_stalled:
            self._world.say(f"{agent.node} is told to go")
            agent.leave()
            self.note()
            self._world.measure()
            self._maybe_replace(agent)

    def _arrive(self) -> None:
        self.note()
        self._world.start(f"x{len(self._world.agents)}")

    def _arrive_with_another_config(self) -> None:
        world, kind = self._world, self._random.randrange(3)
        self.has_strangers = True
        self.note()
        count = len(world.agents)
        if kind == 0:
            # It is taken in, and goes by the job's times.
            world.start(f"z{count}", replace(world.config, last_call_timeout=9.0, scale_up_delay=5.0))
        elif kind == 1:
            # A second job under the same id.
            for index in range(self._random.randint(1, 2)):
                world.start(f"w{count}.{index}", script=_OTHER_SCRIPT)
        else:
            world.start(f"y{count}", replace(world.config, max_restarts=world.config.max_restarts + 1))

    # --- between two operations --------------------------------------------------------------------------------------
    def _arm(self) -> None:
        """Let whoever coordinates die at its next operation but so many."""
        self._fatal_operation = self._random.randrange(12)

    def _arm_pause(self) -> None:
        """Let whoever coordinates stand still at its next operation but so many, before it sends its decision."""
        self._late_operation = self._random.randrange(12)

    def _arm_division(self) -> None:
        """Let newcomers come, and divide the hosts when a round forms or is prepared."""
        self._dividing_slot = self._random.choice((0, 0, 1, 2))
        self._wanderers = 0
        for _ in range(self._random.randint(1, 3)):
            self._arrive()

    def _arm_wandering(self) -> None:
        """Divide the hosts in the same way, but for some that reach both parts."""
        self._arm_division()
        self._wanderers = self._random.randint(1, 3) if self.has(WANDERING) else 0

    def note_slot(self, store: Store, value: bytes) -> None:
        """Restore the store or divide the hosts as soon as a slot was created, before anybody reads it, if armed.

        Args:
            store: Where the slot is.
            value: The entry.
        """
        self._restores.note_decision(json.loads(value)["kind"])
        if self._dividing_slot < 0 or json.loads(value)["kind"] not in ("form", "prepare"):
            return
        self._dividing_slot -= 1
        hosts = sorted({agent.name for agent in self._world.living})
        endpoints = [endpoint.host for endpoint in self._world.endpoints if endpoint.host in hosts]
        server = "" if store.server is None else store.server.name
        others = [host for host in endpoints if host != server]
        if self._dividing_slot >= 0 or not others:
            return
        other = self._random.choice(others)
        rest = {other, *(host for host in hosts if host != server and self._random.random() < 0.5)}
        free = [host for host in hosts if host not in (server, other)]
        wanderers = set(self._random.sample(free, min(len(free), self._wanderers)))
        split = [host for host in hosts if host not in wanderers]
        pairs = {(one, two) for one in split for two in split if (one in rest) != (two in rest)}
        self._pull(pairs, self._random.uniform(10.0, 60.0))
        for host in sorted(wanderers):
            self._plan_moves(host, (other, server))

    def _plan_moves(self, host: str, places: tuple[str, str]) -> None:
        """Let the agents of a host go to and fro between the stores of two hosts."""
        time = self._world.clockwork.now + self._random.uniform(*_WANDERS_AFTER)
        for index in range(self._random.randint(1, 5)):
            self._world.clockwork.at(time, self._wander, host, places[index % 2])
            self.note(time)
            time += self._random.random() * _STAYS
        if self._random.random() < _LEAVES:
            self._world.clockwork.at(time, self._send_some_away, host)

    def _send_some_away(self, host: str) -> None:
        for agent in self._world.living:
            if agent.name == host:
                self._send_away(agent)

    def _wander(self, host: str, place: str) -> None:
        is_open = any(endpoint.host == place and endpoint.open_store for endpoint in self._world.endpoints)
        for agent in self._world.living:
            if agent.name == host and is_open and not agent.is_stalled and not agent.connection.serves_store:
                self._world.say(f"{agent.node} wanders to the store at {place}")
                agent.follow_store(place)

    def note_operation(self, agent: Agent, operation: str) -> float:
        """Count an operation of a coordinator; it may die of it.

        Args:
            agent: Its node.
            operation: Its name.

        Returns:
            For how many true seconds it stands still before its request is sent.
        """
        clockwork = self._world.clockwork
        is_fatal, is_late = self._fatal_operation == 0, self._late_operation == 0
        self._fatal_operation -= self._fatal_operation >= 0
        self._late_operation -= self._late_operation >= 0
        if is_fatal and self._random.random() < 0.5:
            self.kill(agent)
        elif is_fatal:
            clockwork.at(clockwork.now, self.kill, agent)
        if not agent.is_alive:
            return 0.0
        if operation == "delete_where" and (pause := self._restores.note_cleanup(agent)):
            return pause
        if not is_late:
            return 0.0
        return self.stop(agent, is_suspended=self.has(SUSPEND) and self._random.random() < 0.3)

    # --- stores and cables -------------------------------------------------------------------------------------------
    def _spoil(self) -> None:
        """Write garbage over the state of the job, and kill the only one who knows it."""
        if not self._world.stores:
            return
        store = self._world.last_store
        self.is_spoilt = True
        store.values.update({key: SPOILT for key in store.values if key.startswith("s/")})
        self._world.say("a stranger writes garbage over the state")
        self.note()
        self._kill_coordinator()

    def _cut(self) -> None:
        """Cut two hosts from each other, in one direction or both."""
        hosts = sorted({agent.name for agent in self._world.living})
        if len(hosts) > 1:
            one, other = self._random.sample(hosts, 2)
            self._pull({(one, other)} | ({(other, one)} if self._random.random() < 0.5 else set()))

    def _cut_off(self) -> None:
        """Divide the hosts into two parts between which nothing goes, or only in one direction."""
        hosts = sorted({agent.name for agent in self._world.living})
        if len(hosts) < 2:
            return
        some = set(self._random.sample(hosts, self._random.randint(1, len(hosts) - 1)))
        pairs = {(one, other) for one in hosts for other in hosts if one in some and other not in some}
        self._pull(pairs | {(other, one) for one, other in pairs} if self._random.random() < 0.8 else pairs)

    def _pull(self, pairs: set[tuple[str, str]], seconds: float | None = None) -> None:
        world = self._world
        if seconds is None:
            seconds = self._random.choice((3.0, 8.0, 20.0)) * self._random.random()
        until = world.clockwork.now + seconds
        world.network.cuts |= pairs
        self.has_hidden = True
        world.say(
            f"nothing goes from {', '.join(f'{one} to {other}' for one, other in sorted(pairs))} until {until:.3f}"
        )
        self.note(until)
        world.silence()
        world.measure()
        world.clockwork.at(until, self._mend, pairs)

    def _mend(self, pairs: set[tuple[str, str]]) -> None:
        self._world.network.cuts -= pairs
        self._world.say("cables are mended")
        self._world.measure()
