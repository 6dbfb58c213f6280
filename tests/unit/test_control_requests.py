"""The answers to commands: which node a drain means, when a node answers, and what it tells of a round."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from elastic_run.agent.control_requests import ControlRequests, Sample
from elastic_run.agent.control_server import ControlServer
from elastic_run.agent.driver.job import MultiNodeJob
from elastic_run.core.agent.messages import Signalled
from elastic_run.rendezvous.events import StatusAsked
from elastic_run.signals import SIGTERM

if TYPE_CHECKING:
    from collections.abc import Callable


def _make_context(job: Any, *, group_rank: int = 0) -> Any:
    """Make the context of an agent of node7, whose machine has begun round 3."""
    fed: list[object] = []
    return SimpleNamespace(
        hostname="node7",
        group=SimpleNamespace(group_rank=group_rank),
        agent=SimpleNamespace(round=3),
        loop=SimpleNamespace(call_soon=lambda call: call()),
        senders=SimpleNamespace(name=lambda *_: None),
        feed=fed.append,
        fed=fed,
        job=job,
    )


def _make_job(group: Any = None) -> MultiNodeJob:
    context = SimpleNamespace(group=group, options=None, loop=None, say=None)
    return MultiNodeJob(cast("Any", context), cast("Any", None))


@pytest.mark.parametrize(
    ("words", "leaves"),
    [("4 node7", True), ("9 node7", True), ("4 1", True), ("3 1", False), ("4 0", False), ("4 n", False), ("", False)],
)
def test_a_node_rank_means_a_node_of_the_round_in_which_it_was_asked(words: str, *, leaves: bool) -> None:
    """A node that sees the question after the next round was formed may have the rank of the node that has left."""
    job = SimpleNamespace(place=SimpleNamespace(round=4, group_rank=1), describe_round=dict)
    context = _make_context(job, group_rank=1)  # it has not begun the round: the warm workers are not ready
    requests = ControlRequests(context)
    answers: list[dict[str, Any]] = []
    for _ in range(2):
        requests.answer_question(f"drain {words}", answers.append)
    assert [answer["is_leaving"] for answer in answers] == [leaves] * 2
    assert context.fed == [Signalled(SIGTERM)] * leaves


@pytest.mark.parametrize(("words", "leaves"), [("3 0", True), ("4 0", False), ("3 1", False)])
def test_a_job_of_one_node_has_the_round_of_its_agent(words: str, *, leaves: bool) -> None:
    """Without a rendezvous store nobody gives the node a place: its round and its rank are the agent's."""
    answers: list[dict[str, Any]] = []
    ControlRequests(_make_context(None)).answer_question(f"drain {words}", answers.append)
    assert [answer["is_leaving"] for answer in answers] == [leaves]


def test_a_question_that_comes_early_is_answered_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that has just begun answers when its workers are up: the asker waits, but asks no second time."""
    monkeypatch.setattr(ControlRequests, "measure", lambda _, deliver: deliver({"state": "running"}))
    job = _make_job()
    context: Any = SimpleNamespace(job=job)
    told: list[tuple[dict[str, Any], str]] = []
    job._session = cast("Any", SimpleNamespace(has_place=False, tell_status=lambda *words: told.append(words)))
    job._take(StatusAsked("status"))
    assert told == []
    ControlServer(context).settle()
    assert told == [({"state": "running", "round_id": "", "round_nodes": 0}, "status")]
    job._take(StatusAsked("of the future"))
    assert [question for _, question in told] == ["status", "of the future"]


@pytest.mark.parametrize(
    ("nodes", "question", "is_asked"),
    [(None, "status", False), (1, "status", False), (2, "status", True), (None, "drain 0 node7", True)],
)
def test_other_nodes_are_asked_in_a_round_with_others_only(nodes: int | None, question: str, *, is_asked: bool) -> None:
    """A node that waits for its first round, or runs alone, answers at once; it may drain another node all the same."""
    job = _make_job(SimpleNamespace(group_world_size=nodes))
    gathered: list[str] = []
    job._session = cast("Any", SimpleNamespace(gather_status=lambda words, *_: gathered.append(words)))
    told: list[list[dict[str, Any]]] = []
    job.gather_status(question, 1.0, told.append)
    assert gathered == [question] * is_asked
    assert told == [[]] * (not is_asked)


@pytest.mark.parametrize(
    ("has_place", "described"),
    [(True, {"round_id": "4/1/a", "round_nodes": 2}), (False, {"round_id": "", "round_nodes": 0})],
)
def test_a_node_without_which_the_job_went_on_names_no_round(*, has_place: bool, described: dict[str, Any]) -> None:
    """It waits, and knows only its old round: a node that asks all nodes would take that one for the job's."""
    job = _make_job()
    job.place = cast("Any", SimpleNamespace(group_world_size=2, round_id="4/1/a"))
    job._session = cast("Any", SimpleNamespace(has_place=has_place))
    assert job.describe_round() == described


@pytest.mark.parametrize(
    ("name", "nodes"), [("node8", [("node7", False), ("node8", True)]), ("node7", [("node7", True)]), ("node9", None)]
)
def test_a_drain_is_answered_by_the_nodes_that_it_reaches(
    name: str, nodes: list[tuple[str, bool]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is not named asks the others, with the round; a node that leaves answers for itself."""
    monkeypatch.setattr("os.getpid", lambda: 70)
    of_round = {"round_id": "4/1/a", "round_nodes": 2}
    questions: list[str] = []
    replies: list[dict[str, Any]] = []

    def gather(question: str, _: float, deliver: Callable[[list[dict[str, Any]]], None]) -> None:
        questions.append(question)
        if nodes is not None:
            others = [(host, leaves) for host, leaves in nodes if host != "node7"]
            deliver([{"host": host, "pid": 71, "is_leaving": leaves, **of_round} for host, leaves in others])

    place = SimpleNamespace(round=4, group_rank=0)
    job = SimpleNamespace(place=place, gather_status=gather, describe_round=lambda: of_round)
    ControlRequests(_make_context(job)).drain({"node": name}, replies.append)
    assert questions == ([] if name == "node7" else [f"drain 4 {name}"])
    told = [[(node["host"], node["is_leaving"]) for node in reply["nodes"]] for reply in replies]
    assert told == ([] if nodes is None else [nodes])


@pytest.mark.parametrize(("number", "uptime"), [(1, 4.0), (2, None)])
def test_a_round_that_has_not_begun_has_no_time(number: int, uptime: float | None) -> None:
    """While the next round is waited for, the workers and their time are those of the last one."""
    spec = SimpleNamespace(entrypoint="train.py", args=())
    group = SimpleNamespace(group_rank=0, group_world_size=2, spec=spec, workers=[])
    options = SimpleNamespace(job_config=SimpleNamespace(max_restarts=1))
    context: Any = SimpleNamespace(
        hostname="a",
        group=group,
        options=options,
        run_id="job",
        log_directory="",
        kept=None,
        agent=SimpleNamespace(state="joining", round=number, restart_count=0),
        started=1.0,
        current=SimpleNamespace(number=1, started=2.0),
        job=None,
    )
    sample = Sample(6.0, {})
    document = ControlRequests(context).describe_node(sample, sample, {})
    assert (document["round"], document["round_uptime"]) == (number, uptime)
