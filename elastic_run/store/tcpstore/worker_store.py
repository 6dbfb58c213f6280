"""What an agent puts before its workers: one store a round, at an address that is open before anyone is told of it.

Rules
- Three modes, one interface. `agent`: our server, on the agent's own loop. `torch`: torch's server in a child process,
  on our listening socket. `rank0`: the port is kept for the worker of rank 0, which serves the store itself.
- `renew` gives the next round a store without a key or a client of the last one: on a new port, or on the same one
  where the user has fixed it.
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
from elastic_run.store.tcpstore.listener import bind_public_port, open_listeners

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from collections.abc import Callable, Mapping, Sequence

    from elastic_run.loop import Loop
    from elastic_run.store.tcpstore.server import StoreServer
    from elastic_run.store.tcpstore.torch_server import TorchServer

LOCALHOST, LOOPBACK, _LOOPBACK6 = "localhost", "127.0.0.1", "::1"
#: Local workers up to which our server is the faster choice: no second of torch import, no second process.
MOST_WORKERS_OF_AGENT = 512
MODES = ("agent", "torch", "rank0")


class WorkerStore(ABC):
    """The store of one round.

    Attributes:
        mode: `agent`, `torch` or `rank0`.
        host: MASTER_ADDR.
        port: MASTER_PORT.
        use_agent_store: TORCHELASTIC_USE_AGENT_STORE: whether something serves the store already. If not, the worker
            of rank 0 does.
    """

    mode: str
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
            The next round's store, empty and served; this same object where the port is fixed.

        Raises:
            PortTakenError: A fixed port was taken meanwhile.
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
    if LOOPBACK not in named or (_LOOPBACK6 in named and " lo\n" not in _read(f"{root}proc/net/if_inet6")):
        return LOOPBACK, (LOOPBACK,)
    return LOCALHOST, (LOOPBACK, _LOOPBACK6) if _LOOPBACK6 in named else (LOOPBACK,)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def choose_worker_store(requested: str, world_size: int, env: Mapping[str, str]) -> str:
    """Decide which process serves the workers' store.

    Args:
        requested: `auto`, or what the user asked for.
        world_size: The number of workers on this node.
        env: The launcher's environment; TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 leaves the store to rank 0.

    Returns:
        `agent`, `torch` or `rank0`.
    """
    if requested != "auto":
        return requested
    if env.get(contract.ENV_DISABLE_SHARED_STORE) == "1":
        return "rank0"
    return "agent" if world_size <= MOST_WORKERS_OF_AGENT else "torch"


def open_worker_store(
    mode: str,
    *,
    host: str = LOCALHOST,
    port: int | None,
    python: str,
    env: Mapping[str, str],
    on_unknown_operation: Callable[[int], None] | None = None,
    on_lost: Callable[[str], None] | None = None,
    on_refusal: Callable[[str, str], None] | None = None,
) -> WorkerStore:
    """Open the first round's store.

    Args:
        mode: `agent`, `torch` or `rank0`.
        host: The numeric address at which it listens; `localhost` for a job on one node, empty for all interfaces.
            `rank0` leaves that to the worker.
        port: The port that the user fixed, or None (or 0) for a new one each round.
        python: The workers' interpreter, for `torch`.
        env: The launcher's environment, for `torch`.
        on_unknown_operation: Called once a round, with its number, when a worker asks our server for an operation that
            it doesn't know: the next round is better served by torch.
        on_lost: Called when torch's server could not start or died, with one line that says why. From then on our
            server has the port.
        on_refusal: See `StoreServer`, for our server.

    Returns:
        The store; workers may be started at once, and served a little later.

    Raises:
        PortTakenError: The port is taken.
        OSError: The system refuses.
        ValueError: There is no such mode.
    """
    if mode == "agent":
        return _AgentStore(port or 0, on_unknown_operation, host, on_refusal)
    host = LOOPBACK if host == LOCALHOST else host
    if mode == "torch":
        from elastic_run.store.tcpstore.torch_server import TorchServer

        def start(loop: Loop, listener: _socket.socket) -> TorchServer:
            return TorchServer(loop, listener, python=python, env=env, on_lost=on_lost, on_refusal=on_refusal)

        return _TorchStore(port or 0, host, start)
    if mode == "rank0":
        return _Rank0Store(port or 0)
    message = f"worker store {mode!r} is not one of {', '.join(MODES)}"
    raise ValueError(message)


class _ListeningStore(WorkerStore):
    """A store of the agent's: its socket listens from the beginning, also where nothing answers yet."""

    use_agent_store = True

    def __init__(self, fixed_port: int, host: str, addresses: Sequence[str] = ()) -> None:
        self._loop: Loop | None = None
        self._host = host
        self._fixed_port = fixed_port
        self._listener, *self._further = open_listeners(addresses or ([host] if host else []), fixed_port)
        self.host, self.port = self._listener.getsockname()[:2]

    def _give_way(self, following: WorkerStore) -> WorkerStore:
        """Close this store, and serve the next round's if this one was served."""
        if self._loop is not None:
            following.serve(self._loop)
        self.close()
        return following


