"""Our client against our server and torch's, and torch's client and process groups on ours."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from elastic_run.store.client import StoreClient
from elastic_run.store.errors import StoreConnectionError, StoreTimeoutError
from elastic_run.store.wire import VALUE_LIMIT
from elastic_run.store.worker_store import open_worker_store
from tests.compat.torch_versions import (
    expected_sums,
    perform_gloo_cycles,
    perform_operations,
    perform_operations_on_torchs_server,
)
from tests.support.store import LOOPBACK, ServedStore
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def store() -> Iterator[ServedStore]:
    """Give a store that serves."""
    with ServedStore() as served:
        yield served


@pytest.fixture
def client(store: ServedStore) -> Iterator[StoreClient]:
    """Give a client of it."""
    with StoreClient(LOOPBACK, store.port, timeout=DEADLINE) as connected:
        yield connected


def in_thread(target: Callable[[], object]) -> threading.Thread:
    """Start a thread."""
    thread = threading.Thread(target=target)
    thread.start()
    return thread


def test_values_of_every_size(client: StoreClient) -> None:
    """Values around the sizes of packets, buffers and limits come back whole."""
    for size in (0, 1, 1439, 1440, 16_384, 16_385, 65_535, 65_537, 1 << 20, VALUE_LIMIT):
        client.set("k", b"x" * size)
        assert client.get("k") == b"x" * size


def test_a_wait_in_vain_names_the_keys(client: StoreClient) -> None:
    """A wait that runs out of time names the keys."""
    with pytest.raises(StoreTimeoutError, match=r"not within 0.05 s: 'a', 'b', 'c', 'd', 'e' …"):
        client.wait(["a", "b", "c", "d", "e", "f"], 0.05)


def test_a_refusal_shows_at_the_next_operation(client: StoreClient) -> None:
    """When the server closes the connection the client says so, then and from then on."""
    client.set("k", "no number")
    for _ in range(2):
        with pytest.raises(StoreConnectionError, match="closed"):
            client.add("k", 1)


def test_a_silent_server_is_a_timeout() -> None:
    """A server that takes the connection and never answers is given up after the timeout."""
    with (
        socket.create_server((LOOPBACK, 0)) as listener,
        pytest.raises(StoreTimeoutError, match="sends no answer"),
    ):
        StoreClient(LOOPBACK, listener.getsockname()[1], timeout=0.05)


def test_nobody_listening_is_an_error_after_the_timeout() -> None:
    """Where nobody listens the client tries until the timeout and names the address."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(StoreConnectionError, match=rf"no store answers at 127.0.0.1:{port} within 0.05 s"):
        StoreClient(LOOPBACK, port, timeout=0.05)


def test_another_protocol_is_no_store() -> None:
    """A server that answers the opening with something else is named as no store."""
    with socket.create_server((LOOPBACK, 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")
                with suppress(ConnectionResetError):  # the rest was not read
                    connection.recv(100)

        thread = in_thread(serve)
        with pytest.raises(StoreConnectionError, match="is not a TCPStore"):
            StoreClient(LOOPBACK, listener.getsockname()[1], timeout=DEADLINE)
        thread.join(DEADLINE)


# --- torch's client and process groups --------------------------------------------------------------------------------
@pytest.mark.long
def test_every_operation_of_torchs_client() -> None:
    """Torch's client gets from our server, for every operation it has, what it gets from torch's own server."""
    with ServedStore() as store, ThreadPoolExecutor() as pool:
        theirs = pool.submit(perform_operations_on_torchs_server, sys.executable)
        ours = perform_operations(sys.executable, store.port)
        assert ours == theirs.result()
        assert store.unknown == []
    operations = {line.split(" ")[0] for line in ours}
    assert operations >= {"set", "get", "add", "compare_set", "multi_get", "queue_pop", "barrier", "clone", "prefix"}


@pytest.mark.long
def test_ten_process_groups_in_one_life() -> None:
    """Two workers form, use and part ten gloo groups in one life over the agent's store, under a prefix each."""
    with ServedStore() as store:
        assert perform_gloo_cycles(sys.executable, store.port, prefix="/worker/attempt_") == expected_sums()
        assert store.unknown == []


@pytest.mark.long
def test_rank_0_serves_on_the_port_that_was_kept() -> None:
    """In mode rank0 torch's rank 0 can listen on the port that the agent holds for it."""
    store = open_worker_store(by_agent=False, port=None)
    try:
        sums = perform_gloo_cycles(sys.executable, store.port, cycles=1, use_agent_store=store.use_agent_store)
    finally:
        store.close()
    assert sums == expected_sums(1)


@pytest.mark.long
def test_our_client_on_torchs_server() -> None:
    """Our client's operations on torch's server give what they give on ours."""
    program = (
        "import sys; from torch.distributed import TCPStore;"
        "s = TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False); print(s.port, flush=True); sys.stdin.read()"
    )
    env = {**os.environ, "RES_OPTIONS": "attempts:0"}
    with (
        subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
        ) as torch,
        ServedStore() as store,
    ):
        assert torch.stdout is not None
        port = int(torch.stdout.readline())
        assert converse(port) == converse(store.port)
        torch.kill()


def converse(port: int) -> list[object]:
    """Perform each of our client's operations, and return what they gave."""
    with StoreClient("127.0.0.1", port, timeout=20) as client, StoreClient("127.0.0.1", port) as other:
        client.set("k", "v")
        client.set("a", "x" * 5_000_000)
        values: list[object] = [
            other.get("k"),
            client.add("n", 3),
            other.multi_get(["a", "k"]),
        ]
        with pytest.raises(TimeoutError):
            client.wait(["k", "no"], 0.05)
        return values
