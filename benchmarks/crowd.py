"""Thousands of nodes on one machine: programs for `benchmarks.scale`, one for each part of a large job.

``python -m benchmarks.crowd host NODES RUN_ID`` is the first node, all of it real: it coordinates, and is rank 0.
It says ``listening PORT``, ``joined`` once it has joined its own job, and ``formed NANOSECONDS`` when it is in the
round. It answers each line on stdin with the traffic of its port so far, as JSON.

``python -m benchmarks.crowd light|real ENDPOINT RUN_ID NODES FIRST COUNT`` is a part of the other nodes in one
process: light ones (see `LightNode`), or sessions with all their threads. It says ``ready``, begins when it is sent a
line, says ``joined NANOSECONDS CPU_SECONDS`` when the coordinator has read of all (light nodes), and ``formed``
likewise when all are in a round.

Both end with their input.
"""

from __future__ import annotations

import gc
import json
import os
import select
import socket
import sys
import threading
import time
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING

from elastic_run.core.job.codec import encode, to_message
from elastic_run.core.job.documents import PROPOSE, RUNS, START, NodeInfo, NodeState, StoreAddress
from elastic_run.core.job.membership import Formed, Refused
from elastic_run.loop import Loop
from elastic_run.rendezvous.coordination.link import MESSAGE, PREAMBLE, Link, encode_frame
from elastic_run.rendezvous.coordination.opening import NODE, Credentials, Hello, make_nonce
from elastic_run.rendezvous.coordination.places import Place
from elastic_run.rendezvous.events import Lost
from elastic_run.rendezvous.session import Session
from elastic_run.rendezvous.settings import make_place, read_settings
from elastic_run.store.server import StoreServer
from elastic_run.store.worker_store import open_listeners, raise_descriptor_limit
from tests.support.sessions import Node, plain_config, plain_setup
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.core.config import JobConfig
    from elastic_run.rendezvous.events import SessionEvent

#: Per node.
_WORKERS = 8
_STACK = 256 * 1024
#: Seconds that a thread waits for the interpreter before it asks again; hundreds that ask each 5 ms leave no time.
_SWITCH = 0.5
_TOKEN = os.environ.get("CROWD_TOKEN", "").encode() or None
_CREDENTIALS = Credentials(_TOKEN) if _TOKEN else None


def main() -> None:
    """Do what the file says."""
    raise_descriptor_limit()
    kind, *words = sys.argv[1:]
    if kind == "host":
        run_host(int(words[0]), words[1])
        return
    endpoint, run_id = words[:2]
    nodes, first, count = map(int, words[2:])
    if kind == "light":
        run_light(endpoint, run_id, nodes, first, count)
    else:
        run_real(endpoint, run_id, nodes, count)


def say(text: str) -> None:
    """Write a line at once, from whichever thread."""
    os.write(1, f"{text}\n".encode())


# --- the first node --------------------------------------------------------------------------------------------------
def run_host(nodes: int, run_id: str) -> None:
    """Run the first node until the input ends."""
    traffic = count_traffic()
    # The workers' store of rank 0, in a thread: nodes only look whether it listens.
    loop = Loop()
    store_address = StoreAddress("127.0.0.1", StoreServer(loop, open_listeners([])[0]).address[1], use_agent_store=True)
    threading.Thread(target=lambda: loop.run_until(lambda: False), daemon=True).start()
    place = Place("c10d", run_id, [("127.0.0.1", 0)], is_host=True, secret=_TOKEN)
    place.serve_anywhere("127.0.0.1")
    session = Session(
        place,
        read_settings("c10d", {"join_timeout": "600"}),
        plain_setup(_WORKERS, min_nodes=nodes, max_nodes=nodes),
        local_addr="127.0.0.1",
    )

    def deliver(event: SessionEvent) -> None:
        if isinstance(event, Formed):
            say(f"formed {time.monotonic_ns()}")
        elif isinstance(event, Lost | Refused):
            say(f"lost {event.detail}")

    session.start(lambda _: store_address, deliver)
    say(f"listening {place.port}")
    node = Node(session)
    wait_until(lambda: node.is_waiting)
    say("joined")
    for _ in sys.stdin:
        say(json.dumps({"frames": traffic["frames"], "bytes": traffic["bytes"], "cpu": time.process_time()}))
    os._exit(0)


def count_traffic() -> Counter[str]:
    """Count the frames and bytes, both ways, that all connections between agents of this process carry from now on."""
    traffic: Counter[str] = Counter()
    take, take_frame, write = Link.feed, Link._take_frame, Link._write

    def count_bytes(self: Link, data: bytes) -> None:
        traffic["bytes"] += len(data)
        take(self, data)

    def count_frame(self: Link, kind: bytes, content: dict[str, Any]) -> None:
        traffic["frames"] += 1
        take_frame(self, kind, content)

    def count_sent(self: Link, data: bytes) -> None:
        traffic["frames"] += 1
        traffic["bytes"] += len(data)
        write(self, data)

    # In a process of our own.
    for name, function in (("feed", count_bytes), ("_take_frame", count_frame), ("_write", count_sent)):
        setattr(Link, name, function)
    return traffic


