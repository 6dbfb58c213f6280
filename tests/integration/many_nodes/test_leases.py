"""The lease of a job, over etcd's two versions and over a file: one holder, terms that grow, answers that are lost."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING

import pytest

from elastic_run.rendezvous.backend_table import open_lease, read_settings
from elastic_run.rendezvous.leases.lease import Holder
from elastic_run.store.errors import (
    CLOSED,
    FOREIGN,
    REFUSED,
    SILENT,
    UNREACHABLE,
    StoreAccessError,
    StoreConnectionError,
    StoreTokenError,
)
from tests.support.etcd import ROOT, Certificates, Etcd, make_certificates
from tests.support.lost_answers import LosingWay
from tests.support.store import LOOPBACK
from tests.support.system import mark_system
from tests.support.wait import DEADLINE, stretched, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from elastic_run.rendezvous.leases.lease import LeaseStore

#: Seconds; etcd looks for what has expired twice a second.
_TTL = 1.0
_LONG = 30.0
_ETCD = ("etcd", "etcd-v3")

of_etcd = pytest.mark.parametrize("kind", mark_system(_ETCD))


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
    """A job and its agents' connections."""

    def __init__(self, place: Place, run_id: str) -> None:
        self._place = place
        self._run_id = run_id
        self._opened: list[LeaseStore] = []

    def open(self, *, secret: bytes | None = None, timeout: float = DEADLINE) -> LeaseStore:
        """Open the lease for one more agent."""
        self._opened.append(self._place.open(self._run_id, secret=secret, timeout=timeout))
        return self._opened[-1]

    def close(self) -> None:
        """Delete the lease, and close all connections."""
        self._opened[-1].remove()
        for opened in self._opened:
            opened.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Etcd]:
    """Start an etcd of one member for tests that leave it as it is."""
    with Etcd() as started:
        yield started


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Make certificates for all tests."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module", params=mark_system([*_ETCD, "file"], but=["file"]))
def kind_and_server(request: pytest.FixtureRequest) -> tuple[str, Etcd | None]:
    """Give each kind in turn, with its etcd."""
    return request.param, None if request.param == "file" else request.getfixturevalue("server")


@pytest.fixture
def place(kind_and_server: tuple[str, Etcd | None], tmp_path: Path) -> Place:
    """Give each place in turn."""
    kind, server = kind_and_server
    return Place(kind, str(tmp_path / "store") if server is None else str(server.endpoints[0]))


@pytest.fixture
def job(place: Place) -> Iterator[Job]:
    """Give a job that no other test uses."""
    with closing(Job(place, secrets.token_hex(4))) as opened:
        yield opened


def is_free(lease: LeaseStore) -> bool:
    """Whether nobody has the lease."""
    holder = lease.read()
    return holder is None or not holder.is_valid


def take(lease: LeaseStore, ttl: float = _LONG, *, instead_of: Holder | None = None, value: str = "") -> Holder:
    """Acquire a lease that is free."""
    holder = lease.acquire(value or make_value(), ttl, instead_of=instead_of)
    assert holder is not None
    return holder


# --- one holder ------------------------------------------------------------------------------------------------------
def test_one_of_twenty_acquires(job: Job) -> None:
    """Of agents that try at the same time one gets the lease, and all others see this one."""
    leases = [job.open() for _ in range(20)]
    barrier = threading.Barrier(len(leases))

    def acquire(lease: LeaseStore) -> Holder | None:
        barrier.wait(DEADLINE)
        return lease.acquire(make_value(), _LONG)

    with ThreadPoolExecutor(len(leases)) as pool:
        (holder,) = [one for one in pool.map(acquire, leases) if one is not None]
    assert {lease.read() for lease in leases} == {holder}


def test_one_of_many_takes_over_from_a_dead_holder(job: Job) -> None:
    """Of agents that know the holder to be dead one gets its lease, at once; who knows an older holder gets none."""
    leases = [job.open() for _ in range(10)]
    dead = take(leases[0])
    barrier = threading.Barrier(len(leases))

    def acquire(lease: LeaseStore) -> Holder | None:
        barrier.wait(DEADLINE)
        return lease.acquire(make_value(), _LONG, instead_of=dead)

    with ThreadPoolExecutor(len(leases)) as pool:
        (holder,) = [one for one in pool.map(acquire, leases) if one is not None]
    assert holder.term > dead.term
    assert leases[0].acquire(make_value(), _LONG, instead_of=dead) is None
    assert not leases[0].renew(dead, _LONG)
    leases[0].release(dead)
    assert {lease.read() for lease in leases} == {holder}


