"""Several agents of one machine that may serve the job's store at the same address: one of them serves it.

Linux may refuse both of two sockets that bind and listen at one address at the same moment (in 63 of 3,000 such moments
of two processes here): each sees the other one listen.
"""

from __future__ import annotations

import socket
import threading
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from elastic_run.rendezvous.elastic.backend import tcp
from elastic_run.rendezvous.elastic.backend.tcp import TcpBackend
from elastic_run.store.errors import REFUSED, StoreConnectionError
from elastic_run.store.tcpstore.listener import PortTakenError, open_listeners
from tests.support.sessions import free_port
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    import _socket
    from collections.abc import Sequence


def make_backend(port: int, *, is_host: bool | None = None) -> TcpBackend:
    """Return the backend of an agent of this machine."""
    return TcpBackend("c10d", "j", [("127.0.0.1", port)], is_host=is_host)


class Refusals:
    """Stands in place of `open_listeners`, and refuses the first attempts as Linux does.

    Args:
        count: How many attempts are refused.
    """

    def __init__(self, count: int) -> None:
        self.left = count

    def open_listeners(self, hosts: Sequence[str], port: int = 0) -> list[_socket.socket]:
        """Refuse, or listen."""
        if self.left:
            self.left -= 1
            raise PortTakenError(port)
        return open_listeners(hosts, port)


@pytest.mark.parametrize("is_host", [None, True])
def test_a_refused_agent_tries_again_while_nobody_listens(
    monkeypatch: pytest.MonkeyPatch, *, is_host: bool | None
) -> None:
    """An agent whose address was refused serves the store all the same if no other process listens there."""
    monkeypatch.setattr(tcp, "open_listeners", Refusals(3).open_listeners)
    with closing(make_backend(free_port(), is_host=is_host)) as backend:
        backend.prepare()
        assert backend.is_host
        backend.open(DEADLINE).close()


def test_an_agent_that_was_refused_for_long_serves_once_the_port_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent whose port another program has, without listening, serves the store when it finds the port free."""
    monkeypatch.setattr(tcp, "_CONTEST", 0.01)
    port = free_port()
    with closing(make_backend(port)) as backend:
        with socket.socket() as other:
            other.bind(("127.0.0.1", port))
            backend.prepare()
            with pytest.raises(StoreConnectionError) as caught:
                backend.open(DEADLINE)
            assert caught.value.reason == REFUSED
            assert not backend.is_host
        backend.open(DEADLINE).close()
        assert backend.is_host


def test_an_agent_that_reached_the_store_never_serves_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that was refused, and reached the store, doesn't serve an empty one when the store's host is gone."""
    monkeypatch.setattr(tcp, "_CONTEST", 0.01)
    port = free_port()
    with closing(make_backend(port)) as later:
        with closing(make_backend(port)) as first:
            first.prepare()
            later.prepare()
            later.open(DEADLINE).close()
        with pytest.raises(StoreConnectionError):
            later.open(0.1)
        assert not later.is_host


@pytest.mark.parametrize("is_host", [None, True])
def test_an_agent_connects_where_another_one_listens(*, is_host: bool | None) -> None:
    """Where another agent serves the store, a later one connects to it; if told to serve, it says that it can't."""
    port = free_port()
    with closing(make_backend(port)) as first, closing(make_backend(port, is_host=is_host)) as second:
        first.prepare()
        if is_host:
            with pytest.raises(PortTakenError):
                second.prepare()
        else:
            second.prepare()
        assert not second.is_host
        second.open(DEADLINE).close()


def test_one_of_two_serves_when_both_were_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two agents begin to listen at one address at the same moment, and both are refused: one serves in the end."""
    gate = threading.Barrier(2, timeout=DEADLINE)
    refused: set[threading.Thread] = set()

    def refuse_both(hosts: Sequence[str], port: int = 0) -> list[_socket.socket]:
        """Refuse each agent's first attempt, as Linux does."""
        if threading.current_thread() not in refused:
            refused.add(threading.current_thread())
            gate.wait()
            raise PortTakenError(port)
        return open_listeners(hosts, port)

    monkeypatch.setattr(tcp, "open_listeners", refuse_both)
    port = free_port()
    with closing(make_backend(port)) as one, closing(make_backend(port)) as other:
        threads = [threading.Thread(target=agent.prepare) for agent in (one, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        one.open(DEADLINE).close()
        other.open(DEADLINE).close()
        assert one.is_host is not other.is_host