# --- the other nodes -------------------------------------------------------------------------------------------------
class Tally:
    """Says when everyone of a crowd has come so far."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._seen: Counter[str] = Counter()
        self._spent = time.process_time()
        self._lock = threading.Lock()

    def count(self, what: str) -> None:
        """Count that one more has come so far."""
        with self._lock:
            self._seen[what] += 1
            if self._seen[what] == self._count:
                say(f"{what} {time.monotonic_ns()} {time.process_time() - self._spent:.2f}")


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
            on_joined=lambda: tally.count("joined"),
            on_formed=lambda: tally.count("formed"),
        )
        for number in range(first, first + count)
    ]
    loop.add_reader(0, lambda: os._exit(0))
    loop.run_until(lambda: not alive)


class LightNode:
    """A node of a crowd: the real connection, without a thread and a process of its own.

    It says on the wire what a node's thread says: the opening, its state, and its state again where an order has
    changed it; at last it connects to rank 0's store. It decides nothing, since the nodes of a real job have a
    processor each. A test compares the frames and bytes that a coordinator sees with those of real nodes.

    Args:
        loop: What drives it.
        address: The coordinator's.
        run_id: The job.
        number: Which of the crowd it is.
        config: The job's configuration.
        on_joined: Called when the coordinator has read that it is there.
        on_formed: Called when it is in a round and has seen that rank 0's store listens.
    """

    def __init__(
        self,
        loop: Loop,
        address: tuple[str, int],
        run_id: str,
        number: int,
        *,
        config: JobConfig,
        on_joined: Callable[[], None],
        on_formed: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._lease = 2 * config.lease  # as a real node that waits for the first round of a crowd
        self._on_joined: Callable[[], None] | None = on_joined
        self._on_formed = on_formed
        node = f"node{number}_{os.getpid()}_{number:08x}"
        nonce = make_nonce() if _CREDENTIALS else ""
        self._hello = Hello(run_id, node, f"node{number}", nonce=nonce)
        self._state = {**_describe(address[0], config), "node": node}
        self._state["node_info"] = {**self._state["node_info"], "host": f"node{number}"}
        self._master: dict[str, Any] = {}
        self._link: Link
        _connect(loop, address, self._open)

    def _open(self, connected: socket.socket) -> None:
        hello = {key: getattr(self._hello, key) for key in Hello.__slots__}
        connected.sendall(PREAMBLE + encode_frame(MESSAGE, hello))
        self._link = Link(
            *(self._loop, connected),
            lease=self._lease,
            on_document=self._obey,
            on_message=self._join,
            on_end=lambda how, detail: say(f"lost {self._hello.node}: {how} {detail}"),
        )
        self._link.on_delivered = self._note_joined

    def _join(self, answer: dict[str, Any]) -> None:
        if _CREDENTIALS is not None:
            proof = _CREDENTIALS.prove(NODE, self._hello.nonce, answer["nonce"])
            self._link.send({"kind": "proof", "proof": proof})
        self._say({"promise": {"term": answer["term"], "coordinator": answer["node"]}})

    def _note_joined(self) -> None:
        if self._on_joined is not None:
            self._on_joined()
            self._on_joined = None

    def _obey(self, order: dict[str, Any]) -> None:
        if order["phase"] == PROPOSE:
            self._master = order["assignment"]["master"]
            self._say({"accepted": [order["proposal"]], "known_round": order["proposal"]["round"]["number"]})
        elif order["phase"] == START:
            rank = self._state["accepted"][0]["rank"]
            self._say({"accepted": [], "started": order["round"], "rank": rank, "phase": RUNS})
            _connect(self._loop, (self._master["host"], self._master["port"]), self._note_way)

    def _note_way(self, connected: socket.socket) -> None:
        connected.close()
        self._on_formed()

    def _say(self, change: dict[str, Any]) -> None:
        self._state.update(change)
        self._link.offer(encode(self._state))


@cache
def _describe(host: str, config: JobConfig) -> dict[str, Any]:
    """Return the state of a new node."""
    # Nobody will ask for this port: rank 0 is the first to have come, a real session.
    node_info = NodeInfo("", os.getpid(), 8)
    return to_message(NodeState("", node_info, config, StoreAddress(host, 1)))


def _connect(loop: Loop, address: tuple[str, int], on_connected: Callable[[socket.socket], None]) -> None:
    connecting = socket.socket()
    connecting.setblocking(False)
    connecting.connect_ex(address)

    def go_on() -> None:
        loop.remove_writer(connecting.fileno())
        on_connected(connecting)

    try:
        connecting.getpeername()
    except OSError:  # the port's backlog is full
        loop.add_writer(connecting.fileno(), go_on)
    else:
        on_connected(connecting)


def run_real(endpoint: str, run_id: str, nodes: int, count: int) -> None:
    """Open real sessions until the input ends."""
    threading.stack_size(_STACK)
    sys.setswitchinterval(_SWITCH)
    tally = Tally(count)
    settings = read_settings("c10d", {"join_timeout": "600", "is_host": "0"})
    listener = open_listeners([])[0]
    store_address = StoreAddress("127.0.0.1", listener.getsockname()[1], use_agent_store=True)
    sessions = [
        Session(
            make_place("c10d", endpoint, run_id, settings, secret=_TOKEN),
            settings,
            plain_setup(_WORKERS, min_nodes=nodes, max_nodes=nodes),
            local_addr="127.0.0.1",
        )
        for _ in range(count)
    ]

    def deliver(event: SessionEvent) -> None:
        if isinstance(event, Formed):
            tally.count("formed")
        elif isinstance(event, Lost | Refused):
            say(f"lost {event.detail}")

    say("ready")
    sys.stdin.readline()
    for session in sessions:
        session.start(lambda _: store_address, deliver)
    select.select([0], [], [])
    os._exit(0)


if __name__ == "__main__":
    main()
