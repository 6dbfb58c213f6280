"""Search simulated jobs for a fork, a lost budget or a job that never forms: `python -m tests.coordination.search`."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from tests.coordination.mutants import MUTANTS, break_rule
from tests.coordination.world import Agent, BrokenPropertyError, World, phase_of

#: Simulated seconds in which a job that can form has to form after the last fault.
_PATIENCE = 240.0


def run_job(seed: int, choice: str | None = None) -> tuple[str, World]:
    """Run one job through its faults, and return what became of it: `formed`, `ended` or `unjudged`.

    Raises:
        BrokenPropertyError: A property does not hold.
    """
    world = World(seed, choice)
    pick = world.random
    end = pick.uniform(20.0, 200.0)
    world.after(1.0, _tick, world)
    world.after(pick.expovariate(0.2), _disturb, world, end)
    danger = pick.choice((0.0, 0.1, 0.4))
    world.at_turn = lambda: _disturb_turn(world, end, danger)
    world.run_until(end)
    world.cut.clear()
    world.lease_reach = set(range(world.hosts))
    _heal(world)
    if pick.random() < 0.8:
        for host in range(world.hosts):
            world.powered[host] = True
            world.after(pick.uniform(0.0, 10.0), world.boot, host)
        world.run_until(world.now + 11.0)
    for agent in world.agents.values():
        agent.frozen_until = min(agent.frozen_until, world.now)
    can_form = world.can_form()
    for _ in range(int(_PATIENCE)):
        world.run_until(world.now + 1.0)
        if world.is_settled():
            return ("ended" if any(one.verdict for one in world.agents.values()) else "formed"), world
        can_form = can_form and world.can_form()
    if can_form:
        living = [f"{one.name}:{phase_of(one)}:{one.member.phase}" for one in world.agents.values() if one.is_alive]
        message = f"progress: {world.choice}, min {world.config.min_nodes}, {living} never form"
        raise BrokenPropertyError(message)
    return "unjudged", world


def _tick(world: World) -> None:
    world.watch_links()
    world.renew_leases()
    world.fence()
    world.after(0.5, _tick, world)


def _disturb(world: World, end: float) -> None:
    if world.now < end:
        _choose_fault(world)
        world.after(world.random.choice((0.05, 0.5, 2.0, 8.0, 20.0)) * world.random.random(), _disturb, world, end)


def _disturb_turn(world: World, end: float, danger: float) -> None:
    """Rules about proposals matter for moments only: let faults come then."""
    if world.now < end and world.random.random() < danger:
        world.after(world.random.choice((0.0, 0.002, 0.02, 0.3, 1.0)), _choose_fault, world)


def _choose_fault(world: World) -> None:  # noqa: C901 - one for each kind
    pick = world.random
    kind = pick.random()
    living = [one for one in world.agents.values() if one.is_alive]
    if kind < 0.2 and len(living) > 1:
        world.die(_pick_agent(world, living), has_power=True)
    elif kind < 0.27 and len(living) > 1:
        world.die(_pick_agent(world, living), has_power=False)
    elif kind < 0.5:
        host = pick.randrange(world.hosts)
        if world.find(host) is None:
            world.powered[host] = True
            world.boot(host)
    elif kind < 0.62:
        side = {host for host in range(world.hosts) if pick.random() < 0.5}
        world.cut |= {frozenset((one, other)) for one in side for other in range(world.hosts) if other not in side}
        world.say("split", side)
    elif kind < 0.75:
        world.cut.clear()
        world.say("heal")
        _heal(world)
    elif kind < 0.8:
        world.cut.add(frozenset(pick.sample(range(world.hosts), 2)))
    elif kind < 0.88 and living:
        agent = _pick_agent(world, living)
        agent.frozen_until = world.now + pick.choice((0.5, 3.0, 8.0, 20.0))
        world.say("freeze", agent.name, round(agent.frozen_until - world.now, 1))
    elif kind < 0.94:
        links = [one.link for one in living if one.link is not None and one.link.is_open]
        if links:
            link = pick.choice(links)
            world.say("reset", link.node.name)
            world.close(link, "", "broken")
    else:
        world.lease_reach = {host for host in range(world.hosts) if pick.random() < 0.7}


def _pick_agent(world: World, living: list[Agent]) -> Agent:
    """Return a coordinator more often than chance would."""
    coordinators = [one for one in living if one.coordination is not None]
    return world.random.choice(coordinators if coordinators and world.random.random() < 0.4 else living)


def _heal(world: World) -> None:
    for agent in world.agents.values():
        link = agent.link
        if link is not None and link.is_open:
            for way in ("up", "down"):
                if link.wire[way]:
                    world.after(0.01, world.deliver, link, way)


def main() -> None:
    """Run many jobs, and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--choice", choices=("majority", "lease", "only_one"))
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="break a rule, to see that the search finds it")
    parser.add_argument("--first-only", action="store_true", help="stop at the first job that breaks a property")
    options = parser.parse_args()
    if options.mutant:
        break_rule(options.mutant)
    tally: Counter[str] = Counter()
    rounds = 0
    for seed in range(options.first, options.first + options.count):
        try:
            outcome, world = run_job(seed, options.choice)
            rounds += len(world.started)
        except BrokenPropertyError as error:
            outcome = str(error).partition(":")[0]
            print(f"seed {seed}: {error}")  # noqa: T201 - a command
            if options.first_only:
                break
        tally[outcome] += 1
    print(dict(tally), f"{rounds} rounds")  # noqa: T201
    sys.exit(any(name not in ("formed", "ended", "unjudged") for name in tally))


if __name__ == "__main__":
    main()
