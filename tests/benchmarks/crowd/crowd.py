"""A part of a large job's nodes in one process.

``python -m tests.benchmarks.crowd.crowd KIND ENDPOINT RUN_ID NODES FIRST COUNT``, where KIND is ``light`` (see
`light_node`) or ``real`` (sessions with all their threads). It says ``ready``, begins when it is sent a line, says
``joined NANOSECONDS CPU_SECONDS`` when the coordinator has read of all (light nodes), and
``formed`` likewise when all are in a round. It ends with its input.
"""

from __future__ import annotations

import gc
import os
import select
import sys
import threading
from typing import TYPE_CHECKING

from elastic_run.core.job.node_events import Formed, Refused
from elastic_run.core.protocol.facts import StoreAddress
from elastic_run.loop import Loop
from elastic_run.rendezvous.backend_table import make_place, read_settings
from elastic_run.rendezvous.coordination.handler import open_session
from elastic_run.rendezvous.session import Lost
from elastic_run.store.tcpstore.listener import open_listeners, raise_descriptor_limit
from tests.benchmarks.crowd.counting import Tally, say
from tests.benchmarks.crowd.light_node import LightNode
from tests.support.configs import plain_config, plain_setup

if TYPE_CHECKING:
    from elastic_run.rendezvous.session import SessionEvent

#: Per node.
_WORKERS = 8
_STACK = 256 * 1024
#: Seconds that a thread waits for the interpreter before it asks again; hundreds that ask each 5 ms leave no time.
_SWITCH = 0.5


def run_light(endpoint: str, run_id: str, nodes: int, first: int, count: int) -> None:
    """Drive light nodes until the input ends."""
    host, port = endpoint.split(":")
    tally = Tally(count)
    config = plain_config(nodes, nodes)
    loop = Loop()
    gc.disable()  # it looks at all nodes again and again; a node that is alone has next to nothing to look at
    say("ready")
    sys.stdin.readline()
    alive = [
        LightNode(
            loop,
            (host, int(port)),
            run_id,
            number,
            config=config,
            on_joined=lambda: tally.note("joined"),
            on_formed=lambda: tally.note("formed"),
        )
        for number in range(first, first + count)
    ]
    loop.add_reader(0, lambda: os._exit(0))
    loop.run_until(lambda: not alive)


def run_real(endpoint: str, run_id: str, nodes: int, count: int) -> None:
    """Open real sessions until the input ends."""
    threading.stack_size(_STACK)
    sys.setswitchinterval(_SWITCH)
    tally = Tally(count)
    token = os.environ.get("CROWD_TOKEN", "").encode() or None
    settings = read_settings("c10d", {"join_timeout": "600", "is_host": "0"})
    listener = open_listeners([])[0]
    store_address = StoreAddress("127.0.0.1", listener.getsockname()[1], use_agent_store=True)
    sessions = [
        open_session(
            make_place("c10d", endpoint, run_id, settings, secret=token),
            settings,
            plain_setup(_WORKERS, min_nodes=nodes, max_nodes=nodes),
            local_addr="127.0.0.1",
        )
        for _ in range(count)
    ]

    def deliver(event: SessionEvent) -> None:
        if isinstance(event, Formed):
            tally.note("formed")
        elif isinstance(event, Lost | Refused):
            say(f"lost {event.detail}")

    say("ready")
    sys.stdin.readline()
    for session in sessions:
        session.start(lambda _: store_address, deliver)
    select.select([0], [], [])
    os._exit(0)


def main() -> None:
    """Do what the file says."""
    kind, endpoint, run_id = sys.argv[1:4]
    nodes, first, count = map(int, sys.argv[4:7])
    raise_descriptor_limit()
    if kind == "light":
        run_light(endpoint, run_id, nodes, first, count)
    else:
        run_real(endpoint, run_id, nodes, count)


if __name__ == "__main__":
    main()
