"""Jobs of several nodes over every other kind of store: etcd, a file, torch's own TCPStore, signed values."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.node.messages import Ended, Formed, Halted, Refused
from elastic_run.core.protocol.job_keys import FACTS, HEAD, STATUS, decision_key
from elastic_run.core.protocol.messages import DIED, LAST_SEQUENCE, End, Leave, to_json
from elastic_run.rendezvous import RendezvousParameters
from elastic_run.rendezvous.session import Lost
from elastic_run.store.jobstore.c10d import C10dJobStore
from elastic_run.store.jobstore.etcd_v3_client import EtcdV3Client
from tests.support.configs import plain_setup
from tests.support.etcd import Etcd
from tests.support.job_stores import torchs_server
from tests.support.sessions import FAST, Node, free_port, handler_node, tcp_node

if TYPE_CHECKING:
    from contextlib import ExitStack
    from pathlib import Path


def run_job(stack: ExitStack, backend: str, endpoint: str, **conf: str) -> list[Node]:
    """Run a job of three nodes that fails once, then loses a node that leaves, and succeeds with two."""
    setup = plain_setup(max_restarts=1)
    nodes = []
    for _ in range(3):
        parameters = RendezvousParameters(backend, endpoint, "job", 2, 3, "127.0.0.1", **{**FAST, **conf})
        nodes.append(stack.enter_context(handler_node(parameters, setup)))
    assert {node.wait_for(Formed).assignment.group_world_size for node in nodes} == {3}
    nodes[2].fail()
    assert {node.wait_for(Formed).assignment.restart_count for node in nodes} == {1}
    nodes[1].session.leave("signal", "told to stop")
    nodes[1].close()
    rest = [nodes[0], nodes[2]]
    assert {node.wait_for(Halted).reason for node in rest[:1]} <= {"failure", "leave"}
    for node in rest:
        while node.wait_for(Formed).assignment.group_world_size != 2:
            pass
        node.done()
    assert {node.wait_for(Ended).end.verdict for node in rest} == {"success"}
    return rest


@pytest.mark.parametrize("backend", ["etcd", "etcd-v2", "etcd-v3"])
def test_a_job_in_etcd(stack: ExitStack, backend: str) -> None:
    """A job meets in etcd, fails once, loses a node, succeeds, and leaves nothing behind."""
    etcd = stack.enter_context(Etcd())
    nodes = run_job(stack, backend, str(etcd.endpoints[0]))
    for node in nodes:
        node.close()
    if backend == "etcd-v3":
        client = etcd.client()
        stack.callback(client.close)
        assert not EtcdV3Client(client).call("kv/range", {"key": "AA==", "range_end": "AA=="}).get("kvs")


def test_a_job_in_a_file(stack: ExitStack, tmp_path: Path) -> None:
    """A job meets in a file that all nodes see."""
    run_job(stack, "c10d", str(tmp_path / "store"), store_type="file")


def test_a_job_in_a_store_that_torch_serves(stack: ExitStack) -> None:
    """A job meets at a TCPStore of torch's."""
    port = stack.enter_context(torchs_server())
    run_job(stack, "c10d", f"127.0.0.1:{port}", is_host="0")


def test_what_strangers_write_is_passed_over(stack: ExitStack) -> None:
    """With a token, nothing that a stranger writes into an open store does harm: facts, decisions, heartbeats."""
    port = stack.enter_context(torchs_server())
    nodes = [stack.enter_context(tcp_node(port, (2, 2), is_host=False, secret=b"secret")) for _ in range(2)]
    assert {node.wait_for(Formed).assignment.group_world_size for node in nodes} == {2}
    with C10dJobStore("127.0.0.1", port, "job") as stranger:
        stranger.append(FACTS, to_json(Leave(nodes[1].session.node, LAST_SEQUENCE, DIED)))
        stranger.append(FACTS, b"rubbish")
        stranger.create(decision_key(2), to_json(End(1, "worker_failed", 1)))
        stranger.write({HEAD: b"rubbish", STATUS: b"rubbish"})
        stranger.heartbeat(nodes[0].session.node)
    for node in nodes:
        node.done()
    assert {node.wait_for(Ended).end.verdict for node in nodes} == {"success"}
    assert not [event for node in nodes for _, event in node.events if isinstance(event, Halted)]


@pytest.mark.parametrize(("job", "joiner"), [(b"secret", b"another"), (b"secret", None), (None, b"secret")])
def test_a_node_with_another_token_is_refused(stack: ExitStack, job: bytes | None, joiner: bytes | None) -> None:
    """A node whose token is not the job's is told so and not taken in; the job goes on."""
    port = free_port()
    nodes = [stack.enter_context(tcp_node(port, (1, 3), secret=job, conf={**FAST, "last_call_timeout": "0"}))]
    nodes[0].wait_for(Formed)
    stranger = stack.enter_context(tcp_node(port, (1, 3), secret=joiner))
    assert "token" in stranger.wait_for(Refused).detail
    nodes[0].done()
    assert nodes[0].wait_for(Ended).end.verdict == "success"


def test_garbage_at_the_endpoint_harms_nothing(stack: ExitStack) -> None:
    """Foreign bytes on the port of the store leave the job alone."""
    port = free_port()
    nodes = [stack.enter_context(tcp_node(port, (2, 2))) for _ in range(2)]
    for node in nodes:
        node.wait_for(Formed)
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b""):
        with socket.create_connection(("127.0.0.1", port)) as foreign:
            foreign.sendall(garbage)
    for node in nodes:
        node.done()
    assert {node.wait_for(Ended).end.verdict for node in nodes} == {"success"}


def test_a_store_that_was_never_reached_is_named(stack: ExitStack) -> None:
    """Where no store answers within join_timeout the node gives up and says what is wrong."""
    node = stack.enter_context(tcp_node(free_port(), (2, 2), is_host=False, conf={**FAST, "join_timeout": "1"}))
    lost = node.wait_for(Lost)
    assert lost.verdict == "rendezvous"
    assert "refused" in lost.detail
