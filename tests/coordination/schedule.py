"""What befalls a simulated job: faults at any time, and faults at the moments for which the rules are made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_run.core.job.state import BROKEN

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.coordination.agent import Agent
    from tests.coordination.world import World


class Schedule:
    """The faults of one job.

    Args:
        world: The job.
        end: When the faults end.
    """

    def __init__(self, world: World, end: float) -> None:
        self.world = world
        self.end = end
        pick = world.random
        #: The mean of seconds between two faults at any time; how often one comes when a round is proposed or started.
        self.pause, self.danger = pick.choice(((3.0, 0.0), (10.0, 0.3), (40.0, 0.7)))
        world.at_turn = self._disturb_turn
        world.after(pick.expovariate(1 / self.pause), self._act, self._disturb)

    def _disturb(self) -> None:
        self._choose()()
        self.world.after(self.world.random.expovariate(1 / self.pause), self._act, self._disturb)

    def _choose(self) -> Callable[[], None]:
        pick = self.world.random
        kinds = (
            self.kill,
            self.lose_power,
            self.boot,
            self.boot,
            self.split,
            self.cut_one,
            self.freeze,
            self.reset,
        )
        return pick.choice((*kinds, self.heal, self.heal, self.lose_store))

    def _disturb_turn(self, agent: Agent) -> None:
        """Let something happen to a coordinator that has just proposed or started a round, or to a member."""
        world, pick = self.world, self.world.random
        if world.now >= self.end or pick.random() >= self.danger:
            return
        kinds = (self.kill, self.isolate, self.isolate, self.freeze, self.reset, self.split, self.deafen)
        # Orders and answers are on their way for this long.
        delay = pick.choice((0.0, 0.001, 0.02, 0.1, 0.3, 1.0)) * pick.random()
        world.after(delay, self._act, pick.choice(kinds), agent)
        if pick.random() < 0.6:
            world.after(delay + pick.choice((0.5, 3.0, 8.0, 20.0)), self._act, self.heal)
        if pick.random() < 0.3:
            world.after(delay + pick.choice((0.1, 2.0, 9.0)), self._act, self.boot)

    def _act(self, fault: Callable[..., None], *arguments: object) -> None:
        if self.world.now < self.end:
            fault(*arguments)

    # --- kinds of faults ---------------------------------------------------------------------------------------------
    def _pick(self) -> Agent | None:
        """Return a coordinator more often than chance would."""
        living = list(self.world.living.values())
        coordinators = [one for one in living if one.coordination is not None]
        pick = self.world.random
        chosen = coordinators if coordinators and pick.random() < 0.4 else living
        return pick.choice(chosen) if chosen else None

    def kill(self, agent: Agent | None = None) -> None:
        """Kill an agent; its guardian lives."""
        agent = agent or self._pick()
        if agent is not None and len(self.world.living) > 1:
            self.world.die(agent, has_power=True)

    def lose_power(self) -> None:
        """Let a machine go dark."""
        agent = self._pick()
        if agent is not None and len(self.world.living) > 1:
            self.world.die(agent, has_power=False)

    def boot(self) -> None:
        """Start an agent on a host that has none."""
        host = self.world.random.randrange(self.world.hosts)
        if host not in self.world.living:
            self.world.powered[host] = True
            self.world.boot(host)

    def split(self, _: Agent | None = None) -> None:
        """Cut some hosts from the others, sometimes in one direction."""
        world, pick = self.world, self.world.random
        side = {host for host in range(world.hosts) if pick.random() < 0.5}
        is_whole = pick.random() < 0.8
        for one in side:
            for other in set(range(world.hosts)) - side:
                world.add_cut(one, other)
                if is_whole:
                    world.add_cut(other, one)
        world.say("split", side, is_whole)

    def cut_one(self) -> None:
        """Cut two hosts from each other."""
        one, other = self.world.random.sample(range(self.world.hosts), 2)
        self.world.add_cut(one, other)
        self.world.add_cut(other, one)
        self.world.say("cut", one, other)

    def isolate(self, agent: Agent | None = None) -> None:
        """Cut a coordinator from some of the others, or from all."""
        world, pick = self.world, self.world.random
        if agent is not None:
            share = pick.choice((0.3, 0.6, 1.0))
            side = {host for host in range(world.hosts) if host != agent.host and pick.random() < share}
            for other in side:
                world.add_cut(agent.host, other)
                world.add_cut(other, agent.host)
            world.say("isolate", agent.name, "from", side)

    def deafen(self, agent: Agent | None = None) -> None:
        """Let nothing arrive at a coordinator, or nothing of it arrive elsewhere."""
        world, pick = self.world, self.world.random
        if agent is not None:
            is_deaf = pick.random() < 0.5
            for other in range(world.hosts):
                if other != agent.host:
                    world.add_cut(*((other, agent.host) if is_deaf else (agent.host, other)))
            world.say("deaf" if is_deaf else "mute", agent.name)

    def heal(self) -> None:
        """Mend the network, sometimes a part of it."""
        world, pick = self.world, self.world.random
        if pick.random() < 0.6:
            world.heal()
        else:
            mended = {one for one in sorted(world.cut) if pick.random() < 0.5}
            world.heal(mended | {(other, one) for one, other in mended})
        world.say("heal", len(world.cut))

    def freeze(self, agent: Agent | None = None) -> None:
        """Stop an agent for a while."""
        agent = agent or self._pick()
        if agent is not None:
            self.world.freeze(agent, self.world.random.choice((0.5, 3.0, 8.0, 20.0)))

    def reset(self, agent: Agent | None = None) -> None:
        """Break a connection at both ends; its node comes back at once."""
        world, pick = self.world, self.world.random
        links = [one for one in world.links if agent in (None, one.host) and one.node is not one.host]
        if links:
            link = pick.choice(links)
            world.say("reset", link.node.name)
            world.close_at_host(link, BROKEN)
            world.close_at_node(link, BROKEN)

    def lose_store(self) -> None:
        """Put the store of the lease out of reach of some hosts, or of all; or back."""
        world, pick = self.world, self.world.random
        share = pick.choice((0.0, 0.7, 1.0, 1.0))
        world.reach_store({host for host in range(world.hosts) if pick.random() < share})
        world.say("store", world.lease.reach)
