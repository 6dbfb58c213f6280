"""A store that an agent serves for its whole job: its thread and its end."""

from __future__ import annotations

import threading
import time

import pytest

from elastic_run.rendezvous.elastic.backend.hosting import HostedStore
from elastic_run.store.errors import StoreConnectionError
from elastic_run.store.tcpstore.client import StoreClient
from elastic_run.store.tcpstore.listener import open_listener
from tests.support.wait import DEADLINE, stretched


@pytest.mark.parametrize("is_used", [False, True])
def test_a_hosted_store_ends_at_once(*, is_used: bool) -> None:
    """`close` ends the thread, the port and every connection in far less than the ten seconds that it would wait."""
    hosted = HostedStore(open_listener())
    client = StoreClient("127.0.0.1", hosted.port, DEADLINE) if is_used else None
    begun = time.monotonic()
    hosted.close()
    assert time.monotonic() - begun < stretched(2.0)
    assert not [thread for thread in threading.enumerate() if thread.name == "job-store"]
    if client is not None:
        with client, pytest.raises(StoreConnectionError):
            client.add("key", 1)
    open_listener("127.0.0.1", hosted.port).close()
    hosted.close()
