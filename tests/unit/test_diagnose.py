"""Evidence to causes: the likeliest first, with how far it is proved and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elastic_run.contract import EXIT_HUNG, HANG
from elastic_run.core.failure import diagnose as kinds
from elastic_run.core.failure.diagnose import diagnose
from elastic_run.core.failure.job_result import JobResult, RecorderFinding, Rule, exit_code_of
from elastic_run.core.failure.root_cause import ExceptionText, OomKills
from elastic_run.core.failure.stacks import STOPPED, Dump, Place, has_not_moved
from elastic_run.core.job.documents import NodeEnds, StuckRank
from elastic_run.report.closing_report import render
from elastic_run.report.failure_documents import describe_ends, read_places
from elastic_run.report.failure_rules import built_in_rules
from tests.support.job_results import explained, worker_end

if TYPE_CHECKING:
    from typing import Any

    from elastic_run.core.failure.root_cause import WorkerEnd

LOST = "Traceback (most recent call last):\nRuntimeError: Connection closed by peer [127.0.0.1]:39320.\n"
IN_DATA = Place("load_batch", "/home/ada/data.py", 41)
_LOADING = (
    "Thread 0x1 (most recent call first):\n"
    '  File "/lib/python3.11/site-packages/trainer.py", line 41 in fetch\n'
    '  File "/home/ada/train.py", line 9 in <module>\n'
)
_SAVING = _LOADING.replace("  File", '  File "/lib/python3.11/site-packages/trainer.py", line 80 in save\n  File', 1)
OWN = "Traceback (most recent call last):\nValueError: bad batch\n"


def ended(root: WorkerEnd | None, verdict: str = "worker_failed", **fields: Any) -> JobResult:
    """Return the end of a job of `train.py`."""
    return JobResult(verdict, 1, "train.py", root=root, **fields)


def named(job: JobResult) -> list[tuple[str, tuple[int, ...], str]]:
    """Return kind, ranks and confidence of each cause."""
    return [(cause.kind, cause.ranks, cause.confidence) for cause in diagnose(job)]


def test_nothing_known_has_no_cause() -> None:
    """Without a failure and without dumps nobody is accused."""
    assert diagnose(ended(None)) == ()
    assert diagnose(ended(None, recorder=RecorderFinding("no rank waits"))) == ()


@pytest.mark.parametrize(
    ("end", "kills", "kind", "confidence"),
    [
        (worker_end(1, 1, OWN), None, kinds.EXCEPTION, kinds.CERTAIN),
        (worker_end(1, 7), None, kinds.END, kinds.CERTAIN),
        (worker_end(1, -11), OomKills(1, 1), kinds.END, kinds.CERTAIN),
        (worker_end(1, -9), None, kinds.END, kinds.CERTAIN),
        (worker_end(1, -9), OomKills(0, 0), kinds.END, kinds.CERTAIN),
        (worker_end(1, -9), OomKills(0, 2), kinds.OOM_KILL, kinds.LIKELY),
        (worker_end(1, 137), OomKills(1, 2), kinds.OOM_KILL, kinds.CERTAIN),
        (worker_end(1, 1, LOST), None, kinds.LOST_PEER, kinds.POSSIBLE),
    ],
)
def test_a_failure_has_its_kind(end: WorkerEnd, kills: OomKills | None, kind: str, confidence: str) -> None:
    """An exception, an end without words, the OOM killer, a lost peer."""
    end.oom_kills = kills
    (found,) = named(ended(end, ends=(end,)))
    assert found == (kind, (1,), confidence)


def test_an_exception_that_may_have_been_handled_is_likely() -> None:
    """The last exception on stderr with much output behind it proves less."""
    end = worker_end(1, 1, OWN + "2026 INFO a line\n" * 40)
    assert named(ended(end, ends=(end,))) == [(kinds.EXCEPTION, (1,), kinds.LIKELY)]


def test_equal_failures_are_one_cause() -> None:
    """A thousand ranks that fail alike are folded, with one that was stopped while it failed; others are not."""
    ends = [worker_end(rank, 1, OWN) for rank in range(1000)]
    other, stopped = worker_end(1001, 3), worker_end(1000, 1, OWN, was_stopped=True)
    (cause,) = diagnose(ended(ends[5], ends=(*ends, other, stopped)))
    assert cause.ranks[:3] == (5, 0, 1)
    assert cause.ranks[-2:] == (999, 1000)
    silent = [worker_end(rank, -9) for rank in range(2)]
    assert diagnose(ended(silent[0], ends=(*silent, other)))[0].ranks == (0, 1)


def test_a_full_disk_of_the_logs_comes_before_what_the_worker_says() -> None:
    """A worker that can't print fails in any way."""
    end = worker_end(1, 1, OWN)
    assert named(ended(end, is_log_disk_full=True)) == [(kinds.LOG_DISK_FULL, (1,), kinds.LIKELY)]


