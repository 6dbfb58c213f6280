"""A TCPStore server in plain Python, on the agent's loop: torch's own clients can't tell it from torch's.

Rules
- It serves a socket that already listens, and lives in the loop's thread. It never blocks, never looks up a name
  (torch's server asks the DNS for every peer) and starts no thread.
- Nothing that arrives can harm it: what isn't the protocol is closed without a word. What passes a bound of `limits`,
  or makes the server fail, ends its connection and is told to the owner, each kind once.
- Its bounds grow with the hosts whose clients are connected, as the needs of a job do.
- An operation of the protocol that it doesn't know is told to the owner, once, and closes that client's connection:
  silence would leave the worker waiting for ever.
- `reset` begins a round: the keys go, the port stays.
- When descriptors run out it stops accepting until a client leaves or a second has passed: clients wait in the backlog.
  Some descriptors are left to the rest of the process. A client that would take one of these is told the limit and
  closed, and so is the owner, once.
"""

from __future__ import annotations

import _socket  # `socket` builds enums when it is imported: 3 ms, and this is on the launcher's way to its first worker
import errno
import os

from elastic_run.store.errors import LimitError, ServerDefectError, UnknownOperationError, WireError
from elastic_run.store.limits import FEW_DESCRIPTORS, RESERVED_DESCRIPTORS, measure
from elastic_run.store.tcpstore import wire
from elastic_run.store.tcpstore.connection import Connection, Holdings
from elastic_run.store.tcpstore.groups import Member, ProcessGroups
from elastic_run.store.tcpstore.request_handler import RequestHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elastic_run.loop import Loop, Timer
    from elastic_run.store.tcpstore.memory_store import MemoryStore

