"""An agent's port: it tells agents from other clients, answers who coordinates, and hands members on.

Rules
- With static rendezvous workers and agents share the port: whoever doesn't begin as agents do is handed on to the
  workers' store, with nothing read from the connection.
- A connection that has not said which job it belongs to within `_OPEN_WITHIN` is closed, and the oldest of them when
  there are many: strangers that say nothing keep no node away, and take no descriptor that a worker needs.
- A refusal is told once for each kind: a stranger must not fill the log.
"""

from __future__ import annotations

import _socket
import os

from elastic_run.core.job.codec import LARGEST, MessageError, to_message
from elastic_run.core.job.coordinator_search import COORDINATES
from elastic_run.records import replace
from elastic_run.rendezvous.coordination.link import LARGEST_OPENING, NAME, PREAMBLE, Link
from elastic_run.rendezvous.coordination.opening import (
    NODE,
    REFUSED,
    SERVER,
    Answer,
    Hello,
    make_nonce,
    read_opening,
)
from elastic_run.store.accepting import Acceptor
from elastic_run.store.connecting import notice_darkness
from elastic_run.store.wire import RESERVED_DESCRIPTORS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from elastic_run.loop import Loop, Timer
    from elastic_run.rendezvous.coordination.opening import Identity

_OPEN_WITHIN = 10.0
#: Bytes that tell an agent of any release from other clients.
_PEEK = 32
#: What connections that have not opened yet may take of this process's descriptors.
_SHARE = 4
_MOST_OPENING = 4096


class _Visitor:
    """A connection whose opening is not over."""

    def __init__(self, address: tuple[str, int], since: float, connected: _socket.socket) -> None:
        host = address[0].removeprefix("::ffff:")
        self.address = address
        self.peer = f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"
        self.since = since
        self.connected = connected
        self.link: Link | None = None
        self.hello: Hello | None = None
        self.nonce = ""
        self.term = 0
        self.seen = 0  # bytes of the preamble


