"""The lease of a job, over etcd's two versions and over a file: one holder, terms that grow, answers that are lost."""

from __future__ import annotations

import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from elastic_run.store.errors import (
    StoreAccessError,
    StoreTokenError,
)
from tests.support.etcd import Etcd
from tests.support.leases import ETCD, LONG, TTL, Job, Place, is_free, make_value, take
from tests.support.system import mark_system
from tests.support.wait import DEADLINE, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from elastic_run.rendezvous.coordination.lease import Holder, LeaseStore


@pytest.fixture(scope="module")
def server() -> Iterator[Etcd]:
    """Start an etcd of one member for tests that leave it as it is."""
    with Etcd() as started:
        yield started


@pytest.fixture(scope="module", params=mark_system([*ETCD, "file"], but=["file"]))
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


# --- one holder ------------------------------------------------------------------------------------------------------
def test_one_of_twenty_acquires(job: Job) -> None:
    """Of agents that try at the same time one gets the lease, and all others see this one."""
    leases = [job.open() for _ in range(20)]
    barrier = threading.Barrier(len(leases))

    def acquire(lease: LeaseStore) -> Holder | None:
        barrier.wait(DEADLINE)
        return lease.acquire(make_value(), LONG)

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
        return lease.acquire(make_value(), LONG, instead_of=dead)

    with ThreadPoolExecutor(len(leases)) as pool:
        (holder,) = [one for one in pool.map(acquire, leases) if one is not None]
    assert holder.term > dead.term
    assert leases[0].acquire(make_value(), LONG, instead_of=dead) is None
    assert not leases[0].renew(dead, LONG)
    leases[0].release(dead)
    assert {lease.read() for lease in leases} == {holder}


def test_agents_that_acquire_and_release_have_terms_of_their_own(job: Job) -> None:
    """No term is used twice, and a later holder has a higher one."""
    terms: list[int] = []
    leases = [job.open() for _ in range(5)]

    def hold_often(lease: LeaseStore) -> None:
        for _ in range(5):
            while (holder := lease.acquire(make_value(), LONG)) is None:
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
    held = take(holder_s, TTL)
    assert other.read() == held
    assert other.acquire(make_value(), TTL) is None or time.monotonic() - begun > TTL
    wait_until(lambda: is_free(other), what="the lease expires")
    assert time.monotonic() - begun >= TTL
    assert not holder_s.renew(held, TTL)
    assert take(other).term > held.term


def test_a_lease_that_is_renewed_stays(job: Job) -> None:
    """Nobody else gets it, for however long, and its term stays."""
    holder_s, other = job.open(), job.open()
    ttl = 1.5 * TTL
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
    assert not first.renew(held, LONG)
    next_one = take(second)
    assert next_one.term > held.term
    first.release(held)
    assert second.read() == first.read() == next_one
    assert second.renew(next_one, LONG)


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
    one, other = place.open("one"), place.open("other/../job ü")
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
    for ask in (other.read, lambda: other.acquire(make_value(), LONG)):
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
