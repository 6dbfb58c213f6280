"""Auditing the books of `accounted_training.py`: is each sample that the model was made of in them, exactly once?"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

#: Samples of each step, as in `accounted_training.py`, which imports torch and therefore isn't imported here.
SAMPLES_PER_STEP = 12


@dataclass(frozen=True, slots=True)
class Segment:
    """Steps that the model has from one life.

    Attributes:
        life: The life's name.
        first: The first step.
        last: The step after the last.
        ranks: How many ranks took part.
    """

    life: str
    first: int
    last: int
    ranks: int


@dataclass(frozen=True, slots=True)
class Progress:
    """What the newest checkpoint says.

    Attributes:
        step: Steps that are in the model.
        loss: The loss at the last of them.
        life: The life that wrote it.
        ranks: How many ranks that life has.
        ancestry: Where the steps come from, in order.
    """

    step: int
    loss: float
    life: str
    ranks: int
    ancestry: tuple[Segment, ...]


def read_progress(directory: Path) -> Progress | None:
    """Return what the newest checkpoint says, None before the first."""
    try:
        document = json.loads((directory / "progress.json").read_text(encoding="ascii"))
    except FileNotFoundError:
        return None
    return Progress(**{**document, "ancestry": tuple(Segment(**segment) for segment in document["ancestry"])})


def read_books(directory: Path, life: str) -> dict[int, dict[int, list[int]]]:
    """Return the books of a life: step -> rank -> samples."""
    books: dict[int, dict[int, list[int]]] = {}
    for path in sorted((directory / "books").glob(f"{life}.*.jsonl")):
        rank = int(path.suffixes[0][1:])
        for line in path.read_text(encoding="ascii").splitlines():
            entry = json.loads(line)
            books.setdefault(entry["step"], {})[rank] = entry["samples"]
    return books


def audit(progress: Progress, directory: Path, samples_per_step: int = SAMPLES_PER_STEP) -> list[str]:
    """Compare a checkpoint's ancestry with the books.

    Args:
        progress: What the checkpoint says.
        directory: Where the books are.
        samples_per_step: Samples 0 to n-1 belong to step 0, the next n to step 1, and so on.

    Returns:
        What is wrong, a line each; empty when all is accounted for.
    """
    wrong = []
    expected = 0
    for segment in progress.ancestry:
        if segment.first != expected:
            wrong.append(f"life {segment.life} begins at step {segment.first}, not {expected}")
        expected = segment.last
        books = read_books(directory, segment.life)
        for step in range(segment.first, segment.last):
            wrong += _audit_step(segment, step, books.get(step, {}), samples_per_step)
    if expected != progress.step:
        wrong.append(f"the ancestry ends at step {expected}, the checkpoint at {progress.step}")
    return wrong


def _audit_step(segment: Segment, step: int, taken: dict[int, list[int]], samples_per_step: int) -> list[str]:
    wrong = []
    if sorted(taken) != list(range(segment.ranks)):
        wrong.append(f"step {step} of life {segment.life}: ranks {sorted(taken)} of {segment.ranks}")
    counts = Counter(sample for samples in taken.values() for sample in samples)
    if counts != Counter(range(step * samples_per_step, (step + 1) * samples_per_step)):
        wrong.append(f"step {step} of life {segment.life}: samples {sorted(counts.elements())}")
    return wrong