def test_of_lost_peers_the_rank_that_ended_early_is_the_cause() -> None:
    """A rank that had ended with 0 is accused, one that ended after the failure is not."""
    root, early, late = worker_end(0, 1, LOST), worker_end(3, 0, after=-2.0), worker_end(1, 0, after=1.0)
    assert named(ended(root, ends=(root, early, late))) == [
        (kinds.EARLY_EXIT, (3,), kinds.LIKELY),
        (kinds.LOST_PEER, (0,), kinds.POSSIBLE),
    ]
    own = worker_end(0, 1, OWN)
    assert named(ended(own, ends=(own, early))) == [(kinds.EXCEPTION, (0,), kinds.CERTAIN)]


def test_the_flight_recorder_comes_before_lost_peers_and_behind_own_failures() -> None:
    """Its rank is the cause where nothing else is; beside a failure of a worker's own it only supports."""
    finding = RecorderFinding("rank 2 did not join all_reduce number 4", (2,))
    lost, own = worker_end(0, 1, LOST), worker_end(0, 1, OWN)
    assert [cause[:2] for cause in named(ended(lost, ends=(lost,), recorder=finding))] == [
        (kinds.COLLECTIVE, (2,)),
        (kinds.LOST_PEER, (0,)),
    ]
    assert named(ended(own, ends=(own,), recorder=finding))[1] == (kinds.COLLECTIVE, (2,), kinds.POSSIBLE)
    assert named(ended(None, recorder=finding)) == [(kinds.COLLECTIVE, (2,), kinds.LIKELY)]


def test_a_recorder_of_some_ranks_accuses_nobody() -> None:
    """A node that has some of the ranks may lack the dump of the one that is to blame."""
    lost = worker_end(0, 1, LOST)
    finding = RecorderFinding("rank 2 did not join", (2,), is_whole_job=False)
    assert [kind for kind, *_ in named(ended(lost, ends=(lost,), recorder=finding))] == [kinds.LOST_PEER]


def test_early_exit_and_recorder_that_agree() -> None:
    """Where the recorder names the rank that had ended, its end is the cause; where it names another, that one is."""
    root, early = worker_end(0, 1, LOST), worker_end(3, 0, after=-2.0)
    for ranks, first in (((3,), kinds.EARLY_EXIT), ((2,), kinds.COLLECTIVE)):
        found = diagnose(ended(root, ends=(root, early), recorder=RecorderFinding("did not join", ranks)))
        assert found[0].kind == first
        assert {cause.kind for cause in found} == {kinds.EARLY_EXIT, kinds.COLLECTIVE, kinds.LOST_PEER}


def test_different_versions_stand_beside_any_failure() -> None:
    """The failure itself stays the first cause, and the report names the versions with it."""
    said = "torch 2.4.0 on h1; torch 2.13.0 on h0, h2"
    own, lost = worker_end(0, 1, OWN), worker_end(0, 1, LOST)
    for end in (own, lost):
        assert [kind for kind, *_ in named(ended(end, versions=said))][1] == kinds.OTHER_VERSION
    assert render(explained(ended(own, ends=(own,), versions=said)))[3] == f"         the nodes differ: {said}"


def test_the_help_is_that_of_the_first_rule() -> None:
    """The first rule that fits wins, those for signals come last; without a rule there is no help."""
    rules = (Rule("bad loss", "x"), Rule("bad batch", "look at the data"), Rule("batch", "y"))
    end = worker_end(1, 1, OWN)
    assert diagnose(ended(end), rules)[0].help == "look at the data"
    assert diagnose(ended(end))[0].help == ""
    rules_for_all = (*rules, *built_in_rules())
    assert "PYTHONFAULTHANDLER" in diagnose(ended(worker_end(1, -11)), rules_for_all)[0].help


def test_the_report_begins_with_the_rank_that_is_to_blame() -> None:
    """The failure that was seen first stands below it."""
    root = worker_end(0, 1, LOST)
    finding = RecorderFinding("rank 3 calls broadcast as collective number 4, ranks 0-2 call all_reduce", (3,))
    job = ended(root, ends=(root,))
    assert render(explained(job))[1].startswith("cause    rank 0 on")
    job.recorder = finding
    lines = render(explained(job))
    assert lines[1] == "cause    rank 3 calls broadcast as collective number 4, ranks 0-2 call"
    assert lines[3].startswith("first    rank 0 on")
    assert not [line for line in lines if line.startswith("recorder")]
    job.recorder, job.ends = None, (root, worker_end(2, 0, after=-1.0))
    lines = render(explained(job))
    assert lines[1] == "cause    rank 2 ended with code 0, 1.0 s earlier: did it leave the loop early?"
    assert not [line for line in lines[2:] if "leave the loop" in line]


