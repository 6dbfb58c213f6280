"""The words of a hang: in the report the rank that the others wait for comes first."""

from __future__ import annotations

from elastic_run.core.diagnosis.hang import Stillness
from elastic_run.core.diagnosis.stack_groups import Place
from elastic_run.report import hang_lines


def test_the_report_names_the_odd_rank_first() -> None:
    """While the job runs, the odd one out stands last; in the report, where lines are few, it stands first."""
    waiting = Place("all_reduce", "/home/ada/train.py", 88, is_waiting=True)
    other = Place("all_reduce", "/home/ada/train.py", 99, is_waiting=True)
    asleep = Place("load_batch", "/home/ada/data.py", 41)
    places = {0: waiting, 1: other, 2: waiting, 3: asleep, 4: other, 5: other}
    ranks = {rank: Stillness(place, waits=place.is_waiting, same=62.0, idle=62.0) for rank, place in places.items()}
    assert hang_lines.detail(ranks, 62.0).startswith(
        "no progress of any rank for 62.0 s: rank 3 is in load_batch (data.py:41), 62.0 s; ranks "
    )
    assert list(hang_lines.verdict(ranks, 62.0))[-1].startswith("  rank 3 is in load_batch")
    assert hang_lines.find_odd_rank(ranks) == 3
