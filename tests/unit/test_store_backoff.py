"""The pauses of one who asks again."""

from __future__ import annotations

import pytest

from elastic_run.store.backoff import Backoff, draw_fraction


def pauses(backoff: Backoff, count: int) -> list[float]:
    """Return the next pauses."""
    return [backoff.next_pause() for _ in range(count)]


def test_pauses_double_up_to_the_longest() -> None:
    """Each pause may be twice as long as the one before, until they are as long as pauses get."""
    assert pauses(Backoff(0.1, 0.5, lambda: 1.0), 5) == pytest.approx([0.1, 0.2, 0.4, 0.5, 0.5])


def test_a_pause_has_any_length_up_to_its_bound() -> None:
    """A pause is the drawn part of its bound: two who failed at the same moment don't come back at the same moment."""
    drawn = iter([0.0, 0.5, 0.25])
    assert pauses(Backoff(0.1, 5.0, lambda: next(drawn)), 3) == pytest.approx([0.0, 0.1, 0.1])


def test_a_thousand_pauses_are_spread_evenly() -> None:
    """What is drawn covers the whole span from 0 to 1."""
    drawn = [draw_fraction() for _ in range(1000)]
    assert all(0 <= each < 1 for each in drawn)
    tenths = {int(10 * each) for each in drawn}
    assert tenths == set(range(10))
