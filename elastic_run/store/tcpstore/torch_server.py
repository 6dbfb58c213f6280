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

from elastic_run.store.tcpstore.server import StoreServer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elastic_run.loop import Loop

_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "torch_child.py")
_LISTENER = 3
#: What is kept of the child's stderr, for the line that says why it died.
_TAIL = 4096


class TorchServer:
    """Torch's server on a socket, in a child process. If the child dies, our own server follows it.

    Args:
        loop: The agent's loop, which collects the child.
        listener: A listening socket; this object owns it from now on.
        python: The interpreter that has torch.
        env: The child's environment.
        on_lost: Called with one line when the child could not start or died.
        on_refusal: See `StoreServer`, for our server once it has the port.
    """

    def __init__(
        self,
        loop: Loop,
        listener: _socket.socket,
        *,
        python: str,
        env: Mapping[str, str],
        on_lost: Callable[[str], None] | None,
        on_refusal: Callable[[str, str], None] | None,
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._on_lost = on_lost
        self._on_refusal = on_refusal
        self._successor: StoreServer | None = None
        self._is_closed = False
        self._pid = self._life = self._stderr = -1  # no child, no pipes
        self._tail = b""
        try:
            self._start(python, env)
        except OSError as error:
            self._hand_over(f"could not start {python}: {error.strerror}")

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
    def _start(self, python: str, env: Mapping[str, str]) -> None:
        life, self._life = os.pipe()
        try:
            self._stderr, stderr = os.pipe()
        except OSError:
            os.close(life)
            raise
        try:
            self._pid = _spawn(
                [python, _PROGRAM, str(self._listener.getsockname()[1])],
                # Torch's server asks the DNS for every peer's name; this makes the resolver give up at once.
                {**env, "RES_OPTIONS": "attempts:0"},
                stdin=life,
                stderr=stderr,
                listener=self._listener,
            )
        finally:
            os.close(life)
            os.close(stderr)
        os.set_blocking(self._stderr, False)
        self._loop.add_reader(self._stderr, self._read_stderr)
        self._loop.watch_exit(self._pid, self._on_exit)

    def _read_stderr(self) -> None:
        try:
            data = os.read(self._stderr, 65536)
        except BlockingIOError:
            return
        if data:
            self._tail = (self._tail + data)[-_TAIL:]
        else:
            self._loop.remove_reader(self._stderr)

    def _on_exit(self, code: int) -> None:
        self._pid = -1
        if self._is_closed:
            return
        self._read_stderr()
        lines = self._tail.decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        how = f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
        self._hand_over(f"torch's store server {how}{': ' if last else ''}{last}")

    def _hand_over(self, reason: str) -> None:
        """Serve the port ourselves."""
        self._close_pipes()
        self._successor = StoreServer(self._loop, self._listener, on_refusal=self._on_refusal, separates_groups=True)
        if self._on_lost is not None:
            self._on_lost(f"{reason}; serving the workers' store in the agent instead")

    def _close_pipes(self) -> None:
        if self._stderr >= 0:
            self._loop.remove_reader(self._stderr)
            os.close(self._stderr)
        if self._life >= 0:
            os.close(self._life)
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