class Listener:
    """Takes the connections that come to an agent's port, whose listening sockets this object owns.

    `describe` returns what this agent is. `admit` is called with a node that joins, its connection and the term that it
    was told. `hand_on` takes a connection of a worker, where workers share the port.
    """

    def __init__(
        self,
        loop: Loop,
        sockets: Sequence[_socket.socket],
        *,
        identity: Identity,
        describe: Callable[[], Answer],
        admit: Callable[[Hello, Link, int], None],
        hand_on: Callable[[_socket.socket, tuple[str, int]], None] | None = None,
    ) -> None:
        self._loop = loop
        self._job, self._lease, self._credentials = identity.job, identity.lease, identity.credentials
        self._describe = describe
        self._admit = admit
        self._hand_on = hand_on
        self._visitors: dict[_Visitor, None] = {}
        self._told: set[str] = set()
        self._timer: Timer | None = None
        self._port: int = sockets[0].getsockname()[1]
        self._name = f"the job's store at port {self._port}"
        for one in sockets:
            notice_darkness(one, self._lease)  # the kernel hands it on to each connection
        self._acceptor = Acceptor(loop, sockets, on_connection=self._take, on_full=lambda _: self._make_room())

    def close(self) -> None:
        """Close the port and each connection whose opening is not over."""
        self._acceptor.close()
        for visitor in tuple(self._visitors):
            self._drop(visitor)

    # --- connections -------------------------------------------------------------------------------------------------
    def _take(self, connected: _socket.socket, address: tuple[str, int]) -> None:
        visitor = _Visitor(address, self._loop.now(), connected)
        self._visitors[visitor] = None
        self._loop.add_reader(connected.fileno(), lambda: self._peek(visitor))
        if self._timer is None:
            self._timer = self._loop.call_later(_OPEN_WITHIN, self._expire)
        limit = os.sysconf("SC_OPEN_MAX")
        most = min(_MOST_OPENING, max(1, limit // _SHARE)) if limit > 0 else _MOST_OPENING
        if len(self._visitors) > most or 0 < limit - RESERVED_DESCRIPTORS <= connected.fileno():
            self._make_room(visitor)

    def _make_room(self, newest: _Visitor | None = None) -> None:
        """Close the connection that has waited longest without an opening; if there is none, nodes hold the others."""
        oldest = next(iter(self._visitors), None)
        if oldest is not None:
            self._drop(oldest)
        if oldest is newest:
            self._acceptor.pause()
            limit = os.sysconf("SC_OPEN_MAX")
            why = f"its process may open {limit} files: raise ulimit -n, a job needs one for each node"
            self._tell("full", f"{self._name} closed a connection: {why}")

    def _expire(self) -> None:
        self._timer = None
        now = self._loop.now()
        for visitor in tuple(self._visitors):
            left = visitor.since + _OPEN_WITHIN - now
            if left > 0:
                self._timer = self._loop.call_later(left, self._expire)
                return
            self._drop(visitor)

    def _forget(self, visitor: _Visitor) -> None:
        self._visitors.pop(visitor, None)
        if visitor.link is None:
            self._loop.remove_reader(visitor.connected.fileno())

    def _drop(self, visitor: _Visitor) -> None:
        self._forget(visitor)
        (visitor.link or visitor.connected).close()

    # --- who it is ---------------------------------------------------------------------------------------------------
    def _peek(self, visitor: _Visitor) -> None:
        connected = visitor.connected
        try:
            data = connected.recv(_PEEK, _socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if data.startswith(PREAMBLE):
            self._meet(visitor, connected)
        elif data and PREAMBLE.startswith(data) and len(data) > visitor.seen:
            # The next time there is more, or the other side has hung up.
            visitor.seen = len(data)
            connected.setsockopt(_socket.SOL_SOCKET, _socket.SO_RCVLOWAT, len(PREAMBLE))
        elif data and self._hand_on is not None and not data.startswith(NAME):
            self._forget(visitor)
            self._hand_on(connected, visitor.address)  # its peer is unknown by now if it was reset
        else:
            if data.startswith(NAME):
                _show_protocol(connected)
                release = data[len(NAME) :].split(b"\n")[0].decode(errors="replace")
                release = release if release.isprintable() else "?"
                speaks = f"{visitor.peer} speaks protocol {release} of another release of elastic-run"
                self._tell("release", f"{self._name} closed a connection: {speaks}")
            elif data:
                self._tell_garbage(f"{visitor.peer} is no agent of elastic-run, or one of an older release")
            self._drop(visitor)

    def _meet(self, visitor: _Visitor, connected: _socket.socket) -> None:
        data = connected.recv(LARGEST_OPENING)  # with the first message, mostly
        link = visitor.link = Link(
            self._loop,
            connected,
            lease=self._lease,
            on_document=lambda _: self._refuse(visitor, "a document comes before the opening"),
            on_message=lambda message: self._open(visitor, link, message),
            on_end=lambda _how, _detail: self._forget(visitor),
            most=LARGEST_OPENING,
        )
        link.is_foreign = True
        link.feed(data[len(PREAMBLE) :])

    def _open(self, visitor: _Visitor, link: Link, message: dict[str, Any]) -> None:
        if visitor.hello is not None:
            self._check_proof(visitor, link, visitor.hello, message)
            return
        try:
            hello = visitor.hello = read_opening(Hello, message)
        except MessageError as error:
            self._refuse(visitor, str(error))
            return
        answer = self._answer(visitor, hello)
        link.send(to_message(answer))
        if answer.role != COORDINATES or not hello.node:
            self._forget(visitor)
            link.part()
        elif self._credentials is None:
            self._let_in(visitor, link, hello)

    def _answer(self, visitor: _Visitor, hello: Hello) -> Answer:
        answer = self._describe()
        visitor.term = answer.term
        if hello.job != self._job:
            detail = f"the job here has --rdzv-id={self._job}, and this node came with --rdzv-id={hello.job}"
            answer = Answer(REFUSED, detail=detail)
            came = f"{hello.host} ({visitor.peer}) came with --rdzv-id={hello.job}, and this job has {self._job}"
            self._tell("job", f"{self._name} closed a connection: {came}")
        if self._credentials is None:
            return answer
        nonce = visitor.nonce = make_nonce()
        if not hello.nonce:
            self._tell_refused("it has no token, and this job has one", visitor)
            return Answer(REFUSED, nonce=nonce)

        proof = self._credentials.prove(SERVER, hello.nonce, nonce)
        return replace(answer, nonce=nonce, proof=proof)

    def _check_proof(self, visitor: _Visitor, link: Link, hello: Hello, message: dict[str, Any]) -> None:
        if self._credentials is None:
            self._refuse(visitor, "it says more than an opening has")
        elif self._credentials.is_proof(message.get("proof"), NODE, hello.nonce, visitor.nonce):
            self._let_in(visitor, link, hello)
        else:
            self._tell_refused("it has another token than this job", visitor)
            self._drop(visitor)

    def _let_in(self, visitor: _Visitor, link: Link, hello: Hello) -> None:
        self._forget(visitor)
        link.reader.most = LARGEST
        self._admit(hello, link, visitor.term)

    # --- refusals ----------------------------------------------------------------------------------------------------
    def _refuse(self, visitor: _Visitor, what: str) -> None:
        self._tell_garbage(f"{visitor.peer}: {what}")
        self._drop(visitor)

    def _tell_refused(self, reason: str, visitor: _Visitor) -> None:
        self._tell(reason, f"{self._name} refused a connection: {reason} ({visitor.peer})")

    def _tell_garbage(self, what: str) -> None:
        self._tell("garbage", f"refused a message at port {self._port} that does not fit the store's protocol: {what}")

    def _tell(self, kind: str, text: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            import logging

            logging.getLogger(__name__).warning("elastic-run: %s", text)


def _show_protocol(connected: _socket.socket) -> None:
    """Show this agent's protocol to one of another release, which tells its user both."""
    try:
        connected.recv(LARGEST_OPENING)  # with unread bytes the kernel would reset the connection
        connected.send(PREAMBLE)
    except OSError:
        pass
