"""The first node of a large job, all of it real: it coordinates, and is rank 0.

``python -m tests.benchmarks.crowd.host NODES RUN_ID``. It says ``listening PORT``, ``joined`` once it has joined its
own job, ``formed NANOSECONDS`` when it is in the round. To every line it is sent it answers with what its port was told
so far, as JSON. It ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from elastic_run.core.job.node_events import Formed, Refused
from elastic_run.core.protocol.facts import StoreAddress
from elastic_run.loop import Loop
from elastic_run.rendezvous.backend_table import read_settings
from elastic_run.rendezvous.coordination.handler import open_session
from elastic_run.rendezvous.coordination.places import Place
from elastic_run.rendezvous.session import Lost
from elastic_run.store.tcpstore.listener import open_listeners, raise_descriptor_limit
from elastic_run.store.tcpstore.server import StoreServer
from tests.benchmarks.crowd.counting import count_traffic, say
from tests.support.configs import plain_setup
from tests.support.sessions import Node
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from elastic_run.rendezvous.session import SessionEvent


def main() -> None:
    """Do what the file says."""
    nodes, run_id = int(sys.argv[1]), sys.argv[2]
    raise_descriptor_limit()
    traffic = count_traffic()
    workers_store = HostedServer()
    token = os.environ.get("CROWD_TOKEN", "").encode() or None
    place = Place("c10d", run_id, [("127.0.0.1", 0)], is_host=True, secret=token)
    place.serve_anywhere("127.0.0.1")
    session = open_session(
        place,
        read_settings("c10d", {"join_timeout": "600"}),
        plain_setup(8, min_nodes=nodes, max_nodes=nodes),
        local_addr="127.0.0.1",
    )

    def deliver(event: SessionEvent) -> None:
        if isinstance(event, Formed):
            say(f"formed {time.monotonic_ns()}")
        elif isinstance(event, Lost | Refused):
            say(f"lost {event.detail}")

    session.start(lambda _: StoreAddress("127.0.0.1", workers_store.port, use_agent_store=True), deliver)
    say(f"listening {place.port}")
    node = Node(session)
    wait_until(lambda: node.is_waiting)
    say("joined")
    for _ in sys.stdin:
        say(json.dumps({**traffic.document(), "cpu": time.process_time()}))
    os._exit(0)


class HostedServer:
    """The workers' store of rank 0, in a thread: nodes only look whether it listens."""

    def __init__(self) -> None:
        self._loop = Loop()
        server = StoreServer(self._loop, open_listeners([])[0])
        self.port = server.address[1]
        threading.Thread(target=lambda: self._loop.run_until(lambda: False), daemon=True).start()


if __name__ == "__main__":
    main()
