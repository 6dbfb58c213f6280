"""`elastic-run status`: its text, the documents of nodes, and the nodes that a job goes on without."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_run.core.config import Window
from elastic_run.core.job.coordination import list_left_out
from elastic_run.core.job.documents import Promise
from elastic_run.core.job.founding import ONLY_ONE
from elastic_run.core.job.membership import Leaving
from elastic_run.core.job.node_status import DRAIN, STACKS, STATUS, count_members, is_sound, kind_of
from elastic_run.core.job.restart_policy import UNHEALTHY
from elastic_run.core.job.state import Job
from elastic_run.report.status_table import add_behind, find_left_out, find_marks, render_status
from elastic_run.report.text import columns
from tests.unit.test_exclusion import Play


# --- the text, and which workers stand out ----------------------------------------------------------------------------
def worker(rank: int, **changes: Any) -> dict[str, Any]:
    """Return the document of a worker that runs."""
    fields = {
        "rank": rank,
        "local_rank": rank,
        "pid": 100 + rank,
        "state": "sleeping",
        "exit_code": None,
        "cpu": 98.0,
        "memory": 3 << 29,
        "silence": 1.0,
        "last_line": f"step 7 of rank {rank}",
    }
    return {**fields, **changes}


def node(*workers: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the document of a node."""
    fields = {
        "host": "n0",
        "pid": 99,
        "node_rank": 0,
        "nodes": 1,
        "state": "running",
        "program": "train.py",
        "log_dir": "",
        "uptime": 723.0,
        "round": 0,
        "round_uptime": 722.0,
        "restart_count": 1,
        "max_restarts": 3,
        "world_size": len(workers),
        "workers": list(workers),
    }
    return {**fields, **changes}


def test_the_table_has_a_row_for_each_worker_and_names_the_silent_one() -> None:
    """A reader who knows nothing of the tool sees which rank, since when, and what it has written last."""
    workers = [worker(rank) for rank in range(3)]
    late = worker(3, silence=62.4, cpu=97.0, last_line="loading batch 8")
    assert render_status([node(*workers, late)], label="llama", width=80) == [
        "job llama: train.py, running for 12 min 03 s, 4 workers on 1 node, round 0, 1 of 3 restarts used",
        "",
        "RANK  LOCAL  PID  STATE      CPU   MEMORY  SILENT  LAST LINE",
        "   0      0  100  sleeping  98 %  1.5 GiB     1 s  step 7 of rank 0",
        "   1      1  101  sleeping  98 %  1.5 GiB     1 s  step 7 of rank 1",
        "   2      2  102  sleeping  98 %  1.5 GiB     1 s  step 7 of rank 2",
        "   3      3  103  sleeping  97 %  1.5 GiB  62 s !  loading batch 8",
        "",
        "rank 3 is silent: no output for 62.4 s; the median of the other workers is 1.0 s",
        "`elastic-run stacks llama --rank 3` shows where it is",
    ]


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([worker(0, silence=500), worker(1, silence=490), worker(2, silence=0.1)], []),
        ([worker(0, silence=9), worker(1, silence=0.1)], []),
        ([worker(0, silence=41), worker(1, silence=10), worker(2, silence=10)], [(0, "silent")]),
        ([worker(0, silence=0.1), worker(1, silence=490)], []),
        ([worker(rank, silence=0.1 + 490 * (rank % 2)) for rank in range(4)], []),
        ([worker(0, silence=None), worker(1, silence=100)], []),
        ([worker(0, silence=100)], []),
        ([worker(0, cpu=1.0), worker(1), worker(2)], [(0, "idle alone")]),
        ([worker(0, cpu=90.0), worker(1, cpu=0.0), worker(2, cpu=3.0)], [(0, "busy alone")]),
        ([worker(0, cpu=None), worker(1)], []),
        ([worker(0), worker(1, state="stopped", cpu=0.0, silence=70)], [(1, "stopped")]),
        ([worker(0, state="stopped", cpu=0.0), worker(1, state="stopped", cpu=0.0)], []),
        ([worker(0, exit_code=1, silence=100, cpu=None), worker(1), worker(2)], []),
    ],
)
def test_a_worker_stands_out_against_the_median_of_the_others(
    workers: list[dict[str, Any]], expected: list[tuple[int, str]]
) -> None:
    """Only rank 0 writes in most jobs, or a rank of each node: the others are silent, and none of them stands out."""
    assert [(mark.rank, mark.word) for mark in find_marks(workers)] == expected


