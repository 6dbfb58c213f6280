"""What is special about the job store over TCPStore's protocol: gaps, late writers, hosts that hang, a shared port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from elastic_run.store import connecting
from elastic_run.store.errors import FOREIGN, REFUSED, SILENT, UNRESOLVED, StoreConnectionError
from elastic_run.store.jobstore.c10d import C10dJobStore
from elastic_run.store.tcpstore.client import StoreClient
from tests.support.job_stores import torchs_server
from tests.support.slow_way import SlowWay
from tests.support.store import LOOPBACK, ServedStore
from tests.support.wait import DEADLINE, stretched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_JOB = "job"
_PREFIX = f"/elastic-run/{_JOB}/"
_GAP_LIVES = 1.0
#: Keys that are waited for one after another.
_KEYS = 5


@pytest.fixture
def served() -> Iterator[ServedStore]:
    """Give our server."""
    with ServedStore() as serving:
        yield serving


@pytest.fixture
def store(served: ServedStore) -> Iterator[C10dJobStore]:
    """Give a job on it."""
    with C10dJobStore(LOOPBACK, served.port, _JOB, timeout=DEADLINE) as opened:
        yield opened


@pytest.fixture
def raw(served: ServedStore) -> Iterator[StoreClient]:
    """Give a client that sees the job's keys as they are."""
    with StoreClient(LOOPBACK, served.port, DEADLINE, _PREFIX) as client:
        yield client


# --- streams ---------------------------------------------------------------------------------------------------------
def test_the_gap_of_a_dead_writer_is_passed(store: C10dJobStore, raw: StoreClient) -> None:
    """A writer that died between taking its number and filling its slot holds readers up for a second, once."""
    raw.add("s/facts/count", 1)
    store.append("facts", b"a")
    begun = time.monotonic()
    entries, position = store.read("facts", 0, DEADLINE)
    assert entries == [b"a"]
    assert _GAP_LIVES <= time.monotonic() - begun < stretched(_GAP_LIVES + 5)
    assert store.read("facts", 0, 0) == ([b"a"], position)


def test_a_gap_is_passed_by_short_reads_too(store: C10dJobStore, raw: StoreClient) -> None:
    """A reader that never waits for a second passes a gap all the same, and gives what lies before it at once."""
    store.append("facts", b"a")
    raw.add("s/facts/count", 1)
    store.append("facts", b"b")
    entries, position = store.read("facts", 0, 0.01)
    assert entries == [b"a"]
    deadline = time.monotonic() + DEADLINE
    while not (found := store.read("facts", position, 0.05)[0]):
        assert time.monotonic() < deadline
    assert found == [b"b"]


def test_a_gap_that_comes_up_while_we_wait_is_passed(store: C10dJobStore, raw: StoreClient) -> None:
    """A reader that waits for a slot whose writer dies then still gets what comes behind it."""
    got: list[tuple[list[bytes], int]] = []
    thread = threading.Thread(target=lambda: got.append(store.read("facts", 0, DEADLINE)))
    thread.start()
    with store.clone() as writer:
        raw.add("s/facts/count", 1)
        writer.append("facts", b"a")
        thread.join(DEADLINE)
    assert got[0][0] == [b"a"]


