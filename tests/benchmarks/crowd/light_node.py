"""A node of a crowd: the real member and the real connection, without a thread and a process of its own.

It says on the wire what a node's thread says: the opening, its state, an acknowledgement of each order, and its state
again where an order has changed it; at last there is a look whether rank 0's store listens. What it decides is
`core.job.membership`'s. A test holds the frames and bytes that a coordinator sees against those of real sessions.
"""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

from elastic_run import __version__
from elastic_run.core.job import membership
from elastic_run.core.job.documents import Order
from elastic_run.core.job.node_events import Formed
from elastic_run.core.protocol.codec import from_document, to_document
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
        self._lease = config.lease
        self._on_joined: Callable[[], None] | None = on_joined
        self._on_formed = on_formed
        node = f"node{number}_{os.getpid()}_{number:08x}"
        nonce = make_nonce() if _CREDENTIALS else ""
        self._hello = Hello(run_id, node, f"node{number}", __version__, nonce=nonce)
        # Nobody will ask for this port: rank 0 is the first to have come, a real session.
        node_info = NodeInfo(f"node{number}", os.getpid(), 8, version=__version__)
        self._member = membership.Member(node, node_info, config, StoreAddress(address[0], 1))
        self._said: dict[str, Any] = {}
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
        self._say()

    def _note_joined(self) -> None:
        if self._on_joined is not None:
            self._on_joined()
            self._on_joined = None

    def _obey(self, document: dict[str, Any]) -> None:
        order = membership.OrderRead(from_document(Order, document))
        self._member, commands = membership.decide(self._member, order, time.monotonic())
        for command in commands:
            if isinstance(command, Formed):
                master = command.assignment.master
                _connect(self._loop, (master.host, master.port), self._note_way)
        self._say()

    def _note_way(self, connected: socket.socket) -> None:
        connected.close()
        self._on_formed()

    def _say(self) -> None:
        state = to_document(membership.make_state(self._member, time.monotonic(), is_first=not self._said))
        if state != self._said:
            self._said = state
            self._link.offer(state)


def _connect(loop: Loop, address: tuple[str, int], on_connected: Callable[[socket.socket], None]) -> None:
    connecting = socket.socket()
    connecting.setblocking(False)  # noqa: FBT003 - the socket's own signature
    connecting.connect_ex(address)

    def go_on() -> None:
        loop.remove_writer(connecting.fileno())
        on_connected(connecting)

    loop.add_writer(connecting.fileno(), go_on)
