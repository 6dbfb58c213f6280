"""The page of a job's history: where phases and ends lie on the scale, how long a round ran, and the curves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from elastic_run.report import job_history
from elastic_run.report.event_log import find_mistake
from elastic_run.report.history_charts import (
    RUNNING,
    STARTING,
    STOPPING,
    WAITING,
    Span,
    draw_resources,
    draw_rows,
    find_span,
)
from elastic_run.report.history_page import _describe_round, _share_out, find_failures
from elastic_run.report.job_history import (
    _DEPTH,
    _STACK_BYTES,
    LINE_LIMIT,
    Agent,
    Job,
    Member,
    Round,
    Worker,
    fold,
    read_lines,
    read_logs,
)
from tests.unit.test_event_log import encode, event

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from elastic_run.report.history_charts import Chart


def at(name: str, time: float, **fields: Any) -> dict[str, Any]:
    """Return an event under its name."""
    return {name: event(name, time=time, **fields)}


def make_member(node: str, *, stopping_at: float | None = None, last_at: float = 0.0) -> Member:
    """Return a node's part in a round that was formed at 0 s and whose workers ran from 10 s on."""
    events = at("workers_started", 10.0) | ({} if stopping_at is None else at("workers_stopping", stopping_at))
    return Member(event("round_formed", time=0.0, rendezvous_s=0.0, agent=node, node=node), last_at, events)


def make_round(*members: Member, number: int = 1, restart: int = 0) -> Round:
    """Return a round of these nodes."""
    formed = event("round_formed", round=number, restart=restart, nodes=len(members), workers=len(members))
    return Round(formed, dict(enumerate(members)))


def test_a_killed_launcher_ends_at_its_last_line() -> None:
    """A mark says that its end is not in the logs."""
    members = make_member("a", stopping_at=60.0, last_at=100.0), make_member("b", last_at=20.0)
    agents = [Agent("a", "a", "job", 0.0, 100.0, ended={"verdict": "success"}), Agent("b", "b", "job", 0.0, 20.0)]
    job = Job("job", agents, [make_round(*members)])
    there, killed = draw_rows(job, find_span(job))
    assert there.ends == []
    drawn = [(phase.kind, phase.left, phase.width) for phase in there.phases]
    assert drawn == [(STARTING, 0.0, 100.0), (RUNNING, 100.0, 500.0), (STOPPING, 600.0, 400.0)]
    assert killed.ends == [200.0]
    assert (killed.phases[-1].left, killed.phases[-1].width) == (100.0, 100.0)


def test_the_shares_of_the_phases_are_those_of_all_time() -> None:
    """Seconds and percent; time of no phase is waiting."""
    job = Job("job", [], [make_round(make_member("a", stopping_at=60.0, last_at=100.0))])
    assert [(kind, *numbers) for kind, _, *numbers in _share_out(job, 100.0)] == [
        (RUNNING, 50.0, 50.0),
        (STARTING, 10.0, 10.0),
        (WAITING, 0.0, 0.0),
        (STOPPING, 40.0, 40.0),
    ]
    assert [seconds for _, _, seconds, _ in _share_out(job, 200.0)] == [50.0, 10.0, 100.0, 40.0]


def test_a_failure_is_drawn_where_its_worker_ended() -> None:
    """Not where its node said something last."""
    member = make_member("a", last_at=100.0)
    member.workers[0] = Worker(0, at("worker_exited", 20.0) | at("worker_failed", 30.0, is_root=True))
    job = Job("job", [Agent("a", "a", "job", 0.0, 100.0)], [make_round(member)])
    (row,) = draw_rows(job, find_span(job))
    assert row.failures == [(200.0, "round 1, restart 0: rank 0 failed")]


def test_a_round_has_the_rank_for_which_the_others_waited_longest() -> None:
    """With its highest percentage of a minute."""
    member = make_member("a", last_at=100.0)
    member.waits = [(20.0, {1: 30.0}), (40.0, {1: 10.0, 2: 4.0})]
    assert "rank 1: 30 %" in _describe_round(make_round(member))


def test_a_line_that_is_longer_than_any_event_is_one_line(tmp_path: Path) -> None:
    """It is cut, and its rest is no line of its own."""
    (tmp_path / "e").write_bytes(b"x" * (3 * LINE_LIMIT) + b"\nnext\n")
    with (tmp_path / "e").open("rb") as file:
        assert list(read_lines(file)) == [b"x" * (LINE_LIMIT + 1), b"next\n"]


