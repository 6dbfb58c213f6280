"""The agent's control socket: who may ask, bad clients, what is left behind, and what it costs the job."""

from __future__ import annotations

import os
import signal
import socket
import stat
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run.agent import control_requests, http_server
from elastic_run.agent.control_server import ControlServer
from elastic_run.contract import ENV_CONTROL_DIR
from elastic_run.control import client
from elastic_run.control.client import find_job, find_jobs
from elastic_run.control.socket_directory import find_sockets
from elastic_run.loop import Loop
from elastic_run.notices import UsageError
from tests.support.sessions import free_port
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.launch import Launch, Worker


WAITING = "say('running')\nimport signal\nsignal.pause()\n"


def post(name: str, arguments: bytes = b"{}") -> bytes:
    """Return a request."""
    return b"POST /v1/%s HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (name.encode(), len(arguments), arguments)


class Agent:
    """A loop with a control socket, turned by the test: no thread, so every step is the test's."""

    def __init__(self, loop: Loop, directory: Path) -> None:
        self.loop = loop
        context: Any = SimpleNamespace(loop=loop, job=None)
        self.server = ControlServer(context)
        self.server.open({ENV_CONTROL_DIR: str(directory)})
        self.server.settle()

    @property
    def clients(self) -> list[Any]:
        """The open connections."""
        return [] if self.server.server is None else [*self.server.server.clients]

    def connect(self) -> socket.socket:
        """Connect as a client that never blocks."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.server.path)
        connection.settimeout(0)
        return connection

    def turn_until(self, condition: Callable[[], bool], *, seconds: float = 20.0) -> None:
        """Turn the loop until a condition holds; a turn at least every 10 ms."""

        def tick() -> None:
            self.loop.call_later(0.01, tick)

        tick()
        assert self.loop.run_until(condition, self.loop.now() + seconds), "not in time"

    def read_to_end(self, connection: socket.socket) -> bytes:
        """Turn the loop until the agent has ended a connection; return what came."""
        received = bytearray()

        def is_over() -> bool:
            try:
                data = connection.recv(1 << 16)
            except BlockingIOError:
                return False
            except OSError:
                return True
            received.extend(data)
            return not data

        self.turn_until(is_over)
        return bytes(received)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """An agent that knows the request `ping`."""
    monkeypatch.setitem(control_requests.REQUESTS, "ping", lambda _, asked, reply: reply({"pong": asked}))
    with Loop() as loop:
        made = Agent(loop, tmp_path)
        yield made
        made.server.close()


def test_a_request_is_answered_and_the_connection_ends(agent: Agent) -> None:
    """A request of HTTP, and a document."""
    with agent.connect() as connection:
        connection.sendall(post("ping", b'{"a": 1}'))
        assert agent.read_to_end(connection).endswith(b'\r\nContent-Length: 18\r\n\r\n{"pong": {"a": 1}}')


@pytest.mark.parametrize("call", ["_socket.socket", "os.mkdir", "os.rename"])
def test_a_socket_that_can_not_be_opened_is_removed(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent goes on without it, such as without a descriptor for it, and leaves nothing in the directory."""

    def refuse(*_: object) -> None:
        raise OSError

    environment = {ENV_CONTROL_DIR: str(tmp_path)}
    context: Any = SimpleNamespace()
    monkeypatch.setattr(call, refuse)
    ControlServer(context).open(environment)
    assert [*tmp_path.rglob("*-*")] == [*tmp_path.glob("elastic-run-*")]


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"x y\r\n\r\n", b"this is not a request of HTTP/1\n"),
        (post("ping", b"[1]"), b"the arguments of a request are an object of JSON\n"),
        (post("ping", b"{"), b"the arguments of a request are an object of JSON\n"),
        (post("../v2/ping"), b"has no request '/v1/../v2/ping'\n"),
    ],
)
def test_a_wrong_request_gets_an_error(agent: Agent, data: bytes, error: bytes) -> None:
    """The client is told what was wrong."""
    with agent.connect() as connection:
        connection.sendall(data)
        assert agent.read_to_end(connection).endswith(error)


