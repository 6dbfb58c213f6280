"""The lease of a job as its agents have it, and a way to etcd that loses answers."""

from __future__ import annotations

import json
import secrets
import select
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from elastic_run.rendezvous.settings import open_lease, read_settings
from tests.support.store import LOOPBACK
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from types import TracebackType

    from elastic_run.rendezvous.coordination.lease import Holder, LeaseStore

#: Seconds; etcd looks for what has expired twice a second.
TTL = 1.0
LONG = 30.0
ETCD = ("etcd", "etcd-v3")


def make_value(text: str = "") -> str:
    """Return a value with a nonce, as an agent writes it."""
    return json.dumps({"address": f"10.0.0.1:29400 {text}", "nonce": secrets.token_hex(8)}, ensure_ascii=False)


class Place:
    """Where the nodes of a job meet.

    Args:
        kind: A backend, or `file`.
        endpoint: As a user writes it.
        conf: The settings.
    """

    def __init__(self, kind: str, endpoint: str, **conf: str) -> None:
        self.kind = kind
        self.endpoint = endpoint
        self._backend = "c10d" if kind == "file" else kind
        self._conf = {"store_type": "file"} if kind == "file" else conf

    def open(self, run_id: str, *, secret: bytes | None = None, timeout: float = DEADLINE) -> LeaseStore:
        """Open a job's lease, as one agent does."""
        settings = read_settings(self._backend, self._conf)
        return open_lease(self._backend, self.endpoint, run_id, settings, secret=secret, timeout=timeout)


class Job:
    """A job whose lease several agents open."""

    def __init__(self, place: Place, run_id: str) -> None:
        self._place = place
        self._run_id = run_id

    def open(self, *, secret: bytes | None = None, timeout: float = DEADLINE) -> LeaseStore:
        """Open the lease for one more agent."""
        return self._place.open(self._run_id, secret=secret, timeout=timeout)

    def close(self) -> None:
        """Delete the lease."""
        self.open().remove()


def is_free(lease: LeaseStore) -> bool:
    """Whether nobody has the lease."""
    holder = lease.read()
    return holder is None or not holder.is_valid


def take(lease: LeaseStore, ttl: float = LONG, *, instead_of: Holder | None = None, value: str = "") -> Holder:
    """Acquire a lease that is free."""
    holder = lease.acquire(value or make_value(), ttl, instead_of=instead_of)
    assert holder is not None
    return holder


# --- answers that are lost --------------------------------------------------------------------------------------------
class LosingWay:
    """Passes on what comes to its port, and what the server answers.

    Args:
        server: The server's port, on loopback.

    Attributes:
        port: Where clients connect to.
        losses: Number of answers to lose from now on; the connection of each ends with it.
        part: Only answers to requests that contain this are lost.
    """

    def __init__(self, server: int) -> None:
        self.losses = 0
        self.part = b""
        self._server = server
        self._listener = socket.create_server((LOOPBACK, 0))
        self._end, self._ended = socket.socketpair()
        self._threads = [threading.Thread(target=self._accept)]
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> LosingWay:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.close()
        for thread in self._threads:
            thread.join(DEADLINE)
        self._listener.close()
        self._ended.close()

    def _accept(self) -> None:
        while self._listener in select.select([self._listener, self._ended], [], [])[0]:
            client, _ = self._listener.accept()
            thread = threading.Thread(target=self._pass_on, args=(client,))
            self._threads.append(thread)
            thread.start()

    def _pass_on(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection((LOOPBACK, self._server)) as server:
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            request = content = b""
            while True:
                ready = select.select([client, server, self._ended], [], [])[0]
                if self._ended in ready:
                    return
                if client in ready:
                    content = client.recv(1 << 16)
                    request += content
                    server.sendall(content)
                if server in ready:
                    content = server.recv(1 << 16)
                    if self.losses and self.part in request:
                        self.losses -= 1
                        return
                    client.sendall(content)
                    request = b""
                if not content:
                    return
