"""What is special about the job stores over etcd: heartbeats that expire, members that fail, users, certificates."""

from __future__ import annotations

import socket
import threading
import time
from base64 import b64encode
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from elastic_run.store.errors import FOREIGN, REFUSED, SILENT, StoreAccessError, StoreConnectionError
from elastic_run.store.jobstore.api import LEFT_BEHIND
from elastic_run.store.jobstore.etcd_v2 import EtcdV2JobStore
from elastic_run.store.jobstore.etcd_v2_client import EtcdV2Client
from elastic_run.store.jobstore.etcd_v3 import EtcdV3JobStore
from elastic_run.store.jobstore.etcd_v3_client import EtcdV3Client
from elastic_run.store.jobstore.http_client import Credentials, Endpoint, HttpClient, make_tls
from tests.support.etcd import ROOT, Certificates, Etcd, make_certificates
from tests.support.store import LOOPBACK
from tests.support.wait import DEADLINE, stretched, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import TypeAlias

    from elastic_run.store.jobstore.etcd import EtcdJobStore

    Make: TypeAlias = Callable[[HttpClient], EtcdJobStore]

_JOB = "job"
_LEASE = 2.0
#: Seconds that etcd may take beyond a lease to notice that it is over.
_SLACK = 4.0


def make_v2(http: HttpClient) -> EtcdJobStore:
    """Make a store over version 2."""
    return EtcdV2JobStore(EtcdV2Client(http), _JOB, lease=_LEASE)


def make_v3(http: HttpClient) -> EtcdJobStore:
    """Make a store over version 3."""
    return EtcdV3JobStore(EtcdV3Client(http), _JOB, lease=_LEASE)


both = pytest.mark.parametrize("make", [make_v2, make_v3], ids=["v2", "v3"])


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    """Start an etcd of one member for tests that leave it as it is."""
    with Etcd() as started:
        yield started


@pytest.fixture
def three() -> Iterator[Etcd]:
    """Start an etcd of three members for one test, which may break it."""
    with Etcd(3) as started:
        yield started


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Make certificates for all tests."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))


# --- heartbeats ------------------------------------------------------------------------------------------------------
@both
def test_a_heartbeat_expires_with_its_lease(etcd: Etcd, make: Make) -> None:
    """A node that goes on beating stays; one that stops is gone after its lease; one that comes back is there again."""
    with make(etcd.client()) as store, store.clone() as observer:
        store.heartbeat("dies")
        store.heartbeat("lives")
        begun = beaten = time.monotonic()
        assert None not in observer.read_heartbeats(["dies", "lives"])

        def is_gone() -> bool:
            nonlocal beaten
            before, beaten = beaten, time.monotonic()
            store.heartbeat("lives")
            dies, lives = observer.read_heartbeats(["dies", "lives"])
            # On a machine so busy that the lease has passed since the heartbeat before, etcd is right to forget it.
            assert lives is not None or time.monotonic() - before > _LEASE / 2
            return dies is None

        wait_until(is_gone, deadline=_LEASE + _SLACK)
        assert time.monotonic() - begun > _LEASE - 1
        store.heartbeat("dies")
        assert observer.read_heartbeats(["dies"]) != [None]
        store.remove_job()


@both
def test_a_heartbeat_survives_a_new_connection(etcd: Etcd, make: Make) -> None:
    """A node that goes on beating over a clone of a closed object never disappears."""
    with make(etcd.client()) as first, first.clone() as observer:
        first.heartbeat("n")
        first.close()
        with first.clone() as second:
            end = time.monotonic() + _LEASE + 1
            while time.monotonic() < end:
                second.heartbeat("n")
                assert observer.read_heartbeats(["n"]) != [None]
                observer.wait("d/0", 0.2)
            second.remove_job()


