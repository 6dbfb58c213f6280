"""What happens to a job when its nodes die, hang or vanish: processes that are killed and stopped, real sockets."""

from __future__ import annotations

import json
import select
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.node.messages import Ended, Formed, Halted
from elastic_run.core.protocol.job_keys import FACTS, HEAD, state_key
from elastic_run.core.protocol.messages import read_head
from elastic_run.rendezvous.elastic import exit_barrier, retry_deadline
from elastic_run.rendezvous.elastic.backend.hosting import HostedStore
from elastic_run.rendezvous.elastic.node_death.notice import send_death_notice
from elastic_run.rendezvous.session import Lost
from elastic_run.store.jobstore.c10d import C10dJobStore
from elastic_run.store.tcpstore.listener import open_public_listener
from tests.support.configs import plain_setup
from tests.support.sessions import FAST, NodeProcess, free_port, tcp_node
from tests.support.wait import DEADLINE, stretched, wait_until

if TYPE_CHECKING:
    from contextlib import ExitStack

_LEASE = 1.2
CALM = {**FAST, "last_call_timeout": "20"}


def test_a_killed_node_is_replaced_after_its_lease(stack: ExitStack) -> None:
    """A node that was killed is missed within its lease and a second, and a waiting node takes its rank."""
    port = free_port()
    host = stack.enter_context(tcp_node(port, (2, 2), is_host=True))
    victim = stack.enter_context(NodeProcess(port, (2, 2)))
    lost = int(victim.wait_line("Formed").partition("group_rank=")[2].partition(",")[0])
    assert host.wait_for(Formed).assignment.group_rank == 1 - lost
    spare = stack.enter_context(tcp_node(port, (2, 2)))
    victim.process.kill()
    killed = time.monotonic()
    assert host.wait_for(Halted).reason == "loss"
    formed = host.wait_for(Formed).assignment
    assert time.monotonic() - killed < stretched(_LEASE + 1)
    assert formed.group_rank == 1 - lost
    assert spare.wait_for(Formed).assignment.group_rank == lost


def test_a_guardian_tells_of_a_death_at_once(stack: ExitStack) -> None:
    """What the guardian of a killed agent says is heard at once, without waiting for the lease."""
    port = free_port()
    host = stack.enter_context(tcp_node(port, (2, 2), is_host=True))
    victim = stack.enter_context(NodeProcess(port, (2, 2)))
    notice = victim.wait_line("death_notice").partition(" ")[2]
    victim.wait_line("Formed")
    host.wait_for(Formed)
    victim.process.kill()
    victim.process.wait()
    begin = time.monotonic()
    send_death_notice(json.loads(notice))
    assert host.wait_for(Halted).reason in ("loss", "leave")
    assert time.monotonic() - begin < stretched(_LEASE / 2)


def test_the_coordinator_is_replaced(stack: ExitStack) -> None:
    """When the coordinator hangs, another node takes over, and it is missed within its lease and a second.

    When it wakes up it decides nothing, and joins again.
    """
    port = _serve_store(stack)
    coordinator = stack.enter_context(NodeProcess(port, (2, 3), is_host=False))
    coordinator.wait_line("waiting")
    conf = {**FAST, "last_call_timeout": "20"}
    others = [stack.enter_context(tcp_node(port, (2, 3), is_host=False, conf=conf)) for _ in range(2)]
    assert {node.wait_for(Formed).assignment.group_world_size for node in others} == {3}
    coordinator.wait_line("Formed")
    coordinator.process.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    assert {node.wait_for(Halted).reason for node in others} == {"loss"}
    assert time.monotonic() - begin < stretched(_LEASE + 1.0)
    assert {node.wait_for(Formed).assignment.group_world_size for node in others} == {2}
    coordinator.process.send_signal(signal.SIGCONT)
    coordinator.wait_line("Halted")
    assert {node.wait_for(Halted).reason for node in others} == {"join"}
    assert {node.wait_for(Formed).assignment.group_world_size for node in others} == {3}
    coordinator.wait_line("Formed")
    coordinator.say("done")
    for node in others:
        node.done()
    assert {node.wait_for(Ended).end.verdict for node in others} == {"success"}
    assert "success" in coordinator.wait_line("Ended")


