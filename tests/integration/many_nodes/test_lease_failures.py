"""The lease of a job whose etcd or file system fails, refuses, loses answers or is no etcd at all."""

from __future__ import annotations

import gc
import os
import secrets
import socket
import threading
import time
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING

import pytest

from elastic_run import contract
from elastic_run.rendezvous.coordination.lease import Holder
from elastic_run.store.errors import (
    CLOSED,
    FOREIGN,
    REFUSED,
    SILENT,
    UNREACHABLE,
    StoreAccessError,
    StoreConnectionError,
)
from tests.support.etcd import Certificates, Etcd, make_certificates
from tests.support.leases import ETCD, LONG, TTL, Job, LosingWay, Place, is_free, make_value, take
from tests.support.store import LOOPBACK
from tests.support.system import mark_system
from tests.support.wait import DEADLINE, stretched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.launch import Launched


of_etcd = pytest.mark.parametrize("kind", mark_system(ETCD))


@pytest.fixture(scope="module")
def server() -> Iterator[Etcd]:
    """Start an etcd of one member for tests that leave it as it is."""
    with Etcd() as started:
        yield started


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Make certificates for all tests."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))


# --- answers that are lost -------------------------------------------------------------------------------------------
@pytest.fixture
def losing(kind: str, server: Etcd) -> Iterator[tuple[LosingWay, Job, Job]]:
    """Give a way that loses answers, the connections of a job over it, and others of the same job."""
    run_id = secrets.token_hex(4)
    with LosingWay(server.endpoints[0].port) as way:
        over_it = Job(Place(kind, f"{LOOPBACK}:{way.port}"), run_id)
        direct = Job(Place(kind, str(server.endpoints[0])), run_id)
        with closing(direct), closing(over_it):
            yield way, over_it, direct


@of_etcd
@pytest.mark.parametrize("losses", [1, 2, 3])
def test_a_write_whose_answer_was_lost_is_done_once(losing: tuple[LosingWay, Job, Job], losses: int) -> None:
    """Each call is repeated and does what it would have done; it recognises what it did itself."""
    way, over_it, direct = losing
    lease, other = over_it.open(), direct.open()
    dead = take(other)
    way.losses = losses
    held = take(lease, instead_of=dead)
    assert other.read() == held
    way.losses = losses
    assert lease.renew(held, LONG)
    way.losses = losses
    assert lease.acquire(held.value, LONG) == held
    way.losses = losses
    lease.write_last("text")
    assert other.read_last() == "text"
    way.losses = losses
    lease.release(held)
    assert is_free(other)
    way.losses = losses
    assert not lease.renew(held, LONG)


@of_etcd
def test_an_attempt_that_failed_may_be_made_again(kind: str, losing: tuple[LosingWay, Job, Job]) -> None:
    """If all answers are lost until the time is over, the next call with the same value finds the lease its own."""
    way, over_it, direct = losing
    lease, other = over_it.open(timeout=0.5), direct.open()
    way.losses, way.part = 1000, b"PUT /v2/keys" if kind == "etcd" else b"POST /v3/kv/txn"
    value = make_value()
    with pytest.raises(StoreConnectionError) as caught:
        lease.acquire(value, LONG)
    assert caught.value.reason in (CLOSED, SILENT)  # whichever comes last in half a second
    way.losses = 0
    there = other.read()
    assert there is not None
    assert there.value == value
    assert lease.acquire(value, LONG) == there
    assert other.acquire(make_value(), LONG) is None


