"""How long a node waits for a store: as long as it was told, however the store fails to answer, and not much longer."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.job.node_events import Ended, Formed
from elastic_run.rendezvous.session import Lost
from tests.support.sessions import FAST, free_port, tcp_node
from tests.support.wait import stretched

if TYPE_CHECKING:
    from contextlib import ExitStack

#: Seconds beyond what was asked for; the promise is one.
_LATE = 1.0


def test_a_store_that_does_not_answer_is_given_up_in_time(stack: ExitStack) -> None:
    """Where the port takes connections and says nothing, or nobody listens, join_timeout is kept within a second."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    ports = {"sends no answer": listener.getsockname()[1], "refused": free_port()}
    begun = time.monotonic()
    nodes = [
        (kind, join_timeout, stack.enter_context(tcp_node(port, (2, 2), is_host=False, conf=_conf(join_timeout))))
        for join_timeout in (1.0, 4.0)
        for kind, port in ports.items()
    ]
    for kind, join_timeout, node in nodes:
        lost = node.wait_for(Lost)
        assert kind in lost.detail
        assert join_timeout - 0.1 <= time.monotonic() - begun < stretched(join_timeout + _LATE)


def _conf(join_timeout: float) -> dict[str, str]:
    return {**FAST, "join_timeout": str(join_timeout), "keep_alive_interval": "3"}


def test_a_store_that_comes_late_is_found(stack: ExitStack) -> None:
    """A store that comes shortly before the end of that time is joined as any other."""
    port = free_port()
    conf = {**FAST, "join_timeout": "5"}
    first = stack.enter_context(tcp_node(port, (2, 2), is_host=False, conf=conf))
    with pytest.raises(AssertionError):
        first.wait_for(Formed, deadline=2)
    second = stack.enter_context(tcp_node(port, (2, 2), is_host=True, conf=conf))
    for node in (first, second):
        node.wait_for(Formed)


def test_after_the_end_no_store_is_missed(stack: ExitStack) -> None:
    """A node whose workers take their time to end asks for the store no more, nor takes the place of its host."""
    port, next_port = free_port(), free_port()
    host, other = (
        stack.enter_context(tcp_node(port, (2, 2), is_host=is_host, successors=(next_port,)))
        for is_host in (True, False)
    )
    for node in (host, other):
        node.wait_for(Formed)
        node.done()
    assert {node.wait_for(Ended).end.verdict for node in (host, other)} == {"success"}
    host.close()
    with socket.create_server(("127.0.0.1", port)) as listener, socket.create_server(("127.0.0.1", next_port)):
        listener.settimeout(2 * float(FAST["keep_alive_interval"]))
        with pytest.raises(TimeoutError):
            listener.accept()