class _AgentStore(_ListeningStore):
    """Our server, on the agent's loop."""

    mode = "agent"

    def __init__(
        self,
        fixed_port: int,
        on_unknown_operation: Callable[[int], None] | None,
        host: str,
        on_refusal: Callable[[str, str], None] | None,
    ) -> None:
        name, addresses = choose_loopback() if host == LOCALHOST else ("", ())
        super().__init__(fixed_port, host, addresses)
        self.host = name or self.host
        self._on_unknown_operation = on_unknown_operation
        self._on_refusal = on_refusal
        self._server: StoreServer | None = None

    def serve(self, loop: Loop) -> None:
        # The socket listens already. The server itself is made when the first worker comes: while they start they need
        # the processors more.
        self._loop = loop
        for listener in (self._listener, *self._further):
            loop.add_reader(listener.fileno(), lambda: self._begin(loop))

    def _begin(self, loop: Loop) -> None:
        from elastic_run.store.tcpstore.server import StoreServer

        for listener in (self._listener, *self._further):
            loop.remove_reader(listener.fileno())
        self._server = StoreServer(
            loop,
            self._listener,
            further=self._further,
            on_unknown_operation=self._on_unknown_operation,
            on_refusal=self._on_refusal,
            separates_groups=True,
        )

    def renew(self) -> WorkerStore:
        if self._fixed_port:
            if self._server is not None:
                self._server.reset()
            return self
        # The new one before the old one is closed: so their ports differ, and a late client of the old one fails.
        return self._give_way(_AgentStore(0, self._on_unknown_operation, self._host, self._on_refusal))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        elif self._listener.fileno() >= 0:
            for listener in (self._listener, *self._further):
                if self._loop is not None:
                    self._loop.remove_reader(listener.fileno())
                listener.close()


class _TorchStore(_ListeningStore):
    """Torch's server, in a child process."""

    mode = "torch"

    def __init__(self, fixed_port: int, host: str, start: Callable[[Loop, _socket.socket], TorchServer]) -> None:
        super().__init__(fixed_port, host)
        self._start = start
        self._server: TorchServer | None = None

    def serve(self, loop: Loop) -> None:
        self._loop = loop
        self._server = self._start(loop, self._listener)

    def renew(self) -> WorkerStore:
        if self._fixed_port:
            self.close()
        return self._give_way(_TorchStore(self._fixed_port, self._host, self._start))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        else:
            self._listener.close()


class _Rank0Store(WorkerStore):
    """A port that is kept for the worker of rank 0."""

    mode = "rank0"
    use_agent_store = False

    def __init__(self, fixed_port: int) -> None:
        self._fixed_port = fixed_port
        # As wide as torch listens, so that nobody can have the port on another address of this machine either.
        self._held = bind_public_port(fixed_port)
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
