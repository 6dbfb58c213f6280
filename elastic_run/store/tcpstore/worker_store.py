"""What an agent puts before its workers: one store a round, at an address that is open before anyone is told of it.

Rules
- Two modes, one interface. `agent`: our server, on the agent's own loop. `rank0`: the port is kept for the worker of
  rank 0, which serves torch's own store there.
- `renew` gives the next round a store without a key or a client of the last one: on a new port, or on the same one
  if the user has fixed it.
- On a single node it listens on loopback only: its workers need no more, and no other machine should reach a store
  without a token. On several nodes it listens at the address that the agent tells the others.
- On a single node MASTER_ADDR is `localhost`, as under torchrun. Since torch 2.14 rank 0 compares this text with the
  host of `tcp://localhost:$MASTER_PORT`: if they differ, it tries to serve a store there, and prints an error. Clients
  try all addresses of a name, and torch prints a warning for each that fails. So the store listens on all of them; if
  that is impossible (a container without IPv6), MASTER_ADDR is 127.0.0.1.
- `rank0` keeps its port bound and not listening. With SO_REUSEADDR on both sides torch may then listen on it, while the
  kernel gives it to no program that asks for any free port. (Rejected: closing it again, as torchrun does, and hoping.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from elastic_run import contract
from elastic_run.store.tcpstore.listener import bind_port, open_listeners

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from collections.abc import Callable, Mapping, Sequence

    from elastic_run.loop import Loop
    from elastic_run.store.tcpstore.server import StoreServer

LOCALHOST, _LOOPBACK, _LOOPBACK6 = "localhost", "127.0.0.1", "::1"


class WorkerStore(ABC):
    """The store of one round.

    Attributes:
        host: MASTER_ADDR.
        port: MASTER_PORT.
        use_agent_store: TORCHELASTIC_USE_AGENT_STORE: whether something serves the store already. If not, the worker
            of rank 0 does.
    """

    host: str
    port: int
    use_agent_store: bool

    @abstractmethod
    def serve(self, loop: Loop) -> None:
        """Answer clients from now on; some may have connected before."""

    @abstractmethod
    def renew(self) -> WorkerStore:
        """Close this store, which is being served, and open the next round's.

        Returns:
            The next round's store, empty and served; this same object if the port is fixed.

        Raises:
            OSError: The system refuses another.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the port back; harmless when closed."""


def choose_loopback(root: str = "/") -> tuple[str, tuple[str, ...]]:
    """Choose MASTER_ADDR for a job on one node, and the addresses at which its store listens.

    Args:
        root: Root of the file system.
    """
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
    """Whether the agent serves the workers' store; otherwise the worker of rank 0 does.

    Args:
        requested: The value of `--worker-store`: `auto`, `agent`, or `rank0`, of which `torch` is another name.
        env: The launcher's environment; TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 leaves the store to rank 0.
    """
    return requested == "agent" or (requested == "auto" and env.get(contract.ENV_DISABLE_SHARED_STORE) != "1")


def open_worker_store(
    *,
    by_agent: bool,
    host: str = LOCALHOST,
    port: int | None,
    on_refusal: Callable[[str, str], None] | None = None,
) -> WorkerStore:
    """Open the first round's store.

    Args:
        by_agent: Whether the agent serves it.
        host: The numeric address at which it listens; `localhost` for a job on one node, empty for all interfaces.
            The worker of rank 0 decides by itself.
        port: The port that the user fixed, or None (or 0) for a new one each round.
        on_refusal: See `StoreServer`.

    Returns:
        The store; workers may be started at once, and served a little later.

    Raises:
        PortTakenError: The port is taken.
        OSError: The system refuses.
    """
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
        from elastic_run.store.tcpstore.server import StoreServer

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
    """A port that is kept for the worker of rank 0."""

    use_agent_store = False

    def __init__(self, fixed_port: int) -> None:
        self._fixed_port = fixed_port
        # As wide as torch listens, so that nobody can have the port on another address of this machine either.
        self._held = bind_port("", fixed_port)
        self.host = choose_loopback()[0]
        self.port = self._held.getsockname()[1]

    def serve(self, loop: Loop) -> None:
        """Nothing to do: the worker of rank 0 serves it."""

    def renew(self) -> WorkerStore:
        if self._fixed_port:
            return self
        following = _Rank0Store(0)
        self.close()
        return following

    def close(self) -> None:
        self._held.close()
