"""Simulated training jobs for the hang detection: long pauses of every kind, and hangs if asked for.

All ranks of a job go through the same phases. What a rank shows at a moment follows from the phase, from the time since
its beginning and from a seeded random number; the detector is asked at its own ticks. The job is made hard to judge:
its ranks are at the same place at nearly every look, and some jobs write no line for hours.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from elastic_run.core.failure import hang
from elastic_run.core.failure.hang import HangWatch, Look, Signs
from elastic_run.core.failure.stacks import Place

RANKS = 4
#: Shortest and longest of each pause in seconds, where the timeout is 300.
PHASES = {
    "train": (60, 7200),
    "evaluate": (10, 2400),
    "save": (5, 900),
    "flush": (1, 240),
    "compile": (20, 2400),
    "load": (5, 1800),
    "starve": (1, 240),
    "compute": (10, 2400),
    "feed": (10, 7200),
}
#: Phases in which rank 0 is busy or stuck, and the others wait for it.
_WAITED_FOR = ("evaluate", "save", "flush", "compile", "compute", "feed", "hang", "loop")
#: Place and wait of a rank by phase: of rank 0, and of the others.
_STEP = Place("item", "train.py", 30)
_BARRIER = Place("barrier", "train.py", 40, is_waiting=True)
#: Part of the looks at which a training rank is where nearly all looks find it.
_SAME_PLACE = 0.98


@dataclass
class Counters:
    """What one rank has done so far."""

    cpu: float = 0.0
    children: float = 0.0
    moved: int = 0
    steps: int = 0
    written: int = 0


class Training:
    """One simulated job.

    Args:
        seed: Decides all of it.
        timeout: The hang timeout in seconds, 0 for `auto`.
        tick: Seconds between two ticks, at most.
    """

    def __init__(self, seed: int, timeout: float, tick: float) -> None:
        self.random = random.Random(seed)  # noqa: S311 - a simulation
        self.watch = HangWatch(timeout, longest_tick=tick)
        self.now = 0.0
        self.looks = 0
        self.verdicts: list[tuple[float, str]] = []
        self.has_recorder = self.random.random() < 0.7
        #: Seconds of one training step, and steps between two lines; no line in a third of the jobs.
        self.step = self.random.choice([0.1, 1.0, 20.0])
        self.steps_a_line = self.random.choice([10, 1000, 0])
        self.spins = self.random.random() < 0.5
        self.ranks = [Counters() for _ in range(RANKS)]

    def run(self, seconds: float) -> None:
        """Train for some time, in phases."""
        end = self.now + seconds
        while self.now < end:
            self.play("train")
            self.play(self.random.choice([*PHASES]))

    def play(self, phase: str, seconds: float = 0.0) -> None:
        """Spend a while in one phase."""
        least, most = PHASES.get(phase, (0, 0))
        duration = seconds or self.random.uniform(least, most)
        end = self.now + duration
        while self.now < end:
            passed = self.watch.period * self.random.uniform(1, 1.2)
            self.now += passed
            for number, rank in enumerate(self.ranks):
                self._advance(phase, number, rank, passed)
            self._observe(phase)

    def _advance(self, phase: str, number: int, rank: Counters, passed: float) -> None:
        """Count what a rank does in some seconds."""
        waits = phase in _WAITED_FOR and phase != "hang" and number > 0
        if phase == "train" or (phase in ("evaluate", "compute", "load") and not waits) or (waits and self.spins):
            rank.cpu += passed * self.random.uniform(0.3, 1.0)
        if phase == "train":
            before = rank.steps
            rank.steps = int(self.now / self.step)
            if self.steps_a_line and number == 0 and rank.steps // self.steps_a_line > before // self.steps_a_line:
                rank.written += 80
        if phase in ("save", "feed") and not waits:
            rank.moved += int(passed * 50e6)
        if phase in ("compile", "feed", "loop") and not waits:
            rank.children += passed

    def _observe(self, phase: str) -> None:
        signs = {number: Signs((rank.written,), rank.cpu) for number, rank in enumerate(self.ranks)}
        self.watch, wants_look = hang.tick(self.watch, self.now, signs)
        if not wants_look:
            return
        self.looks += 1
        self.watch = hang.look(self.watch, self.now, {n: self._look(phase, n) for n in range(RANKS)})
        if hang.count_seconds(hang.measure(self.watch, self.now)) >= self.watch.timeout and self.watch.told is None:
            self.verdicts.append((self.now, phase))
            self.watch = hang.tell(self.watch)

    def _look(self, phase: str, number: int) -> Look:
        rank = self.ranks[number]
        seen = Look(phase, _STEP, cpu=rank.cpu, children_cpu=rank.children, moved=rank.moved)
        if phase in _WAITED_FOR and number > 0:
            seen = replace(seen, stack="barrier", place=_BARRIER, is_open=self.has_recorder)
        elif phase in ("train", "evaluate") and self.random.random() > _SAME_PLACE:
            seen = replace(seen, stack=f"{phase} elsewhere")
        # A job that has a GPU waits with its processors in use, in whatever function needs the result.
        if phase == "train" and self.has_recorder:
            seen = replace(seen, is_open=self.random.random() < 0.9)
        return replace(seen, collectives=f"{rank.steps}" if self.has_recorder else "")