def test_agents_that_acquire_and_release_have_terms_of_their_own(job: Job) -> None:
    """No term is used twice, and a later holder has a higher one."""
    terms: list[int] = []
    leases = [job.open() for _ in range(5)]

    def hold_often(lease: LeaseStore) -> None:
        for _ in range(5):
            while (holder := lease.acquire(make_value(), _LONG)) is None:
                time.sleep(0)
            terms.append(holder.term)  # while no other agent may
            lease.release(holder)

    with ThreadPoolExecutor(len(leases)) as pool:
        list(pool.map(hold_often, leases))
    assert len(terms) == 25
    assert terms == sorted(set(terms))


# --- the time to live ------------------------------------------------------------------------------------------------
def test_a_lease_that_is_not_renewed_expires(job: Job) -> None:
    """After its time the lease can't be renewed; the next holder has a higher term."""
    holder_s, other = job.open(), job.open()
    begun = time.monotonic()
    held = take(holder_s, _TTL)
    assert other.read() == held
    assert other.acquire(make_value(), _TTL) is None or time.monotonic() - begun > _TTL
    wait_until(lambda: is_free(other), what="the lease expires")
    assert time.monotonic() - begun >= _TTL
    assert not holder_s.renew(held, _TTL)
    assert take(other).term > held.term


def test_a_lease_that_is_renewed_stays(job: Job) -> None:
    """Nobody else gets it, for however long, and its term stays."""
    holder_s, other = job.open(), job.open()
    ttl = 1.5 * _TTL
    held, renewed_at = take(holder_s, ttl), time.monotonic()
    end = renewed_at + 2.5
    while time.monotonic() < end:
        assert other.read() == held or time.monotonic() - renewed_at > ttl
        before, now = renewed_at, time.monotonic()
        is_renewed = holder_s.renew(held, ttl)
        # On a machine so busy that the time has passed since the renewal before, the lease is right to be over.
        assert is_renewed or time.monotonic() - before > ttl
        if not is_renewed:
            return
        renewed_at = now
        threading.Event().wait(ttl / 8)
    assert other.acquire(make_value(), ttl) is None or time.monotonic() - renewed_at > ttl


def test_a_lease_that_is_released_is_free(job: Job) -> None:
    """The next agent gets it at once, with a higher term; to release it again changes nothing."""
    first, second = job.open(), job.open()
    held = take(first)
    first.release(held)
    assert is_free(second)
    assert not first.renew(held, _LONG)
    next_one = take(second)
    assert next_one.term > held.term
    first.release(held)
    assert second.read() == first.read() == next_one
    assert second.renew(next_one, _LONG)


# --- beside the lease ------------------------------------------------------------------------------------------------
def test_the_text_beside_the_lease_outlives_it(job: Job) -> None:
    """The next holder reads what the last one wrote, and nothing is read before."""
    first, second = job.open(secret=b"s"), job.open(secret=b"s")
    assert second.read_last() == ""
    held = take(first)
    first.write_last("nodes of round 1")
    first.write_last('{"nodes": ["ü"], "round": 2}')
    first.release(held)
    take(second)
    assert second.read_last() == '{"nodes": ["ü"], "round": 2}'


def test_a_removed_job_leaves_nothing(place: Place, kind_and_server: tuple[str, Etcd | None], tmp_path: Path) -> None:
    """Neither a key nor a directory is left; another job at the same place stays."""
    with closing(place.open("one")) as one, closing(place.open("other/../job ü")) as other:
        kept = take(other, value=make_value("ü€"))
        for _ in range(2):
            take(one)
            one.write_last("text")
            one.remove()
            assert is_free(one)
            assert one.read_last() == ""
        assert other.read() == kept
        other.remove()
        one.remove()
    server = kind_and_server[1]
    if server is None:
        assert list(tmp_path.iterdir()) == []
    else:
        assert server.list_keys() == []
        assert "elastic-run" not in str(server._get(0, "GET", "/v2/keys/?recursive=true"))


