"""The client of the control socket: answers that are long, agents that go without one, and the job that RUN means."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from pathlib import Path

import pytest

from elastic_run.contract import ENV_CONTROL_DIR
from elastic_run.control.client import Answer, RunningAgent, RunningJob, ask_all, choose_job, find_job, find_jobs
from elastic_run.control.socket_directory import is_stale, make_directory
from elastic_run.notices import UsageError
from tests.support.wait import DEADLINE


def encode(body: object, status: int = 200) -> bytes:
    """Return an answer: a document, or the reason why there is none."""
    text = body if isinstance(body, str) else json.dumps(body)
    return f"HTTP/1.0 {status} x\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


def ask_agent_that_answers(path: Path, data: bytes) -> Answer:
    """Ask an agent that sends some bytes, then ends the connection."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(data)

        thread = threading.Thread(target=serve)
        thread.start()
        (answer,) = ask_all([str(path)], "status", wait_limit=DEADLINE)
        thread.join(DEADLINE)
    return answer


def test_an_answer_of_many_pieces_is_read_to_its_end(tmp_path: Path) -> None:
    """The table of a large job takes more than a read of a socket gives."""
    document = {"text": "x" * (1 << 20)}
    answer = ask_agent_that_answers(tmp_path / "4711-a.sock", encode(document))
    assert (answer.document, answer.error) == (document, "")


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"x", "the agent's answer can't be read"),
        (encode([7]), "the agent's answer is not a JSON object"),
        (encode("{"), "the agent's answer is not a JSON object"),
        (encode({"text": "x" * (1 << 24)}), f"the agent's answer is larger than {1 << 24} bytes"),
    ],
    ids=["no answer", "a list", "cut", "too long"],
)
def test_what_is_no_answer_is_told(data: bytes, error: str, tmp_path: Path) -> None:
    """A command never works with a list where it expects fields."""
    answer = ask_agent_that_answers(tmp_path / "4711-a.sock", data)
    assert (answer.document, answer.error) == (None, error)


def test_an_agent_that_answers_late_is_waited_for_after_the_others(tmp_path: Path) -> None:
    """The first answer ends its own connection only."""
    paths = [str(tmp_path / name) for name in ("1-a.sock", "2-b.sock")]
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        for listener, path in zip((first, second), paths, strict=True):
            listener.bind(path)
            listener.listen()

        def serve() -> None:
            connections = [listener.accept()[0] for listener in (first, second)]
            for number, connection in enumerate(connections):
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(encode({"number": number}))
                time.sleep(0.05)  # the first answer is read, and the second is not there yet

        thread = threading.Thread(target=serve)
        thread.start()
        answers = ask_all(paths, "status", wait_limit=DEADLINE)
        thread.join(DEADLINE)
    assert [answer.document for answer in answers] == [{"number": 0}, {"number": 1}]


def test_a_socket_is_stale_if_nobody_listens_there(tmp_path: Path) -> None:
    """The socket of an agent that lives is left alone, and so is a path without a socket."""
    path = str(tmp_path / "1-a.sock")
    assert not is_stale(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        assert not is_stale(path)
    assert is_stale(path)


def test_an_agent_that_ends_the_connection_is_not_waited_for(tmp_path: Path) -> None:
    """Its end is told at once, and not as an agent that may be stopped."""
    answer = ask_agent_that_answers(tmp_path / "4711-a.sock", b"")
    assert answer.document is None
    assert answer.error.endswith(" has ended, or has too many clients")


def test_an_agent_that_refuses_tells_why(tmp_path: Path) -> None:
    """Its line is the error."""
    answer = ask_agent_that_answers(tmp_path / "1-a.sock", encode("there is no request 'x'\n", 404))
    assert (answer.document, answer.error) == (None, "there is no request 'x'")


def test_an_agent_that_has_ended_gives_no_answer(tmp_path: Path) -> None:
    """Its socket is removed."""
    path = tmp_path / "1-a.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    assert ask_all([str(path)], "identify") == []
    assert not path.exists()


def test_a_directory_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that others can write to: a stranger's process would be asked in place of an agent."""
    monkeypatch.setenv(ENV_CONTROL_DIR, str(tmp_path))
    made = make_directory(os.environ)
    assert find_jobs(os.environ) == []
    Path(made).chmod(0o701)
    problem = f"{made} is open to other users (chmod 700 mends it)"
    with pytest.raises(UsageError, match=f"^{re.escape(problem)}$"):
        find_jobs(os.environ)


def test_the_directory_is_made_for_its_user_alone(tmp_path: Path) -> None:
    """Also where the process gives all of its files to everybody (umask 0)."""
    earlier = os.umask(0)
    try:
        made = make_directory({ENV_CONTROL_DIR: str(tmp_path)})
    finally:
        os.umask(earlier)
    assert Path(made).stat().st_mode & 0o777 == 0o700


# --- the job of RUN ---------------------------------------------------------------------------------------------------
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


def test_an_agent_of_another_pid_namespace_tells_its_pid_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has no number for it here; where it has one, that counts, since commands send signals to it."""
    document = {"run_id": "llama", "program": "train.py", "log_dir": "", "state": "running", "started_at": 1}
    document |= {"max_nodes": 1, "place": "", "is_whole_process": True, "pid": 7}
    answers = [Answer("", 0, document), Answer("", 4711, document | {"started_at": 2})]
    monkeypatch.setattr("elastic_run.control.client.ask_all", lambda *_, **__: answers)
    agents = [agent for job in find_jobs({}) for agent in job.agents]
    assert [agent.pid for agent in agents] == [7, 4711]


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
    monkeypatch.setattr("elastic_run.control.client.ask_all", lambda *_, **__: answers)
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
    monkeypatch.setattr("elastic_run.control.client.ask_all", lambda *_, **__: answers)
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
    monkeypatch.setattr("elastic_run.control.client.ask_all", lambda *_, **__: answers)
    assert [job.label for job in find_jobs({})] == ["12", "13"]
    with pytest.raises(UsageError, match=r"^the agent with pid 12 sent an answer that can't be read: "):
        find_job({}, "12")