def test_a_writer_whose_slot_was_voided_takes_another(
    store: C10dJobStore, raw: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that was stopped for so long that its slot was voided loses no entry."""
    raw.add("s/facts/count", 1)
    store.append("facts", b"a")
    _, position = store.read("facts", 0, DEADLINE)
    _take_numbers(store, monkeypatch, 1)
    store.append("facts", b"late")
    assert store.read("facts", position, 0)[0] == [b"late"]


def test_a_writer_whose_slot_was_trimmed_takes_another(
    store: C10dJobStore, raw: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer whose voided slot was even trimmed away loses no entry, and leaves nothing below the floor."""
    raw.add("s/facts/count", 1)
    store.append("facts", b"a")
    _, position = store.read("facts", 0, DEADLINE)
    store.trim("facts", position)
    _take_numbers(store, monkeypatch, 1)
    store.append("facts", b"late")
    assert store.read("facts", position, 0)[0] == [b"late"]
    assert sorted(raw.list_keys()) == ["s/facts/3", "s/facts/count", "s/facts/floor"]


def _take_numbers(store: C10dJobStore, monkeypatch: pytest.MonkeyPatch, *first: int) -> None:
    """Let the store's writer begin with numbers that it took long ago."""
    client = store._client
    numbers, add = list(first), client.add
    monkeypatch.setattr(client, "_is_extended", False)  # a server of ours takes the number itself
    monkeypatch.setattr(client, "add", lambda key, amount: numbers.pop(0) if numbers and amount else add(key, amount))


def test_a_position_of_another_server_begins_anew(store: C10dJobStore) -> None:
    """A reader whose server was replaced by an empty one reads from its beginning."""
    store.append("facts", b"a")
    assert store.read("facts", 57, DEADLINE) == ([b"a"], 1)


def test_garbage_in_a_stream_is_left_out(store: C10dJobStore, raw: StoreClient) -> None:
    """What a stranger wrote into a slot is passed over."""
    raw.set(f"s/facts/{raw.add('s/facts/count', 1)}", "garbage")
    store.append("facts", b"a")
    assert store.read("facts", 0, DEADLINE)[0] == [b"a"]


# --- hosts that fail -------------------------------------------------------------------------------------------------
def test_a_refused_connection_says_so() -> None:
    """Where nobody listens the error says `refused`, within the timeout."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(StoreConnectionError, match="connection refused") as caught:
        C10dJobStore(LOOPBACK, port, _JOB, timeout=0.1)
    assert caught.value.reason == REFUSED


def test_a_silent_server_says_so() -> None:
    """A server that takes the connection and never answers is `silent`, within the timeout."""
    with socket.create_server((LOOPBACK, 0)) as listener, pytest.raises(StoreConnectionError) as caught:
        C10dJobStore(LOOPBACK, listener.getsockname()[1], _JOB, timeout=0.1)
    assert caught.value.reason == SILENT


def test_a_stranger_says_so() -> None:
    """A server of another protocol is `no store`, at once."""
    with socket.create_server((LOOPBACK, 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                connection.recv(100)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(StoreConnectionError) as caught:
            C10dJobStore(LOOPBACK, listener.getsockname()[1], _JOB, timeout=DEADLINE)
        thread.join(DEADLINE)
    assert caught.value.reason == FOREIGN


def test_a_resolver_that_never_answers_stalls_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up that hangs is given up at the deadline as `unresolved`; a numeric address needs none."""
    let_go = threading.Event()
    look_up = socket.getaddrinfo

    def hang(host: str, port: int, **options: int) -> object:
        if not options.get("flags", 0) & socket.AI_NUMERICHOST:
            let_go.wait(DEADLINE)
        return look_up(host, port, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    try:
        begun = time.monotonic()
        with pytest.raises(StoreConnectionError, match="no name server answers") as caught:
            C10dJobStore("node-1.cluster", 29400, _JOB, timeout=0.2)
        assert caught.value.reason == UNRESOLVED
        assert time.monotonic() - begun < stretched(5)
        with ServedStore() as served:
            C10dJobStore(LOOPBACK, served.port, _JOB, timeout=DEADLINE).close()
    finally:
        let_go.set()


def test_a_server_that_stops_is_noticed() -> None:
    """When the host's process is stopped an operation ends after the timeout, and a wait soon after its own."""
    program = (
        "from elastic_run.loop import Loop\n"
        "from elastic_run.store.tcpstore.listener import open_listener\n"
        "from elastic_run.store.tcpstore.server import StoreServer\n"
        "with Loop() as loop:\n"
        "    print(StoreServer(loop, open_listener()).address[1], flush=True)\n"
        "    loop.run_until(lambda: False)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        try:
            store = C10dJobStore(LOOPBACK, int(server.stdout.readline()), _JOB, timeout=0.3)
            other = store.clone()
            os.kill(server.pid, signal.SIGSTOP)
            operations: list[Callable[[], object]] = [lambda: store.heartbeat("n"), lambda: other.wait("d/0", 0.1)]
            for ask in operations:
                begun = time.monotonic()
                with pytest.raises(StoreConnectionError) as caught:
                    ask()
                assert caught.value.reason == SILENT
                assert time.monotonic() - begun < stretched(5)
            with pytest.raises(StoreConnectionError):
                store.clone()
            os.kill(server.pid, signal.SIGCONT)
            with store.clone() as again:
                assert again.create("d/0", b"x") == b"x"
        finally:
            server.kill()


def test_the_kernel_breaks_a_connection_to_a_dark_host() -> None:
    """A connection is set up so that a host which went dark ends it, also while nothing is sent."""
    with ServedStore() as served, connecting.connect_once(LOOPBACK, served.port, DEADLINE, dark_after=6.0) as connected:
        option = connected.getsockopt
        assert option(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert option(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 2
        assert option(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 2
        assert option(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 3
        assert option(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 6000


# --- agents and workers at one port ----------------------------------------------------------------------------------
def test_a_reset_leaves_the_agents_alone(served: ServedStore, store: C10dJobStore) -> None:
    """A new round's empty store closes the workers' connections, and neither the agents' nor what they share."""
    store.append("facts", b"a")
    got: list[bytes | None] = []
    with store.clone() as waiting, StoreClient(LOOPBACK, served.port, DEADLINE) as worker:
        waiting.get(["d/0"])  # before its first key an agent's connection can't be told from a worker's
        thread = threading.Thread(target=lambda: got.append(waiting.wait("d/0", DEADLINE)))
        thread.start()
        worker.set("k", "v")
        assert worker.list_keys() == ["k"]
        served.reset()
        with pytest.raises(StoreConnectionError):
            worker.check(["k"])
        with StoreClient(LOOPBACK, served.port, DEADLINE) as next_worker:
            assert next_worker.num_keys() == 0
        store.create("d/0", b"x")
        thread.join(DEADLINE)
    assert got == [b"x"]
    assert store.read("facts", 0, 0)[0] == [b"a"]


def test_workers_and_agents_dont_see_each_other(served: ServedStore, store: C10dJobStore) -> None:
    """Workers neither list, count nor wait for what is the agents', and agents don't remove what is the workers'."""
    store.create("d/0", b"x")
    with StoreClient(LOOPBACK, served.port, DEADLINE) as worker:
        worker.set("k", "v")
        assert worker.num_keys() == 1
        assert not worker.check([f"{_PREFIX[1:]}k/d/0"])
        store.remove_job()
        assert worker.get("k") == b"v"


_WORKER = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), 1, False, timeout=timedelta(seconds=20))
store.set("from torch", "v")
print(store.num_keys(), flush=True)
sys.stdin.read()
"""


def test_torchs_client_is_a_worker(served: ServedStore, store: C10dJobStore) -> None:
    """Torch's own client at the agents' port is served as a worker: it doesn't see them, and a reset ends it."""
    store.create("d/0", b"x")
    command = [sys.executable, "-c", _WORKER, str(served.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as torch:
        assert torch.stdout is not None
        assert torch.stdout.readline() == b"2\n"  # torch counts its clients in a key
        served.reset()
        torch.communicate(b"", DEADLINE)
    with StoreClient(LOOPBACK, served.port, DEADLINE) as worker:
        assert worker.num_keys() == 0
    assert store.get(["d/0"]) == [b"x"]


def test_a_job_leaves_the_rest_of_torchs_server_alone() -> None:
    """What a job does on torch's server leaves torch's other keys alone."""
    with (
        torchs_server() as port,
        C10dJobStore(LOOPBACK, port, _JOB, timeout=DEADLINE) as store,
        StoreClient(LOOPBACK, port, DEADLINE) as other,
    ):
        other.set("k", "v")
        store.append("facts", b"a")
        store.remove_job()
        assert other.list_keys() == ["k"]


def test_a_timeout_is_the_kernels_as_well(served: ServedStore) -> None:
    """A connection that was opened in a hurry does not break for good after as short an outage of the network."""
    with C10dJobStore(LOOPBACK, served.port, _JOB, timeout=0.8) as store:
        used = store._client._stream._socket
        assert used is not None
        before = used.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        store.set_timeout(5.0)
        assert (before, used.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)) == (800, 5000)
    store.set_timeout(1.0)  # it is closed, and nothing is left to set


# --- two threads over a slow network ---------------------------------------------------------------------------------
@pytest.mark.parametrize("pause", [0.0, 0.02], ids=["without a pause", "with a short pause"])
def test_operations_one_after_another_leave_the_wait_its_end(served: ServedStore, pause: float) -> None:
    """Where a round trip takes longer than the pause between them, the other thread sees its key all the same."""
    is_over = threading.Event()
    got: list[bytes | None] = []
    with (
        SlowWay(served.port, 0.03) as way,
        C10dJobStore(LOOPBACK, way.port, _JOB, timeout=DEADLINE) as store,
        C10dJobStore(LOOPBACK, served.port, _JOB, timeout=DEADLINE) as other,
    ):
        shared = store.share()

        def ask() -> None:
            while not is_over.wait(pause):
                store.get(["c/none"])

        def wait() -> None:
            got.extend(shared.wait(f"d/{number}", DEADLINE) for number in range(_KEYS))

        other.write({f"d/{number}": b"x" for number in range(1, _KEYS)})
        threads = [threading.Thread(target=run) for run in (ask, wait)]
        for thread in threads:
            thread.start()
        begun = time.monotonic()
        other.create("d/0", b"x")
        threads[1].join(DEADLINE)
        took = time.monotonic() - begun
        is_over.set()
        threads[0].join(DEADLINE)
    assert got == [b"x"] * _KEYS
    assert took < stretched(4.0)