def test_a_worker_that_is_stopped_is_told_with_what_lets_it_go_on() -> None:
    """The process is not in the wrong place, so its stacks would not help."""
    stopped = worker(1, state="stopped", cpu=0.0, silence=70)
    lines = render_status([node(worker(0), stopped, worker(2))], label="1", width=80)
    mend = "`kill -CONT 101` on its node lets it go on"
    assert lines[-1] == f"rank 1 is stopped (SIGSTOP, or a shell's job control): {mend}"
    assert [line.count("!") for line in lines[3:6]] == [0, 1, 0]


def test_nothing_that_a_worker_writes_reaches_the_terminal_as_a_command() -> None:
    """A last line of escape sequences, wide characters and 10,000 columns fits the width."""
    nasty = worker(0, last_line="\x1b[2J\x07" + "漢" * 5000)
    lines = render_status([node(nasty)], label="1", width=80)
    assert "\x1b" not in "".join(lines)
    assert columns(lines[3]) <= 80


def test_a_job_that_waits_says_for_which_nodes() -> None:
    """The line comes once, also between two rounds, when the workers of the last round have ended."""
    said = "waiting: 3/4 nodes (n0, n1, n3); not in the job: n2 (its agent died)"
    nodes = [node(worker(number, exit_code=-15), host=f"n{number}", waiting=said) for number in (0, 1, 3)]
    lines = render_status(nodes, label="j", width=80)
    assert lines[1] == said
    assert lines.count(said) == 1


def test_silences_that_are_not_known_are_explained() -> None:
    """Where stdout goes past the launcher a question mark stands instead of a wrong number."""
    lines = render_status([node(worker(0, silence=None), worker(1, silence=None))], label="j", width=80)
    assert " ? " in lines[3]
    assert (
        lines[-1]
        == "the output of ranks 0-1 does not pass through elastic-run: --log-dir, --tee=3 or --redirects=3 show it"
    )


def test_rows_that_stand_out_are_bold_on_a_terminal() -> None:
    """And only those."""
    lines = render_status([node(worker(0, silence=99), worker(1), worker(2))], label="j", width=80, color=True)
    assert [line.startswith("\x1b[1m") for line in lines[2:6]] == [False, True, False, False]


def test_gpus_have_columns_where_any_is_known() -> None:
    """Without one the table is as wide as before."""
    workers = [worker(0, gpu=97.4, gpu_memory=61 << 30), worker(1, gpu=None, gpu_memory=None)]
    lines = render_status([node(*workers)], label="llama", width=110)
    assert lines[2] == "RANK  LOCAL  PID  STATE      CPU   MEMORY   GPU   GPU MEM  SILENT  LAST LINE"
    assert lines[3].startswith("   0      0  100  sleeping  98 %  1.5 GiB  97 %  61.0 GiB     1 s  step 7")
    assert lines[4].startswith("   1      1  101  sleeping  98 %  1.5 GiB     -         -     1 s  step 7")


def test_the_last_change_of_nodes_is_told() -> None:
    """As the round's news have it, such as an exclusion; what another node says can't control the terminal."""
    lines = render_status([node(worker(0), news="node h3 is excluded\x1b[2J: 3 incidents")], label="llama", width=80)
    assert lines[1] == "last change: node h3 is excluded: 3 incidents"


