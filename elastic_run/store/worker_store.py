"""What an agent puts before its workers: one store a round, at an address that is open before anyone is told of it.

- On a single node it listens on loopback only: its workers need no more, and no other machine should reach a store
  without a token. On several nodes it listens at the address that the agent tells the others.
- On a single node MASTER_ADDR is `localhost`, as under torchrun. Since torch 2.14 rank 0 compares this text with the
  host of `tcp://localhost:$MASTER_PORT`: if they differ, it tries to serve a store there, and prints an error. Clients
  try all addresses of a name, and torch prints a warning for each that fails. So the store listens on all of them; if
  that is impossible (a container without IPv6), MASTER_ADDR is 127.0.0.1.
- `rank0` keeps its port bound and not listening. With SO_REUSEADDR on both sides torch may then listen on it, while the
  kernel gives it to no program that asks for any free port. (Rejected: closing it again, as torchrun does, and hoping.)
- A port is opened before its number is given to anyone, so that no other program can take it in between. All sockets
  are close-on-exec, and no name is looked up. If a port is taken, the error says by whom, as far as that can be seen.
"""

from __future__ import annotations

import _socket  # `socket` builds enums when it is imported: 3 ms, and this is on the launcher's way to its first worker
import errno
from abc import ABC, abstractmethod

from elastic_run import contract

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from elastic_run.loop import Loop
    from elastic_run.store.server import StoreServer

LOCALHOST, _LOOPBACK, _LOOPBACK6 = "localhost", "127.0.0.1", "::1"
_BACKLOG = 4096
#: How often a free port of one address may turn out to be taken on another.
_ATTEMPTS = 16


class WorkerStore(ABC):
    """The store of one round."""

    host: str  # MASTER_ADDR
    port: int  # MASTER_PORT
    #: TORCHELASTIC_USE_AGENT_STORE: whether something serves the store already. If not, the worker of rank 0 does.
    use_agent_store: bool

    @abstractmethod
    def serve(self, loop: Loop) -> None:
        """Answer clients from now on; some may have connected before."""

    @abstractmethod
    def renew(self) -> WorkerStore:
        """Close this store, which is being served, and return the next round's, empty and served.

        It is this same object if the port is fixed. Raises OSError if the system refuses another.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the port back; harmless when closed."""


def choose_loopback(root: str = "/") -> tuple[str, tuple[str, ...]]:
    """Choose MASTER_ADDR for a job on one node, and the addresses at which its store listens."""
    entries = [line.partition("#")[0].split() for line in _read(f"{root}etc/hosts").splitlines()]
    named = {entry[0] for entry in entries if LOCALHOST in entry[1:]}
    if _LOOPBACK not in named or (_LOOPBACK6 in named and " lo\n" not in _read(f"{root}proc/net/if_inet6")):
        return _LOOPBACK, (_LOOPBACK,)
    return LOCALHOST, (_LOOPBACK, _LOOPBACK6) if _LOOPBACK6 in named else (_LOOPBACK,)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def is_served_by_agent(requested: str, env: Mapping[str, str]) -> bool:
    """Whether the agent serves the workers' store, by `--worker-store`; otherwise the worker of rank 0 does.

    `rank0` has the other name `torch`. With `auto`, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 leaves the store to rank 0.
    """
    return requested == "agent" or (requested == "auto" and env.get(contract.ENV_DISABLE_SHARED_STORE) != "1")


def open_worker_store(
    *,
    by_agent: bool,
    host: str = LOCALHOST,
    port: int | None,
    on_refusal: Callable[[str, str], None] | None = None,
) -> WorkerStore:
    """Open the first round's store at a numeric address; `localhost` for a job on one node, "" for all interfaces."""
    return _AgentStore(port or 0, host, on_refusal) if by_agent else _Rank0Store(port or 0)


class _AgentStore(WorkerStore):
    """Our server, on the agent's loop; its socket listens from the beginning, also while nothing answers yet."""

    use_agent_store = True

    def __init__(self, fixed_port: int, host: str, on_refusal: Callable[[str, str], None] | None) -> None:
        name, addresses = choose_loopback() if host == LOCALHOST else ("", [host] if host else [])
        self._host = host
        self._fixed_port = fixed_port
        self._on_refusal = on_refusal
        self._listeners: Sequence[_socket.socket] = open_listeners(addresses, fixed_port)
        self._loop: Loop | None = None
        self._server: StoreServer | None = None
        self.host, self.port = self._listeners[0].getsockname()[:2]
        self.host = name or self.host

    def serve(self, loop: Loop) -> None:
        # The socket listens already. The server itself is made when the first worker comes: while they start they need
        # the processors more.
        self._loop = loop
        for listener in self._listeners:
            loop.add_reader(listener.fileno(), lambda: self._begin(loop))

    def _begin(self, loop: Loop) -> None:
        from elastic_run.store.server import StoreServer

        for listener in self._listeners:
            loop.remove_reader(listener.fileno())
        self._server = StoreServer(loop, self._listeners[0], further=self._listeners[1:], on_refusal=self._on_refusal)

    def renew(self) -> WorkerStore:
        if self._fixed_port:
            if self._server is not None:
                self._server.reset()
            return self
        # The new one before the old one is closed: so their ports differ, and a late client of the old one fails.
        following = _AgentStore(0, self._host, self._on_refusal)
        if self._loop is not None:
            following.serve(self._loop)
        self.close()
        return following

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        elif self._listeners[0].fileno() >= 0:
            for listener in self._listeners:
                if self._loop is not None:
                    self._loop.remove_reader(listener.fileno())
                listener.close()


