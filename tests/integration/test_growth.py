"""Jobs that last for months: what they leave in the store, and in memory, does not grow with rounds and nodes."""

from __future__ import annotations

import gc
import sys
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.node.messages import Formed
from elastic_run.rendezvous import RendezvousParameters
from elastic_run.rendezvous.elastic.store_connection import StoreConnection
from elastic_run.store.jobstore.c10d import C10dJobStore
from elastic_run.store.jobstore.signed import SignedStore
from tests.support.configs import plain_setup
from tests.support.job_stores import file, memory, our_server, torch_libuv
from tests.support.sessions import FAST, Node, free_port, handler_node, tcp_node
from tests.support.store import ServedStore
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.job_stores import Opener
    from tests.support.launch import Launched

SETUP = plain_setup(max_restarts=100_000, max_backoff=0.0)
CONF = {**FAST, "last_call_timeout": "0"}
STORES = {"memory": memory, "ours": our_server, "torch's": torch_libuv, "file": file}


@contextmanager
def keys_of(port: int, run_id: str = "job") -> Iterator[C10dJobStore]:
    """Open a job's store, to count its keys."""
    with C10dJobStore("127.0.0.1", port, run_id) as store:
        store.get(["anything"])  # shows the server that it is an agent's connection
        yield store


def count(port: int) -> int:
    """Return the number of keys that a job has in its store."""
    with keys_of(port) as store:
        return len(store._client.list_keys())


def links() -> int:
    """Return the number of connections of all sessions of this process, open or not."""
    gc.collect()
    # Not isinstance: that asks the objects themselves, and torch has some that warn.
    return sum(issubclass(type(one), StoreConnection) for one in gc.get_objects())


def heartbeat(port: int, node: Node) -> None:
    """Heartbeat for a node, which leaves too soon to do so itself."""
    with keys_of(port) as store:
        store.heartbeat(node.session.node)


def visit(port: int, host: Node) -> None:
    """Let a node join a running job, and leave it."""
    with tcp_node(port, (1, 2), is_host=False, conf=CONF, setup=SETUP) as visitor:
        assert visitor.wait_for(Formed).assignment.group_world_size == 2
        heartbeat(port, visitor)
        visitor.session.leave("signal")
    while host.wait_for(Formed).assignment.group_world_size != 1:
        pass


#: A launcher that says how many blocks of memory it has when it begins its 150th round, and each 100 rounds later.
_COUNTING = """
import gc, os, runpy, sys
from elastic_run.agent.driver.round import Round
begin = Round.__init__
def count(self, *arguments, **options):
    if options["number"] % 100 == 50 and options["number"] > 100:
        gc.collect()
        os.write(1, b"blocks %d\\n" % sys.getallocatedblocks())
    begin(self, *arguments, **options)
Round.__init__ = count
sys.argv = ["elastic_run", *sys.argv[1:]]
runpy.run_module("elastic_run", run_name="__main__")
"""


@pytest.mark.long
def test_restarts_leave_nothing_in_memory(launch: Callable[..., Launched], tmp_path: Path) -> None:
    """In some 100 restarts of 900 the launcher gets no more objects, and it still counts them all.

    What is imported or waited for once, at some time of the job, may fall into the others; so do the timers of the
    rounds of the last second, whose number grows until the job is a second old.
    """
    path = tmp_path / "worker.sh"
    path.write_text("exit $((TORCHELASTIC_RESTART_COUNT % 2 + 1))\n")
    flags = ("--standalone", "--max-restarts=1051", "--max-backoff=0", "--no-python", "sh", path)
    job = launch(*flags, program=(sys.executable, "-c", _COUNTING))
    assert job.wait_exit(deadline=200) in {1, 2}
    blocks = [int(line.split()[1]) for line in job.stdout.splitlines()]
    assert len(blocks) == 10
    assert min(after - before for before, after in pairwise(blocks)) < 200, blocks  # it was 800
    assert "restart 1051 of 1051" in job.stderr
    assert "(1051 attempts in all)" in job.stderr


