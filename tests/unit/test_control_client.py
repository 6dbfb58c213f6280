"""The client of the control socket: answers that are long, and agents that go without one."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_run.contract import ENV_CONTROL_DIR
from elastic_run.control.client import Call, ControlError, ask, ask_agents, ask_all
from elastic_run.control.socket_directory import explain_unfit, find_sockets, is_stale, make_directory, pid_in_name
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from elastic_run.control.client import Answer


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
        (answer,) = ask_all([str(path)], Call("status", {}), wait_limit=DEADLINE)
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
        answers = ask_all(paths, Call("status", {}), wait_limit=DEADLINE)
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


@pytest.mark.parametrize(("name", "pid"), [("4711-0f3a.sock", 4711), ("x-1.sock", 0), ("-1.sock", 0), ("²-1.sock", 0)])
def test_the_pid_of_an_agent_that_accepts_nobody_comes_from_the_name_of_its_socket(name: str, pid: int) -> None:
    """A name of another form has none."""
    assert pid_in_name(f"/tmp/12-x/{name}") == pid


def test_one_agent_answers_or_its_error_is_raised(tmp_path: Path) -> None:
    """An agent that refuses, and one that has ended; its socket is removed."""
    path = tmp_path / "1-a.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            for line in (encode({"run_id": "llama"}), encode("there is no request 'x'\n", 404)):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(line)

        thread = threading.Thread(target=serve)
        thread.start()
        assert ask(str(path), Call("identify", {}), wait_limit=DEADLINE) == {"run_id": "llama"}
        with pytest.raises(ControlError, match=r"^there is no request 'x'$"):
            ask(str(path), Call("x", {}), wait_limit=DEADLINE)
        thread.join(DEADLINE)
    with pytest.raises(ControlError, match=f"^the agent at {path} has ended$"):
        ask(str(path), Call("identify", {}), wait_limit=DEADLINE)
    assert not path.exists()


def test_a_directory_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that others can write to: a stranger's process would be asked in place of an agent."""
    monkeypatch.setenv(ENV_CONTROL_DIR, str(tmp_path))
    made = make_directory(os.environ)
    assert explain_unfit(made) == ""
    Path(made).chmod(0o701)
    problem = f"{made} is open to other users (chmod 700 mends it)"
    assert explain_unfit(made) == problem
    with pytest.raises(ControlError, match=f"^{re.escape(problem)}$"):
        ask_agents(os.environ, Call("identify", {}), wait_limit=DEADLINE)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert explain_unfit(made) == f"{made} belongs to another user ({os.getuid()})"


def test_the_directory_is_made_for_its_user_alone(tmp_path: Path) -> None:
    """Also where the process gives all of its files to everybody (umask 0)."""
    earlier = os.umask(0)
    try:
        made = make_directory({ENV_CONTROL_DIR: str(tmp_path)})
    finally:
        os.umask(earlier)
    assert Path(made).stat().st_mode & 0o777 == 0o700


def test_a_path_that_the_system_does_not_take_is_no_socket(tmp_path: Path) -> None:
    """It has 107 bytes at most (unix(7))."""
    directory = tmp_path / f"elastic-run-{os.geteuid()}"
    directory.mkdir(mode=0o700)
    room = 107 - len(os.fsencode(directory)) - len("/.sock")
    names = [f"{'1' * room}.sock", f"{'2' * (room + 1)}.sock"]
    for name in names:
        (directory / name).touch()
    assert find_sockets({ENV_CONTROL_DIR: str(tmp_path)}) == ([str(directory / names[0])], "")
