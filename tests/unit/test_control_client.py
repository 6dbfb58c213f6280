"""The client of the control socket: answers that are long, and agents that go without one."""

from __future__ import annotations

import os
import socket
import threading
import time
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from elastic_run.control import socket_directory
from elastic_run.control.client import ask_agents, ask_all
from elastic_run.control.socket_directory import is_stale, make_directory, pid_in_name
from elastic_run.control.wire import Call, encode_answer
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from pathlib import Path

    from elastic_run.control.client import Answer


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
    answer = ask_agent_that_answers(tmp_path / "4711-a.sock", encode_answer(document))
    assert (answer.document, answer.error) == (document, "")


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
                    connection.sendall(encode_answer({"number": number}))
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


def test_a_directory_that_others_can_open_hides_no_agent_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent whose directory under /tmp was taken by a stranger is in /dev/shm, and a command finds it there."""
    strangers, own = (tmp_path / place / f"elastic-run-{os.geteuid()}" for place in "ab")
    monkeypatch.setattr(socket_directory, "_PLACES", (str(tmp_path / "a"), str(tmp_path / "b")))
    assert ask_agents({}, Call("identify", {}), wait_limit=DEADLINE) == []
    for directory, mode in ((strangers, 0o755), (own, 0o700)):
        directory.mkdir(parents=True)
        directory.chmod(mode)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(own / "1-a.sock"))
        listener.listen()
        (answer,) = ask_agents({}, Call("identify", {}), wait_limit=0.0)
    assert "does not answer" in answer.error


def test_an_agent_that_is_stopped_holds_up_a_command_no_longer_than_its_limit(tmp_path: Path) -> None:
    """The system connects a client for it, and nothing answers."""
    path = str(tmp_path / "1-a.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        moments = [time.monotonic()]
        for _ in range(3):  # a busy machine may hold up some of them
            (answer,) = ask_all([path], Call("status", {}), wait_limit=0.1)
            assert "does not answer within 0.1 s" in answer.error
            moments.append(time.monotonic())
    assert 0.1 <= min(after - before for before, after in pairwise(moments)) < 0.9


@pytest.mark.parametrize(("name", "pid"), [("4711-0f3a.sock", 4711), ("x-1.sock", 0), ("-1.sock", 0), ("²-1.sock", 0)])
def test_the_pid_of_an_agent_that_accepts_nobody_comes_from_the_name_of_its_socket(name: str, pid: int) -> None:
    """A name of another form has none."""
    assert pid_in_name(f"/tmp/12-x/{name}") == pid


def test_each_place_that_has_no_room_for_a_socket_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place that is missing, and one in which a file has the directory's name."""
    name = f"elastic-run-{os.geteuid()}"
    (tmp_path / name).touch()
    monkeypatch.setattr(socket_directory, "_PLACES", (str(tmp_path / "none"), str(tmp_path)))
    with pytest.raises(OSError, match=f"/none/{name}: No such file or directory; .*/{name} is not a directory"):
        make_directory({})
