"""How often chance excludes a good node, and how soon broken nodes go: `python -m tests.simulation.exclusion`.

The command prints the table of docs/health.md. Good nodes fail at random, so that each failure hits any of them. In
some jobs three broken nodes fail as well, each every twenty minutes on the average. All failures look different, so
none is taken for the program's. A node that is excluded is replaced.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from types import MappingProxyType
from typing import NamedTuple

from elastic_run.core.config import JobConfig, Window
from elastic_run.core.job.documents import NodeInfo, Promise, StoreAddress
from elastic_run.core.job.exclusion import judge, note_incident
from elastic_run.core.job.founding import ONLY_ONE
from elastic_run.core.job.restart_policy import Failure
from elastic_run.core.job.state import Job, Node, Root, Seat
from elastic_run.records import replace

HOUR = 3600.0
#: Names of the broken nodes, and seconds between two failures of one of them.
LEMONS = ("n3", "n50", "n99")
LEMON_PAUSE = 1200.0
#: Failures of good nodes in a young job, and in a long one.
YOUNG, LONG = 30, 1000


class Setting(NamedTuple):
    """A row of the table.

    Attributes:
        nodes: Of the job.
        pause: Seconds between two failures of good nodes, of all of them.
        window: The value of --exclude-after.
    """

    nodes: int
    pause: float
    window: Window


SETTINGS = [
    Setting(1000, 24 * HOUR, Window(2, 6 * HOUR)),
    Setting(1000, 6 * HOUR, Window(2, 6 * HOUR)),
    Setting(1000, 6 * HOUR, Window(2, 24 * HOUR)),
    Setting(1000, HOUR, Window(2, 6 * HOUR)),
    Setting(1000, HOUR, Window(2, 24 * HOUR)),
    Setting(1000, HOUR, Window(2, HOUR)),
    Setting(1000, 600.0, Window(2, 6 * HOUR)),
    Setting(100, 24 * HOUR, Window(2, 6 * HOUR)),
    Setting(100, HOUR, Window(2, 6 * HOUR)),
    Setting(100, HOUR, Window(3, 6 * HOUR)),
]


class Played(NamedTuple):
    """The exclusions of one simulated job.

    Attributes:
        excluded: Good nodes that were excluded.
        incidents: Failures of each broken node until it was excluded.
    """

    excluded: int
    incidents: Counter[str]


def begin(setting: Setting) -> tuple[Job, JobConfig]:
    """Return a job whose nodes all run, and its configuration."""
    names = [f"n{number}" for number in range(setting.nodes)]
    config = JobConfig(min_nodes=1, max_nodes=setting.nodes, exclude_after=setting.window)
    nodes = {name: Node(name, NodeInfo(name, 1, 1), StoreAddress("h", 1), 1, 0.0) for name in names}
    return Job(
        Promise(), ONLY_ONE, 0.0, config=config, nodes=MappingProxyType(nodes), seats=tuple(map(Seat, names))
    ), config


def play(
    setting: Setting,
    begun: tuple[Job, JobConfig],
    chance: random.Random,
    *,
    failures: int,
    has_lemons: bool = False,
    kinds: int = 10**6,
) -> Played:
    """Let nodes fail at random."""
    job, config = begun
    names = sorted(job.nodes)
    lemons: list[str] = []
    incidents: Counter[str] = Counter()
    excluded, now, left = 0, 0.0, failures
    while True:
        if not left and has_lemons:
            lemons, has_lemons = list(LEMONS), False
        if not left and not lemons:
            return Played(excluded, incidents)
        rate = len(lemons) / LEMON_PAUSE
        now += chance.expovariate(rate + 1 / setting.pause)
        is_lemon = chance.random() < rate / (rate + 1 / setting.pause)
        name = chance.choice(lemons if is_lemon else names)
        left = max(left - 1, 0)
        incidents.update({name} & set(lemons))
        root = Root(name, severity=0, order=0, failure=Failure(1, signature=f"kind {chance.randrange(kinds)}"))
        job = note_incident(job, config, root, now)
        if judge(job, config, root).excludes:
            job = replace(job, incidents=tuple(one for one in job.incidents if one.machine != name))
            excluded += name not in lemons
            lemons = [one for one in lemons if one != name]


def measure(setting: Setting, jobs: int, failures: int, chance: random.Random) -> float:
    """Return how many good nodes are excluded in 1,000 failures, in jobs of so many failures each."""
    begun = begin(setting)
    excluded = sum(play(setting, begun, chance, failures=failures).excluded for _ in range(jobs))
    return 1000 * excluded / (jobs * failures)


def measure_lemons(setting: Setting, jobs: int, failures: int, chance: random.Random) -> list[float]:
    """Return the shares of broken nodes that are gone after two of their failures, and after three."""
    begun = begin(setting)
    played = [play(setting, begun, chance, failures=failures, has_lemons=True) for _ in range(jobs)]
    counts = [count for one in played for count in one.incidents.values()]
    return [100 * sum(count <= most for count in counts) / len(counts) for most in (2, 3)]


def describe(setting: Setting, effort: int) -> str:
    """Return a row of the table."""
    chance = random.Random(1)  # noqa: S311 - a simulation
    young = measure(setting, 100 * effort, YOUNG, chance)
    long = measure(setting, effort, LONG, chance)
    shares = measure_lemons(setting, 15 * effort, 0, chance) + measure_lemons(setting, 5 * effort, YOUNG, chance)
    pause = {600.0: "ten minutes", HOUR: "hour", 6 * HOUR: "six hours", 24 * HOUR: "day"}[setting.pause]
    window = f"`{setting.window.count}/{(setting.window.seconds or 0.0) / HOUR:g}h`"
    gone = [f"{shares[index]:.0f} %, {shares[index + 1]:.0f} %" for index in (0, 2)]
    return f"| {setting.nodes:,} | {pause} | {window} | {young:.1f} | {long:.1f} | {gone[0]} | {gone[1]} |"


def main() -> None:
    """Print the table."""
    for setting in SETTINGS:
        sys.stdout.write(f"{describe(setting, 40)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
