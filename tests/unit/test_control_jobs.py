"""Which job a command's RUN means."""

from __future__ import annotations

import pytest

from elastic_run.control.client import Answer, ControlError
from elastic_run.control.jobs import RunningAgent, RunningJob, choose_job, find_job, find_jobs
from elastic_run.errors import UsageError


def job(run_id: str, *pids: int, program: str = "train.py") -> RunningJob:
    """Return a job with an agent for each pid."""
    return RunningJob(tuple(RunningAgent(f"/s/{pid}.sock", pid, run_id=run_id, program=program) for pid in pids))


LLAMA, OTHER, UNNAMED = job("llama", 10, 11), job("llava", 20), job("none", 30)


@pytest.mark.parametrize(
    ("run", "expected"), [("llama", LLAMA), ("11", LLAMA), ("llav", OTHER), ("30", UNNAMED), ("none", UNNAMED)]
)
def test_a_job_is_named_by_its_run_id_its_beginning_or_a_pid(run: str, expected: RunningJob) -> None:
    """Any launcher's pid will do."""
    assert choose_job([LLAMA, OTHER, UNNAMED], run) is expected


def test_the_only_job_needs_no_name() -> None:
    """RUN may be left out where one job runs."""
    assert choose_job([LLAMA], None) is LLAMA


def test_a_whole_run_id_wins_over_a_longer_one() -> None:
    """A job can always be named, also where its run id is the beginning of another's."""
    longer = job("llama-2", 40)
    assert choose_job([longer, LLAMA], "llama") is LLAMA


@pytest.mark.parametrize(
    ("jobs", "run", "error"),
    [
        ([], None, "no job of yours runs on this machine"),
        ([], "llama", "no job of yours runs on this machine, so none is 'llama'"),
        ([LLAMA], "x", "'x' is not a job of yours on this machine, which has llama (train.py)"),
        ([LLAMA, UNNAMED], None, "several jobs run on this machine, name one: llama (train.py), 30 (train.py)"),
        ([LLAMA, job("llama", 40)], "llama", "'llama' means several jobs, name one: 10 (train.py), 40 (train.py)"),
        ([LLAMA, OTHER], "lla", "'lla' means several jobs, name one: llama (train.py), llava (train.py)"),
    ],
)
def test_what_names_no_single_job_is_refused_in_one_line(jobs: list[RunningJob], run: str | None, error: str) -> None:
    """The line names what may be typed instead."""
    with pytest.raises(UsageError) as raised:
        choose_job(jobs, run)
    assert str(raised.value) == error


def test_where_no_job_runs_a_command_may_say_what_helps() -> None:
    """The advice follows the message."""
    with pytest.raises(UsageError, match=r"^no job of yours runs on this machine; name the directory$"):
        choose_job([], None, advice="name the directory")


def test_an_agent_of_another_pid_namespace_tells_its_pid_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has no number for it here; where it has one, that counts, since commands send signals to it."""
    document = {"run_id": "llama", "program": "train.py", "log_dir": "", "state": "running", "started_at": 1}
    document |= {"max_nodes": 1, "place": "", "is_whole_process": True, "pid": 7}
    answers = [Answer("", 0, document), Answer("", 4711, document | {"started_at": 2})]
    monkeypatch.setattr("elastic_run.control.jobs.ask_agents", lambda *_, **__: answers)
    agents = [agent for job in find_jobs({}) for agent in job.agents]
    assert [agent.pid for agent in agents] == [7, 4711]


def test_a_directory_of_sockets_that_is_not_read_is_an_error_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, as for a wrong RUN."""

    def refuse(*_: object, **__: object) -> None:
        message = "/tmp/elastic-run-0 belongs to another user (7)"
        raise ControlError(message)

    monkeypatch.setattr("elastic_run.control.jobs.ask_agents", refuse)
    with pytest.raises(UsageError, match=r"^/tmp/elastic-run-0 belongs to another user \(7\)$"):
        find_jobs({})


def test_an_error_names_only_some_of_many_jobs() -> None:
    """The line stays short."""
    with pytest.raises(UsageError, match=r"name one: j0 .*, j5 \(train.py\) and 4 more$"):
        choose_job([job(f"j{number}", 100 + number) for number in range(10)], None)
    with pytest.raises(UsageError, match=r"j5 \(train.py\)$"):
        choose_job([job(f"j{number}", 100 + number) for number in range(6)], None)


def test_a_run_id_that_nobody_chose_is_no_label() -> None:
    """The default of torchrun and long random numbers are replaced by the pid."""
    assert [each.label for each in (LLAMA, UNNAMED, job("1" * 39, 50))] == ["llama", "30", "50"]
    assert [job("a" * length, 50).label for length in (32, 33)] == ["a" * 32, "50"]


def test_jobs_of_one_node_are_told_apart_and_one_without_an_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs without a run id are two; a command to a launcher that is stopped says so in one line."""
    document = {"run_id": "none", "program": "train.py", "log_dir": "", "state": "running", "started_at": 1}
    document |= {"max_nodes": 1, "place": "", "is_whole_process": True}
    answers = [Answer("", pid, document | {"pid": pid}) for pid in (10, 11)]
    answers.append(Answer("", 12, error="the agent with pid 12 does not answer"))
    monkeypatch.setattr("elastic_run.control.jobs.ask_agents", lambda *_, **__: answers)
    assert sorted(find_job({}, str(pid)).label for pid in (10, 11)) == ["10", "11"]
    with pytest.raises(UsageError, match=r"^the agent with pid 12 does not answer$"):
        find_job({}, "12")


def test_two_jobs_without_an_id_are_two_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of one job share the endpoint; `elastic-run stop` must not stop another job with it."""

    def identify(pid: int, place: str) -> Answer:
        document = {"pid": pid, "run_id": "none", "program": "train.py", "log_dir": "", "state": "running"}
        document |= {"started_at": pid, "max_nodes": 2, "place": place, "is_whole_process": True}
        return Answer("", pid, document)

    answers = [identify(10, "h:29500"), identify(11, "h:29600"), identify(12, "h:29500")]
    monkeypatch.setattr("elastic_run.control.jobs.ask_agents", lambda *_, **__: answers)
    jobs = find_jobs({})
    assert [[agent.pid for agent in each.agents] for each in jobs] == [[10, 12], [11]]
    with pytest.raises(UsageError, match=r"several jobs run on this machine, name one: 10 .*, 11 "):
        choose_job(jobs, None)


@pytest.mark.parametrize("document", [{}, {"run_id": "none", "started_at": "noon"}, {"pid": None}])
def test_an_answer_of_another_release_that_lacks_something_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, document: dict[str, object]
) -> None:
    """The command names the launcher, and goes on with the others."""
    answers = [Answer("", 12, document), Answer("", 13, error="the agent with pid 13 does not answer")]
    monkeypatch.setattr("elastic_run.control.jobs.ask_agents", lambda *_, **__: answers)
    assert [job.label for job in find_jobs({})] == ["12", "13"]
    with pytest.raises(UsageError, match=r"^the agent with pid 12 sent an answer that can't be read: "):
        find_job({}, "12")
