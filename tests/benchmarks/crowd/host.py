"""The first node of a large job, all of it real: it serves the store, is rank 0, and becomes the coordinator.

``python -m tests.benchmarks.crowd.host NODES RUN_ID``. It says ``listening PORT``, ``joined`` once the store has its
join, ``formed NANOSECONDS`` when it is in the round. To every line it is sent it answers with what its store was asked
so far, as JSON. It ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING

from elastic_run.core.node.messages import Formed, Refused
from elastic_run.core.protocol.facts import StoreAddress
from elastic_run.rendezvous.backend_table import read_settings
from elastic_run.rendezvous.elastic.backend.hosting import HostedStore
from elastic_run.rendezvous.elastic.backend.tcp import TcpBackend
from elastic_run.rendezvous.coordination.handler import open_session
from elastic_run.rendezvous.session import Lost
from elastic_run.store.tcpstore.listener import open_public_listener, raise_descriptor_limit
from tests.benchmarks.crowd.counting import count_traffic, say
from tests.support.configs import plain_setup
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from elastic_run.rendezvous.elastic.context import SessionContext
    from elastic_run.rendezvous.session import Session, SessionEvent


def main() -> None:
    """Do what the file says."""
    nodes, run_id = int(sys.argv[1]), sys.argv[2]
    raise_descriptor_limit()
    traffic = count_traffic()
    workers_store = HostedStore(open_public_listener(0))
    token = os.environ.get("CROWD_TOKEN", "").encode() or None
    backend = TcpBackend("c10d", run_id, [("127.0.0.1", 0)], is_host=True, secret=token)
    backend.host_anywhere("127.0.0.1")
    session = open_session(
        backend,
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
    say(f"listening {backend.port}")
    wait_joined(session)
    say("joined")
    for _ in sys.stdin:
        say(json.dumps({**traffic.document(), "cpu": time.process_time()}))
    os._exit(0)


def wait_joined(session: Session) -> None:
    """Wait until the store has the join of a session."""
    affairs: SessionContext = session._context  # type: ignore[attr-defined] # a benchmark may look inside
    wait_until(
        lambda: affairs.sender.member_driver is not None and affairs.sender.member_driver.member.facts.sequence > 0
    )
    wait_until(lambda: not affairs.has_unsent)


if __name__ == "__main__":
    main()
