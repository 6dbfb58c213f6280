"""--exclude-after over simulated time: chance excludes no good node, and broken nodes are gone soon."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from elastic_run.core.config import Window
from elastic_run.core.job.exclusion import exclude, judge, note_incident
from elastic_run.core.job.restart_policy import Failure
from elastic_run.core.job.state import Root
from tests.simulation.exclusion import Setting, begin, measure, measure_lemons, play

HOUR = 3600.0
LEMONS = ("n3", "n500", "n999")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("is_alike", [True, False], ids=["lemons alike", "lemons different"])
def test_a_thousand_nodes_with_three_lemons(seed: int, is_alike: bool) -> None:
    """Each lemon is gone after its second incident, and no good node is excluded with them.

    A lemon fails every twenty minutes on the average, a good node every three years: one of them in each 26 hours.
    """
    chance = random.Random(seed)  # noqa: S311 - a simulation
    job, config = begin(Setting(1000, 26 * HOUR, Window(2, 6 * HOUR)))
    now, incidents, excluded = 0.0, Counter[str](), set[str]()
    while set(LEMONS) - excluded:
        lemons = [name for name in LEMONS if name not in excluded]
        is_lemon = chance.random() < 26 * 3 * len(lemons) / (26 * 3 * len(lemons) + 1)
        name = chance.choice(lemons) if is_lemon else chance.choice(sorted(set(job.nodes) - excluded))
        now += chance.expovariate(1 / (1200 / len(lemons)))
        likeness = "xid 79" if is_alike and is_lemon else f"fault {chance.randrange(5)} of {name}"
        root = Root(name, severity=0, order=0, failure=Failure(1, likeness))
        job = note_incident(job, config, root, now)
        judgement = judge(job, config, root)
        if judgement.excludes:
            job = exclude(job, root, judgement, now)
            excluded.add(name)
        incidents[name] += 1
    assert {name: incidents[name] for name in LEMONS} == dict.fromkeys(LEMONS, 2)
    assert excluded == set(LEMONS)


@pytest.mark.parametrize(
    ("period", "pause", "kinds"),
    [
        (6 * HOUR, 26 * HOUR, 5),
        (HOUR, 12 * HOUR, 50),
        (6 * HOUR, 600.0, 1),
        (6 * HOUR, HOUR, 10**6),
        (HOUR, HOUR, 10**6),
        (6 * HOUR, 600.0, 10**6),
        (24 * HOUR, HOUR, 10**6),
        (24 * HOUR, 6 * HOUR, 10**6),
    ],
    ids=[
        "rare",
        "often",
        "code",
        "each hour",
        "each hour, short period",
        "each ten minutes",
        "each hour, long period",
        "each six hours",
    ],
)
def test_good_nodes_stay(period: float, pause: float, kinds: int) -> None:
    """Of a thousand failures that hit a thousand good nodes at random, at most one excludes a node, on the average.

    However frequent the failures are, and whether they look alike or not. The bound leaves room for chance; the table
    of docs/health.md has more failures.
    """
    setting = Setting(1000, pause, Window(2, period))
    chance = random.Random(3)  # noqa: S311 - a simulation
    assert play(setting, begin(setting), chance, failures=2000, kinds=kinds).excluded <= 4


@pytest.mark.parametrize(("period", "pause"), [(6 * HOUR, 600.0), (24 * HOUR, HOUR)])
def test_good_nodes_stay_in_a_young_job(period: float, pause: float) -> None:
    """So it is in 300 jobs that have 30 failures each: the rate is known long before the first period is over."""
    chance = random.Random(5)  # noqa: S311 - a simulation
    assert measure(Setting(1000, pause, Window(2, period)), 300, 30, chance) <= 1.0


def test_lemons_go_where_other_nodes_fail_each_hour() -> None:
    """Three lemons that fail every twenty minutes among a thousand nodes: two failures do for nearly all of them.

    Another node fails each hour. A lemon whose failures happen to be further apart goes after its third one.
    """
    chance = random.Random(7)  # noqa: S311 - a simulation
    after_two, after_three = measure_lemons(Setting(1000, HOUR, Window(2, 6 * HOUR)), 50, 0, chance)
    assert after_two > 90
    assert after_three == 100


def test_lemons_go_after_two_failures_at_the_rate_of_a_large_training() -> None:
    """One good node of a thousand fails in six hours: lemons that break later are gone after their second failure."""
    chance = random.Random(7)  # noqa: S311 - a simulation
    after_two, after_three = measure_lemons(Setting(1000, 6 * HOUR, Window(2, 24 * HOUR)), 30, 30, chance)
    assert after_two > 98
    assert after_three == 100
