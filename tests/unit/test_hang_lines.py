"""The words of a hang: in the report the rank that the others wait for comes first."""

from __future__ import annotations

from elastic_run.core.failure.hang import Stillness
from elastic_run.core.failure.job_result import RecorderFinding
from elastic_run.core.failure.stacks import Place
from elastic_run.records import replace
from elastic_run.report import stack_lines

_REDUCES = Stillness(Place("all_reduce", "/code/train.py", 88, is_waiting=True), waits=True, same=62.0, idle=62.0)
_BACKWARD = Stillness(Place("backward", "/code/train.py", 90), waits=True, same=62.0, idle=62.0)
_LOADS = Stillness(Place("load_batch", "/code/data.py", 41), waits=False, same=63.0, idle=63.0)


def test_the_rank_that_the_others_wait_for_comes_last() -> None:
    """With its place and the seconds for which it has been there; the first line and the report begin with it."""
    assert [*stack_lines.hang_verdict({0: _REDUCES, 1: _LOADS, 2: _REDUCES})] == [
        "the job hangs: no progress of any rank for 62.0 s; look at rank 1: other ranks wait for it",
        "  ranks 0, 2 wait in all_reduce (train.py:88), 62.0 s",
        "  rank 1 is in load_batch (data.py:41), 63.0 s",
    ]
    assert stack_lines.hang_detail({0: _REDUCES, 1: _LOADS}) == (
        "no progress of any rank for 62.0 s: rank 1 is in load_batch (data.py:41), 63.0 s; "
        "rank 0 waits in all_reduce (train.py:88), 62.0 s"
    )


def test_without_a_difference_no_rank_is_to_be_looked_at() -> None:
    """Where all ranks wait, or none does, the first line accuses nobody; of several it names all."""
    for same in (_REDUCES, _LOADS):
        assert next(stack_lines.hang_verdict({0: same, 1: same})) == "the job hangs: no progress of any rank for " + (
            "62.0 s" if same is _REDUCES else "63.0 s"
        )
    several = {0: _REDUCES, 1: _LOADS, 2: _LOADS}
    assert next(stack_lines.hang_verdict(several)).endswith("; look at ranks 1-2: other ranks wait for them")


def test_a_rank_that_has_ended_is_what_the_others_wait_for() -> None:
    """It stands in the first line, below all places, and first in the report, if a rank waits."""
    assert [*stack_lines.hang_verdict({0: _REDUCES, 2: _REDUCES}, ended=(1,))] == [
        "the job hangs: no progress of any rank for 62.0 s; look at rank 1: it has ended, and other ranks wait for it",
        "  ranks 0, 2 wait in all_reduce (train.py:88), 62.0 s",
        "  rank 1 has ended with exit code 0",
    ]
    assert stack_lines.hang_detail({0: _REDUCES}, ended=(1, 2)) == (
        "no progress of any rank for 62.0 s: ranks 1-2 have ended with exit code 0; "
        "rank 0 waits in all_reduce (train.py:88), 62.0 s"
    )
    assert (
        next(stack_lines.hang_verdict({0: _LOADS}, ended=(1, 2))) == "the job hangs: no progress of any rank for 63.0 s"
    )
    both = next(stack_lines.hang_verdict({0: _REDUCES, 3: _LOADS}, ended=(1, 2)))
    assert both.endswith("; look at rank 3: other ranks wait for it")


