"""One node asks all nodes of a job for their state, over a store in memory."""

from __future__ import annotations

import json
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run.core.protocol.job_keys import STATUS_REQUEST
from elastic_run.core.protocol.node_status import DRAIN, STACKS, STATUS, MemberCount, is_sound, kind_of
from elastic_run.rendezvous.elastic import status_exchange
from elastic_run.rendezvous.elastic.status_exchange import LIMIT, StatusAnswers, find_stream, gather
from elastic_run.store.errors import StoreConnectionError
from elastic_run.store.jobstore.memory import JobSpace, MemoryJobStore
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The fields of a node of a round of one node, and of a node that waits for a round.
IN_ROUND = {"round_id": "1/1/a", "round_nodes": 1}
WAITS = {"round_id": "", "round_nodes": 0}


def document(host: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - values of any field
    """Return a node's document."""
    node = dict.fromkeys(("node_rank", "nodes", "round_uptime", "world_size"))
    node |= dict.fromkeys(("uptime", "round", "restart_count", "max_restarts"), 0)
    node |= dict.fromkeys(("state", "program", "log_dir", "news"), "")
    return {**node, "host": host, "pid": 1, "workers": [worker(0)], **IN_ROUND, **fields}


def worker(rank: int, **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - values of any field
    """Return a worker's part of a document."""
    unknown = dict.fromkeys(("pid", "exit_code", "cpu", "memory", "gpu", "gpu_memory", "silence"))
    return {**unknown, "rank": rank, "local_rank": rank, "state": "running", "last_line": "x", **fields}


@pytest.fixture
def space() -> JobSpace:
    """The store's content."""
    return JobSpace()


def stacks_document(host: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - values of any field
    """Return a node's answer with stacks."""
    worker = {"rank": 0, "text": "", "problem": "is stopped", "details": "", "silence": None, **fields}
    return {"host": host, "pid": 1, "workers": [worker], **IN_ROUND}


def drain_document(host: str, name: str) -> dict[str, Any]:
    """Return the answer of a node to a drain of the node with this name: the named node leaves, the others stay."""
    node = {"host": host, "pid": 1, "node_rank": None, "is_leaving": host == name, "workers": []}
    return {**node, "asked": f"drain 3 {name}", **IN_ROUND}


def answer_from(
    space: JobSpace, hosts: list[str], question: str = STATUS, *, nodes: int = 0, spares: list[str] | None = None
) -> threading.Thread:
    """Answer the next request as nodes do: first as the spares, then as the nodes of the round.

    Args:
        space: The store's content.
        hosts: The nodes of the round that answer.
        question: What is asked.
        nodes: Number of nodes of the round, if not all of them answer.
        spares: Nodes that wait for a round; they answer before the others.
    """

    def run() -> None:
        store = MemoryJobStore(space)
        store.wait(STATUS_REQUEST, 20.0)
        for host in (*(spares or ()), *hosts):
            asked: list[str] = []
            answers = StatusAnswers(asked.append, lambda: None)
            answers.note_request(store.get([STATUS_REQUEST])[0])
            assert asked == [question]
            answer = document(host) if question == STATUS else stacks_document(host)
            place = {**IN_ROUND, "round_nodes": nodes or len(hosts)} if host in hosts else WAITS
            answers.add(answer | place, question)
            answers.send(store)
            assert not answers.has_unsent

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_all_nodes_are_asked_and_the_answers_are_removed(space: JobSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The asker has them as soon as the last one has come, and asks once; garbage of before is passed over."""
    store = MemoryJobStore(space)
    write, questions = store.write, []

    def note(values: Mapping[str, bytes]) -> None:
        questions.append(values[STATUS_REQUEST])
        write(values)

    monkeypatch.setattr(store, "write", note)
    old = json.dumps({"version": 1, "node": document("old")}).encode()
    for entry in (old, b"\xff", b"[]", b'{"version": 2}', b'{"version": 1, "node": {"host": 3}}'):
        store.append(find_stream(STATUS), entry)
    nodes = answer_from(space, ["a", "b", "c"])
    found = gather(store, wait_limit=20.0)
    nodes.join()
    assert sorted(node["host"] for node in found) == ["a", "b", "c"]
    assert store.read(find_stream(STATUS), 0, 0.0)[0] == []
    assert len(questions) == 1


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
    nodes = answer_from(space, ["a"], nodes=2)
    found = gather(MemoryJobStore(space), wait_limit=0.2)
    nodes.join()
    assert [node["host"] for node in found] == ["a"]


def test_a_spare_does_not_take_the_place_of_a_node_that_has_not_answered(space: JobSpace) -> None:
    """A node of the round is waited for, however many spares answer before it."""
    nodes = answer_from(space, ["a", "b"], spares=["s", "t"])
    found = gather(MemoryJobStore(space), wait_limit=20.0)
    nodes.join()
    assert sorted(node["host"] for node in found) == ["a", "b", "s", "t"]


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
    assert MemberCount([{"round_id": name, "round_nodes": 3 if name else 0} for name in rounds]).total() == counted


def test_a_node_that_answers_again_counts_once() -> None:
    """It may be in another round by then."""
    before, after = ({"round_id": name, "round_nodes": 3} for name in ("r", "s"))
    count = MemberCount([before, before])
    count.add(before, -1)
    count.add(after)
    count.add(after)
    assert count.total() == (3, 1)


def test_two_drains_at_once_are_about_two_nodes(space: JobSpace) -> None:
    """An asker takes no answer to the other question, and a node answers both."""
    store = MemoryJobStore(space)
    answers = StatusAnswers(lambda _: None, lambda: None)
    for name in ("a", "b"):
        answers.add(drain_document("a", name), f"drain 3 {name}")
    answers.send(store)
    entries, _ = store.read(find_stream(DRAIN), 0, 0.0)
    for name in ("a", "b"):
        found = [node for entry in entries if (node := status_exchange._decode(entry, f"drain 3 {name}"))]
        assert found == [drain_document("a", name)]


class BrokenStore(MemoryJobStore):
    """A store that is lost when an answer, or nothing, has come."""

    def read(self, stream: str, position: int, wait_limit: float) -> tuple[list[bytes], int]:
        """Read what is there; there is nothing to wait for."""
        entries, end = super().read(stream, position, 0.0)
        if wait_limit and not entries:
            message = "gone"
            raise StoreConnectionError(message)
        return entries, end


def test_the_answer_of_a_node_that_takes_the_store_with_it_counts(space: JobSpace) -> None:
    """The drained node may serve the store, and be gone before the other nodes have answered."""
    with pytest.raises(StoreConnectionError):
        gather(BrokenStore(space), wait_limit=20.0, question="drain 3 a")
    answer = drain_document("a", "a") | {"round_nodes": 2}
    store = BrokenStore(space)
    on_write = store.write

    def write(values: dict[str, bytes]) -> None:
        on_write(values)
        store.append(find_stream(DRAIN), json.dumps({"version": 1, "drain": answer}).encode())

    store.write = write  # type: ignore[assignment,method-assign] # the node answers as soon as it is asked
    assert gather(store, wait_limit=20.0, question="drain 3 a") == [answer]


def test_the_question_is_for_stacks(space: JobSpace) -> None:
    """Answers to another question, which may come at the same time, are passed over."""
    store = MemoryJobStore(space)
    nodes = answer_from(space, ["a", "b"], STACKS)
    found = gather(store, wait_limit=20.0, question=STACKS)
    nodes.join()
    assert sorted(node["host"] for node in found) == ["a", "b"]
    assert found[0]["workers"][0]["problem"] == "is stopped"
    status = json.dumps({"version": 1, "node": document("a")}).encode()
    assert status_exchange._decode(status, STACKS) is None
    wrong = json.dumps({"version": 1, "stacks": stacks_document("a", silence="long")}).encode()
    assert status_exchange._decode(wrong, STACKS) is None


def test_a_question_may_be_about_a_node() -> None:
    """Nodes get its words; the answer has to say whether the node leaves. An unknown kind is one about the state."""
    asked: list[str] = []
    answers = StatusAnswers(asked.append, lambda: None)
    for value in (None, b"1a drain 3 node7", b"1b news of the future", b"\xff\xfe", b"x" * 1000):
        answers.note_request(value)
    assert asked == ["drain 3 node7", "news of the future", "", ""]
    assert [kind_of(question) for question in asked] == [DRAIN, STATUS, STATUS, STATUS]
    node = drain_document("a", "node7")
    assert is_sound(node, "drain 3 node7")
    assert not is_sound({**node, "is_leaving": 1}, "drain 3 node7")


def test_a_question_that_another_has_hidden_is_asked_again(space: JobSpace) -> None:
    """After a part of the time; who has answered already counts."""
    store = MemoryJobStore(space)

    def run() -> None:
        other = MemoryJobStore(space)
        other.wait(STATUS_REQUEST, 20.0)
        other.write({STATUS_REQUEST: b"another question"})
        answers = StatusAnswers(lambda _: None, lambda: None)
        wait_until(lambda: (other.get([STATUS_REQUEST])[0] or b"").endswith(b"stacks"))
        answers.add(stacks_document("a"), STACKS)
        answers.send(other)

    thread = threading.Thread(target=run)
    thread.start()
    found = gather(store, wait_limit=4.0, question=STACKS)
    thread.join()
    assert [node["host"] for node in found] == ["a"]


def test_an_answer_that_another_asker_has_trimmed_comes_again(space: JobSpace) -> None:
    """A node does not answer the same line twice, so the question is asked anew."""
    store = MemoryJobStore(space)

    def run() -> None:
        other = MemoryJobStore(space)
        other.wait(STATUS_REQUEST, 20.0)
        asked: list[str] = []
        answers = StatusAnswers(asked.append, lambda: None)

        def has_asked(times: int) -> bool:
            answers.note_request(other.get([STATUS_REQUEST])[0])
            return len(asked) == times

        wait_until(partial(has_asked, 1))  # the answer to this one is lost
        wait_until(partial(has_asked, 2))
        answers.add(document("a"))
        answers.send(other)

    thread = threading.Thread(target=run)
    thread.start()
    found = gather(store, wait_limit=8.0)
    thread.join()
    assert [node["host"] for node in found] == ["a"]


def has_questions(store: MemoryJobStore, count: int) -> bool:
    """Whether so many questions are asked."""
    return (store.get([STATUS_REQUEST])[0] or b"").count(b" ") == count


def test_two_questions_at_once_are_both_seen(space: JobSpace) -> None:
    """A node that looks once finds both, and both askers get its answer at once."""
    found: dict[str, list[dict[str, Any]]] = {}

    def ask(question: str) -> None:
        found[question] = gather(MemoryJobStore(space), wait_limit=10.0, question=question)

    store, threads = MemoryJobStore(space), []
    for number, question in enumerate((STATUS, STACKS), 1):
        threads.append(threading.Thread(target=ask, args=(question,)))
        threads[-1].start()
        wait_until(partial(has_questions, store, number))
    asked: list[str] = []
    answers = StatusAnswers(asked.append, lambda: None)
    answers.note_request(store.get([STATUS_REQUEST])[0])
    assert asked == [STATUS, STACKS]
    answers.add(document("a"), STATUS)
    answers.add(stacks_document("a"), STACKS)
    began = time.monotonic()
    answers.send(store)
    for thread in threads:
        thread.join()
    assert time.monotonic() - began < 4.0
    assert [node["host"] for question in (STATUS, STACKS) for node in found[question]] == ["a", "a"]


def test_questions_do_not_pile_up(space: JobSpace) -> None:
    """The key holds a question once, and a few of them."""
    store = MemoryJobStore(space)
    for number in range(100):
        gather(store, wait_limit=0.0, question=f"drain 3 node{number % 50}")
    assert len((store.get([STATUS_REQUEST])[0] or b"").split(b"\n")) == 8


@pytest.mark.parametrize("question", [STATUS, STACKS])
def test_a_node_that_comes_later_does_not_answer(space: JobSpace, question: str) -> None:
    """The asker has gone, so the answers of all that ever join would stay in the store."""
    store = MemoryJobStore(space)
    nodes = answer_from(space, ["a"], question)
    assert len(gather(store, wait_limit=20.0, question=question)) == 1
    nodes.join()
    gather(store, wait_limit=0.0, question="drain 3 node7")
    gather(store, wait_limit=0.0, question=question)
    asked: list[str] = []
    StatusAnswers(asked.append, lambda: None).note_request(store.get([STATUS_REQUEST])[0])
    assert asked == []
    assert (store.get([STATUS_REQUEST])[0] or b"").count(b"\n") == 0


def test_a_node_that_has_just_come_is_not_drained_by_an_old_question() -> None:
    """The question was about the node that had its name or rank before; a question that comes later counts."""
    asked: list[str] = []
    answers = StatusAnswers(asked.append, lambda: None)
    answers.note_request(b"1a drain 3 node7\n1b status")
    answers.note_request(b"1a drain 3 node7\n1b status")
    assert asked == ["status"]
    answers.note_request(b"1b status\n1c drain 3 node7")
    assert asked == ["status", "drain 3 node7"]


def test_stacks_that_are_too_large_keep_the_main_threads() -> None:
    """Each worker gets the same room; what the kernel tells goes first."""
    answers = StatusAnswers(lambda _: None, lambda: None)
    store = MemoryJobStore(JobSpace())
    thread = "Thread 0x01 (most recent call first):\n" + '  File "a.py", line 1 in f\n' * 50
    many = stacks_document("a", text=thread * 300 + "Thread 0x02 (most recent call first):\n", details="x" * 300)
    answers.add(many, STACKS)
    answers.send(store)
    (entry,), _ = store.read(find_stream(STACKS), 0, 0.0)
    (worker,) = json.loads(entry)["stacks"]["workers"]
    assert worker["text"].endswith("Thread 0x02 (most recent call first):\n")
    assert (worker["text"].count("Thread 0x01") > 10, worker["details"]) == (True, "")


def test_a_request_is_answered_once() -> None:
    """However often it is read; a key that was never written is no request."""
    asked: list[str] = []
    answers = StatusAnswers(asked.append, lambda: None)
    for value in (None, b"1", b"1", None, b"2", b"2"):
        answers.note_request(value)
    assert len(asked) == 2


def test_only_the_newest_answer_waits_and_none_is_too_large() -> None:
    """While the store is away answers don't pile up; last lines go first where there are too many workers."""
    answers = StatusAnswers(lambda _: None, lambda: None)
    store = MemoryJobStore(JobSpace())
    workers = [worker(rank, last_line="x" * 512) for rank in range(1000)]
    answers.add(document("first"))
    answers.add(document("second", workers=workers))
    answers.send(store)
    (entry,), _ = store.read(find_stream(STATUS), 0, 0.0)
    node = json.loads(entry)["node"]
    assert (node["host"], len(node["workers"]), node["workers"][7]["last_line"]) == ("second", 1000, "")
    answers.add(document("huge", name="x" * LIMIT))
    assert not answers.has_unsent
