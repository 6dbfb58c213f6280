"""Several agents of one machine that may serve one endpoint: one of them serves it.

Linux may refuse both of two sockets that bind and listen at one address at the same moment (in 63 of 3,000 such moments
of two processes here): each sees the other one listen.
"""

from __future__ import annotations

import threading
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from elastic_run.rendezvous.coordination import places
from elastic_run.rendezvous.coordination.places import Place
from elastic_run.store.tcpstore.listener import PortTakenError, open_listeners
from tests.support.sessions import free_port
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    import _socket
    from collections.abc import Sequence


def make_place(port: int, *, is_host: bool | None = None) -> Place:
    """Return the place of an agent of this machine."""
    return Place("c10d", "j", [("127.0.0.1", port)], is_host=is_host)


@pytest.mark.parametrize("is_host", [None, True])
def test_an_agent_whose_endpoint_is_served_by_another_one_does_not_serve_it(*, is_host: bool | None) -> None:
    """It goes on as one of the others; if the user says that it serves the endpoint, it can't."""
    port = free_port()
    with closing(make_place(port)) as first, closing(make_place(port, is_host=is_host)) as second:
        assert first.serve()
        if is_host:
            with pytest.raises(PortTakenError):
                second.serve()
        else:
            assert not second.serve()


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

    monkeypatch.setattr(places, "open_listeners", refuse_both)
    port = free_port()
    with closing(make_place(port)) as one, closing(make_place(port)) as other:
        threads = [threading.Thread(target=agent.serve) for agent in (one, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert bool(one.own) is not bool(other.own)
