"""The slow rank: which rank is named when all ranks compute and meet, in time that the test makes."""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run.core.failure import slow_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from elastic_run.core.failure.slow_rank import Calls

    #: The seconds that a rank computes in a step before each of its collectives; a random number is from 0 to 1.
    Work = Callable[[int, int, Callable[[], float]], Sequence[float]]

_PERIOD = 10.0


def answer(calls: Sequence[Sequence[float]], group: str = "gloo 0 0", **changes: Any) -> list[dict[str, Any]]:
    """Return the answer of one rank's recorder; moments are in seconds."""
    told = [(number, int(at * 1e6)) for number, at in calls]
    return [{"group": group, "size": 4, "is_measured": False, "scale": 1.0, "calls": told, **changes}]


class Training:
    """Ranks that meet after each collective, or, as DDP's, after the last of a step; and the watch over them."""

    def __init__(self, work: Work, *, ranks: int = 4, overlaps: bool = False) -> None:
        self.watch = slow_rank.SlowRanks(300.0, 60.0)
        self.named: dict[int, list[float]] = {}
        self.now = 0.0
        self._work, self._ranks, self._overlaps = work, range(ranks), overlaps
        self._random = Random(0).random  # noqa: S311 - it simulates
        self._at, self._step, self._number = [0.0] * ranks, 0, 0
        self._answers: list[Any] = [{rank: [] for rank in self._ranks}]

    def run(self, seconds: float) -> None:
        """Train for so long, and ask now and then."""
        while self.now < seconds:
            work = [self._work(rank, self._step, self._random) for rank in self._ranks]
            self._step += 1
            for index in range(len(work[0])):
                self._number += 1
                for rank in self._ranks:
                    self._at[rank] += work[rank][index]
                    self._answers[-1][rank].append((self._number, self._at[rank]))
                if not self._overlaps or index == len(work[0]) - 1:
                    self._at = [max(self._at) + 0.001 for _ in self._ranks]
            while max(self._at) >= self.now + _PERIOD:
                self.now += _PERIOD
                told = [{r: answer(own, size=len(self._ranks)) for r, own in each.items()} for each in self._answers]
                self.take(slow_rank.join_ranks(told, self.watch.counted))
                self._answers = [*self._answers[-2:], {rank: [] for rank in self._ranks}]

    def take(self, calls: Sequence[Calls], error: float = 0.0) -> None:
        """Take an answer, and note the slow ranks."""
        self.watch = slow_rank.add(self.watch, calls, self.now, error)
        found = slow_rank.find_slow(self.watch, self.now)
        self.watch = slow_rank.tell(self.watch, found)
        for rank, share in found.items():
            self.named.setdefault(rank, []).append(share)


def slow(rank: int) -> float:
    """Return how much longer rank 2 computes than the others."""
    return 1.2 if rank == 2 else 1.0


#: What the ranks do, whether rank 2 is named, and how many ranks there are or whether they go on within a step.
_WORK: dict[str, tuple[Work, bool, dict[str, Any]]] = {
    "constant": (lambda rank, _, __: [0.1 * slow(rank)], True, {}),
    "with differences": (lambda rank, _, random: [0.1 * slow(rank) * (0.9 + 0.2 * random())], True, {}),
    "buckets": (lambda rank, _, __: [0.06 * slow(rank), *[0.01 * slow(rank)] * 9], True, {"overlaps": True}),
    "then small ones": (lambda rank, _, random: [0.1 * slow(rank), *(0.001 * random() for _ in range(7))], True, {}),
    "long steps": (lambda rank, _, __: [30 * slow(rank)], True, {}),
    "random": (lambda _, __, random: [0.1 * (0.9 + 0.2 * random())], False, {}),
    "unequal": (lambda rank, _, __: [0.1 + 0.003 * rank], False, {}),
    "overloaded": (lambda _, __, random: [0.2 * random()], False, {"ranks": 2}),
    "overloaded, long steps": (lambda _, __, random: [8 * (0.8 + 0.4 * random())], False, {"ranks": 2}),
    "checkpoints": (lambda rank, step, _: [0.1 + 10 * (rank == 0 and step % 400 == 399)], False, {}),
    "most ranks": (lambda rank, _, __: [0.1 * slow(2 if rank > 0 else 0)], False, {}),
}


@pytest.mark.parametrize("kind", _WORK)
def test_only_the_rank_that_the_others_wait_for_again_and_again_is_named(kind: str) -> None:
    """Once, with its share of the time; nobody where each time another one is the last."""
    work, is_named, options = _WORK[kind]
    training = Training(work, **options)
    training.run(900.0)
    assert training.named == ({2: [pytest.approx(0.16, abs=0.02)]} if is_named else {})


