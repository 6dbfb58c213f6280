"""A store whose host goes dark: no FIN, no RST, nothing. Whoever waits in it must learn of that all the same."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from elastic_run.store.errors import SILENT, StoreConnectionError
from elastic_run.store.jobstore.c10d import C10dJobStore
from tests.support.hosts import virtual_hosts
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable

_PORT = 29400
_TIMEOUT = 3.0
_SERVER = f"""
from elastic_run.loop import Loop
from elastic_run.store.tcpstore.listener import open_listener
from elastic_run.store.tcpstore.server import StoreServer
with Loop() as loop:
    StoreServer(loop, open_listener("0.0.0.0", {_PORT}))
    print("serving", flush=True)
    loop.run_until(lambda: False)
"""


def test_waits_on_a_dark_host_end() -> None:
    """Waits that could last for ever, and a new connection, end with `silent` soon after the host went dark."""
    with virtual_hosts(2) as hosts:
        hosts[0].start([sys.executable, "-c", _SERVER]).wait_line("serving")
        with hosts[1].on_network():
            store = C10dJobStore(hosts[0].address, _PORT, "job", timeout=_TIMEOUT)
            waiting, reading = store.clone(), store.clone()
            store.append("facts", b"a")
            _, position = reading.read("facts", 0, DEADLINE)
            waits: list[Callable[[], object]] = [
                lambda: waiting.wait("d/0", 10 * DEADLINE),
                lambda: reading.read("facts", position, 10 * DEADLINE),
                lambda: store.heartbeat("n"),
            ]
            reasons: list[str] = []

            def run(wait: Callable[[], object]) -> None:
                try:
                    wait()
                except StoreConnectionError as error:
                    reasons.append(error.reason)

            threads = [threading.Thread(target=run, args=(wait,)) for wait in waits]
            for thread in threads[:2]:
                thread.start()
            hosts[0].go_dark()
            threads[2].start()
            begun = time.monotonic()
            for thread in threads:
                thread.join(DEADLINE)
            assert reasons == [SILENT] * 3
            assert time.monotonic() - begun < 3 * _TIMEOUT
            with pytest.raises(StoreConnectionError) as caught:
                store.clone()
            assert caught.value.reason == SILENT
            hosts[0].come_to_light()
            with store.clone() as again:
                assert again.create("d/0", b"x") == b"x"