def test_the_report_of_a_hang_names_the_collective_within_five_lines_and_once() -> None:
    """The name of the host may be long. If the text of the hang lacks the finding, the finding has a section."""
    said = "rank 3 did not join all_reduce number 4 of group 'inner', in which ranks 0-2 wait (train.py:118)"
    places = "rank 3 waits in all_reduce (train.py:80), 62.0 s; ranks 0-2 wait in all_reduce (train.py:118), 62.0 s"
    hang = f"no progress of any rank for 62.0 s: {places}"
    for text in (f"{said}; {hang}", hang):
        root = worker_end(3, EXIT_HUNG, host="worker-3.training.ml.example.org", exception=ExceptionText(HANG, text))
        lines = render(explained(ended(root, "hung", ends=(root,), recorder=RecorderFinding(said, (3,)))))
        assert f"Hang: {text}" in " ".join(" ".join(lines).split())
        assert " ".join(" ".join(lines).split()).count("did not join") == 1
        assert ("did not join all_reduce" in " ".join(lines[:5])) == (text != hang)
        assert any(line.startswith("recorder") for line in lines) == (text == hang)


def test_a_rank_that_did_not_stop_is_the_cause_of_lost_peers() -> None:
    """Its stacks before SIGKILL show that it waited for nobody; a rank that waited is not accused."""
    root, other = worker_end(0, 1, LOST), worker_end(1, 1, LOST)
    waited = worker_end(2, -9, was_stopped=True, stuck_at=Place("all_reduce", "/t.py", 8, is_waiting=True))
    stuck = worker_end(3, -9, was_stopped=True, stuck_at=IN_DATA)
    ends = (root, other, waited, stuck)
    assert named(ended(root, ends=ends))[0] == (kinds.STUCK, (3,), kinds.LIKELY)
    lines = render(explained(ended(root, ends=ends)))
    assert lines[1] == "cause    rank 3 is in load_batch (data.py:41): it did not stop, and SIGKILL"
    assert lines[3].startswith("first    rank 0 on")


def test_a_rank_of_another_node_that_did_not_stop_is_the_cause() -> None:
    """The job has found it at its end; the places travel as far as they are needed, and what a node knows is less."""
    root, other = worker_end(0, 1, LOST), worker_end(1, 1, LOST)
    waited = worker_end(2, -9, was_stopped=True, stuck_at=Place("all_reduce", "/t.py", 8, is_waiting=True))
    stuck = worker_end(3, -9, was_stopped=True, stuck_at=IN_DATA)
    assert describe_ends((worker_end(2, -15, was_stopped=True),)) is None
    told = describe_ends((root, other))
    assert told is not None
    assert (told.failed, told.stuck, [error.ranks for error in told.errors]) == (2, (), [2])
    told = describe_ends((waited, stuck))
    assert told == NodeEnds(0, 1, (StuckRank(3, IN_DATA.function, IN_DATA.file, IN_DATA.line),))
    places = read_places(told.stuck)
    assert places == {3: IN_DATA}
    for ends in ((root, other), (root, waited, stuck)):
        causes = named(ended(root, ends=ends, stuck=places))
        assert causes[0] == (kinds.STUCK, (3,), kinds.LIKELY)
        lines = render(explained(ended(root, ends=ends, stuck=places)))
        assert lines[1] == "cause    rank 3 is in load_batch (data.py:41): it did not stop, and SIGKILL"
    # The job as a whole has accused nobody.
    assert [kind for kind, *_ in named(ended(root, ends=(root, other, stuck), stuck={}))] == [kinds.LOST_PEER]


def test_the_texts_of_stuck_ranks_are_cut() -> None:
    """Each node of the job reads them: eight ranks are named, and of a long path the end."""
    place = Place("f", "/d/" * 500 + "t.py", 1)
    told = describe_ends([worker_end(rank, -9, was_stopped=True, stuck_at=place) for rank in range(9)])
    assert told is not None
    assert (told.failed, told.stuck_count, len(told.stuck)) == (0, 9, 8)
    assert len(told.stuck[0].file) == 400
    assert told.stuck[0].file.endswith("/t.py")