def test_the_flight_recorder_comes_first_where_all_ranks_wait() -> None:
    """Then the rank that it names is the odd one; where a rank does not wait or has ended, that tells the cause."""
    finding = RecorderFinding("rank 2 did not join all_reduce number 4 of group 'inner', in which ranks 0-1 wait", (2,))
    other = Stillness(Place("all_reduce", "/code/train.py", 99, is_waiting=True), waits=True, same=62.0, idle=62.0)
    assert stack_lines.hang_detail({0: _REDUCES, 1: _REDUCES, 2: other}, finding=finding) == (
        "rank 2 did not join all_reduce number 4 of group 'inner', in which ranks 0-1 wait; "
        "no progress of any rank for 62.0 s: rank 2 waits in all_reduce (train.py:99), 62.0 s; "
        "ranks 0-1 wait in all_reduce (train.py:88), 62.0 s"
    )
    for ranks, ended in (({0: _REDUCES, 2: _LOADS}, ()), ({0: _REDUCES, 1: other}, (2,))):
        assert stack_lines.hang_detail(ranks, ended, finding) == stack_lines.hang_detail(ranks, ended)
    unknown = RecorderFinding("all ranks of group 'inner' are in all_reduce number 4: no rank is missing")
    assert stack_lines.hang_detail({0: _REDUCES}, finding=unknown).startswith(f"{unknown.text}; no progress ")


def test_a_large_job_takes_one_screen() -> None:
    """Of many places the first and the last are shown, and the number of the other ranks: the odd one out is last."""
    places = {rank: Place("f", "a.py", rank, is_waiting=rank != 17) for rank in range(40)}
    ranks = {rank: Stillness(place, waits=place.is_waiting, same=62.0, idle=62.0) for rank, place in places.items()}
    lines = [*stack_lines.hang_verdict(ranks)]
    assert len(lines) == 14
    assert lines[7] == "  28 ranks elsewhere"
    assert lines[-1] == "  rank 17 is in f (a.py:17), 62.0 s"
    assert stack_lines.hang_detail(ranks).startswith(
        "no progress of any rank for 62.0 s: rank 17 is in f (a.py:17), 62.0 s; "
    )


def test_the_rank_that_does_not_wait_is_the_odd_one() -> None:
    """Also where only the flight recorder knows that the other waits; where all wait, it is the rank that it names."""
    assert stack_lines.find_odd_rank({0: _BACKWARD, 1: _LOADS}) == 1
    assert stack_lines.find_odd_rank({0: _REDUCES, 1: _LOADS, 2: _LOADS, 3: _LOADS}, accused=(0,)) == 1
    assert stack_lines.find_odd_rank({0: _REDUCES, 1: _REDUCES, 2: _BACKWARD}) == 2
    assert stack_lines.find_odd_rank({0: _REDUCES, 1: _REDUCES, 2: _BACKWARD}, accused=(1,)) == 1


def test_a_rank_that_has_ended_is_no_odd_rank() -> None:
    """The flight recorder accuses a rank without a dump; if that rank has ended, one that waits stands for the hang."""
    assert stack_lines.find_odd_rank({0: _REDUCES, 2: _REDUCES}, accused=(1,)) == 0
    assert stack_lines.find_odd_rank({0: _REDUCES, 2: _REDUCES}, accused=(1, 2)) == 2
    assert [*stack_lines.hang_verdict({0: _BACKWARD})][1] == "  rank 0 waits in backward (train.py:90), 62.0 s"


def test_a_rank_that_has_failed_comes_before_others() -> None:
    """Then one whose last output is an exception, then one whose main thread has ended; also if no rank waits."""

    def be(problem: str) -> Stillness:
        return replace(_LOADS, place=Place(problem=problem))

    ranks = {0: _LOADS, 1: be("has ended its main thread, and another thread still runs"), 2: _REDUCES}
    assert stack_lines.find_odd_rank(ranks) == 1
    assert next(stack_lines.hang_verdict({0: _LOADS, 1: ranks[1]})).endswith(
        "; look at rank 1: it has ended the main thread"
    )
    ranks |= {3: be("has written KeyError: 3 and nothing after it, and is in wait (a.py:1)")}
    assert next(stack_lines.hang_verdict(ranks)).endswith(
        "; look at rank 3: it has written an exception and nothing after it"
    )
    ranks |= {rank: be("has raised KeyError: 3, and has not ended: thread t still runs") for rank in (4, 5, 6)}
    assert next(stack_lines.hang_verdict(ranks)).endswith("; look at ranks 4-6: they have failed and not ended")