#: Kinds of refusals, beside those of `LimitError`.
GARBAGE, DEFECT = "garbage", "defect"
_ACCEPTS_PER_TURN = 64
_ACCEPT_AGAIN = 1.0
_OPENING_SIZE = 4096
#: Stands for all loopback addresses, which are one host: every program there can come from 16 million of them.
_LOOPBACK = "loopback"
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class StoreServer:
    """Serves a store on a socket.

    Args:
        loop: The loop whose thread this lives in.
        listener: A listening, non-blocking socket; the server owns it from now on.
        further: More of them, on other addresses.
        data: What to serve; a new, empty store if None.
        on_unknown_operation: Called once, with the operation's number, when a client asks for one that we don't know.
        on_refusal: Called with the kind and with what was wrong when a client is closed, once for each kind: it sent
            what is no message (`GARBAGE`), it passed a bound, or serving it failed.
        separates_groups: Whether process groups that a worker forms one after another are kept apart (see `groups`).
        is_fed: Whether somebody else listens, and hands connections on with `take`.
    """

    def __init__(
        self,
        loop: Loop,
        listener: _socket.socket,
        data: MemoryStore | None = None,
        on_unknown_operation: Callable[[int], None] | None = None,
        *,
        further: Sequence[_socket.socket] = (),
        on_refusal: Callable[[str, str], None] | None = None,
        separates_groups: bool = False,
        is_fed: bool = False,
    ) -> None:
        self._loop = loop
        self._listeners = () if is_fed else (listener, *further)
        self._handler = RequestHandler(data)
        self._on_unknown_operation = on_unknown_operation
        self._groups = ProcessGroups(self._handler.data) if separates_groups else None
        self._on_refusal = on_refusal
        self._refused_kinds: set[str] = set()
        self._holdings = Holdings(self._close_largest)
        self._clients_by_host: dict[str, int] = {}
        self._has_told = False
        self._connections: set[Connection] = set()
        self._pause: Timer | None = None
        self._is_closed = False
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._set_limits()
        self._watch_listeners()

    @property
    def connections(self) -> int:
        """The number of clients that are connected."""
        return len(self._connections)

    def reset(self) -> None:
        """Forget all keys and close all connections, those included that were not accepted yet; the port stays open."""
        for connection in tuple(self._connections):
            connection.close()
        for listener in self._listeners:
            while (waiting := self._take_connection(listener)) is not None:
                waiting[0].close()
        self._handler.data.clear()
        if self._groups is not None:
            self._groups.clear()
        self._has_told = False
        self._refused_kinds.clear()

    def close(self) -> None:
        """Close the port and all connections; harmless when closed."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stop_pause()
        self._leave_listeners()
        for listener in self._listeners:
            listener.close()
        for connection in tuple(self._connections):
            connection.close()

    # --- connections ---------------------------------------------------------------------------------------------
    def _watch_listeners(self) -> None:
        for listener in self._listeners:
            self._watch(listener)

    def _watch(self, listener: _socket.socket) -> None:
        self._loop.add_reader(listener.fileno(), lambda: self._accept(listener))

    def _leave_listeners(self) -> None:
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())

    def _accept(self, listener: _socket.socket) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            taken = self._take_connection(listener)
            if taken is None:
                return
            self.take(*taken)

    def take(self, socket: _socket.socket, peer: tuple[str, int]) -> None:
        """Serve a connection that was accepted just now.

        Args:
            socket: The connection, non-blocking, from which nothing was read; the server owns it from now on.
            peer: The client's address and port.
        """
        if _is_reserved(socket.fileno()):
            self._refuse_full(socket, peer)
            return
        connection = Connection(
            self._loop,
            socket,
            self._holdings,
            peer=peer,
            on_message=self._answer,
            on_close=self._forget,
        )
        if self._groups is not None:
            connection.member = Member(peer[0])
        self._connections.add(connection)
        self._count_client(peer[0], 1)

    def _refuse_full(self, socket: _socket.socket, peer: tuple[str, int]) -> None:
        limit = os.sysconf("SC_OPEN_MAX")
        try:
            socket.recv(_OPENING_SIZE)  # what is left unread would make the kernel drop the answer
        except OSError:
            pass
        try:
            socket.send(wire.U32.pack(wire.STORE_FULL) + wire.U32.pack(limit & 0xFFFFFFFF))
        except OSError:
            pass  # it is gone already
        socket.close()
        self._tell_full(f"{peer[0]}:{peer[1]}", limit)

    def _tell_full(self, peer: str, limit: int) -> None:
        what = f"{self.connections} other connections leave too few of the {limit} file descriptors of this process"
        self._tell("descriptors", f"{peer}: {what}: raise the limit (ulimit -n), a job needs one for each node")

    def _count_client(self, host: str, more: int) -> None:
        if _is_loopback(host):
            host = _LOOPBACK
        clients = self._clients_by_host.get(host, 0) + more
        if clients > 0:
            self._clients_by_host[host] = clients
        else:
            self._clients_by_host.pop(host, None)
        if clients == more == 1:  # a host has come
            self._set_limits()

    def _set_limits(self) -> None:
        # It never falls: what was put there while more hosts were connected may stay, and be replaced.
        limit = max(self._holdings.limit, measure(len(self._clients_by_host)))
        self._holdings.limit = limit
        self._handler.data.set_limit(limit)

    def _close_largest(self) -> None:
        """Close the connection that holds most, since all of them together hold too much."""
        largest = max(self._connections, key=lambda one: one.held)
        limit = self._holdings.limit
        total = f"unfinished messages and unread replies of all clients pass {limit} bytes"
        largest.close(LimitError(f"{total}; this client has {largest.held}", "connections"))

    def _take_connection(self, listener: _socket.socket) -> tuple[_socket.socket, tuple[str, int]] | None:
        try:
            # What socket.accept itself calls; the descriptor is close-on-exec.
            fd, address = listener._accept()  # type: ignore[attr-defined]  # noqa: SLF001
        except OSError as error:
            if error.errno in _OUT_OF_DESCRIPTORS:
                self._pause_accepting()
                if error.errno == errno.EMFILE:
                    self._tell_full("the next one", os.sysconf("SC_OPEN_MAX"))
            # Anything else is that client's: it left the backlog before its turn (ECONNABORTED), or there is none.
            return None
        socket = _socket.socket(listener.family, listener.type, listener.proto, fd)
        socket.setblocking(False)
        try:
            socket.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        except OSError:
            pass  # it is gone already; the first read will say so
        return socket, (str(address[0]), int(address[1]))

    def _pause_accepting(self) -> None:
        if self._pause is None:
            self._leave_listeners()
            self._pause = self._loop.call_later(_ACCEPT_AGAIN, self._resume_accepting)

    def _resume_accepting(self) -> None:
        if self._pause is not None:
            self._stop_pause()
            self._watch_listeners()

    def _stop_pause(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None

    def _forget(self, connection: Connection, error: WireError | None) -> None:
        self._connections.discard(connection)
        self._count_client(connection.host, -1)
        self._handler.forget(connection)
        if self._groups is not None and connection.member is not None:
            self._groups.leave(connection.member)
        self._resume_accepting()
        if error is not None:
            self._tell_refusal(connection, error)
        if isinstance(error, UnknownOperationError) and self._on_unknown_operation and not self._has_told:
            self._has_told = True
            self._on_unknown_operation(error.operation)

    def _tell_refusal(self, connection: Connection, error: WireError) -> None:
        kind = error.kind if isinstance(error, LimitError) else GARBAGE
        kind = DEFECT if isinstance(error, ServerDefectError) else kind
        self._tell(kind, f"{connection.peer}: {error}")

    def _tell(self, kind: str, what: str) -> None:
        if self._on_refusal is not None and kind not in self._refused_kinds:
            self._refused_kinds.add(kind)
            self._on_refusal(kind, what)

    # --- answers -------------------------------------------------------------------------------------------------
    def _answer(self, connection: Connection, operation: int, fields: list[bytes | int]) -> None:
        if self._groups is not None and connection.member is not None and connection.member.number != 1:
            fields = self._groups.rename(connection.member, operation, fields)
        self._handler.answer(connection, operation, fields)


def _is_loopback(host: str) -> bool:
    return host == "::1" or host.removeprefix("::ffff:").startswith("127.")


def _is_reserved(fd: int) -> bool:
    """Whether a descriptor is one of the last, which the rest of the process needs."""
    limit = os.sysconf("SC_OPEN_MAX")  # the soft limit; the module `resource` is not needed for it
    return limit >= FEW_DESCRIPTORS and fd >= limit - RESERVED_DESCRIPTORS
