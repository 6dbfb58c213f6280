"""Many agents at one etcd that doesn't answer for a while, or late: they wait, don't wear it down, and all go on."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.node.messages import Ended, Formed, Halted, Refused
from elastic_run.rendezvous import RendezvousParameters
from elastic_run.rendezvous.backend_table import make_backend, read_settings
from elastic_run.rendezvous.elastic.backend.base import SharedBackend
from elastic_run.rendezvous.elastic.store_connection import StoreConnection
from elastic_run.rendezvous.session import Lost
from elastic_run.store.errors import SILENT, UNREADY, StoreConnectionError
from elastic_run.store.jobstore.etcd_v3_client import EtcdV3Client
from elastic_run.store.jobstore.http_client import Endpoint, HttpClient
from tests.support.configs import plain_setup
from tests.support.etcd import Etcd
from tests.support.sessions import Node, handler_node
from tests.support.system import starter
from tests.support.wait import DEADLINE, stretched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_NODES = 48
_LEASE = 3.0
_CONF = {"keep_alive_interval": "1", "keep_alive_max_attempt": "3", "join_timeout": "60", "last_call_timeout": "0"}
#: Seconds after which each of them has had its turn again, at the latest; it takes less than one.
_SOON = 40.0
_TOO_MANY = b'{"error": "etcdserver: too many requests", "message": "etcdserver: too many requests", "code": 2}'

BACKENDS = ("etcd-v2", "etcd-v3")


def make_nodes(stack: ExitStack, etcd: Etcd, backend: str) -> list[Node]:
    """Return nodes that have begun to join."""
    setup = plain_setup()
    endpoint = str(etcd.endpoints[0])
    parameters = RendezvousParameters(backend, endpoint, "crowd", _NODES, _NODES, "127.0.0.1", **_CONF)
    return [stack.enter_context(handler_node(parameters, setup)) for _ in range(_NODES)]


@starter
def make_etcds(stack: ExitStack) -> dict[str, Etcd]:
    """Start an etcd for each backend; a test has both at once, for it waits for several leases."""
    return {backend: stack.enter_context(Etcd()) for backend in BACKENDS}


def stop_for(etcds: Iterable[Etcd], seconds: float) -> float:
    """Stop them for so long, in which time their clients send what they have; returns when they went on."""
    for etcd in etcds:
        etcd.pause(0)
    threading.Event().wait(seconds)
    for etcd in etcds:
        etcd.resume(0)
    return time.monotonic()


@pytest.mark.long
def test_a_crowd_outlives_an_etcd_that_stops(stack: ExitStack) -> None:
    """When etcd says nothing for two leases and then goes on, no round is halted, nobody is lost, the job succeeds."""
    etcds = make_etcds(stack)
    crowds = [make_nodes(stack, etcd, backend) for backend, etcd in etcds.items()]
    nodes = [node for crowd in crowds for node in crowd]
    for node in nodes:
        node.wait_for(Formed, deadline=_SOON)
    resumed = stop_for(etcds.values(), 2 * _LEASE)
    # Who was lost meanwhile would be found out within a lease.
    with suppress(AssertionError):
        crowds[0][0].wait_for(Halted, deadline=_LEASE + 1)
    for node in nodes:
        node.done()
    for node in nodes:
        assert node.wait_for(Ended, deadline=_SOON).end.verdict == "success"
        assert not [event for _, event in node.events if isinstance(event, Halted | Lost | Refused)]
    assert time.monotonic() - resumed < stretched(_LEASE + 1 + _SOON)


@pytest.mark.long
def test_a_crowd_that_comes_while_etcd_hangs_forms_its_round_soon_after(stack: ExitStack) -> None:
    """Agents that started in vain, all at once, are in a round soon after etcd goes on."""
    etcds = make_etcds(stack)
    for etcd in etcds.values():
        etcd.pause(0)
    nodes = [node for backend, etcd in etcds.items() for node in make_nodes(stack, etcd, backend)]
    resumed = stop_for(etcds.values(), 2 * _LEASE)
    for node in nodes:
        assert node.wait_for(Formed, deadline=_SOON).assignment.group_world_size == _NODES
    assert time.monotonic() - resumed < stretched(_SOON)


# --- an etcd that has too much to do ---------------------------------------------------------------------------------
class BusyServer(http.server.ThreadingHTTPServer):
    """Says to so many requests what etcd 3.4 says under a load that is too much, and does what it is asked then."""

    daemon_threads = True

    def __init__(self, refusals: int) -> None:
        super().__init__(("127.0.0.1", 0), _BusyAnswer)
        self.refusals = refusals
        self.asked = 0


class _BusyAnswer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: BusyServer

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked += 1
        is_busy = self.server.asked <= self.server.refusals
        body = _TOO_MANY if is_busy else b'{"header": {"revision": "1"}}'
        self.send_response(500 if is_busy else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def make_busy(stack: ExitStack) -> Callable[[int], tuple[BusyServer, EtcdV3Client]]:
    """Return a function that starts such a server, and gives a client of it."""

    def make(refusals: int) -> tuple[BusyServer, EtcdV3Client]:
        server = stack.enter_context(BusyServer(refusals))
        threading.Thread(target=lambda: server.serve_forever(0.01)).start()
        stack.callback(server.shutdown)
        api = EtcdV3Client(HttpClient([Endpoint("127.0.0.1", server.server_address[1])], 1.0))
        stack.callback(api.http.close)
        return server, api

    return make


def test_an_etcd_with_too_many_requests_is_asked_again(
    make_busy: Callable[[int], tuple[BusyServer, EtcdV3Client]],
) -> None:
    """Too many requests is no refusal for good, though etcd says it as an error of its own: it is asked again."""
    server, api = make_busy(2)
    assert api.call("kv/range", {}) == {"header": {"revision": "1"}}
    assert server.asked == 3


def test_an_etcd_that_stays_busy_is_not_ready(make_busy: Callable[[int], tuple[BusyServer, EtcdV3Client]]) -> None:
    """Where that does not end the failure says so, after few requests: the store is not ready, and may be later."""
    server, api = make_busy(1000)
    with pytest.raises(StoreConnectionError, match="too many requests") as caught:
        api.call("kv/range", {})
    assert caught.value.reason == UNREADY
    assert server.asked < 40


# --- late answers ----------------------------------------------------------------------------------------------------
class LateServer:
    """Stands before a server, and passes its answers on late.

    Args:
        target: Host and port of the server.
        delay: Seconds by which each piece of an answer is late.
    """

    def __init__(self, target: tuple[str, int], delay: float) -> None:
        self._target = target
        self._delay = delay
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._is_over = threading.Event()

    def __enter__(self) -> LateServer:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for one in (self._listener, *self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(DEADLINE)
        for one in (self._listener, *self._open):
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(self._target)
                self._open += [client, server]
                for source, sink, delay in ((client, server, 0.0), (server, client, self._delay)):
                    thread = threading.Thread(target=self._pass_on, args=(source, sink, delay))
                    self._threads.append(thread)
                    thread.start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, delay: float) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._is_over.wait(delay)
                sink.sendall(data)


@pytest.mark.parametrize("backend", BACKENDS)
def test_late_answers_are_waited_for_longer_the_next_time(stack: ExitStack, backend: str) -> None:
    """An etcd whose answers come later than the first deadline is not given up: the next deadline is twice as long."""
    etcd = stack.enter_context(Etcd())
    late = stack.enter_context(LateServer((etcd.endpoints[0].host, etcd.endpoints[0].port), 0.75))
    settings = read_settings(backend, _CONF)
    endpoint = f"127.0.0.1:{late.port}"
    made = make_backend(backend, endpoint, "job", settings)
    assert isinstance(made, SharedBackend)
    link = StoreConnection(made, 0.5, threading.Event(), longest_timeout=_LEASE)
    stack.callback(link.drop)
    with pytest.raises(StoreConnectionError) as caught:
        link.store.get(["d/0"])
    assert caught.value.reason == SILENT
    link.drop()
    link.pause(caught.value)
    assert link.store.get(["d/0"]) == [None]
