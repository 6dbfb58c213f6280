"""Search simulated jobs for a fork, a lost budget or a job that never forms: `python -m tests.coordination.search`.

With `--walks` the jobs have no clock, and are searched for forks alone; see `walk`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from tests.coordination.mutants import MUTANTS, break_rule
from tests.coordination.properties import BrokenPropertyError, can_form, is_settled
from tests.coordination.schedule import Schedule
from tests.coordination.walk import Walk, run_walk
from tests.coordination.world import World, phase_of

#: Simulated seconds in which a job that can form has to form after the last fault.
_PATIENCE = 240


def run_job(seed: int, choice: str | None = None, *, log: list[tuple[object, ...]] | None = None) -> tuple[str, World]:
    """Run one job through its faults, and return what became of it: `formed`, `ended` or `unjudged`.

    Raises:
        BrokenPropertyError: A property does not hold.
    """
    world = World(seed, choice)
    world.log = world.log if log is None else log
    pick = world.random
    end = pick.uniform(20.0, 150.0)
    Schedule(world, end)
    world.run_until(end)
    world.heal()
    world.reach_store(set(range(world.hosts)))
    world.say("calm")
    if pick.random() < 0.8:
        for host in range(world.hosts):
            world.powered[host] = True
            world.after(pick.uniform(0.0, 10.0), world.boot, host)
    for agent in world.agents.values():
        agent.frozen_until = min(agent.frozen_until, world.now)
    world.run_until(world.now + 11.0)
    is_formable = can_form(world)
    for _ in range(_PATIENCE):
        world.run_until(world.now + 1.0)
        if is_settled(world):
            return ("ended" if any(one.verdict for one in world.agents.values()) else "formed"), world
        is_formable = is_formable and can_form(world)
    if is_formable:
        living = [f"{one.name}:{phase_of(one)}:{one.member.phase}" for one in world.living.values()]
        message = f"progress: {world.choice}, min {world.config.min_nodes}, {living} never form"
        raise BrokenPropertyError(message)
    return "unjudged", world


def main() -> None:
    """Run many jobs, and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--choice", choices=("majority", "lease", "only_one"))
    parser.add_argument("--walks", action="store_true", help="search jobs without a clock")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="break a rule, to see that the search finds it")
    parser.add_argument("--first-only", action="store_true", help="stop at the first job that breaks a property")
    parser.add_argument("--show", action="store_true", help="print what happened in the jobs that break a property")
    options = parser.parse_args()
    if options.mutant:
        break_rule(options.mutant)
        options.choice = options.choice or MUTANTS[options.mutant].choice
        options.walks = options.walks or MUTANTS[options.mutant].needs_walk
    tally: Counter[str] = Counter()
    rounds = 0
    for seed in range(options.first, options.first + options.count):
        log: list[tuple[object, ...]] = []
        try:
            job: World | Walk
            outcome, job = run_walk(seed, log=log) if options.walks else run_job(seed, options.choice, log=log)
            rounds += len(job.started)
        except (BrokenPropertyError, LookupError) as error:
            outcome = str(error).partition(":")[0]
            for line in log if options.show else ():
                print(*line)  # noqa: T201 - a command
            print(f"seed {seed}: {error}", flush=True)  # noqa: T201
            if options.first_only:
                break
        tally[outcome] += 1
    print(dict(tally), f"{rounds} rounds")  # noqa: T201
    sys.exit(any(name not in ("formed", "ended", "unjudged", "walked") for name in tally))


if __name__ == "__main__":
    main()
