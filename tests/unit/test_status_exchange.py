"""One node asks all nodes of a job for their state, over a store in memory."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from elastic_run.core.protocol.job_keys import STATUS_ANSWERS, STATUS_REQUEST
from elastic_run.rendezvous.elastic import status_exchange
from elastic_run.rendezvous.elastic.status_exchange import LIMIT, StatusAnswers, gather
from elastic_run.store.jobstore.memory import JobSpace, MemoryJobStore


def document(host: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - values of any field
    """Return a node's document."""
    node = dict.fromkeys(("node_rank", "nodes", "round_uptime", "world_size"))
    node |= dict.fromkeys(("uptime", "round", "restart_count", "max_restarts"), 0)
    node |= dict.fromkeys(("state", "program", "log_dir"), "")
    return {**node, "host": host, "pid": 1, "workers": [worker(0)], **fields}


def worker(rank: int, **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - values of any field
    """Return a worker's part of a document."""
    unknown = dict.fromkeys(("pid", "exit_code", "cpu", "memory", "silence"))
    return {**unknown, "rank": rank, "local_rank": rank, "state": "running", "last_line": "x", **fields}


@pytest.fixture
def space() -> JobSpace:
    """The store's content."""
    return JobSpace()


def answer_from(space: JobSpace, hosts: list[str]) -> threading.Thread:
    """Let nodes answer the next request, each as its sender would."""

    def run() -> None:
        store = MemoryJobStore(space)
        store.wait(STATUS_REQUEST, 20.0)
        for host in hosts:
            asked: list[None] = []
            answers = StatusAnswers(lambda: asked.append(None), lambda: None)  # noqa: B023 - called at once
            answers.note_request(store.get([STATUS_REQUEST])[0])
            assert asked
            answers.add(document(host))
            answers.send(store)
            assert not answers.has_unsent

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_all_nodes_are_asked_and_the_answers_are_removed(space: JobSpace) -> None:
    """The asker has them as soon as the last one has come; garbage of before and between is passed over."""
    store = MemoryJobStore(space)
    old = json.dumps({"version": 1, "node": document("old")}).encode()
    for entry in (old, b"\xff", b"[]", b'{"version": 2}', b'{"version": 1, "node": {"host": 3}}'):
        store.append(STATUS_ANSWERS, entry)
    nodes = answer_from(space, ["a", "b", "c"])
    found = gather(store, expected=3, patience=20.0)
    nodes.join()
    assert sorted(node["host"] for node in found) == ["a", "b", "c"]
    assert store.read(STATUS_ANSWERS, 0, 0.0)[0] == []


@pytest.mark.parametrize(
    "entry",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b'{"version": 1, "node": []}',
        b'{"version": 1, "node": {"host": "a", "pid": 1}}',
        json.dumps({"version": 1, "node": document("a", workers=[{}])}).encode(),
        json.dumps({"version": 1, "node": document("a", workers=[worker(0, pid=True)])}).encode(),
        json.dumps({"version": 1, "node": document("a", workers=[worker(0, silence="long")])}).encode(),
        json.dumps({"version": 1, "node": document("a", workers=[worker(0, cpu=float("nan"))])}).encode(),
        json.dumps({"version": 1, "node": document("a", workers=["x"])}).encode(),
        json.dumps({"version": 1, "node": document("a", state=None)}).encode(),
        json.dumps({"version": 1, "node": {"host": "a", "pid": 1, "workers": []}}).encode(),
        b" " * (LIMIT + 1),
    ],
)
def test_what_is_no_document_is_passed_over(entry: bytes) -> None:
    """A node of another release, or a stranger, can't break the command of a user."""
    assert status_exchange._decode(entry) is None


def test_who_does_not_answer_is_waited_for_only_so_long(space: JobSpace) -> None:
    """The others are shown."""
    nodes = answer_from(space, ["a"])
    found = gather(MemoryJobStore(space), expected=2, patience=0.2)
    nodes.join()
    assert [node["host"] for node in found] == ["a"]


def test_a_request_is_answered_once() -> None:
    """However often it is read; a key that was never written is no request."""
    asked: list[None] = []
    answers = StatusAnswers(lambda: asked.append(None), lambda: None)
    for value in (None, b"1", b"1", None, b"2", b"2"):
        answers.note_request(value)
    assert len(asked) == 2


def test_only_the_newest_answer_waits_and_none_is_too_large() -> None:
    """While the store is away answers don't pile up; last lines go first where there are too many workers."""
    answers = StatusAnswers(lambda: None, lambda: None)
    store = MemoryJobStore(JobSpace())
    workers = [worker(rank, last_line="x" * 512) for rank in range(1000)]
    answers.add(document("first"))
    answers.add(document("second", workers=workers))
    answers.send(store)
    (entry,), _ = store.read(STATUS_ANSWERS, 0, 0.0)
    node = json.loads(entry)["node"]
    assert (node["host"], len(node["workers"]), node["workers"][7]["last_line"]) == ("second", 1000, "")
    answers.add(document("huge", name="x" * LIMIT))
    assert not answers.has_unsent
