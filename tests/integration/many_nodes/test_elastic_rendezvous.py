"""Jobs of several nodes over a real c10d store: sessions in threads, real sockets, our server."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.job.membership import Ended, Formed, Halted, Refused
from elastic_run.rendezvous import RendezvousClosedError, RendezvousParameters, get_rendezvous_handler
from elastic_run.store.client import StoreClient
from tests.support.sessions import FAST, Node, NodeProcess, free_port, handler_node, plain_setup, tcp_node
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def enter() -> Iterator[Callable[[Node], Node]]:
    """Return a function that starts a node and closes it after the test, the first one last."""
    with ExitStack() as stack:
        yield stack.enter_context


def test_two_nodes_form_a_round_and_succeed(enter: Callable[[Node], Node]) -> None:
    """Two nodes meet at an endpoint, get ranks 0 and 1, and both learn of the success of both."""
    port = free_port()
    nodes = [enter(tcp_node(port, (2, 2))) for _ in range(2)]
    formed = [node.wait_for(Formed).assignment for node in nodes]
    assert sorted(one.group_rank for one in formed) == [0, 1]
    assert len({(one.master.host, one.master.port, one.round) for one in formed}) == 1
    for node in nodes:
        node.done()
    assert [node.wait_for(Ended).end.verdict for node in nodes] == ["success"] * 2


def static_node(port: int, rank: int, size: int) -> Node:
    """Return a node of a job with static rendezvous."""
    parameters = RendezvousParameters("static", f"127.0.0.1:{port}", "job", size, size, rank=rank, timeout=30)
    return handler_node(parameters, plain_setup(max_restarts=1))


def test_static_nodes_have_the_ranks_that_were_given(enter: Callable[[Node], Node]) -> None:
    """With static rendezvous each node has the rank it was given, and the store is at the address that was given."""
    port = free_port()
    nodes = [enter(static_node(port, rank, 3)) for rank in (0, 2, 1)]
    formed = [node.wait_for(Formed).assignment for node in nodes]
    assert [one.group_rank for one in formed] == [0, 2, 1]
    assert {(one.master.host, one.master.port) for one in formed} == {("127.0.0.1", port)}
    with StoreClient("127.0.0.1", port, 10.0) as worker:
        worker.set("left", "behind")
        nodes[1].fail()
        formed = [node.wait_for(Formed).assignment for node in nodes]
    assert [one.group_rank for one in formed] == [0, 2, 1]
    with StoreClient("127.0.0.1", port, 10.0) as worker:
        assert worker.add("left", 1) == 1
    for node in nodes:
        node.done()
    assert {node.wait_for(Ended).end.verdict for node in nodes} == {"success"}


def test_an_endpoint_belongs_to_one_job(enter: Callable[[Node], Node]) -> None:
    """A node with another id is refused with both ids, before and after the first round; the job goes on without it."""
    port = free_port()
    nodes = [enter(tcp_node(port, (2, 2), is_host=True))]
    wait_until(lambda: nodes[0].is_waiting)
    typo = "the job here has --rdzv-id=job, and this node came with --rdzv-id=jbo"
    assert typo in enter(tcp_node(port, (2, 2), run_id="jbo")).wait_for(Refused).detail
    nodes.append(enter(tcp_node(port, (2, 2))))
    for node in nodes:
        node.wait_for(Formed)
    assert typo in enter(tcp_node(port, (2, 2), run_id="jbo")).wait_for(Refused).detail
    for node in nodes:
        node.done()
    assert {node.wait_for(Ended).end.verdict for node in nodes} == {"success"}


def test_a_master_that_cannot_be_reached_is_named(enter: Callable[[Node], Node]) -> None:
    """Where rank 0's store can't be reached no worker is started, and the verdict says from where and why."""
    port = free_port()
    nodes = [tcp_node(port, (2, 2)) for _ in range(2)]
    for node in nodes:
        node.offers_closed_port = True
        enter(node)
    ended = [node.wait_for(Ended).end for node in nodes]
    assert {end.verdict for end in ended} == {"rendezvous"}
    assert all("refused" in end.detail and "can't reach" in end.detail for end in ended)


def test_a_plain_handler_joins_rounds() -> None:
    """An agent that knows only torch's methods forms rounds with another, shares a store with it, and ends with it."""
    port = free_port()
    parameters = RendezvousParameters("c10d", f"127.0.0.1:{port}", "job", 2, 2, "127.0.0.1", **FAST)
    handlers = [get_rendezvous_handler(parameters) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            rounds = list(pool.map(lambda handler: handler.next_rendezvous(), handlers))
            assert sorted(one.rank for one in rounds) == [0, 1]
            rounds[0].store.set("key", b"value")
            assert rounds[1].store.get("key") == b"value"
            assert [handler.num_nodes_waiting() for handler in handlers] == [0, 0]
        assert all(pool.map(lambda handler: handler.shutdown(), handlers))
    assert all(handler.is_closed() for handler in handlers)
    with pytest.raises(RendezvousClosedError):
        handlers[0].next_rendezvous()


# --- two rounds of one number, after a job was begun anew -------------------------------------------------------------
_SIZE = (1, 2)


def test_who_runs_round_1_of_before_is_no_member_of_round_1_of_now() -> None:
    """The node's workers are stopped, it waits as any newcomer, and gets a round with a number that it never had."""
    port = free_port()
    with ExitStack() as stack:
        host = stack.enter_context(NodeProcess(port, _SIZE, is_host=True))
        sleeper = stack.enter_context(NodeProcess(port, _SIZE, is_host=False))
        for node in (host, sleeper):
            assert "round=1," in node.wait_line("Formed")
        sleeper.process.send_signal(signal.SIGSTOP)
        host.process.kill()
        host.process.wait()
        others = [stack.enter_context(tcp_node(port, _SIZE, is_host=is_host)) for is_host in (True, False)]
        assert [node.wait_for(Formed).assignment.round for node in others] == [1, 1]
        sleeper.process.send_signal(signal.SIGCONT)
        assert "replaced" in sleeper.wait_line("Halted")
        # Nobody was touched for it; it comes in when there is room.
        assert not [event for node in others for _, event in node.events if isinstance(event, Halted)]
        others[1].session.leave("signal", "told to stop")
        others[1].close()
        # Alone at first, should its workers' end not have been heard of before the other went.
        formed = next(
            formed for _ in range(2) if (formed := others[0].wait_for(Formed).assignment).group_world_size > 1
        )
        assert formed.round > 1
        assert f"round={formed.round}," in sleeper.wait_line("Formed")
        sleeper.say("done")
        others[0].done()
        assert others[0].wait_for(Ended).end.verdict == "success"
        assert "success" in sleeper.wait_line("Ended")