@both
def test_heartbeats_of_many_nodes(etcd: Etcd, make: Make) -> None:
    """One call reads the heartbeats of two hundred nodes."""
    nodes = [f"host-{number}_1_0a" for number in range(200)]
    with make(etcd.client()) as store:
        store._lease = DEADLINE  # longer than they take to be written on a busy machine
        for node in nodes:
            store.write_heartbeat(node, b"1")
        assert None not in store.read_heartbeats(nodes)
        assert store.read_heartbeats([*nodes, "missing"])[-1] is None
        store.remove_job()


# --- what is left ----------------------------------------------------------------------------------------------------
def test_a_removed_job_leaves_no_key_of_version_3(etcd: Etcd) -> None:
    """Nothing is left in etcd of a job that was removed."""
    with make_v3(etcd.client()) as store:
        store.append("facts", b"a")
        store.write({"head": b"1", "d/0": b"x"})
        store.heartbeat("n")
        assert etcd.list_keys()
        store.remove_job()
        assert etcd.list_keys() == []


def test_a_removed_job_leaves_no_key_of_version_2(etcd: Etcd) -> None:
    """Nothing is left in etcd of a job that was removed, not even a directory."""
    api = EtcdV2Client(etcd.client())
    with make_v2(etcd.client()) as store:
        store.append("facts", b"a")
        store.write({"head": b"1", "d/0": b"x"})
        store.heartbeat("n")
        store.remove_job()
    left = api.read("/", recursive=True)
    api.http.close()
    assert [node.key for node in left.leaves] == [None]


def test_what_a_killed_job_left_behind_goes_by_itself(etcd: Etcd) -> None:
    """All that a job wrote hangs on a lease that ends when nobody renews it."""
    with make_v3(etcd.client()) as store:
        store.append("facts", b"a")
        store.write({"head": b"1"})
        store.create("d/0", b"x")
        api = EtcdV3Client(etcd.client())
        answer = api.call("kv/range", {"key": "AA==", "range_end": "AA=="})
        assert {item["lease"] for item in answer["kvs"]} == {str(_job_lease(store))}
        alive = api.call("lease/timetolive", {"ID": str(_job_lease(store))})
        assert int(alive["grantedTTL"]) == LEFT_BEHIND
        api.http.close()
        store.remove_job()