def test_nodes_that_the_job_goes_on_without_are_listed() -> None:
    """With the reason, and when they may come back; only the coordinator's node names them."""
    excluded = {
        "host": "n7",
        "kind": "excluded",
        "reason": "exit code 77 is listed",
        "seconds": 61.0,
        "expires": 3539.0,
    }
    unhealthy = {"host": "n8", "kind": "unhealthy", "reason": "check.sh: exit code 1", "seconds": None, "expires": None}
    forever = {**excluded, "host": "n9", "expires": None}
    nodes = [node(worker(0), left_out=[]), node(worker(1), left_out=[excluded, unhealthy, forever])]
    lines = render_status(nodes, label="llama", width=80)
    assert [line for line in lines if line.startswith("left out")] == [
        "left out: n7 is excluded for 61.0 s: exit code 77 is listed; it may join again in 58 min 59 s",
        "left out: n8 is unhealthy: check.sh: exit code 1; it may join again when its launcher is started",
        "left out: n9 is excluded for 61.0 s: exit code 77 is listed; it may not join this job again",
    ]


@pytest.mark.parametrize(
    "left_out",
    [
        None,
        7,
        {"host": "x"},
        ["x"],
        [{}],
        [{"host": 1}],
        [{"host": "x", "kind": "excluded", "reason": "r", "expires": "1"}],
    ],
)
def test_a_strangers_list_of_left_out_nodes_is_passed_over(left_out: object) -> None:
    """Another release, or a stranger, may send anything."""
    assert find_left_out([node(worker(0), left_out=left_out)]) == []


@pytest.mark.parametrize(
    "kept",
    [
        {},
        {"used": 1, "size": None},
        {"used": 1, "size": 2, "label": 7, "age": 1.0},
        {"used": 1, "size": 2, "label": "7"},
        {"used": float("inf"), "size": 2},
    ],
)
def test_a_strangers_kept_state_is_passed_over(kept: dict[str, object]) -> None:
    """The command shows the rest, whatever a node of another release sends."""
    lines = [
        render_status([node(worker(0), kept_state=state)], label="llama", width=80)
        for state in (kept, {"used": 1 << 20, "size": 2 << 20, "label": "7", "age": 2.0})
    ]
    found = [[line for line in each if line.startswith("kept state")] for each in lines]
    assert found == [[], ["kept state: step 7, 2.0 s old, 1 MiB of 2 MiB"]]


def test_a_column_shows_how_long_the_others_waited_where_a_node_knows_it() -> None:
    """The first node of a job tells it of all ranks; garbage of another node is left out."""
    nodes = [node(worker(0), behind=[[0, 0.0], [1, 0.226]]), node(worker(1), behind=[[2], "x", [1, "y"]])]
    nodes.append(node(worker(2), behind=7))
    add_behind(nodes)
    head, *rows = render_status(nodes, label="llama", width=100)[2:]
    end = head.index("BEHIND") + 6
    assert [row[end - 6 : end].strip() for row in (head, *rows)] == ["BEHIND", "0 %", "23 %", "-"]


# --- documents that nodes send where somebody asks --------------------------------------------------------------------
def document(**fields: Any) -> dict[str, Any]:
    """Return a node's document."""
    node = dict.fromkeys(("node_rank", "nodes", "round_uptime", "world_size"))
    node |= dict.fromkeys(("uptime", "round", "restart_count", "max_restarts"), 0)
    node |= dict.fromkeys(("state", "program", "log_dir", "news"), "")
    return {**node, "host": "a", "pid": 1, "workers": [worker_part()], "round_id": "1/1/a", "round_nodes": 1, **fields}


def worker_part(**fields: Any) -> dict[str, Any]:
    """Return a worker's part of a document."""
    unknown = dict.fromkeys(("pid", "exit_code", "cpu", "memory", "gpu", "gpu_memory", "silence"))
    return {**unknown, "rank": 0, "local_rank": 0, "state": "running", "last_line": "x", **fields}


