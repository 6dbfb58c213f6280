"""A node of a crowd: the real connection, without a thread and a process of its own.

It says on the wire what a node's thread says: the opening, its state, and its state again where an order has changed
it; at last there is a look whether rank 0's store listens. It does as it is told without a thought, since the nodes of
a real job have a processor each. A test holds the frames and bytes that a coordinator sees against those of real ones.
"""

from __future__ import annotations

import os
import socket
from functools import cache
from typing import TYPE_CHECKING

from elastic_run import __version__
from elastic_run.core.job.documents import PROPOSE, RUNS, START, NodeState
from elastic_run.core.protocol.codec import to_document
from elastic_run.core.protocol.facts import NodeInfo, StoreAddress
from elastic_run.rendezvous.coordination.frames import MESSAGE, PREAMBLE, encode_frame
from elastic_run.rendezvous.coordination.link import Link
from elastic_run.rendezvous.coordination.opening import Credentials, Hello, make_nonce
from elastic_run.rendezvous.coordination.token_proof import NODE
from tests.benchmarks.crowd.counting import say

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.core.job.config import JobConfig
    from elastic_run.loop import Loop

_TOKEN = os.environ.get("CROWD_TOKEN", "").encode()
_CREDENTIALS = Credentials(_TOKEN) if _TOKEN else None


class LightNode:
    """One node.

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
        self._hello = Hello(run_id, node, f"node{number}", __version__, nonce=nonce)
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
        self._link.offer(self._state)


@cache
def _describe(host: str, config: JobConfig) -> dict[str, Any]:
    """Return the state of a new node."""
    # Nobody will ask for this port: rank 0 is the first to have come, a real session.
    node_info = NodeInfo("", os.getpid(), 8, version=__version__)
    return to_document(NodeState("", node_info, config, StoreAddress(host, 1)))


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
