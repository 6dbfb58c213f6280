"""Torch's own TCPStore server in a child process, for jobs so wide that C++ pays for a second of import and 200 MB.

Rules
- The port is ours: the child gets the listening socket, so clients can connect (and wait in the backlog) while it still
  imports torch, and it can't lose a race for the port.
- The child ends when the agent does, however that ends: it holds the read end of a pipe that only the agent could
  write to. It has its own session, so that Ctrl-C reaches the workers and not their store, and no descriptor of the
  launcher's.
- If it dies (no torch in that interpreter, killed) our own server takes the socket over: workers that wait in the
  backlog are served, and those that had a connection learn that it is gone.
"""

from __future__ import annotations

import _socket
import os
import signal

from elastic_run.store.server import StoreServer
from elastic_run.store.worker_store import LOOPBACK, WorkerStore, open_worker_listener

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elastic_run.loop import Loop

_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "torch_child.py")
_LISTENER = 3
#: What is kept of the child's stderr, for the line that says why it died.
_TAIL = 4096


class TorchStore(WorkerStore):
    """The store of one round, served by torch in a child process.

    Args:
        fixed_port: The port that the user fixed, or 0.
        python: The interpreter that has torch.
        env: The child's environment.
        host: The numeric address at which it listens; empty for all interfaces.
        on_lost: Called with one line when the child could not start or died.
        on_refusal: See `StoreServer`, for our server once it has the port.
    """

    mode = "torch"
    use_agent_store = True

    def __init__(
        self,
        fixed_port: int,
        *,
        python: str,
        env: Mapping[str, str],
        on_lost: Callable[[str], None] | None,
        host: str = LOOPBACK,
        on_refusal: Callable[[str, str], None] | None = None,
    ) -> None:
        self._loop: Loop | None = None
        self._host = host
        self._fixed_port = fixed_port
        self._python = python
        self._env = env
        self._on_lost = on_lost
        self._on_refusal = on_refusal
        self._listener = open_worker_listener(host, fixed_port)
        self.host, self.port = self._listener.getsockname()[:2]
        self._successor: StoreServer | None = None
        self._is_closed = False
        self._pid = self._life = self._stderr = -1  # no child, no pipes
        self._tail = b""

    def serve(self, loop: Loop) -> None:
        """Start the child."""
        self._loop = loop
        try:
            self._start(loop)
        except OSError as error:
            self._hand_over(loop, f"could not start {self._python}: {error.strerror}")

    @property
    def pid(self) -> int:
        """The child's pid, or -1 when it could not be started."""
        return self._pid

    def renew(self) -> WorkerStore:
        """Close this store and open the next round's, with a child of its own."""
        if self._fixed_port:
            self.close()
        following = TorchStore(
            self._fixed_port,
            python=self._python,
            env=self._env,
            on_lost=self._on_lost,
            host=self._host,
            on_refusal=self._on_refusal,
        )
        if self._loop is not None:
            following.serve(self._loop)
        self.close()
        return following

    def close(self) -> None:
        """End the child and give the port back; harmless when closed."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._successor is not None:
            self._successor.close()
        else:
            _stop_listening(self._listener)
        self._close_pipes()
        if self._pid > 0:
            # The pipe's end has killed it already; this is for systems without SIGIO. The loop collects it.
            os.kill(self._pid, signal.SIGKILL)

    # --- the child -------------------------------------------------------------------------------------------------
    def _start(self, loop: Loop) -> None:
        life, self._life = os.pipe()
        try:
            self._stderr, stderr = os.pipe()
        except OSError:
            os.close(life)
            raise
        try:
            self._pid = _spawn(
                [self._python, _PROGRAM, str(self.port)],
                # Torch's server asks the DNS for every peer's name; this makes the resolver give up at once.
                {**self._env, "RES_OPTIONS": "attempts:0"},
                stdin=life,
                stderr=stderr,
                listener=self._listener,
            )
        finally:
            os.close(life)
            os.close(stderr)
        os.set_blocking(self._stderr, False)
        loop.add_reader(self._stderr, lambda: self._read_stderr(loop))
        loop.watch_exit(self._pid, lambda code: self._on_exit(loop, code))

    def _read_stderr(self, loop: Loop) -> None:
        try:
            data = os.read(self._stderr, 65536)
        except BlockingIOError:
            return
        if data:
            self._tail = (self._tail + data)[-_TAIL:]
        else:
            loop.remove_reader(self._stderr)

    def _on_exit(self, loop: Loop, code: int) -> None:
        self._pid = -1
        if self._is_closed:
            return
        self._read_stderr(loop)
        lines = self._tail.decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        how = f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
        self._hand_over(loop, f"torch's store server {how}{': ' if last else ''}{last}")

    def _hand_over(self, loop: Loop, reason: str) -> None:
        """Serve the port ourselves."""
        self._close_pipes()
        self._successor = StoreServer(loop, self._listener, on_refusal=self._on_refusal, separates_groups=True)
        if self._on_lost is not None:
            self._on_lost(f"{reason}; serving the workers' store in the agent instead")

    def _close_pipes(self) -> None:
        if self._life >= 0:
            if self._loop is not None:
                self._loop.remove_reader(self._stderr)
            os.close(self._life)
            os.close(self._stderr)
            self._life = self._stderr = -1


def _stop_listening(listener: _socket.socket) -> None:
    """Close a socket that the child has too, so that its port is free at once and not when the child is gone."""
    try:
        listener.shutdown(_socket.SHUT_RDWR)
    except OSError:
        pass  # only Linux lets a listening socket be shut down
    listener.close()


def _spawn(argv: list[str], env: Mapping[str, str], *, stdin: int, stderr: int, listener: _socket.socket) -> int:
    """Start the child in a session of its own, with nothing but these descriptors; returns its pid."""
    source = listener.fileno()
    # A descriptor that already has the right number would stay close-on-exec under older C libraries.
    spare = os.dup(source) if source == _LISTENER else -1
    actions = (
        (os.POSIX_SPAWN_DUP2, stdin, 0),
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        (os.POSIX_SPAWN_DUP2, stderr, 2),
        (os.POSIX_SPAWN_DUP2, source if spare < 0 else spare, _LISTENER),
    )
    # Whoever started us may have ignored or blocked the signals that end it.
    defaults = (signal.SIGTERM, signal.SIGIO)
    try:
        return os.posix_spawnp(argv[0], argv, env, file_actions=actions, setsid=True, setsigdef=defaults, setsigmask=())
    except NotImplementedError:  # a C library without POSIX_SPAWN_SETSID
        return os.posix_spawnp(argv[0], argv, env, file_actions=actions, setpgroup=0, setsigdef=defaults, setsigmask=())
    finally:
        if spare >= 0:
            os.close(spare)
