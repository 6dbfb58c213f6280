"""The event log's schema, its file and its fold: what is torn, foreign or missing never raises."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_run.agent.driver.event_recorder import EventRecorder
from elastic_run.core.config import AgentConfig
from elastic_run.report.event_log import ALWAYS, EVENTS, OF_WORKER, EventFile, find_mistake
from elastic_run.report.history_page import find_failures
from elastic_run.report.job_history import LINE_LIMIT, fold, read_events

_VALUES: dict[str, Any] = {"text": "text", "count": 1, "seconds": 1.5, "yes or no": True, "numbers": [0]}


def event(name: str, **fields: Any) -> dict[str, Any]:
    """Return an event with some value in every field."""
    kind = EVENTS[name]
    every = (*ALWAYS, *(OF_WORKER if kind.is_of_worker else ()), *kind.fields)
    return {each.name: _VALUES[each.type] for each in every} | {"version": 1, "event": name} | fields


def history() -> list[dict[str, Any]]:
    """Return a job of one node with one restart."""
    clock = iter(range(1, 100))

    def put(name: str, **fields: Any) -> dict[str, Any]:
        now = float(next(clock))
        return event(name, agent="a", time=1000.0 + now, monotonic=now, **fields)

    return [
        put("agent_started", round=None, restart=0),
        put("rendezvous_started", round=None, restart=0),
        put("round_formed", round=0, restart=0, node_rank=0, nodes=1, workers=1, job="a", round_id=""),
        put("worker_started", round=0, restart=0, rank=0),
        put("workers_started", round=0, restart=0),
        put("first_output", round=0, restart=0, rank=0),
        put("silence", round=0, restart=0, rank=0),
        put("resources", round=0, restart=0),
        put("hang_found", round=0, restart=0, rank=0),
        put("waits", round=0, restart=0),
        put("slow_rank_found", round=0, restart=0, rank=0),
        put("worker_exited", round=0, restart=0, rank=0, exit_code=1, signal=None),
        put("workers_stopping", round=0, restart=0, reason="failure"),
        put("worker_failed", round=0, restart=0, rank=0, exit_code=1, signal=None),
        put("workers_stopped", round=0, restart=0),
        put("signal_received", round=0, restart=0),
        put("pause_started", round=0, restart=0),
        put("round_formed", round=1, restart=1, node_rank=0, nodes=1, workers=1, job="a", round_id=""),
        put("round_warned", round=1, restart=1),
        put("lines_lost", round=1, restart=1, lines=3),
        put("agent_ended", round=1, restart=1, verdict="success"),
    ]


def encode(events: list[dict[str, Any]]) -> bytes:
    """Return events as a file's bytes."""
    return b"".join(json.dumps(each).encode() + b"\n" for each in events)


def test_every_event_of_the_schema_is_in_the_example_and_fits() -> None:
    """So that the tests below try the fold of each."""
    assert {each["event"] for each in history()} == set(EVENTS)
    assert {find_mistake(each) for each in history()} == {""}


def test_a_history_is_folded() -> None:
    """Rounds, restarts, members, workers and ending."""
    (job,) = fold(history())
    assert [(each.number, each.formed["restart"]) for each in job.rounds] == [(0, 0), (1, 1)]
    assert (job.restarts, job.verdict, job.agents[0].lost_lines) == (1, "success", 3)
    worker = job.rounds[0].members[0].workers[0]
    assert (worker.events["worker_exited"]["exit_code"], len(worker.silences)) == (1, 2)
    assert "worker_failed" in worker.events
    assert len(fold([*history(), *history()])) == 1, "the same lines from two files count once"


def test_a_log_that_ends_anywhere_is_folded() -> None:
    """Kill -9 in the middle of a write: each whole line counts, and the torn one is named."""
    whole = encode(history())
    for length in range(0, len(whole), 7):
        lines = whole[:length].splitlines(keepends=True)
        events, mistakes = read_events(lines, "e")
        is_torn = bool(length) and not whole[:length].endswith((b"\n", b"}"))
        assert (mistakes is not None) == is_torn
        fold(events)