def test_a_link_that_was_made_twice_is_the_first_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS repeats a call whose answer was lost, and then says that the place is taken."""
    lease = Place("file", str(tmp_path / "store")).open("job")
    link = os.link

    def link_twice(source: str, target: str) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", link_twice)
    held = take(lease)
    assert lease.read() == held
    lease.remove()


def test_a_holder_that_could_not_write_gets_time_to_do_so(tmp_path: Path) -> None:
    """After an outage of the file system no lease has expired for an agent that could not read."""
    place = Place("file", f"{tmp_path}/")
    holder_s, other = place.open("job"), place.open("job")
    held = take(holder_s, TTL)
    assert other.read() == held
    job = tmp_path / "elastic-run" / "job"
    kept = job.rename(tmp_path / "kept")
    job.touch()
    begun = time.monotonic()
    while time.monotonic() < begun + TTL:
        with pytest.raises(StoreAccessError):
            other.read()
    job.unlink()
    kept.rename(job)
    assert other.read() == held
    assert not holder_s.renew(held, TTL)
    assert take(holder_s, TTL, value=held.value) == Holder(held.value, held.term + 1) == other.read()


def test_an_agent_that_was_stopped_before_its_link_comes_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have had its term meanwhile and gone on: it does not get the lease, and leaves no file."""
    place = Place("file", str(tmp_path / "store"))
    late, other = place.open("job"), place.open("job")
    link = os.link
    later: list[str] = []

    def link_late(source: str, target: str) -> None:
        if not later:
            later.append(target)
            first = take(other)
            later.append(take(other, instead_of=first).value)
        link(source, target)

    monkeypatch.setattr(os, "link", link_late)
    assert late.acquire(make_value(), LONG) is None
    assert late.read() == other.read() == Holder(later[1], 2)
    other.remove()
    assert list(tmp_path.iterdir()) == []


# --- servers that fail -----------------------------------------------------------------------------------------------
@of_etcd
def test_etcd_is_gone_and_comes_back(kind: str) -> None:
    """Each call ends with the reason, in time; with etcd the lease is back, and the same holder has it."""
    with Etcd() as etcd:
        lease = Place(kind, str(etcd.endpoints[0])).open("job", timeout=0.4)
        held = take(lease)
        lease.write_last("text")
        etcd.kill(0)
        for ask in (lease.read, lambda: lease.renew(held, LONG), lambda: lease.write_last("x"), lease.remove):
            begun = time.monotonic()
            with pytest.raises(StoreConnectionError, match="connection refused") as caught:
                ask()
            assert caught.value.reason == REFUSED
            assert str(etcd.endpoints[0]) in str(caught.value)
            assert time.monotonic() - begun < stretched(5)
        etcd.revive(0)
        etcd.wait_healthy(0)
        assert lease.renew(held, LONG)
        assert lease.read() == held
        assert lease.read_last() == "text"


@pytest.fixture
def three() -> Iterator[Etcd]:
    """Start an etcd of three members."""
    with Etcd(3) as started:
        yield started


@of_etcd
def test_a_member_hangs_and_another_dies(kind: str, three: Etcd) -> None:
    """A server that says nothing is left for the next endpoint soon; a lease outlives the cluster's leader."""
    leader = three.find_leader()
    hanging = (leader + 1) % 3
    endpoints = sorted(three.endpoints, key=lambda one: one is not three.endpoints[hanging])
    lease = Place(kind, ",".join(map(str, endpoints))).open("job")
    assert lease.read() is None
    three.pause(hanging)
    try:
        begun = time.monotonic()
        held = take(lease)
        assert time.monotonic() - begun < stretched(DEADLINE / 6)
    finally:
        three.resume(hanging)
    three.kill(leader)
    assert lease.renew(held, LONG)
    assert lease.read() == held
    assert take(lease, instead_of=held).term > held.term


# --- who may ---------------------------------------------------------------------------------------------------------
@of_etcd
def test_certificates(kind: str, certificates: Certificates) -> None:
    """Both sides show their certificate; a node that shows none, or doesn't trust the server's, is refused at once."""
    trust, own = {"cacert": certificates.cacert}, {"cert": certificates.cert, "key": certificates.key}
    with Etcd(certificates=certificates) as etcd:
        lease = Place(kind, str(etcd.endpoints[0]), protocol="https", **trust, **own).open("job")
        held = take(lease)
        assert lease.renew(held, LONG)
        for conf, said in ((trust, "certificate"), (own, "CERTIFICATE_VERIFY_FAILED")):
            begun = time.monotonic()
            refused = Place(kind, str(etcd.endpoints[0]), protocol="https", **conf).open("job")
            with pytest.raises(StoreAccessError, match=said):
                refused.read()
            assert time.monotonic() - begun < stretched(DEADLINE / 4)