@pytest.mark.parametrize("garbage", [b"rubbish", b'{"protocol":1,"term":1}', None], ids=["rubbish", "half", "gone"])
def test_a_job_survives_its_state(stack: ExitStack, garbage: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    """Garbage over the job's state, which a successor reads, costs no agent: it is said once, and the job goes on."""
    port = _serve_store(stack)
    coordinator = stack.enter_context(NodeProcess(port, (2, 3), is_host=False))
    coordinator.wait_line("waiting")
    others = [stack.enter_context(tcp_node(port, (2, 3), is_host=False, conf=CALM)) for _ in range(2)]
    rounds = [node.wait_for(Formed).assignment for node in others]
    assert {formed.group_world_size for formed in rounds} == {3}
    with C10dJobStore("127.0.0.1", port, "job") as stranger:
        # Nodes are told of a round a moment before the head is.
        wait_until(lambda: read_head(stranger.get([HEAD])[0] or b"").is_running, what="the head of a round that runs")
        head = read_head(stranger.get([HEAD])[0] or b"")
        key = state_key(head.state_slot, head.state_term)
        assert stranger.get([key])[0] is not None
        if garbage is None:
            stranger.delete([key])
        else:
            stranger.write({key: garbage})
    coordinator.process.kill()
    # The round that they run is theirs still: it is the killed node's loss that ends it.
    assert {node.wait_for(Halted).reason for node in others} == {"loss"}
    again = [node.wait_for(Formed).assignment for node in others]
    assert {formed.group_world_size for formed in again} == {2}
    for node in others:
        node.done()
    assert {node.wait_for(Ended).end.verdict for node in others} == {"success"}
    said = [record.getMessage() for record in caplog.records if "the state of the job is lost" in record.getMessage()]
    assert len(said) == 1
    assert key in said[0]


def test_a_host_that_is_paused_is_not_missed(stack: ExitStack) -> None:
    """While the process that serves the store is stopped for less than the lease, nobody's workers are touched."""
    port = free_port()
    host = stack.enter_context(NodeProcess(port, (3, 3), is_host=True))
    nodes = [stack.enter_context(tcp_node(port, (3, 3), is_host=False)) for _ in range(2)]
    for node in nodes:
        node.wait_for(Formed)
    host.wait_line("Formed")
    host.process.send_signal(signal.SIGSTOP)
    _let_pass(_LEASE * 0.75)
    host.process.send_signal(signal.SIGCONT)
    host.say("done")
    for node in nodes:
        node.done()
    assert "success" in host.wait_line("Ended")
    for node in nodes:
        assert node.wait_for(Ended).end.verdict == "success"
        assert not [event for _, event in node.events if isinstance(event, Halted)]


def test_a_host_that_is_gone_is_named(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the process that serves the store dies, every agent gives up after a stated time and says why."""
    port = free_port()
    host = stack.enter_context(NodeProcess(port, (2, 2), is_host=True))
    node = stack.enter_context(tcp_node(port, (2, 2), is_host=False))
    node.wait_for(Formed)
    monkeypatch.setattr(retry_deadline, "REFUSED_FOR", 1.0)
    host.process.kill()
    lost = node.wait_for(Lost)
    assert lost.verdict == "store_lost"
    assert "refused" in lost.detail


def test_a_host_that_leaves_alone_takes_the_job_with_it(stack: ExitStack) -> None:
    """A node that serves the store and is told to stop says to the others that the job ends with it, at once."""
    port = free_port()
    host = stack.enter_context(tcp_node(port, (2, 2), is_host=True))
    node = stack.enter_context(tcp_node(port, (2, 2), is_host=False))
    for one in (host, node):
        one.wait_for(Formed)
    host.session.leave("signal", "told to stop")
    begin = time.monotonic()
    host.close()
    lost = node.wait_for(Lost)
    assert time.monotonic() - begin < stretched(1.0)
    assert lost.verdict == "store_lost"
    assert "told to stop" in lost.detail
    assert "no successor" in lost.detail


def test_a_successor_takes_over_from_a_host_that_died(stack: ExitStack) -> None:
    """With a successor the job goes on when the host of the store dies: same round numbers, same budget."""
    ports = free_port(), free_port()
    host = stack.enter_context(NodeProcess(ports[0], (2, 3), is_host=True, successor=ports[1]))
    host.wait_line("waiting")
    setup = plain_setup(max_restarts=1)
    nodes = [
        stack.enter_context(tcp_node(ports[0], (2, 3), is_host=False, successors=ports[1:], setup=setup, conf=CALM))
        for _ in range(2)
    ]
    first = [node.wait_for(Formed).assignment for node in nodes]
    assert {one.group_world_size for one in first} == {3}
    nodes[0].fail()
    again = [node.wait_for(Formed).assignment for node in nodes]
    assert {one.restart_count for one in again} == {1}
    host.process.kill()
    formed = [node.wait_for(Formed).assignment for node in nodes]
    assert {one.group_world_size for one in formed} == {2}
    assert {one.restart_count for one in formed} == {1}
    assert all(one.round > again[0].round for one in formed)
    nodes[1].fail(9)
    assert {(end.verdict, end.exit_code) for end in (node.wait_for(Ended).end for node in nodes)} == {
        ("worker_failed", 9)
    }


def test_a_host_hands_over_to_a_successor(stack: ExitStack) -> None:
    """A host that is told to stop hands the store over, and the others go on without it."""
    ports = free_port(), free_port()
    nodes = [
        stack.enter_context(tcp_node(ports[0], (2, 3), is_host=is_host, successors=ports[1:], conf=CALM))
        for is_host in (True, False, False)
    ]
    assert {node.wait_for(Formed).assignment.group_world_size for node in nodes} == {3}
    nodes[0].session.leave("signal", "told to stop")
    begin = time.monotonic()
    nodes[0].close()
    assert {node.wait_for(Formed).assignment.group_world_size for node in nodes[1:]} == {2}
    assert time.monotonic() - begin < stretched(_LEASE + 1)
    for node in nodes[1:]:
        node.finish()
    assert {node.wait_for(Ended).end.verdict for node in nodes[1:]} == {"success"}


def _serve_store(stack: ExitStack) -> int:
    """Serve a store that no node has; returns its port."""
    hosted = HostedStore(open_public_listener(0))
    stack.callback(hosted.close)
    return hosted.port


def _let_pass(seconds: float) -> None:
    """Let time pass where its passing is the subject: what happens in it must not be noticed."""
    select.select([], [], [], seconds)


def test_a_host_that_goes_with_all_others_waits_for_nobody(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the other nodes end while the host of the store hands it over, as under scancel, the host ends with them."""
    monkeypatch.setattr(exit_barrier, "_TELL", 10 * DEADLINE)
    ports, setup = (free_port(), free_port()), plain_setup(max_restarts=1)
    host = stack.enter_context(tcp_node(ports[0], (2, 2), is_host=True, successors=ports[1:], setup=setup))
    other = stack.enter_context(NodeProcess(ports[0], (2, 2), is_host=False, successors=ports[1:]))
    other.wait_line("Formed")
    host.wait_for(Formed)
    other.process.send_signal(signal.SIGSTOP)  # so nobody decides that the store moves
    host.session.leave("signal", "told to stop")
    closing = threading.Thread(target=host.close, args=(10 * DEADLINE,))
    closing.start()
    with C10dJobStore("127.0.0.1", ports[0], "job") as stranger:
        entries, position = stranger.read(FACTS, 0, DEADLINE)
        while not any(b'"failover_request"' in entry for entry in entries):
            entries, position = stranger.read(FACTS, position, DEADLINE)
    other.process.kill()
    closing.join(stretched(DEADLINE))
    assert not closing.is_alive()