# --- the token -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (b"a", b"b", "has another token than this node"),
        (None, b"b", "has no token, and this node was given one"),
        (b"a", None, "has a token, and this node has none"),
    ],
)
def test_a_node_with_another_token_is_told_so(job: Job, theirs: bytes | None, ours: bytes | None, said: str) -> None:
    """It can't read the holder, and can't take the lease; a job that comes later may have another token."""
    holder_s, other = job.open(secret=theirs), job.open(secret=ours)
    held = take(holder_s)
    holder_s.write_last("text")
    for ask in (other.read, lambda: other.acquire(make_value(), _LONG)):
        with pytest.raises(StoreTokenError, match=said) as caught:
            ask()
        assert other.name in str(caught.value)
    assert holder_s.read() == held
    holder_s.release(held)
    take(other)
    assert other.read_last() == ""


def test_what_was_copied_from_another_job_is_not_believed(tmp_path: Path) -> None:
    """The proof holds for one job and one key."""
    jobs = [Place("file", f"{tmp_path}/").open(name, secret=b"s") for name in ("one", "two")]
    take(jobs[0])
    take(jobs[1])
    one, two = (tmp_path / "elastic-run" / name / "coordinator.1" for name in ("one", "two"))
    two.write_bytes(one.read_bytes())
    with pytest.raises(StoreTokenError):
        jobs[1].read()
    two.write_text("00000000000000000000 000000000030.000\nsomething else")
    with pytest.raises(StoreAccessError, match="not written by this release"):
        jobs[1].read()


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
    assert lease.renew(held, _LONG)
    way.losses = losses
    assert lease.acquire(held.value, _LONG) == held
    way.losses = losses
    lease.write_last("text")
    assert other.read_last() == "text"
    way.losses = losses
    lease.release(held)
    assert is_free(other)
    way.losses = losses
    assert not lease.renew(held, _LONG)


@of_etcd
def test_an_attempt_that_failed_may_be_made_again(kind: str, losing: tuple[LosingWay, Job, Job]) -> None:
    """If all answers are lost until the time is over, the next call with the same value finds the lease its own."""
    way, over_it, direct = losing
    lease, other = over_it.open(timeout=0.5), direct.open()
    way.losses, way.part = 1000, b"PUT /v2/keys" if kind == "etcd" else b"POST /v3/kv/txn"
    value = make_value()
    with pytest.raises(StoreConnectionError) as caught:
        lease.acquire(value, _LONG)
    assert caught.value.reason == CLOSED
    way.losses = 0
    there = other.read()
    assert there is not None
    assert there.value == value
    assert lease.acquire(value, _LONG) == there
    assert other.acquire(make_value(), _LONG) is None


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
    held = take(holder_s, _TTL)
    assert other.read() == held
    job = tmp_path / "elastic-run" / "job"
    kept = job.rename(tmp_path / "kept")
    job.touch()
    begun = time.monotonic()
    while time.monotonic() < begun + _TTL:
        with pytest.raises(StoreAccessError):
            other.read()
    job.unlink()
    kept.rename(job)
    assert other.read() == held
    assert not holder_s.renew(held, _TTL)
    assert take(holder_s, _TTL, value=held.value) == Holder(held.value, held.term + 1) == other.read()


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
    assert late.acquire(make_value(), _LONG) is None
    assert late.read() == other.read() == Holder(later[1], 2)
    other.remove()
    assert list(tmp_path.iterdir()) == []