def test_a_directory_that_refuses_us_is_named(tmp_path: Path) -> None:
    """A path below a file, or no file system at all, is an error that names the place."""
    (tmp_path / "file").touch()
    place = Place("file", f"{tmp_path}/file/below")
    with pytest.raises(StoreAccessError, match=r"can't be used as a rendezvous: Not a directory: .*file/below"):
        take(place.open("job"))
    with pytest.raises(StoreConnectionError, match="fails") as caught:
        take(Place("file", f"{tmp_path}/{'x' * 300}").open("job"))
    assert caught.value.reason == UNREACHABLE


# --- strangers -------------------------------------------------------------------------------------------------------
@contextmanager
def answering(*pieces: bytes, pause: float = 0.0) -> Iterator[tuple[int, list[bytes]]]:
    """Serve every connection the same answer, in pieces with a pause between them; gives the port and the requests."""
    asked: list[bytes] = []
    is_over = threading.Event()
    with socket.create_server((LOOPBACK, 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(OSError):
                        asked.append(connection.recv(65536))
                        for piece in pieces:
                            connection.sendall(piece)
                            is_over.wait(pause)
                        connection.settimeout(DEADLINE)
                        while connection.recv(65536):
                            pass

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1], asked
        finally:
            is_over.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(DEADLINE)


@pytest.mark.parametrize("kind", ETCD)
@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ((b"SSH-2.0-OpenSSH_9.2\r\n",), FOREIGN),
        ((b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\nnot found",), FOREIGN),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",), FOREIGN),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n" + 99999 * b"[",), FOREIGN),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",), FOREIGN),
        ((b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"7fffff\r\n", b"x" * 0x7FFFFF), FOREIGN),
        ((), SILENT),
        ((b"HTTP/1.1 200 OK\r\n", *(100 * [b"X: y\r\n"])), SILENT),
    ],
    ids=[
        "another protocol",
        "another server",
        "no etcd",
        "deep",
        "too long",
        "too long in pieces",
        "nothing",
        "byte by byte",
    ],
)
def test_a_stranger_is_no_etcd(kind: str, pieces: tuple[bytes, ...], reason: str) -> None:
    """A server that is no etcd is named so; one that says nothing, or little, is given up after the timeout."""
    gc.collect()  # else a destructor of an earlier test may run where a deep answer has used up the recursion limit
    pause = 0.2 if len(pieces) > 100 else 0.0
    with answering(*pieces, pause=pause) as (port, _):
        lease = Place(kind, f"{LOOPBACK}:{port}").open("job", timeout=0.4)
        begun = time.monotonic()
        with pytest.raises(StoreConnectionError, match=f"{LOOPBACK}:{port}") as caught:
            lease.read()
        assert caught.value.reason == reason
        assert time.monotonic() - begun < stretched(5)


#: Answers in the form of etcd, whatever the question is.
SHAPES = {"etcd": b'{"action": 1, "node": 5}', "etcd-v3": b'{"kvs": [{"value": 5}]}'}


@pytest.mark.parametrize("kind", SHAPES)
def test_a_job_gives_up_a_stranger_that_looks_like_etcd(
    launch: Callable[..., Launched], worker: Callable[[str], Path], kind: str
) -> None:
    """It waits until join_timeout, as for any store that isn't there, and says what it got."""
    body = SHAPES[kind]
    head = f"HTTP/1.1 200 OK\r\nX-Etcd-Index: 1\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    with answering(head.encode() + body) as (port, _):
        flags = (f"--rdzv-backend={kind}", f"--rdzv-endpoint={LOOPBACK}:{port}", "--rdzv-conf=join_timeout=1")
        job = launch("--nnodes=2", *flags, worker("say('worker')"))
        assert job.wait_exit() == contract.EXIT_RENDEZVOUS
    assert "the answer can't be read: " in " ".join(job.stderr.split())
    assert "Traceback" not in job.stderr


# --- around it -------------------------------------------------------------------------------------------------------
