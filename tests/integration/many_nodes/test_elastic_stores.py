"""A job's place as its nodes see it: another token, foreign bytes, an endpoint where nobody is."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.job.node_events import Ended, Formed, Refused
from elastic_run.rendezvous.session import Lost
from tests.support.sessions import FAST, free_port, tcp_node

if TYPE_CHECKING:
    from contextlib import ExitStack


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
