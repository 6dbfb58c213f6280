"""What is judged of a report: the rank that it names first, its cause, and how far up that stands."""

from __future__ import annotations

from dataclasses import replace

from tests.benchmarks.diagnosis.cases import Case, all_cases, choose
from tests.benchmarks.diagnosis.faults import HOSTS, LIGHT, Fault
from tests.benchmarks.diagnosis.summary import make_figures, name_misses
from tests.benchmarks.diagnosis.verdict import closing_lines, judge

_FULL = Fault("disk full", r"No space left on device", LIGHT)
_CASE = Case(_FULL, 1, 4)
_REPORT = """\
elastic-run: a worker has lost a peer
-- elastic-run: train.py failed --- exit code 1 --
cause    rank 1 on vm (local rank 1, pid 7) failed with exit code 1
         at 2026-11-24 02:05:27.024, 0.22 s after its start
         OSError: [Errno 28] No space left on
         device
others   ranks 0, 2-3 were stopped
"""
_TORCHRUN = """\
E1124 02:00 api.py:1 failed (exitcode: 1) local_rank: 1 (pid: 5) of binary: python
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  rank      : 0 (local_rank: 0)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 5)
============================================================
"""


def test_a_cause_counts_where_its_last_words_stand() -> None:
    """A cause that is broken over two lines is complete with the second."""
    verdict = judge(_CASE, [_REPORT], 1.0)
    assert (verdict.has_rank, verdict.has_cause, verdict.line, verdict.is_early) == (True, True, 5, True)


def test_the_first_rank_counts() -> None:
    """A report that names several ranks first, or another one, has missed the rank."""
    for first in ("rank 2", "ranks 1-2", "ranks 1, 3"):
        assert not judge(_CASE, [_REPORT.replace("rank 1", first)], 1.0).has_rank


def test_every_node_has_to_name_it() -> None:
    """One node without a report, or with the cause further down, counts for all."""
    late = _REPORT.replace("         OSError", "         x\n         OSError")
    assert judge(_CASE, [_REPORT, late], 1.0).line == 6
    verdict = judge(_CASE, [_REPORT, "killed"], 1.0)
    assert (verdict.has_rank, verdict.has_cause, verdict.line) == (False, False, 0)
    assert not judge(_CASE, [], None).has_cause


def test_a_host_is_named_instead_of_a_rank() -> None:
    """Where a host has the fault, the first host that a report names counts."""
    case = Case(Fault("host dark", "silent for", HOSTS), 2, 6)
    report = "-- elastic-run: x: too few nodes were left --\ncause    lost: h1 (silent for 1.5 s), h2 waits\n"
    assert judge(case, [report], 1.0, host="h1").has_rank
    assert not judge(case, [report], 1.0, host="h2").has_rank


def test_closing_lines_of_torchrun_are_its_block() -> None:
    """What torchrun logs, and the failures that it takes for others, do not count: its root cause does."""
    assert closing_lines(_TORCHRUN)[0] == "Root Cause (first observed failure):"
    verdict = judge(_CASE, [_TORCHRUN], 1.0)
    assert (verdict.has_rank, verdict.has_cause) == (True, False)


def test_all_cases_differ_and_are_enough() -> None:
    """At least 200 faults are planted, each once; a shortened run takes some of all."""
    cases = all_cases()
    assert len(cases) == len({case.name for case in cases}) >= 200
    some = choose(20)
    assert len(some) <= 20
    assert len({case.fault.place for case in some}) == 3


def test_the_latest_verdict_on_a_hang_has_a_bar() -> None:
    """One that comes 2.1 s after the timeout misses it; faults that are no hangs do not count."""
    verdict = judge(_CASE, [_REPORT], 1.0)
    verdicts = [verdict, replace(verdict, late=0.4), replace(verdict, late=2.1), replace(verdict, late=0.6)]
    (row,) = [figure for figure in make_figures(verdicts, []) if "--hang-timeout to the verdict" in figure.name]
    assert (row.name[:8], row.elastic_run, row.is_met, row.note) == ("3 hangs:", 2.1, False, "median 0.6 s")


def test_misses_are_named() -> None:
    """The note of a share holds the faults that it lacks, the places of one kind together."""
    found, missed = judge(_CASE, [_REPORT], 1.0), judge(Case(_FULL, 2, 4), [_REPORT], 1.0)
    rank, cause, *_ = make_figures([found, missed], [])
    assert (rank.elastic_run, cause.elastic_run) == (50.0, 100.0)
    assert rank.note == "missed: disk full (light, rank 2 of 4)"
    assert cause.note == ""
    other = judge(Case(_FULL, 0, 4), [_REPORT], 1.0)
    assert name_misses([missed, other]) == "missed: disk full (light, rank 2 of 4; light, rank 0 of 4)"
