"""Nodes of a job without workers: a session, an open port, and a record of what the session delivered.

A `Node` is one agent as the rendezvous sees it. It answers `Halted` by itself, as an agent does whose workers stop at
once; a test says what its workers do otherwise (`done`, `fail`). `NodeProcess` is the same in a process of its own, to
be killed or stopped: it obeys lines and prints one line per event.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from elastic_run.core.config import JobConfig, NodeConfig
from elastic_run.core.job.documents import NodeInfo, StoreAddress
from elastic_run.core.job.membership import Ended, Formed, Halted, Refused, Warned
from elastic_run.records import replace
from elastic_run.rendezvous import RendezvousParameters, get_rendezvous_handler
from elastic_run.rendezvous.coordination.places import Place
from elastic_run.rendezvous.events import Lost, Notice, Setup
from elastic_run.rendezvous.handler import ElasticRendezvousHandler
from elastic_run.rendezvous.session import Session
from elastic_run.rendezvous.settings import read_settings
from elastic_run.store.worker_store import open_listeners
from tests.support.wait import DEADLINE, DeadlinePassedError, wait_until

if TYPE_CHECKING:
    import _socket
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from elastic_run.core.job.documents import Assignment
    from elastic_run.rendezvous.events import SessionEvent


E = TypeVar("E", Ended, Formed, Halted, Lost, Notice, Refused, Warned)

#: A lease of 1.2 s: long enough for a busy machine, short enough for a test.
FAST = {"keep_alive_interval": "0.4", "keep_alive_max_attempt": "3", "last_call_timeout": "20", "join_timeout": "30"}
#: Seconds without a tick of the clock after which the process was stopped, or had no processor for as long.
_STOPPED = 0.5
_HOST = {"auto": None, "yes": True, "no": False}

#: The kernel's own ports, which it gives to those who ask for any, begin behind these.
_PORTS = range(16384, int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0]))
_numbers = itertools.count(secrets.randbelow(len(_PORTS)))


def free_port() -> int:
    """Return a port that nobody has, and that neither this function nor the kernel gives to anybody else soon."""
    for number in _numbers:
        with contextlib.suppress(OSError):
            port = _PORTS[number % len(_PORTS)]
            open_listeners([], port)[0].close()
            return port
    raise AssertionError


def can_connect(host: str, port: int) -> bool:
    """Return whether somebody takes connections there."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), 5.0):
        return True
    return False


