"""Jobs of several nodes over a real c10d store: sessions in threads, real sockets, our server."""

from __future__ import annotations

import re
import shlex
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.job.config import JoinCommand, NodeConfig
from elastic_run.core.job.node_events import Ended, Formed, Halted, Refused
from elastic_run.rendezvous import RendezvousClosedError, RendezvousParameters, get_rendezvous_handler
from elastic_run.rendezvous.session import Notice
from elastic_run.report import waiting
from elastic_run.store.tcpstore.client import StoreClient
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


def test_a_failure_restarts_all(enter: Callable[[Node], Node]) -> None:
    """A worker's failure stops the round on every node, and the next round begins on all of them."""
    port = free_port()
    setup = plain_setup(2, max_restarts=1)
    nodes = [enter(tcp_node(port, (3, 3), setup=setup)) for _ in range(3)]
    for node in nodes:
        assert node.wait_for(Formed).assignment.world_size == 6
    nodes[1].fail()
    for node in nodes[::2]:
        assert node.wait_for(Halted).reason == "failure"
    formed = [node.wait_for(Formed).assignment for node in nodes]
    assert {one.restart_count for one in formed} == {1}
    nodes[2].fail(7)
    ended = [node.wait_for(Ended).end for node in nodes]
    assert {(one.verdict, one.exit_code) for one in ended} == {("worker_failed", 7)}
    assert all(one.root == ended[0].root and one.root is not None for one in ended)


def test_a_node_that_leaves_is_replaced_by_a_spare(enter: Callable[[Node], Node]) -> None:
    """A node that was told to stop leaves in order, and a waiting node takes its rank."""
    port = free_port()
    setup = plain_setup()
    nodes = [enter(tcp_node(port, (2, 2), setup=setup)) for _ in range(2)]
    ranks = {node.wait_for(Formed).assignment.group_rank: node for node in nodes}
    spare = enter(tcp_node(port, (2, 2), setup=setup))
    leaver = next(node for node in ranks.values() if node.session._thread.coordinator is None)  # type: ignore[attr-defined]
    stayer = next(node for node in nodes if node is not leaver)
    leaver.session.leave("signal", "told to stop")
    leaver.close()
    assert stayer.wait_for(Halted).reason == "leave"
    formed = [node.wait_for(Formed).assignment for node in (stayer, spare)]
    assert sorted(one.group_rank for one in formed) == [0, 1]
    assert {one.restart_count for one in formed} == {0}


def test_the_last_call_waits_for_more(enter: Callable[[Node], Node]) -> None:
    """With fewer than the most nodes the first round waits for the last call, then begins without them."""
    port = free_port()
    nodes = [enter(tcp_node(port, (1, 4), conf={**FAST, "last_call_timeout": "2"})) for _ in range(2)]
    assert {node.wait_for(Formed).assignment.group_world_size for node in nodes} == {2}


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
        assert not worker.check(["left"])
    for node in nodes:
        node.done()
    assert {node.wait_for(Ended).end.verdict for node in nodes} == {"success"}


def test_a_node_with_other_rules_is_refused(enter: Callable[[Node], Node]) -> None:
    """A node that was told another number of nodes is refused with both values, and the job goes on."""
    port = free_port()
    nodes = [enter(tcp_node(port, (2, 2))) for _ in range(2)]
    for node in nodes:
        node.wait_for(Formed)
    other = enter(tcp_node(port, (2, 5)))
    detail = other.wait_for(Refused).detail
    assert "2:5" in detail
    assert "2:2" in detail
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


def test_who_is_missing_is_told(enter: Callable[[Node], Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """While nodes are missing, a line says how many are there, who, and how long they are waited for."""
    monkeypatch.setattr(waiting, "FIRST", 0.2)
    node = enter(tcp_node(free_port(), (2, 2)))
    while not (text := node.wait_for(Notice).text).startswith("waiting: 1/2 nodes"):
        pass
    assert socket.gethostname() in text
    assert re.search(r", gives up in \d+:\d\d(;|$)", text)


def test_without_an_endpoint_a_node_hosts_one_and_says_how_to_join(enter: Callable[[Node], Node]) -> None:
    """The shortest command serves a store here, starts at the minimum, and says with which command others join."""
    command = JoinCommand(("elastic-run",), ("--nnodes=1:2",), ("train.py", "--name=a b"))
    setup = plain_setup(node_config=NodeConfig(join_command=command, token=b""))
    conf = {key: value for key, value in FAST.items() if key != "last_call_timeout"}
    first = enter(handler_node(RendezvousParameters("c10d", "", "none", 1, 2, "127.0.0.1", **conf), setup))
    words = shlex.split(first.wait_for(Notice).text.partition("join with: ")[2])
    assert words[-3:] == ["--nnodes=1:2", "train.py", "--name=a b"]
    flags = dict(word.lstrip("-").split("=", 1) for word in words[1:5])
    assert first.wait_for(Formed).assignment.group_world_size == 1
    second = enter(
        handler_node(
            RendezvousParameters(
                "c10d",
                flags["rdzv-endpoint"],
                flags["rdzv-id"],
                1,
                2,
                "127.0.0.1",
                **{**conf, **dict([flags["rdzv-conf"].split("=")])},
            )
        )
    )
    assert {node.wait_for(Formed).assignment.group_world_size for node in (first, second)} == {2}


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
