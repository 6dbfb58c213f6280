"""Whatever comes to an agent's port: a stranger gets a bounded answer, the user one line at most, no job suffers."""

from __future__ import annotations

import resource
import socket
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING

import pytest

from elastic_run import __version__
from elastic_run.rendezvous.coordination.frames import PREAMBLE
from elastic_run.rendezvous.coordination.opening import Hello, ask
from tests.support import hostile_frames
from tests.support.launch import ELASTIC_RUN
from tests.support.local_rendezvous import RUN_ID, place, wait_coordinated
from tests.support.sessions import free_port
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]

_MIB = 1 << 20
_LIMIT = 1024
_LIMITED = ("sh", "-c", f'ulimit -n {_LIMIT} && exec "$@"', "limited", *ELASTIC_RUN)


@pytest.fixture
def many_files() -> Iterator[None]:
    """Let the test open more connections than the launcher may: a usual shell permits 1,024 files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("has_token", "knows_it"),
    [(False, False), (True, False), (True, True)],
    ids=["no token", "a stranger to the token", "a process with the token"],
)
def test_a_job_bears_hostile_frames(*, has_token: bool, knows_it: bool) -> None:
    """Random and altered frames end their connections, fill nothing, and a node joins afterwards as before."""
    outcome = hostile_frames.run(1, 5_000, has_token=has_token, knows_it=knows_it)
    assert outcome.growth < 16 * _MIB
    assert len(outcome.lines) <= 6
    assert "defect" not in "".join(outcome.lines)


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"elastic-run 0\n", r"127\.0\.0\.1:\d+ speaks protocol 0 of another release of elastic-run"),
        (b"GET / HTTP/1.1\r\n\r\n", r"127\.0\.0\.1:\d+ is no agent of elastic-run, or one of an older release"),
        (b"\x00\x07", r"127\.0\.0\.1:\d+ is no agent of elastic-run, or one of an older release"),  # torch's TCPStore
    ],
    ids=["another release", "http", "torch"],
)
def test_another_protocol_is_named_once(launch: Launch, worker: Worker, data: bytes, line: str) -> None:
    """The connection is closed at once; the agent's user reads once who came."""
    port, path = free_port(), worker("say('trained')")
    agents = [launch(*place(port), "--nnodes=2", path)]
    wait_coordinated(port)
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port), DEADLINE) as stranger:
            stranger.sendall(data)
            with suppress(ConnectionResetError):
                assert stranger.recv(64) in (b"", PREAMBLE)
    agents[0].wait_line(line)
    agents.append(launch(*place(port), "--nnodes=2", path))
    assert [agent.wait_exit() for agent in agents] == [0, 0]
    assert agents[0].stderr.count("127.0.0.1:") == 1


@pytest.mark.usefixtures("many_files")
def test_connections_that_say_nothing_keep_no_node_away(launch: Launch, worker: Worker) -> None:
    """Ten thousand of them take no descriptor that a node or a worker needs; a node joins, and the job ends."""
    port, path = free_port(), worker("say('trained')")
    agents = [launch(*place(port), "--nnodes=2", path, program=_LIMITED)]
    wait_coordinated(port)
    with ExitStack() as held:
        for _ in range(10_000):
            held.enter_context(socket.create_connection(("127.0.0.1", port), DEADLINE))
        agents.append(launch(*place(port), "--nnodes=2", path))
        assert [agent.wait_exit() for agent in agents] == [0, 0]
    assert "closed a connection" not in agents[0].stderr


@pytest.mark.usefixtures("many_files")
def test_an_agent_without_descriptors_names_the_limit(launch: Launch, worker: Worker) -> None:
    """More nodes than its process may open files: one line says so, and a node joins when there is room again."""
    port, path = free_port(), worker("say('trained')")
    agents = [launch(*place(port), "--nnodes=2", path, program=_LIMITED)]
    wait_coordinated(port)
    with ExitStack() as held:
        for number in range(_LIMIT):
            hello = Hello(RUN_ID, f"node{number}", "there", __version__)
            try:
                _, connected, _ = ask(("127.0.0.1", port), hello, 1.0, None, dark_after=DEADLINE)
            except OSError:
                break
            if connected is not None:
                held.enter_context(closing(connected))
        agents[0].wait_line(f"its process may open {_LIMIT} files: raise ulimit -n, a job needs one for each node")
    agents.append(launch(*place(port), "--nnodes=2", path))
    assert [agent.wait_exit() for agent in agents] == [0, 0]
    assert agents[0].stderr.count("raise ulimit -n") == 1