def test_a_log_from_which_any_line_is_missing_is_folded() -> None:
    """Also the line that begins a round."""
    for missing in range(len(history())):
        fold([each for index, each in enumerate(history()) if index != missing])
        fold(history()[missing:])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"hello\n", "is not a whole line of JSON"),
        (b"\xff\xfe\x00\n", "is not a whole line of JSON"),
        (b"[" * 100_000, "is longer than any event"),
        (b"[" * 50_000, "is not a whole line of JSON"),
        (b"[1, 2]\n", "is not a JSON object"),
        (b"null\n", "is not a JSON object"),
        (b'{"time": 1}\n', "is not an event of elastic-run"),
        (b'{"version": 2, "event": "silence"}\n', "has version 2; this release reads version 1"),
        (b'{"version": true, "event": "silence"}\n', "has version True; this release reads version 1"),
        (b'{"version": 1, "event": "__class__"}\n', "has an unknown event: '__class__'"),
        (b'{"version": 1, "event": ["x"]}\n', "has an unknown event: ['x']"),
        (encode([event("round_formed", time=float("nan"))]), "has a wrong value of time (round_formed)"),
        (encode([event("round_formed", nodes=10**400)]), "has a wrong value of nodes (round_formed)"),
        (encode([event("round_formed", nodes=True)]), "has a wrong value of nodes (round_formed)"),
        (encode([event("round_formed", nodes=None)]), "has a wrong value of nodes (round_formed)"),
        (encode([event("worker_exited", rank="0")]), "has a wrong value of rank (worker_exited)"),
    ],
)
def test_what_is_no_event_is_counted_and_named(line: bytes, reason: str) -> None:
    """With the number of the first such line."""
    events, mistakes = read_events([b"\n", *encode(history()).splitlines(keepends=True), line, line], "e.jsonl")
    assert len(events) == len(history())
    assert mistakes is not None
    assert (mistakes.file, mistakes.count, mistakes.first_line) == ("e.jsonl", 2, len(history()) + 2)
    assert mistakes.reason == reason


def test_our_longest_line_is_read() -> None:
    """The texts of an event are cut to sizes that fit into one line."""
    assert len(encode([event("agent_ended", detail="\U0001f600" * 2000, cause="\U0001f600" * 2000)])) < LINE_LIMIT


def test_new_fields_and_two_jobs_of_one_id_are_understood() -> None:
    """A later release adds fields; the same id may be used again."""
    again = [each | {"agent": "b", "job": "b", "new": 1} for each in history()]
    late = [event("agent_started", agent="c", time=1002.5), event("agent_ended", agent="c", monotonic=9.0)]
    jobs = fold([*again, *late, *history()])
    assert [sorted(agent.name for agent in job.agents) for job in jobs] == [["b"], ["a", "c"]]