def test_the_line_comes_after_five_minutes_and_again_when_the_rank_has_recovered_in_between() -> None:
    """A rank that stays slow is told once."""
    training = Training(lambda rank, step, _: [0.1 * (1.0 if 8000 < step < 12000 else slow(rank))])
    for seconds, times in ((300.0, 0), (900.0, 1), (2000.0, 2)):
        training.run(seconds)
        assert len(training.named.get(2, ())) == times
    assert slow_rank.count_shares(training.watch, training.now) == pytest.approx({0: 0, 1: 0, 2: 0.165, 3: 0}, abs=0.01)
    assert slow_rank.count_shares(training.watch, training.now + 61) == {}


# --- what counts ------------------------------------------------------------------------------------------------------
def make_steps(late: Mapping[int, float], clock: float = 0.0, **changes: Any) -> list[Calls]:
    """Return the calls of ranks of a node that come some seconds late to each of the collectives of a window."""
    steps = {rank: [(step, clock + 0.125 * step + seconds) for step in range(80)] for rank, seconds in late.items()}
    return slow_rank.join_ranks([{rank: answer(calls, **changes) for rank, calls in steps.items()}], {})


def measure_shares(*nodes: Sequence[Calls], error: float = 0.0) -> dict[int, float]:
    """Return the shares of a window, from what each node tells."""
    training = Training(lambda *_: [])
    training.take([])
    training.now = _PERIOD
    training.take([each for node in nodes for each in node], error)
    return {rank: round(share, 3) for rank, share in slow_rank.count_shares(training.watch, training.now).items()}


def test_the_ranks_of_several_nodes_are_compared_by_the_age_of_their_calls() -> None:
    """Each node's clock has an origin of its own; a wait that is shorter than the question took counts for nothing."""
    nodes = []
    for host, late in enumerate(({0: 0.0, 1: 0.0}, {2: 0.025}, {3: 0.0})):
        told = slow_rank.describe_calls(make_steps(late, 1000.0 * host), 1000.0 * host + 10.0, 4096)
        nodes.append(slow_rank.read_calls(json.loads(json.dumps(told)), at=500.0))
    assert measure_shares(*nodes) == {0: 0.0, 1: 0.0, 2: 0.2, 3: 0.0}
    assert measure_shares(*nodes, error=0.03) == {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0}
    assert measure_shares(*nodes[1:]) == {}  # a node has not answered


def test_durations_need_no_clock_and_the_newest_of_many_collectives_stand_for_all() -> None:
    """The rank that came last has spent the least time in the collective."""
    took = {rank: [(step, -(0.005 if rank == 1 else 0.025)) for step in range(80)] for rank in range(4)}
    calls = {rank: answer(own, is_measured=True) for rank, own in took.items()}
    told = slow_rank.describe_calls(slow_rank.join_ranks([calls], {}), now=1e9, most=8)
    assert [number for number, *_ in told[0]["calls"]] == list(range(72, 80))
    assert measure_shares(slow_rank.read_calls(told, at=5.0))[1] == pytest.approx(0.16)


def test_a_rank_that_has_waited_in_another_group_is_not_late_itself() -> None:
    """Ranks 0 and 1, and 2 and 3, are a group each; rank 1 is slow, so rank 0 comes late to that of ranks 0 and 2."""
    groups: dict[str, dict[int, float]] = {"a": {0: 0.0, 1: 0.025}, "b": {2: 0.0, 3: 0.0}}
    groups |= {"c": {0: 0.025, 2: 0.0}, "d": {1: 0.025, 3: 0.0}}
    nodes = [make_steps(late, group=name, size=2) for name, late in groups.items()]
    assert measure_shares(*nodes) == {0: 0.0, 1: 0.2, 2: 0.0, 3: 0.0}


@pytest.mark.parametrize("changes", [{"calls": [["a", 0, 0, 0]]}, {"calls": 7}, {"size": "x"}, {"ranks": [None]}])
def test_what_a_node_tells_is_checked(changes: dict[str, Any]) -> None:
    """It comes over the network: garbage is left out."""
    good = {"group": "a", "size": 2, "is_measured": True, "ranks": [0], "scale": 1, "calls": [[1, 0, -5, -5]]}
    assert [len(slow_rank.read_calls([each, None, {}], 0.0)) for each in (good, {**good, **changes})] == [1, 0]