@pytest.mark.long
def test_nodes_that_came_and_went(stack: ExitStack) -> None:
    """After hundreds of visitors, two rounds each, the store has as many keys as after the first of them."""
    port = free_port()
    host = stack.enter_context(tcp_node(port, (1, 2), is_host=True, conf=CONF, setup=SETUP))
    host.wait_for(Formed)
    for _ in range(100):
        visit(port, host)
    keys, connections = count(port), links()
    counts, heartbeats = [], []
    for _ in range(200):
        visit(port, host)
        with keys_of(port) as store:
            found = store._client.list_keys()
        counts.append(len(found))
        heartbeats.append(sum(key.startswith("b/") for key in found))
    # What is past is deleted now and then, and by another thread: on a busy machine some visits later.
    assert min(counts[-50:]) < keys + 10, counts
    assert 1 <= min(heartbeats[-50:]) < 10, heartbeats
    assert links() < connections + 5


def test_coordinators_that_came_and_went(stack: ExitStack) -> None:
    """So it is where every node that leaves was the coordinator."""
    port = stack.enter_context(ServedStore()).port
    nodes = [stack.enter_context(tcp_node(port, (1, 2), is_host=False, conf=CONF, setup=SETUP))]
    nodes[0].wait_for(Formed)
    counts = []
    for _ in range(60):
        nodes.append(tcp_node(port, (1, 2), is_host=False, conf=CONF, setup=SETUP).start())
        assert nodes[-1].wait_for(Formed).assignment.group_world_size == 2
        heartbeat(port, nodes[-2])
        nodes[-2].session.leave("signal")
        nodes[-2].close()
        while nodes[-1].wait_for(Formed).assignment.group_world_size != 1:
            pass
        counts.append(count(port))
    nodes[-1].close()
    assert max(counts[30:]) < max(counts[:30]) + 10, counts


def test_rounds_of_a_static_job(stack: ExitStack) -> None:
    """Hundreds of restarts of a static job, whose rounds are opened by a key each, leave a handful of those."""
    port = free_port()
    nodes = []
    for rank in range(2):
        parameters = RendezvousParameters("static", f"127.0.0.1:{port}", "job", 2, 2, "127.0.0.1", rank=rank, **FAST)
        nodes.append(stack.enter_context(handler_node(parameters, SETUP)))
    for _ in range(150):
        for node in nodes:
            node.wait_for(Formed)
        nodes[1].fail()
    for node in nodes:
        node.wait_for(Formed)
    with keys_of(port) as store:
        found = store._client.list_keys()
    assert 1 <= len([key for key in found if "open/" in key]) <= 3
    assert len(found) < 250


@pytest.fixture(params=list(STORES))
def opener(request: pytest.FixtureRequest) -> Iterator[Opener]:
    """Start one kind of store that keeps what nobody removes."""
    with STORES[request.param]() as opened:
        yield opened


def test_heartbeats_are_forgotten(opener: Opener) -> None:
    """The coordinator removes the heartbeats of nodes that are gone; others stay, and a node may come again."""
    with opener("job") as store:
        for node in ("a", "b", "c"):
            store.heartbeat(node)
        assert None not in store.read_heartbeats(["a", "b", "c"])
        store.forget_heartbeats(["a", "c", "never there"])
        a, b, c = store.read_heartbeats(["a", "b", "c"])
        assert (a, c) == (None, None)
        assert b is not None
        store.heartbeat("a")
        assert store.read_heartbeats(["a"]) != [None]


def test_reports_of_garbage_are_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    """What strangers wrote is reported once for each place, and not remembered for ever."""
    with memory() as opened:
        plain, store = opened("job"), SignedStore(opened("job"), b"secret")
        plain.write({f"k{number}": b"garbage" for number in range(1000)})
        for number in range(1000):
            assert store.get([f"k{number}"]) == [None]
            assert store.get([f"k{number}"]) == [None]
        assert len(caplog.records) == 1000
        assert len(store._reported) <= 256


def test_a_coordinator_whose_term_ended_has_no_connection(stack: ExitStack) -> None:
    """A node that is the coordinator again and again keeps one connection for that."""
    node = stack.enter_context(tcp_node(free_port(), (1, 2), is_host=True, conf=CONF, setup=SETUP))
    node.wait_for(Formed)
    session = node.session
    before = len(session._context.connections)  # type: ignore[attr-defined]
    term = session._terms[-1]  # type: ignore[attr-defined]
    term.stop()
    term.join(10)
    wait_until(lambda: len(session._context.connections) == before - 1)  # type: ignore[attr-defined]