class _Rank0Store(WorkerStore):
    """A port that is kept for the worker of rank 0, which serves torch's own store there."""

    use_agent_store = False

    def __init__(self, fixed_port: int) -> None:
        self._fixed_port = fixed_port
        # As wide as torch listens, so that nobody can have the port on another address of this machine either.
        self._held = bind_port("", fixed_port)
        self.host = choose_loopback()[0]
        self.port = self._held.getsockname()[1]

    def serve(self, loop: Loop) -> None:
        """Do nothing: the worker of rank 0 serves this store."""

    def renew(self) -> WorkerStore:
        if self._fixed_port:
            return self
        following = _Rank0Store(0)
        self.close()
        return following

    def close(self) -> None:
        self._held.close()


# --- ports -----------------------------------------------------------------------------------------------------------
class PortTakenError(OSError):
    """Another process listens on the port. Its name is looked up when the message is shown, since few of them are."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._fact = ""
        super().__init__(errno.EADDRINUSE, f"port {port} is taken")

    def __str__(self) -> str:
        return f"{self.fact}; choose another one or 0 for any"

    @property
    def fact(self) -> str:
        """The message without the advice, which does not fit a job of several nodes."""
        if not self._fact:
            owner = find_port_owner(self.port)
            self._fact = f"port {self.port} is taken{f' by {owner}' if owner else ''}"
        return self._fact


def open_listeners(hosts: Sequence[str], port: int = 0) -> list[_socket.socket]:
    """Listen on one port at several numeric addresses of this machine, or at all its addresses if none is given.

    Port 0 means any port that is free at each address. Raises `PortTakenError` if another process listens there.
    """
    for _ in range(_ATTEMPTS - 1 if port == 0 and len(hosts) > 1 else 0):
        try:
            return _open_together(hosts, port)
        except PortTakenError:
            pass
    return _open_together(hosts, port)


def _open_together(hosts: Sequence[str], port: int) -> list[_socket.socket]:
    listeners: list[_socket.socket] = []
    try:
        for host in hosts or [""]:
            bound = bind_port(host, port)
            listeners.append(bound)
            try:
                bound.listen(_BACKLOG)
            except OSError as error:
                raise _explain(error, bound.getsockname()[0], port) from error
            port = listeners[0].getsockname()[1]
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def bind_port(host: str, port: int) -> _socket.socket:
    """Bind a port of a numeric address of this machine, of all interfaces if it is empty, without listening on it.

    The socket has SO_REUSEADDR: connections of a past job that are still in TIME_WAIT don't count, and another socket
    with SO_REUSEADDR may listen on the port while this one doesn't. Raises as `open_listeners` does.
    """
    if not host:
        try:
            return _bind("::", port)
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                raise
            host = "0.0.0.0"  # noqa: S104 - a machine without IPv6, and other nodes are to reach it
    return _bind(host, port)


def _bind(host: str, port: int) -> _socket.socket:
    bound = None
    try:
        bound = _socket.socket(_socket.AF_INET6 if ":" in host else _socket.AF_INET, _socket.SOCK_STREAM)
        bound.setblocking(False)
        bound.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        if host == "::":
            bound.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 0)
        bound.bind((host, port))
    except OSError as error:
        if bound is not None:
            bound.close()
        raise _explain(error, host, port) from error
    return bound


def _explain(error: OSError, host: str, port: int) -> OSError:
    if error.errno == errno.EADDRINUSE and port:
        return PortTakenError(port)
    where = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}") if port else host
    return OSError(error.errno, f"can't listen on {where}: {error.strerror}")


def find_port_owner(port: int) -> str:
    """Return the process that listens on a TCP port as "pid 123 (name)"; "" if it can't be seen, as another user's."""
    try:
        import psutil

        listening = (each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN)
        pid = next((each.pid for each in listening if each.pid and each.laddr and each.laddr.port == port), None)
        if pid is None:
            return ""
        process = psutil.Process(pid)
        # For a long name psutil reads the command line, which may have to wait for a process in uninterruptible sleep.
        is_stuck = process.status() == psutil.STATUS_DISK_SLEEP
        return f"pid {pid}" if is_stuck else f"pid {pid} ({process.name()})"
    except Exception:  # noqa: BLE001 - psutil may not know what a kernel writes there, and this is for a message only
        return ""


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit of descriptors to the hard one: every client of a server takes one.

    Returns the soft limit before, which workers should get back: select() breaks above 1024.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            pass  # macOS reports an unlimited hard limit and refuses it. The soft one then has to do.
    return soft
