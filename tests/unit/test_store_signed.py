"""Signed values: what members write is read, what strangers write is refused, wherever it lies."""

from __future__ import annotations

import logging

import pytest

from elastic_run.store.errors import StoreForgedError
from elastic_run.store.jobstore.memory import JobSpace, MemoryJobStore
from elastic_run.store.jobstore.signed import SignedStore

SECRET = b"secret"


@pytest.fixture
def space() -> JobSpace:
    """Give what members and strangers share."""
    return JobSpace()


@pytest.fixture
def store(space: JobSpace) -> SignedStore:
    """Give a member's store."""
    return SignedStore(MemoryJobStore(space), SECRET)


@pytest.fixture
def stranger(space: JobSpace) -> MemoryJobStore:
    """Give somebody who writes without the secret."""
    return MemoryJobStore(space)


def test_members_read_what_members_write(space: JobSpace, store: SignedStore) -> None:
    """Another member with the secret reads all that one has written."""
    other = SignedStore(MemoryJobStore(space), SECRET)
    store.append("facts", b"a")
    store.write({"head": b"1"})
    assert store.create("d/0", b"x") == other.create("d/0", b"y") == other.wait("d/0", 0) == b"x"
    store.heartbeat("n")
    assert other.read("facts", 0, 0)[0] == [b"a"]
    assert other.get(["head", "missing"]) == [b"1", None]
    assert isinstance(other.read_heartbeats(["n"])[0], int)
    assert other.wait("missing", 0) is None


@pytest.mark.parametrize("garbage", [b"garbage", b"g" * 100, b"\0"], ids=["short", "long", "a byte"])
def test_garbage_is_left_out(store: SignedStore, stranger: MemoryJobStore, garbage: bytes) -> None:
    """A stranger's entries, values and heartbeats are as good as none."""
    stranger.append("facts", garbage)
    store.append("facts", b"a")
    stranger.write({"head": garbage})
    stranger.write_heartbeat("n", garbage)
    assert store.read("facts", 0, 0)[0] == [b"a"]
    assert store.get(["head"]) == [None]
    assert store.read_heartbeats(["n"]) == [None]


def test_a_taken_place_is_told(store: SignedStore, stranger: MemoryJobStore) -> None:
    """Who finds a stranger's value where only one can be is told that the place is taken."""
    stranger.create("d/0", b"garbage")
    with pytest.raises(StoreForgedError, match="key d/0 at memory was not written by a member"):
        store.create("d/0", b"x")
    with pytest.raises(StoreForgedError):
        store.wait("d/0", 0)


def test_a_value_is_good_only_where_it_was_written(
    space: JobSpace, store: SignedStore, stranger: MemoryJobStore
) -> None:
    """A signed value that a stranger copied to another place, kind or job is refused."""
    store.write({"head": b"1"})
    store.append("facts", b"1")
    store.write_heartbeat("n", b"1")
    signed = [space.values["head"], space.streams["facts"][1][0], space.heartbeats["n"]]
    assert len(set(signed)) == 3
    for copied in signed:
        stranger.write({"status": copied})
        stranger.append("others", copied)
        stranger.write_heartbeat("m", copied)
        assert store.get(["status"]) == [None]
        assert store.read("others", 0, 0)[0] == []
        assert store.read_heartbeats(["m"]) == [None]
    assert SignedStore(MemoryJobStore(space, "other job"), SECRET).get(["head"]) == [None]
    assert SignedStore(MemoryJobStore(space), b"another secret").get(["head"]) == [None]


def test_each_place_is_reported_once(
    store: SignedStore, stranger: MemoryJobStore, caplog: pytest.LogCaptureFixture
) -> None:
    """However much garbage comes, there is one line for each place, clones included."""
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            stranger.append("facts", b"garbage")
            stranger.write({"head": b"garbage"})
            store.read("facts", 0, 0)
            store.get(["head"])
            store.clone().get(["head"])
    assert [record.getMessage() for record in caplog.records] == [
        "elastic-run: entry facts at memory was not written by a member of this job: left out",
        "elastic-run: key head at memory was not written by a member of this job: left out",
    ]


def test_the_secret_is_not_in_the_store(space: JobSpace, store: SignedStore) -> None:
    """Nothing that is stored contains the secret; the rest is passed on."""
    store.write({"head": b"1"})
    assert SECRET not in space.values["head"]
    store.append("facts", b"a")
    store.trim("facts", store.read("facts", 0, 0)[1])
    store.delete(["head"])
    store.remove_job()
    store.close()
    assert space.values == {}