# --- servers that fail -----------------------------------------------------------------------------------------------
@of_etcd
def test_etcd_is_gone_and_comes_back(kind: str) -> None:
    """Each call ends with the reason, in time; with etcd the lease is back, and the same holder has it."""
    with Etcd() as etcd, closing(Place(kind, str(etcd.endpoints[0])).open("job", timeout=0.4)) as lease:
        held = take(lease)
        lease.write_last("text")
        etcd.kill(0)
        for ask in (lease.read, lambda: lease.renew(held, _LONG), lambda: lease.write_last("x"), lease.remove):
            begun = time.monotonic()
            with pytest.raises(StoreConnectionError, match="connection refused") as caught:
                ask()
            assert caught.value.reason == REFUSED
            assert str(etcd.endpoints[0]) in str(caught.value)
            assert time.monotonic() - begun < stretched(5)
        etcd.revive(0)
        etcd.wait_healthy(0)
        assert lease.renew(held, _LONG)
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
    with closing(Place(kind, ",".join(map(str, endpoints))).open("job")) as lease:
        assert lease.read() is None
        three.pause(hanging)
        try:
            begun = time.monotonic()
            held = take(lease)
            assert time.monotonic() - begun < stretched(DEADLINE / 6)
        finally:
            three.resume(hanging)
        three.kill(leader)
        assert lease.renew(held, _LONG)
        assert lease.read() == held
        assert take(lease, instead_of=held).term > held.term


# --- who may ---------------------------------------------------------------------------------------------------------
@of_etcd
def test_certificates(kind: str, certificates: Certificates) -> None:
    """Both sides show their certificate; a node that shows none, or doesn't trust the server's, is refused at once."""
    trust, own = {"cacert": certificates.cacert}, {"cert": certificates.cert, "key": certificates.key}
    with Etcd(certificates=certificates) as etcd:
        with closing(Place(kind, str(etcd.endpoints[0]), protocol="https", **trust, **own).open("job")) as lease:
            held = take(lease)
            assert lease.renew(held, _LONG)
        for conf, said in ((trust, "certificate"), (own, "CERTIFICATE_VERIFY_FAILED")):
            begun = time.monotonic()
            with (
                closing(Place(kind, str(etcd.endpoints[0]), protocol="https", **conf).open("job")) as refused,
                pytest.raises(StoreAccessError, match=said),
            ):
                refused.read()
            assert time.monotonic() - begun < stretched(DEADLINE / 4)


def test_users(certificates: Certificates, tmp_path: Path) -> None:
    """A user of etcd is let in, also after its token has expired; a wrong password, or none, is refused for good."""
    secret = tmp_path / "password"
    secret.write_text(f"{ROOT[1]}\n")
    conf = {"protocol": "https", "cacert": certificates.cacert}
    with Etcd(certificates=certificates, has_users=True) as etcd:
        place = Place("etcd-v3", str(etcd.endpoints[0]), user=ROOT[0], password_file=str(secret), **conf)
        with closing(place.open("job")) as lease:
            held = take(lease)
            lease._pass = "expired"  # type: ignore[attr-defined] # noqa: S105 - no secret
            assert lease.renew(held, _LONG)
            lease.remove()
        for user in ({"user": ROOT[0], "password": "wrong"}, {}, {"user": "guest", "password": "guest"}):
            place = Place("etcd-v3", str(etcd.endpoints[0]), **user, **conf)
            with closing(place.open("job")) as refused, pytest.raises(StoreAccessError):
                refused.acquire(make_value(), _LONG)


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


@pytest.mark.parametrize("kind", _ETCD)
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
    pause = 0.2 if len(pieces) > 100 else 0.0
    with (
        answering(*pieces, pause=pause) as (port, _),
        closing(Place(kind, f"{LOOPBACK}:{port}").open("job", timeout=0.4)) as lease,
    ):
        begun = time.monotonic()
        with pytest.raises(StoreConnectionError, match=f"{LOOPBACK}:{port}") as caught:
            lease.read()
        assert caught.value.reason == reason
        assert time.monotonic() - begun < stretched(5)


# --- around it -------------------------------------------------------------------------------------------------------
def test_without_python_etcd_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of a server before."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ValueError, match=r"'etcd' needs python-etcd: pip install 'elastic-run\[etcd\]'"):
        Place("etcd", "h:1").open("job")


@pytest.mark.parametrize(
    "module", ["elastic_run.rendezvous.leases.etcd_v3", "elastic_run.rendezvous.leases.file", "etcd_servers"]
)
def test_the_others_import_neither_python_etcd_nor_urllib3(module: str) -> None:
    """They would take a tenth of a second."""
    name = module if "." in module else f"elastic_run.rendezvous.leases.{module}"
    program = f"import sys, {name}\nprint([one for one in ('etcd', 'urllib3', 'ssl') if one in sys.modules])"
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert said == ("['ssl']\n" if module == "etcd_servers" else "[]\n")
