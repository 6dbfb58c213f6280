"""How long a node waits for a store: as long as it was told, however the store fails to answer, and not much longer."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.job.node_events import Ended, Formed
from elastic_run.rendezvous import RendezvousParameters
from elastic_run.rendezvous.session import Lost, Notice
from tests.support.etcd import Etcd
from tests.support.sessions import FAST, free_port, handler_node, tcp_node
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


def test_an_etcd_that_goes_silent_is_given_up_in_time(stack: ExitStack) -> None:
    """So it is where the store answered before: the time counts from the first question that got no answer."""
    etcd = stack.enter_context(Etcd())
    conf = {"keep_alive_interval": "0.5", "keep_alive_max_attempt": "12", "join_timeout": "7", "last_call_timeout": "0"}
    nodes = []
    for backend in ("etcd", "etcd-v3"):
        parameters = RendezvousParameters(backend, str(etcd.endpoints[0]), "job", 1, 2, "127.0.0.1", **conf)
        nodes.append(stack.enter_context(handler_node(parameters)))
    for node in nodes:
        node.wait_for(Formed)
    etcd.pause(0)
    stack.callback(etcd.resume, 0)
    begun = time.monotonic()
    for node in nodes:
        assert "did not answer" in node.wait_for(Lost).detail
        assert 7 - 0.1 <= time.monotonic() - begun < stretched(7 + 0.5 + _LATE)


@pytest.mark.parametrize("is_mended", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_store_that_answers_and_takes_no_writes_is_out_of_reach(stack: ExitStack, *, is_mended: bool) -> None:
    """A node of an etcd whose quota is used up says so, goes on if there is room again, and else gives up in time."""
    etcd = stack.enter_context(Etcd())
    conf = {"keep_alive_interval": "0.2", "keep_alive_max_attempt": "5", "join_timeout": "4", "last_call_timeout": "0"}
    node = stack.enter_context(
        handler_node(RendezvousParameters("etcd-v3", str(etcd.endpoints[0]), "job", 1, 1, "127.0.0.1", **conf))
    )
    node.wait_for(Formed)
    begun = time.monotonic()
    etcd.set_full(is_full=True)
    assert "database space exceeded" in node.wait_for(Notice).text
    if is_mended:
        etcd.set_full(is_full=False)
        assert "answers again" in node.wait_for(Notice).text
        return
    assert "database space exceeded" in node.wait_for(Lost).detail
    assert time.monotonic() - begun < stretched(4 + 1 + _LATE)


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