def test_what_a_killed_job_left_behind_in_version_2_goes_by_itself(etcd: Etcd) -> None:
    """All that a job wrote is in a directory that etcd removes when nobody renews it, as each node does many times."""
    with make_v2(etcd.client()) as store:
        store.append("facts", b"a")
        api = EtcdV2Client(etcd.client())
        assert LEFT_BEHIND - 600 < api.read(store._root).ttl <= LEFT_BEHIND
        api.write(store._root, None, dir=True, ttl=LEFT_BEHIND // 2, prevExist=True)
        store.heartbeat("n")
        assert api.read(store._root).ttl <= LEFT_BEHIND // 2
        assert isinstance(store, EtcdV2JobStore)
        store._job_renewed_at -= LEFT_BEHIND / 4
        store.heartbeat("n")
        assert LEFT_BEHIND - 600 < api.read(store._root).ttl <= LEFT_BEHIND
        api.http.close()
        store.remove_job()


def _job_lease(store: EtcdJobStore) -> int:
    assert isinstance(store, EtcdV3JobStore)
    return store._job_lease


# --- members that fail -----------------------------------------------------------------------------------------------
@both
def test_the_leader_dies(three: Etcd, make: Make) -> None:
    """When the leader is killed every operation still works, and those who wait get what comes."""
    with make(three.client(timeout=DEADLINE)) as store, store.clone() as waiting, store.clone() as reading:
        store.append("facts", b"before")
        _, position = reading.read("facts", 0, DEADLINE)
        got: list[object] = []
        threads = [
            threading.Thread(target=lambda: got.append(waiting.wait("d/0", DEADLINE))),
            threading.Thread(target=lambda: got.append(reading.read("facts", position, DEADLINE)[0])),
        ]
        for thread in threads:
            thread.start()
        three.kill(three.find_leader())
        store.heartbeat("n")
        assert store.create("d/0", b"x") == b"x"
        store.append("facts", b"after")
        for thread in threads:
            thread.join(DEADLINE)
        assert sorted(got, key=str) == sorted([b"x", [b"after"]], key=str)
        assert store.read_heartbeats(["n"]) != [None]


def test_an_entry_that_was_sent_twice_is_there_once(etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a server dies before its answer, the append goes to the next one; all readers see the entry, and once."""
    with make_v3(etcd.client()) as store, store.clone() as following, store.clone() as late:
        assert following.read("facts", 0, 0.01) == ([], 0)  # follows from now on
        call = EtcdV3Client.call

        def call_twice(client: EtcdV3Client, path: str, request: dict[str, object]) -> dict[str, object]:
            call(client, path, request)
            return call(client, path, request)

        with monkeypatch.context() as patched:
            patched.setattr(EtcdV3Client, "call", call_twice)
            store.append("facts", b"a")
        store.append("facts", b"b")
        for reader in (following, late):
            found, position = reader.read("facts", 0, DEADLINE)
            while len(found) < 2:
                entries, position = reader.read("facts", position, DEADLINE)
                found += entries
            assert found == [b"a", b"b"]
        store.remove_job()


@both
def test_a_member_hangs(three: Etcd, make: Make) -> None:
    """When a member is stopped operations go to another one, and who follows it learns soon what comes."""
    endpoints = three.endpoints
    hanging = next(member for member in range(3) if member != three.find_leader())
    in_order = [endpoints[hanging], *(one for one in endpoints if one is not endpoints[hanging])]
    with make(HttpClient(in_order, 6.0)) as waiting:
        got: list[bytes | None] = []
        assert waiting.wait("d/0", 0.01) is None  # follows the member that will hang
        thread = threading.Thread(target=lambda: got.append(waiting.wait("d/0", DEADLINE)))
        thread.start()
        three.pause(hanging)
        try:
            with waiting.clone() as store:
                assert store.create("d/0", b"x") == b"x"
            begun = time.monotonic()
            thread.join(DEADLINE)
            assert time.monotonic() - begun < stretched(_LEASE + 10)
        finally:
            three.resume(hanging)
        assert got == [b"x"]


@both
def test_etcd_is_gone_and_comes_back(make: Make) -> None:
    """Without any member operations and waits end with the reason; a clone works once etcd is there again."""
    with Etcd() as etcd, make(etcd.client(timeout=1.0)) as store, store.clone() as waiting:
        store.create("d/0", b"x")
        assert waiting.wait("d/1", 0.01) is None
        etcd.kill(0)
        for ask in (lambda: store.get(["d/0"]), lambda: waiting.wait("d/1", DEADLINE), store.clone):
            begun = time.monotonic()
            with pytest.raises(StoreConnectionError) as caught:
                ask()
            assert caught.value.reason == REFUSED
            assert time.monotonic() - begun < stretched(10)
        etcd.revive(0)
        etcd.wait_healthy(0)
        with store.clone() as again:
            assert again.get(["d/0"]) == [b"x"]


@both
def test_history_that_was_dropped_is_no_loss(etcd: Etcd, make: Make) -> None:
    """A reader and a waiter that slept through more than etcd remembers go on with what is there."""
    with make(etcd.client()) as store, store.clone() as other, store.clone() as noisy:
        store.append("facts", b"a")
        _, position = store.read("facts", 0, DEADLINE)
        assert store.wait("d/0", 0.01) is None
        other.append("facts", b"b")
        other.create("d/0", b"x")
        for _ in range(1100):
            noisy.write({"noise/n": b"n"})
        api = EtcdV3Client(etcd.client())
        revision = api.read("x", "y").number
        api.call("kv/compaction", {"revision": str(revision), "physical": True})
        api.http.close()
        # Their watches are opened, or opened anew, only now.
        for follower in store._followers.values():
            follower._drop_watch()
        assert store.read("facts", position, DEADLINE)[0] == [b"b"]
        assert store.wait("d/0", DEADLINE) == b"x"
        store.remove_job()


# --- who may ---------------------------------------------------------------------------------------------------------
def test_users_of_version_3(certificates: Certificates) -> None:
    """A user is let in; a wrong password, no user, and a user without the right are refused for good."""
    with Etcd(certificates=certificates, has_users=True) as etcd:

        def make(credentials: Credentials | None) -> EtcdV3JobStore:
            return EtcdV3JobStore(EtcdV3Client(etcd.client(), credentials), _JOB, lease=_LEASE)

        with make(Credentials(*ROOT)) as store:
            store.create("d/0", b"x")
            assert store.wait("d/1", 0.01) is None
            store._api._pass.token = "expired"  # noqa: S105 - no secret
            assert store.get(["d/0"]) == [b"x"]
        for credentials in (Credentials(ROOT[0], "wrong"), None, Credentials("guest", "guest")):
            with make(credentials) as refused, pytest.raises(StoreAccessError):
                refused.create("d/1", b"x")


@both
def test_certificates(certificates: Certificates, make: Make, tmp_path: Path) -> None:
    """Both sides show their certificate; a stranger's, or none, is refused at once."""
    strangers = make_certificates(tmp_path)
    with Etcd(certificates=certificates) as etcd:
        with make(etcd.client()) as store:
            assert store.create("d/0", b"x") == b"x"
        for tls in (
            make_tls(),  # doesn't know who signed the server's
            make_tls(strangers.cacert, strangers.cert, strangers.key),
            make_tls(certificates.cacert),  # shows none
            make_tls(certificates.cacert, strangers.cert, strangers.key),
        ):
            begun = time.monotonic()
            with pytest.raises(StoreAccessError), make(HttpClient(etcd.endpoints, DEADLINE, tls)) as refused:
                refused.get(["d/0"])
            assert time.monotonic() - begun < stretched(DEADLINE / 2)


def test_a_missing_file_is_named() -> None:
    """A certificate that is not there is refused with its path."""
    with pytest.raises(StoreAccessError, match=r"can't use /nowhere/ca.pem: No such file"):
        make_tls("/nowhere/ca.pem")


# --- strangers -------------------------------------------------------------------------------------------------------
@both
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", FOREIGN),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\nnot found", FOREIGN),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", FOREIGN),
        (b"", SILENT),
    ],
    ids=["another protocol", "another server", "too long", "nothing"],
)
def test_a_stranger_is_no_store(make: Make, answer: bytes, reason: str) -> None:
    """A server that is no etcd is named so; one that says nothing is given up after the timeout."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        connections = []

        def serve() -> None:
            with suppress(OSError):  # it is over
                while True:
                    connection, _ = listener.accept()
                    connections.append(connection)
                    connection.recv(1000)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with (
            pytest.raises(StoreConnectionError) as caught,
            make(HttpClient([Endpoint(*listener.getsockname())], 0.5)) as store,
        ):
            store.get(["d/0"])
        assert caught.value.reason == reason
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(DEADLINE)
        for connection in connections:
            connection.close()


def test_garbage_in_etcd_harms_nobody(etcd: Etcd) -> None:
    """What a stranger wrote comes out as it is, for those who check it."""
    with make_v3(etcd.client()) as store:
        store.append("facts", b"a")
        api = EtcdV3Client(etcd.client())
        for name, value in (("s/facts/zz", "Z2FyYmFnZQ=="), ("k/-/head", "ent6"), ("k/d/0", "")):
            key = f"elastic-run/{_JOB}/{name}"
            api.call("kv/put", {"key": b64encode(key.encode()).decode(), "value": value})
        api.http.close()
        assert store.read("facts", 0, DEADLINE)[0] == [b"a", b"garbage"]
        assert store.get(["head"]) == [b"z{z"]
        store.remove_job()