class Node:
    """One agent of a job.

    Args:
        session: Its session, not yet started.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.events: list[tuple[float, SessionEvent]] = []
        self.answers_halts = True
        self._finishes = False
        self.offers_closed_port = False
        self._failed_round = 0
        self._changed = threading.Condition()
        self._listeners: list[_socket.socket] = []
        self._seen = 0
        self.round: Assignment | None = None

    def __enter__(self) -> Node:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> Node:
        """Join the job."""
        self.session.start(lambda _: self._store_address(), self._deliver)
        return self

    def close(self, timeout: float = 10.0) -> None:
        """Close the session."""
        self.session.close(timeout)
        for listener in self._listeners:
            listener.close()

    def _store_address(self) -> StoreAddress:
        store = self.session.worker_store
        if store is not None:
            return StoreAddress(store.host, store.port, use_agent_store=True)
        if self.offers_closed_port:
            return StoreAddress("", free_port(), use_agent_store=True)
        self._listeners.append(open_listeners([])[0])
        return StoreAddress("", self._listeners[-1].getsockname()[1], use_agent_store=True)

    def _deliver(self, event: SessionEvent) -> None:
        with self._changed:
            self.events.append((time.monotonic(), event))
            if isinstance(event, Formed):
                self.round = event.assignment
            is_done = isinstance(event, Formed) and self._finishes
            self._changed.notify_all()
        if is_done:
            self.done()
        if isinstance(event, Halted) and self.answers_halts and event.round != self._failed_round:
            self.session.report_ready(event.round, "stopped", report=None, store_address=self._store_address())

    @property
    def is_waiting(self) -> bool:
        """Whether it has said that it joins, and the store has heard it."""
        node = self.session._node
        return node.member is not None and node._link is not None and node._link.has_delivered

    # --- what the agent does -------------------------------------------------------------------------------------
    @property
    def current_round(self) -> int:
        """The round that was formed last."""
        assert self.round is not None
        return self.round.round

    def done(self) -> None:
        """All workers ended with 0."""
        self.session.report_ready(self.current_round, "done", report=None, store_address=self._store_address())

    def finish(self) -> None:
        """All workers end with 0, in this round and in each that follows: a busy machine may cost one more."""
        with self._changed:
            self._finishes = True
        self.done()

    def fail(self, exit_code: int = 1, *, severity: int = 0, signature: str = "boom") -> None:
        """A worker failed, and the others are gone."""
        self._failed_round = self.current_round
        self.session.report_failing(self.current_round)
        report = {
            "exit_code": exit_code,
            "severity": severity,
            "signature": signature,
            "is_deterministic": False,
            "uptime": 100.0,
            "host": self.session.node,
        }
        self.session.report_ready(self.current_round, "failed", report=report, store_address=self._store_address())

    # --- what the test waits for ---------------------------------------------------------------------------------
    def wait_for(self, kind: type[E], *, deadline: float = DEADLINE) -> E:
        """Wait for the next event of a kind; those before it are passed over."""
        end = time.monotonic() + deadline
        with self._changed:
            while True:
                for index in range(self._seen, len(self.events)):
                    event = self.events[index][1]
                    if isinstance(event, kind):
                        self._seen = index + 1
                        return event
                left = end - time.monotonic()
                if left <= 0:
                    message = f"no {kind.__name__} within {deadline} s; there was {self.events}"
                    raise DeadlinePassedError(message)
                self._changed.wait(left)

    def when(self, event: SessionEvent) -> float:
        """Return the monotonic time at which an event was delivered."""
        return next(time for time, one in self.events if one is event)


def tcp_node(
    port: int,
    nodes: tuple[int, int],
    *,
    is_host: bool | None = None,
    secret: bytes | None = None,
    run_id: str = "job",
    conf: Mapping[str, str] | None = None,
    setup: Setup | None = None,
    successors: tuple[int, ...] = (),
) -> Node:
    """Return a node whose store is at a port of this machine."""
    endpoints = [("127.0.0.1", port), *(("127.0.0.1", one) for one in successors)]
    place = Place("c10d", run_id, endpoints, is_host=is_host, secret=secret)
    settings = read_settings("c10d", FAST if conf is None else conf)
    setup = setup or plain_setup()
    setup = replace(setup, job_config=replace(setup.job_config, min_nodes=nodes[0], max_nodes=nodes[1]))
    return Node(Session(place, settings, setup, local_addr="127.0.0.1"))


def handler_node(parameters: RendezvousParameters, setup: Setup | None = None) -> Node:
    """Return a node as the launcher makes it: from a handler of the registry."""
    handler = get_rendezvous_handler(parameters)
    assert isinstance(handler, ElasticRendezvousHandler)
    return Node(handler.open_session(setup or plain_setup()))


class NodeProcess:
    """A node in a process of its own.

    Args:
        port: Port of the store on this machine.
        nodes: Least and most nodes.
        is_host: Whether it serves the store; None to find out.
        successor: Port of a successor, and one restart; 0 for none.
        successors: Ports of several, in its place.
        suspends: Whether its clock stands still while it is stopped.
        place: A backend and its endpoint, in place of the port; none for the port.
    """

    def __init__(
        self,
        port: int,
        nodes: tuple[int, int],
        *,
        is_host: bool | None = None,
        successor: int = 0,
        successors: tuple[int, ...] = (),
        suspends: bool = False,
        place: tuple[str, str] | tuple[()] = (),
    ) -> None:
        host = {None: "auto", True: "yes", False: "no"}[is_host]
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.support.sessions",
                str(port),
                str(nodes[0]),
                str(nodes[1]),
                host,
                ",".join(map(str, successors or (successor,))),
                "suspends" if suspends else "runs",
                *place,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.lines: list[str] = []

    def __enter__(self) -> NodeProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def say(self, line: str) -> None:
        """Give an order: `done`, `fail`, `leave`, `close`."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")

    def wait_line(self, start: str) -> str:
        """Wait for a line of output that begins so; the test's own time limit is the deadline."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith(start):
                return self.lines[-1]
        message = f"no {start!r} before the end of {self.lines}"
        raise DeadlinePassedError(message)


# --- a node in a process of its own -----------------------------------------------------------------------------------
def main() -> None:
    """Run a node for `NodeProcess`: print each event, obey the lines of standard input until it ends or says `close`.

    `python -m tests.support.sessions PORT MIN MAX HOST SUCCESSORS [CLOCK [BACKEND ENDPOINT]]`. With the clock
    `suspends` the monotonic clock of the process stands still while the process is stopped, as that of a machine does
    in suspend. A backend and an endpoint replace the store at the port.
    """
    port, least, most = (int(word) for word in sys.argv[1:4])
    successors = tuple(int(word) for word in sys.argv[5].split(",") if word != "0")
    setup = plain_setup(max_restarts=1 if successors else 0)
    if sys.argv[6:7] == ["suspends"]:
        time.monotonic = _make_suspended_clock()
    if sys.argv[7:]:
        backend, endpoint = sys.argv[7:9]
        conf = {**FAST, "store_type": "file"} if backend == "c10d" else FAST
        node = handler_node(RendezvousParameters(backend, endpoint, "job", least, most, "127.0.0.1", **conf), setup)
    else:
        node = tcp_node(port, (least, most), is_host=_HOST[sys.argv[4]], setup=setup, successors=successors)
    deliver = node._deliver

    def tell(event: object) -> None:
        deliver(event)  # type: ignore[arg-type]  # what the session delivers
        sys.stdout.write(f"{event}\n")
        sys.stdout.flush()

    node._deliver = tell  # type: ignore[method-assign]
    node.start()
    wait_until(lambda: node.is_waiting)
    sys.stdout.write("waiting\n")
    sys.stdout.flush()
    for line in sys.stdin:
        if line.strip() == "close":
            break
        _obey(node, line.strip())
    node.close()
    sys.stdout.write("closed\n")


def _make_suspended_clock() -> Callable[[], float]:
    """Return a monotonic clock for which no time passes while this process is stopped."""
    lock = threading.Lock()
    true_clock = time.monotonic
    last, slept = true_clock(), 0.0

    def tell() -> float:
        nonlocal last, slept
        with lock:
            now = true_clock()
            if now - last > _STOPPED:
                slept += now - last
            last = now
            return now - slept

    def tick() -> None:
        while True:
            tell()
            time.sleep(_STOPPED / 10)

    threading.Thread(target=tick, daemon=True).start()
    return tell


def _obey(node: Node, order: str) -> None:
    if order == "done":
        node.done()
    elif order == "fail":
        node.fail()
    elif order == "leave":
        node.session.leave("signal", "told to stop")


# --- configurations without the waits that a user's job has by default ------------------------------------------------
def plain_config(min_nodes: int = 1, max_nodes: int = 1, **changes: Any) -> JobConfig:
    """Return a configuration in which new nodes come at once, without a warning, as often as they like."""
    plain = {"scale_up_delay": 0.0, "scale_up_grace": 0.0, "membership_window": None}
    return JobConfig(min_nodes, max_nodes, **{**plain, **changes})


def plain_setup(
    workers: int = 1,
    *,
    node_config: NodeConfig | None = None,
    role: str = "default",
    **changes: Any,
) -> Setup:
    """Return what an agent tells its rendezvous."""
    return Setup(
        plain_config(**changes), node_config or NodeConfig(), NodeInfo(socket.gethostname(), os.getpid(), workers, role)
    )


if __name__ == "__main__":
    main()