def test_a_node_answers_each_kind_of_question_with_its_own_fields() -> None:
    """An unknown question, of another release, is taken for one about the state; unknown fields are passed over."""
    assert is_sound(document(mood="good"))
    assert not is_sound(document(), STACKS)
    drained = {"host": "a", "pid": 1, "node_rank": None, "is_leaving": True, "workers": [], "asked": "drain 3 a"}
    assert is_sound({**drained, "round_id": "", "round_nodes": 0}, "drain 3 a")
    assert [kind_of(question) for question in ("drain 3 a", "stacks", "mood")] == [DRAIN, STACKS, STATUS]


@pytest.mark.parametrize(
    "fields",
    [
        {"host": 3},
        {"state": None},
        {"pid": True},
        {"uptime": float("nan")},
        {"round_id": None},
        {"workers": [{}]},
        {"workers": ["x"]},
        {"workers": [worker_part(pid=True)]},
        {"workers": [worker_part(silence="long")]},
        {"workers": [worker_part(cpu=float("inf"))]},
    ],
)
def test_what_is_no_document_is_passed_over(fields: dict[str, Any]) -> None:
    """A node of another release, or a stranger, can't break the command of a user."""
    assert not is_sound(document(**fields))


@pytest.mark.parametrize(
    ("rounds", "counted"),
    [
        ([], (0, 0)),
        (["", ""], (0, 0)),
        (["r", "r", "r"], (3, 0)),
        (["r", "", "", "r"], (3, 1)),
        (["r", "s", "s", ""], (3, 1)),
        (["r", "r", "r", "r"], (3, 0)),
    ],
)
def test_nodes_are_counted_in_the_round_of_most(rounds: list[str], counted: tuple[int, int]) -> None:
    """Nodes that wait, and nodes of an earlier round, answer for no node of this round."""
    assert count_members([{"round_id": name, "round_nodes": 3 if name else 0} for name in rounds]) == counted


# --- nodes that the job goes on without -------------------------------------------------------------------------------
def play(period: Window | None = None) -> Play:
    """Let three nodes be a job of which one is excluded by an exit code."""
    job = Play(["a", "b", "c"], min_nodes=1, exclude_exit_codes=(77,), exclude_after=period)
    job.now = 40.0
    job.fail("b", code=77)
    return job


def test_an_excluded_machine_is_listed_until_it_may_join_again() -> None:
    """With its host, its reason, and the seconds that are left."""
    job = play(Window(2, 3600.0))
    (found,) = list_left_out(job.job, 700.0)
    assert found == {
        "host": "b",
        "kind": "excluded",
        "reason": "exit code 77 is listed in --exclude-exit-codes: b fails",
        "seconds": 600.0,
        "expires": 3000.0,
    }
    assert list_left_out(job.job, 3701.0) == []


def test_an_exclusion_without_a_period_lasts() -> None:
    """There is nothing to count down."""
    (found,) = list_left_out(play().job, 9e6)
    assert found["expires"] is None


def test_an_unhealthy_node_is_listed_until_its_host_is_back() -> None:
    """A node that has left for another reason is not in the list."""
    job = Play(["a", "b", "c"], min_nodes=1)
    job.small_job.feed("c", Leaving("signal"))
    job.small_job.feed("b", Leaving(UNHEALTHY, "check.sh ended with exit code 1"))
    (found,) = list_left_out(job.job, 5.0)
    assert (found["host"], found["kind"], found["seconds"], found["expires"]) == ("b", "unhealthy", None, None)
    assert found["reason"] == "check.sh ended with exit code 1"
    job.join("again", host="b")
    assert list_left_out(job.job, 5.0) == []


def test_a_job_that_has_not_begun_leaves_nobody_out() -> None:
    """Before the first node has joined there is no configuration."""
    assert list_left_out(Job(Promise(), ONLY_ONE, 0.0), 0.0) == []