def test_many_ranks_that_do_not_stop_are_no_cause() -> None:
    """They save a checkpoint before they end; and beside a failure of its own nobody is accused."""
    lost, own = worker_end(0, 1, LOST), worker_end(0, 1, OWN)
    stuck = [worker_end(rank, -9, was_stopped=True, stuck_at=IN_DATA) for rank in (1, 2)]
    assert [kind for kind, *_ in named(ended(lost, ends=(lost, *stuck)))] == [kinds.LOST_PEER]
    assert [kind for kind, *_ in named(ended(own, ends=(own, stuck[0])))] == [kinds.EXCEPTION]
    assert [kind for kind, *_ in named(ended(own, ends=(own, lost, stuck[0])))] == [kinds.EXCEPTION]


def test_a_rank_that_had_been_there_before_the_stop_is_the_cause_however_few_failed() -> None:
    """It cannot be busy with the stop: of two ranks, or if the launcher stops the others before they fail."""
    root = worker_end(0, 1, LOST)
    moved, held = [worker_end(rank, -9, was_stopped=True, stuck_at=IN_DATA) for rank in (1, 2)]
    held.is_unmoved = True
    barrier = Place("barrier", "/t.py", 8, is_waiting=True)
    waited = worker_end(3, -9, was_stopped=True, stuck_at=barrier, is_unmoved=True)
    ends = (root, moved, held, waited)
    assert named(ended(root, ends=ends))[0] == (kinds.STUCK, (2,), kinds.LIKELY)
    assert [kind for kind, *_ in named(ended(root, ends=(root, waited)))] == [kinds.LOST_PEER]
    told = describe_ends(ends[1:])
    assert told is not None
    assert (told.failed, told.stuck_count, told.unmoved, [stuck.rank for stuck in told.stuck]) == (0, 2, 1, [2, 1])


@pytest.mark.parametrize(
    ("before", "after", "is_unmoved"),
    [
        (Dump(_LOADING), Dump(_LOADING), True),
        (Dump(_LOADING), Dump(_LOADING.replace("41", "42")), False),
        (Dump(_LOADING), Dump(_SAVING), False),
        (None, Dump(_LOADING), False),
        (Dump(), Dump(), False),
        (Dump(problem="shows no Python stacks"), Dump(problem="shows no Python stacks"), False),
        (None, Dump(problem=STOPPED), True),
    ],
    ids=["same", "other line", "handler", "not asked", "no frames", "no Python", "stopped"],
)
def test_a_rank_is_unmoved_if_all_of_its_calls_are_the_same(
    before: Dump | None, after: Dump, *, is_unmoved: bool
) -> None:
    """A handler of SIGTERM is one call more, also where the program's own innermost line is the same."""
    assert has_not_moved(before, after) == is_unmoved


def test_a_hang_is_a_cause_of_its_own() -> None:
    """The stacks prove it, not an exception on stderr."""
    end = worker_end(3, EXIT_HUNG, exception=ExceptionText(HANG, "rank 3 is in load_batch"))
    (cause,) = diagnose(ended(end, ends=(end,)))
    assert (cause.kind, cause.ranks, cause.confidence) == (kinds.HUNG, (3,), kinds.LIKELY)
    assert cause.why == ("no rank made progress", "its stacks at two moments are equal")


def test_lost_nodes_are_the_cause_of_lost_peers() -> None:
    """The job has ended for want of nodes: what their peers said comes below, and a failure of its own above."""
    said = "more than 2 changes of membership; lost: h3 (silent for 6.1 s)"
    lost, own = worker_end(0, 1, LOST), worker_end(0, 1, OWN)
    order = [[kind for kind, *_ in named(ended(end, "nodes_lost", detail=said))] for end in (None, lost, own)]
    assert order == [[kinds.NODE_EVENT], [kinds.NODE_EVENT, kinds.LOST_PEER], [kinds.EXCEPTION, kinds.NODE_EVENT]]
    lines = render(explained(ended(lost, "nodes_lost", ends=(lost,), detail=said)))
    assert lines[1] == f"cause    {said}"
    assert lines[2].startswith("first    rank 0 on")
    assert "lost: h3" not in " ".join(lines[2:])
    assert diagnose(ended(None, "excluded", detail="its GPU"))[0].why == ("its GPU",)


@pytest.mark.parametrize(
    ("verdict", "signal", "root", "code"),
    [
        ("success", None, None, 0),
        ("hung", None, None, EXIT_HUNG),
        ("worker_failed", 15, worker_end(0, 7), 143),
        ("worker_failed", None, worker_end(0, 7), 7),
        ("worker_failed", None, worker_end(0, -9), 137),
        ("worker_failed", None, None, 1),
    ],
)
def test_the_exit_code_is_that_of_the_signal_of_the_worker_or_of_the_verdict(
    verdict: str, signal: int | None, root: WorkerEnd | None, code: int
) -> None:
    """In this order; 128+n stands for signal n."""
    assert exit_code_of(verdict, signal, root) == code