def test_lines_of_several_writers_in_one_file_are_whole(tmp_path: Path) -> None:
    """Two launchers that were given the same file append whole lines, in their own order each."""
    path = tmp_path / "e"
    writers = [EventFile(str(path), lambda _: b"", lambda *_: None) for _ in range(2)]

    def write(writer: EventFile, name: str) -> None:
        for number in range(2000):
            writer.write(f"{name} {number} {'x' * 300}\n".encode())

    threads = [threading.Thread(target=write, args=pair) for pair in zip(writers, "ab", strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for writer in writers:
        writer.close(10)
    lines = [line.split() for line in path.read_text(encoding="ascii").splitlines() if line]
    for name in "ab":
        assert [int(line[1]) for line in lines if line[0] == name] == list(range(2000))
    assert all(len(line) == 3 and len(line[2]) == 300 for line in lines)


def test_a_line_that_somebody_left_unfinished_is_ended_first(tmp_path: Path) -> None:
    """A launcher that was killed within a line spoils no line of the others."""
    path = tmp_path / "e"
    file = EventFile(str(path), lambda _: b"", lambda *_: None)
    file._append(b"one\n")
    with path.open("ab") as other:
        other.write(b'{"half": ')
    file.write(b"two\n")
    file.write(b"three\n")
    file.close(10)
    assert path.read_bytes() == b'one\n{"half": \ntwo\nthree\n'


def test_what_is_lost_is_told_once_and_counted(tmp_path: Path) -> None:
    """A full pipe takes nothing; when it takes lines again, the first says how many are missing."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    errors: list[OSError] = []
    file = EventFile(str(path), b"%d lost\n".__mod__, lambda _, error: errors.append(error))
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    line = b"x" * 4095 + b"\n"
    for _ in range(40):
        file._append(line)
    while os.read(reader, 1 << 16).endswith(line):
        try:
            os.set_blocking(reader, False)
            rest = os.read(reader, 1 << 16)
        except BlockingIOError:
            break
        assert rest
    file._append(b"again\n")
    assert os.read(reader, 1 << 16).endswith(b" lost\nagain\n")
    assert len(errors) == 1
    os.close(reader)
    file.close(10)


def test_a_closed_file_leaves_no_descriptor(tmp_path: Path) -> None:
    """A program that runs many jobs does not run out of descriptors."""
    before = [*Path("/proc/self/fd").iterdir()]
    EventFile(str(tmp_path / "e"), lambda _: b"", lambda *_: None).close(10)
    assert [*Path("/proc/self/fd").iterdir()] == before


def test_a_log_that_can_not_be_opened_is_told_and_costs_nothing_else(tmp_path: Path) -> None:
    """The directory of the log is gone, or is a file, since the command line was checked."""
    said: list[str] = []
    (tmp_path / "plain").touch()
    options = SimpleNamespace(agent_config=AgentConfig(events_file=str(tmp_path / "gone" / "e")))
    context: Any = SimpleNamespace(
        hostname="node1",
        run_id="job",
        log_directory=str(tmp_path / "plain"),
        options=options,
        metrics_port=None,
        has_temporary_logs=False,
        logs_specs=None,
        loop=None,
        say=said.append,
    )
    EventRecorder(context).begin()
    assert said == [
        f"the event log {tmp_path}/plain/events.jsonl can't be written: Not a directory; this does not affect the job",
        f"the event log {tmp_path}/gone/e can't be written: No such file or directory; this does not affect the job",
    ]


def test_equal_failures_are_one_card_and_the_last_kind_is_first() -> None:
    """With the rounds and the nodes that failed so; a failure of a peer's is not the first."""
    events = []
    for number, (node, cause) in enumerate([("n1", "a"), ("n2", "b"), ("n2", "a"), ("n1", "a")]):
        for index, name in enumerate(("n1", "n2")):
            base = {"agent": name, "node": name, "round": number, "restart": number, "rank": index, "local_rank": 0}
            clock = iter(range(number * 10, number * 10 + 10))
            for kind, fields in (
                ("round_formed", {"job": "j", "round_id": f"r{number}", "node_rank": index, "nodes": 2}),
                ("worker_started", {}),
                ("worker_exited", {"exit_code": 1, "signal": None, "was_stopped": False}),
                (
                    "worker_failed",
                    {"exit_code": 1, "signal": None, "cause": cause, "is_consequence": name != node, "where": "t.py:1"},
                ),
            ):
                now = float(next(clock))
                events.append(event(kind, time=now, monotonic=now, **{**base, **fields}))
    (job,) = fold(events)
    cards = find_failures(job)
    assert [(card.cause, card.rounds, card.nodes) for card in cards] == [
        ("a", [0, 2, 3], {"n1": 2, "n2": 1}),
        ("b", [1], {"n2": 1}),
    ]
    assert cards[0].others == [1]