def test_a_client_that_reads_nothing_never_stalls_the_loop(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer of 8 MB waits, others are answered at once, and then it is dropped."""
    monkeypatch.setattr(http_server, "WAIT_LIMIT", 0.5)
    monkeypatch.setitem(control_requests.REQUESTS, "large", lambda *asked: asked[-1]({"text": "a" * (8 << 20)}))
    with agent.connect() as slow:
        slow.sendall(post("large"))
        agent.turn_until(lambda: any(each._unsent for each in agent.clients))
        with agent.connect() as connection:
            connection.sendall(post("ping"))
            assert b"pong" in agent.read_to_end(connection)
        agent.turn_until(lambda: not agent.clients)
        received = agent.read_to_end(slow)
    assert len(received) < 8 << 20


def test_the_socket_belongs_to_the_user_alone(agent: Agent, tmp_path: Path) -> None:
    """Mode 0600 in a directory with 0700; closing removes the socket."""
    path = Path(agent.server.path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    agent.server.close()
    assert find_sockets({ENV_CONTROL_DIR: str(tmp_path)}) == ([], "")


@pytest.mark.parametrize("kind", ["open", "file", "link"])
def test_a_directory_that_is_not_private_is_not_used(kind: str, tmp_path: Path) -> None:
    """The agent opens no socket there, and a command says why it finds nothing."""
    place = tmp_path / f"elastic-run-{os.geteuid()}"
    if kind == "open":
        place.mkdir()
        place.chmod(0o755)
    elif kind == "file":
        place.write_text("", encoding="utf-8")
    else:
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "elsewhere")
    environment = {ENV_CONTROL_DIR: str(tmp_path)}
    context: Any = SimpleNamespace()
    server = ControlServer(context)
    server.open(environment)
    assert server.path == ""
    with pytest.raises(UsageError, match=r"is open to other users|is not a directory"):
        find_jobs(environment)


def test_somebody_elses_directory_is_named_and_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says whose it is."""
    (tmp_path / "elastic-run-4711").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(UsageError, match=f"belongs to another user \\({os.getuid()}\\)"):
        find_jobs({ENV_CONTROL_DIR: str(tmp_path)})


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """Listen at a path and never answer."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield listener


def test_an_agent_that_does_not_answer_is_told_after_a_moment(tmp_path: Path) -> None:
    """A stopped agent holds a command up for the given time only."""
    with listening(tmp_path / "a.sock"):
        (answer,) = client.ask_all([str(tmp_path / "a.sock")], "ping", wait_limit=0.1)
    assert (answer.pid, answer.document) == (os.getpid(), None)
    assert "does not answer within 0.1 s" in answer.error


def test_a_job_is_found_asked_and_leaves_nothing(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """By its pid, or as the only one; after its end there is no socket."""
    environment = {ENV_CONTROL_DIR: str(tmp_path)}
    launcher = launch(worker(WAITING), env=environment)
    (path,) = wait_until(lambda: find_sockets(environment)[0], what="the control socket")
    (answer,) = client.ask_all([path], "identify")
    assert answer.document is not None
    assert (answer.pid, answer.document["pid"], answer.document["state"]) == (launcher.pid, launcher.pid, "running")
    assert answer.document["program"].endswith("worker1.py")
    assert find_job(environment, None).label == find_job(environment, str(launcher.pid)).label == str(launcher.pid)
    launcher.send(signal.SIGTERM)
    assert launcher.wait_exit() == 143
    assert find_sockets(environment) == ([], "")


def test_a_killed_agents_socket_is_removed_by_a_command_that_finds_it(
    launch: Launch, worker: Worker, tmp_path: Path
) -> None:
    """Nobody listens there any more."""
    environment = {ENV_CONTROL_DIR: str(tmp_path)}
    launcher = launch(worker(WAITING), env=environment)
    wait_until(lambda: find_sockets(environment)[0], what="the control socket")
    launcher.send(signal.SIGKILL)
    launcher.wait_exit()
    assert find_sockets(environment)[0]
    find_jobs(environment)
    assert find_sockets(environment)[0] == []


def test_a_job_runs_where_there_is_no_place_for_a_socket(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """It says nothing of that: the user has asked for nothing."""
    launcher = launch(worker("time.sleep(1.5)"), env={ENV_CONTROL_DIR: str(tmp_path / "missing")})
    assert launcher.wait_exit() == 0
    assert launcher.stderr == ""


def test_nodes_of_one_job_on_one_machine_are_one_job(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """A node that waits for others is found as well."""
    environment = {ENV_CONTROL_DIR: str(tmp_path)}
    place = (f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-backend=c10d", "--rdzv-id=j", "--nnodes=2")
    first = launch(*place, worker(WAITING), env=environment)
    wait_until(lambda: find_sockets(environment)[0], what="the control socket")
    (job,) = find_jobs(environment)
    assert [(agent.pid, agent.state, agent.max_nodes) for agent in job.agents] == [(first.pid, "joining", 2)]


def test_an_unknown_request_names_the_release(agent: Agent) -> None:
    """An older agent says that it is older."""
    with agent.connect() as connection:
        connection.sendall(post("future"))
        assert b"has no request '/v1/future'" in agent.read_to_end(connection)