def test_of_a_long_log_the_last_part_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page says that a part is left out; the line at the border is not cut."""
    path = str(tmp_path / "events.jsonl")
    lines = [encode([event("resources", round=number, monotonic=number)]) for number in range(100)]
    lines[95] = b"no event\n"
    size = len(lines[50])
    monkeypatch.setattr(job_history, "_LONGEST", 20 * size)
    (tmp_path / "events.jsonl").write_bytes(b"".join(lines[:20]))
    assert (len(read_logs(path).events), read_logs(path).problems) == (20, [])
    whole = b"".join(lines)
    (tmp_path / "events.jsonl").write_bytes(whole)
    logs = read_logs(path)
    assert [each["round"] for each in logs.events] == [*range(80, 95), *range(96, 100)]
    assert logs.problems == [f"{path} has 0 MiB: only the last 0 MiB are read"]
    (mistake,) = logs.mistakes
    assert (mistake.file, mistake.count) == (path, 1)


def test_lines_of_a_round_whose_beginning_is_missing_belong_to_no_other_round() -> None:
    """The middle of a long log is not read."""
    (job,) = fold(
        [
            event("round_formed", round=3, round_id="", node_rank=0, monotonic=1.0),
            event("worker_started", round=3, rank=0, monotonic=2.0),
            event("worker_exited", round=9, rank=0, monotonic=3.0, time=2e9),
            event("workers_stopping", round=9, reason="failure", monotonic=4.0, time=2e9),
            event("first_output", round=3, rank=0, monotonic=5.0, after_s=7.5),
        ]
    )
    (member,) = job.rounds[0].members.values()
    assert (member.events, member.last_at < 2e9) == ({}, True)
    assert list(member.workers[0].events) == ["worker_started", "first_output"]


def test_files_are_read_in_directories_of_directories_and_long_stacks_are_cut(tmp_path: Path) -> None:
    """One log directory holds those of many runs and nodes."""
    run = tmp_path.joinpath(*"abcdefgh"[:_DEPTH])
    run.mkdir(parents=True)
    (run / "stacks.txt").write_bytes(b"x" * (_STACK_BYTES + 1))
    ((path, text),) = read_logs(str(tmp_path)).stacks
    assert path == str(run / "stacks.txt")
    assert text == "x" * _STACK_BYTES + "\n..."


def test_a_round_without_running_workers_ran_for_no_time() -> None:
    """The time that a round ran is that of its longest node; without one it is 0."""
    formed = Member(event("round_formed", time=5.0), 9.0)
    assert _describe_round(make_round(formed))[6] == "0.00 s"
    ran = make_member("a", stopping_at=30.0), make_member("b", stopping_at=50.0)
    assert _describe_round(make_round(*ran))[6] == "40.0 s"


def test_the_verdict_is_that_of_the_last_round() -> None:
    """Launchers that left the job before its last round do not tell how it ended, even if they are more."""
    agents = [Agent(name, name, "job", 0.0, 9.0, ended={"verdict": "node_lost"}) for name in "abc"]
    agents[2].ended = {"verdict": "success"}
    first, last = (make_round(make_member(name)) for name in "ac")
    assert Job("job", agents, [first, last]).verdict == "success"


def test_the_failure_of_a_launcher_that_was_killed_is_the_worker_that_was_not_stopped() -> None:
    """Without a line about the failure, a worker that ended badly by itself is shown, not one that was stopped."""
    member = make_member("a", last_at=30.0)
    for rank, (ended, number, was_stopped) in enumerate(((20.0, "SIGTERM", True), (21.0, "SIGSEGV", False))):
        exited = at("worker_exited", ended, exit_code=None, signal=number, was_stopped=was_stopped)
        member.workers[rank] = Worker(rank, at("worker_started", 10.0) | exited)
    (card,) = find_failures(Job("job", [Agent("a", "a", "job", 0.0, 30.0)], [make_round(member)]))
    assert (card.title, card.uptime) == ("rank 1 on a was killed by SIGSEGV", 11.0)


def make_hang(action: str, *, rounds: int = 1) -> Job:
    """Return a job in which rank 1 kept the others waiting in each round."""
    events = [each for number in range(rounds) for each in _hang_of(number, action)]
    moments = [{"agent": "a", "node": "n1", "time": float(at), "monotonic": float(at)} for at in range(len(events))]
    (job,) = fold([each | moment for each, moment in zip(events, moments, strict=True)])
    return job


def _hang_of(number: int, action: str) -> list[dict[str, Any]]:
    detail = f"no progress of any rank for {number}.5 s: rank 1 is in get"
    found = [
        event("round_formed", round=number, node_rank=0, nodes=1, workers=2, job="a", round_id=""),
        event("worker_started", round=number, rank=1),
        event("hang_found", round=number, rank=1, action=action, detail=detail),
    ]
    if action == "report":
        return found
    return [
        *found,
        event("workers_stopping", round=number, reason="failure", detail=""),
        event("worker_exited", round=number, rank=1, exit_code=None, signal="SIGTERM", was_stopped=True),
        event("worker_failed", round=number, rank=1, exit_code=212, signal=None, cause=f"Hang: {detail}", is_root=True),
    ]


def test_a_hang_that_was_only_reported_has_a_card() -> None:
    """No worker has failed, and the page is where a user looks for it."""
    (card,) = find_failures(make_hang("report"))
    assert card.title == "rank 1 on n1 made no progress"
    assert card.cause == "Hang: no progress of any rank for 0.5 s: rank 1 is in get"
    assert card.rounds == [0]


def test_hangs_that_ended_rounds_are_told_as_hangs() -> None:
    """Not by the signal that stopped the worker; hangs of one rank are one card, however long they lasted."""
    job = make_hang("restart", rounds=2)
    (card,) = find_failures(job)
    assert (card.title, card.rounds) == ("rank 1 on n1 made no progress", [0, 1])
    assert [_describe_round(each)[-1] for each in job.rounds] == ["a hang", "a hang"]


def draw(*readings: tuple[float, list[int], list[float], list[int]]) -> list[Chart]:
    """Draw a job of one node from moments, ranks, seconds of processor time and MiB."""

    def put(name: str, at: float, **fields: Any) -> dict[str, Any]:
        return event(name, agent="a", time=at, monotonic=at, round=0, restart=0, **fields)

    formed = put("round_formed", 0.0, node_rank=0, nodes=1, workers=9, job="a", round_id="")
    started = [put("worker_started", 0.0, rank=rank) for rank in range(9)]
    events = [put("resources", at, ranks=ranks, cpu_s=cpu, memory_mib=memory) for at, ranks, cpu, memory in readings]
    (job,) = fold([formed, *started, *events])
    return draw_resources(job, Span(0.0, 100.0))


def test_curves_of_processor_time_and_memory() -> None:
    """Processor time is what was used between two readings; the path goes from the left to the right edge."""
    cpu, memory = draw((0, [0, 1], [0, 0], [100, 2048]), (50, [0, 1], [50, 5], [300, 2048]), (100, [0], [75], [200]))
    assert (cpu.title, cpu.top, cpu.others) == ("Processor time", "100 %", 0)
    assert [words for _, words, _ in cpu.curves] == ["83 % on average", "10 % on average"]
    assert cpu.curves[0][2] == "M0.0 0.0L500.0 0.0L1000.0 60.0"
    assert [curve[:2] for curve in memory.curves] == [(0, "300 MiB"), (1, "2.0 GiB")]
    assert memory.top == "2.0 GiB"


def test_the_rank_that_stands_out_is_drawn() -> None:
    """Of many ranks six are drawn: those whose processor time is farthest from the median, also below it."""
    ranks = list(range(9))
    used = [40.0] * 9
    used[7] = 0.0
    cpu, _ = draw((0, ranks, [0.0] * 9, [1] * 9), (50, ranks, used, [1] * 9))
    assert [rank for rank, *_ in cpu.curves] == [0, 1, 2, 3, 4, 7]
    assert (len(cpu.curves), cpu.others) == (6, 3)


@pytest.mark.parametrize(
    "readings", [[], [(1, [0], [1], [1])], [(1, [0, 77], [1], [])], [(5, [0], [1], [1]), (5, [1], [1], [1])]]
)
def test_too_few_readings_draw_nothing(readings: list[Any]) -> None:
    """Also if lists differ in length, and of ranks that no line has named."""
    assert draw(*readings) == []


@pytest.mark.parametrize("value", [["x"], [None], [True], [1e300], [float("nan")], [[1]], "12", {"0": 1}])
def test_lists_that_hold_no_numbers_are_no_events(value: object) -> None:
    """Nothing foreign comes into a drawing."""
    assert find_mistake(event("resources", cpu_s=value)) == "has a wrong value of cpu_s (resources)"
