"""A store that has no room for one more connection names the limit and the mend, to its user and to those who come."""

from __future__ import annotations

import resource
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.node.messages import Ended, Formed
from elastic_run.rendezvous.elastic.job_session import JobSession
from elastic_run.store.errors import FULL, StoreConnectionError
from elastic_run.store.stream import Stream
from elastic_run.store.tcpstore import wire
from elastic_run.store.tcpstore.token_proof import ClientAuthentication
from tests.support.launch import ELASTIC_RUN
from tests.support.local_rendezvous import place, wait_coordinated, wait_id_left
from tests.support.sessions import Node, free_port, tcp_node
from tests.support.wait import DEADLINE, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.launch import Launched

_LIMIT = 1024
_ESTABLISHED = "01"


@pytest.fixture(autouse=True)
def many_files() -> Iterator[None]:
    """Let the test open more connections than the launcher may: a usual shell permits 1,024 files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4 * _LIMIT, before[1]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_full_store_says_so(launch: Callable[..., Launched], tmp_path: Path) -> None:
    """The node that serves the store names its limit once; a node that finds no room names it while it waits."""
    script = tmp_path / "train.py"
    script.write_text("print('trained', flush=True)", encoding="utf-8")
    port = free_port()
    flags = (*place(port), "--nnodes=2", script)
    host = launch(*flags, program=("sh", "-c", f'ulimit -n {_LIMIT} && exec "$@"', "limited", *ELASTIC_RUN))
    wait_coordinated(port)
    with ExitStack() as held:
        for _ in range(_LIMIT):
            held.enter_context(socket.create_connection(("127.0.0.1", port)))
        host.wait_line(f"leave too few of the {_LIMIT} file descriptors of this process: raise the limit .ulimit -n.")
        late = launch(*flags)
        late.wait_line(f"takes no more connections: its process may open {_LIMIT} files, so raise ulimit -n")
    assert late.wait_exit() == host.wait_exit() == 0
    # The workers' store of the same process may say it as well.
    assert host.stderr.count(f"the job's store at port {port} closed a connection") == 1


def test_a_node_that_finds_room_once_needs_no_more(launch: Callable[..., Launched], tmp_path: Path) -> None:
    """A node that has joined over the last connection that there was room for trains, says so, and knows the end."""
    script = tmp_path / "train.py"
    script.write_text("print('trained', flush=True)", encoding="utf-8")
    port = free_port()
    flags = (*place(port), "--nnodes=2", script)
    host = launch(*flags, program=("sh", "-c", f'ulimit -n {_LIMIT} && exec "$@"', "limited", *ELASTIC_RUN))
    host.wait_line("waiting: 1/2 nodes")  # it has opened by now what it opens at its start
    # Of its own: the one that the sender and the log reader share, and the coordinator's.
    wait_until(lambda: count_connections(port) == 2)
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(_LIMIT)]
        assert sockets[-1].recv(wire.U32.size) == wire.U32.pack(wire.STORE_FULL)  # none of them waits for its turn
        sockets[0].close()
        late = launch(*flags)
        late.wait_line("trained")
        assert late.wait_exit() == 0
    assert host.wait_exit() == 0
    assert "takes no more connections" not in late.stderr


@pytest.mark.parametrize("secret", [None, b"secret"], ids=["open", "token"])
def test_a_node_has_one_connection_while_it_trains(secret: bytes | None) -> None:
    """Between its heartbeats and during them, as before the first of them; the coordinator has one more."""
    port = free_port()
    conf = {"keep_alive_interval": "0.3", "keep_alive_max_attempt": "20"}
    with ExitStack() as stack:
        nodes = [stack.enter_context(tcp_node(port, (3, 3), secret=secret, conf=conf)) for _ in range(3)]
        for node in nodes:
            node.wait_for(Formed)
        wait_id_left(port, secret)
        wait_until(lambda: count_connections(port) == len(nodes) + 1)
        for node in nodes * 3:
            before = last_heartbeat(node)
            wait_until(lambda node=node, before=before: last_heartbeat(node) > before)  # type: ignore[misc]
            assert count_connections(port) == len(nodes) + 1
        for node in nodes:
            node.done()
        assert {node.wait_for(Ended).end.verdict for node in nodes} == {"success"}


def last_heartbeat(node: Node) -> float:
    """Return when a node wrote its last heartbeat."""
    assert isinstance(node.session, JobSession)
    return node.session._context.sender.last_heartbeat_at


def count_connections(port: int) -> int:
    """Return how many connections there are to a port of this machine."""
    lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    words = [line.split() for line in lines]
    return sum(peer.endswith(f":{port:04X}") and state == _ESTABLISHED for _, _, peer, state, *_ in words)


def test_a_node_with_a_token_hears_it_too() -> None:
    """Where a challenge comes back with the limit, that is what the node says."""
    here, there = socket.socketpair()
    with there:
        there.sendall(wire.U32.pack(wire.STORE_FULL) + wire.U32.pack(_LIMIT))
        stream = Stream(here, "store")
        with pytest.raises(StoreConnectionError, match=f"may open {_LIMIT} files") as caught:
            ClientAuthentication(b"secret").challenge(stream, "store", DEADLINE)
        assert caught.value.reason == FULL
        stream.close()
