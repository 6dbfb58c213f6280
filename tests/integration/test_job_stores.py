"""What every job store promises, asked of each kind in front of the real server.

The file is longer than others so that each server is started once for all of it.
"""

from __future__ import annotations

import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from elastic_run.store.errors import StoreConnectionError
from elastic_run.store.jobstore.api import ENTRIES_AT_ONCE
from tests.support.job_stores import STORES, WITHOUT_ETCD
from tests.support.system import mark_system
from tests.support.wait import DEADLINE, stretched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elastic_run.store.jobstore.api import JobStore
    from tests.support.job_stores import Opener

_SHORT = 0.05
_CROSSINGS = 40


@pytest.fixture(scope="module", params=mark_system(STORES, but=WITHOUT_ETCD))
def opener(request: pytest.FixtureRequest) -> Iterator[Opener]:
    """Start one kind of store for all tests of the module."""
    with STORES[request.param]() as opened:
        yield opened


@pytest.fixture
def store(opener: Opener) -> Iterator[JobStore]:
    """Give a job of its own."""
    with opener(f"job {uuid.uuid4().hex}") as opened:
        yield opened
        _remove(opened)


@pytest.fixture
def other(store: JobStore) -> Iterator[JobStore]:
    """Give a second connection to the job."""
    with store.clone() as cloned:
        yield cloned


@pytest.fixture
def shared(store: JobStore) -> Iterator[JobStore]:
    """Give an object for another thread, over the connection of `store` where two threads can use one."""
    with store.share() as sharing:
        yield sharing


def _remove(store: JobStore) -> None:
    with store.clone() as again:
        again.remove_job()


def _begin(target: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=target)
    thread.start()
    return thread


def _begin_wait(store: JobStore, key: str) -> tuple[threading.Thread, list[bytes | None]]:
    got: list[bytes | None] = []
    return _begin(lambda: got.append(store.wait(key, DEADLINE))), got


def _begin_read(store: JobStore, position: int) -> tuple[threading.Thread, list[tuple[list[bytes], int]]]:
    got: list[tuple[list[bytes], int]] = []
    return _begin(lambda: got.append(store.read("facts", position, DEADLINE))), got


def _read_all(store: JobStore, count: int, position: int = 0) -> tuple[list[bytes], int]:
    entries: list[bytes] = []
    while len(entries) < count:
        found, position = store.read("facts", position, DEADLINE)
        assert found, "not in time"
        entries += found
    return entries, position


# --- streams ---------------------------------------------------------------------------------------------------------
def test_entries_come_in_one_order(store: JobStore, other: JobStore) -> None:
    """Every reader sees the entries in the order in which they were appended, and goes on behind a position."""
    for number in range(3):
        (store, other)[number % 2].append("facts", b"%d" % number)
    entries, position = _read_all(other, 3)
    assert entries == [b"0", b"1", b"2"]
    assert store.read("facts", 0, 0)[0] == entries
    store.append("facts", b"3")
    assert store.read("facts", position, DEADLINE)[0] == [b"3"]


def test_streams_are_separate(store: JobStore) -> None:
    """An entry of one stream is not in another one."""
    store.append("facts", b"a")
    assert store.read("others", 0, 0)[0] == []


def test_a_read_in_vain_returns_at_its_timeout(store: JobStore) -> None:
    """A read that finds nothing returns nothing, at its timeout; the position stays good, also for a read at once."""
    store.append("facts", b"a")
    _, position = _read_all(store, 1)
    begun = time.monotonic()
    entries, later = store.read("facts", position, _SHORT)
    assert entries == []
    assert _SHORT <= time.monotonic() - begun < stretched(_SHORT + 5)
    store.append("facts", b"b")
    assert store.read("facts", later, 0)[0] == [b"b"]


def test_a_read_waits_for_an_entry(store: JobStore, other: JobStore) -> None:
    """A read that began before the entry was there returns it, each time anew."""
    position = 0
    for number in range(3):
        thread, got = _begin_read(other, position)
        store.append("facts", b"%d" % number)
        thread.join(DEADLINE)
        assert got[0][0] == [b"%d" % number]
        position = got[0][1]


def test_writers_at_once_lose_nothing(store: JobStore) -> None:
    """Entries that eight appended at once are all there, once."""

    def append(writer: int) -> None:
        with store.clone() as own:
            for number in range(20):
                own.append("facts", b"%d-%d" % (writer, number))

    with ThreadPoolExecutor(8) as pool:
        done = pool.map(append, range(8))
        entries, _ = _read_all(store, 160)
        list(done)
    assert sorted(entries) == sorted(b"%d-%d" % (writer, number) for writer in range(8) for number in range(20))
    for writer in range(8):
        own = [entry for entry in entries if entry.startswith(b"%d-" % writer)]
        assert own == [b"%d-%d" % (writer, number) for number in range(20)]


def test_what_was_trimmed_is_gone(store: JobStore, other: JobStore) -> None:
    """A reader from the beginning finds what was not trimmed, and what comes later."""
    for number in range(5):
        store.append("facts", b"%d" % number)
    _, position = _read_all(store, 5)
    store.append("facts", b"5")
    store.trim("facts", position)
    store.trim("facts", position)
    assert _read_all(other, 1)[0] == [b"5"]
    store.trim("facts", _read_all(store, 1, position)[1])
    assert other.read("facts", 0, _SHORT)[0] == []
    store.append("facts", b"6")
    assert _read_all(other, 1)[0] == [b"6"]


def test_a_long_stream_comes_in_pieces(store: JobStore) -> None:
    """More entries than one read returns come with the next ones."""
    count = ENTRIES_AT_ONCE + 20
    for number in range(count):
        store.append("facts", b"%d" % number)
    first, position = store.read("facts", 0, DEADLINE)
    assert 0 < len(first) <= ENTRIES_AT_ONCE
    assert first + _read_all(store, count - len(first), position)[0] == [b"%d" % number for number in range(count)]


# --- keys ------------------------------------------------------------------------------------------------------------
def test_the_first_creates(store: JobStore, other: JobStore) -> None:
    """Of two who create a key the first wins, both see it, and repeating it changes nothing."""
    assert store.create("d/0", b"first") == b"first"
    assert other.create("d/0", b"second") == b"first"
    assert store.create("d/0", b"first") == b"first"


def test_one_of_many_creates(store: JobStore) -> None:
    """Of eight who create a key at once one wins, and all see the same."""

    def create(number: int) -> bytes:
        with store.clone() as own:
            return own.create("d/7", b"%d" % number)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(create, range(8)))) == 1


def test_a_wait_ends_with_the_key(store: JobStore, other: JobStore) -> None:
    """A wait returns what was created, or written, after it began, and at once what is there."""
    for key, make in (
        ("d/1", store.create),
        ("d/2", lambda key, value: store.write({key: value})),
        ("d/3", store.create),
    ):
        thread, got = _begin_wait(other, key)
        make(key, b"value")
        thread.join(DEADLINE)
        assert got == [b"value"]
        assert other.wait(key, 0) == b"value"


def test_a_wait_in_vain_returns_none(store: JobStore, other: JobStore) -> None:
    """A wait for a key that does not come returns at its timeout and leaves the object usable."""
    begun = time.monotonic()
    assert store.wait("d/0", 0) is None
    assert store.wait("d/0", _SHORT) is None
    assert _SHORT <= time.monotonic() - begun < stretched(_SHORT + 5)
    other.create("d/0", b"late")
    assert store.wait("d/0", DEADLINE) == b"late"


def test_a_key_that_was_deleted_is_waited_for(store: JobStore, other: JobStore) -> None:
    """A wait does not return what was there once."""
    store.create("d/0", b"old")
    assert other.wait("d/0", DEADLINE) == b"old"
    store.delete(["d/0"])
    assert other.wait("d/0", _SHORT) is None
    store.create("d/0", b"new")
    assert other.wait("d/0", DEADLINE) == b"new"


def test_who_follows_a_key_waits_for_its_neighbours(store: JobStore, other: JobStore) -> None:
    """To follow a key returns it, or None; waits for its neighbours find those that were there, and those to come."""
    assert other.follow("d/store_id") is None
    store.write({"d/store_id": b"born", "d/0": b"zero"})
    assert other.follow("d/store_id") == b"born"
    assert other.wait("d/0", DEADLINE) == b"zero"
    thread, got = _begin_wait(other, "d/1")
    store.create("d/1", b"one")
    thread.join(DEADLINE)
    assert got == [b"one"]
    store.delete(["d/0"])
    assert other.wait("d/0", _SHORT) is None
    store.write({"d/store_id": b"store again"})
    assert other.follow("d/store_id") == b"store again"
    assert other.wait("d/1", DEADLINE) == b"one"


def test_values_are_written_read_and_deleted(store: JobStore, other: JobStore) -> None:
    """A value that was written is what others read; of those missing and deleted they read None."""
    store.write({"head": b"1", "status": b"\0\xff"})
    store.write({"head": b"2"})
    assert other.get(["head", "missing", "status"]) == [b"2", None, b"\0\xff"]
    store.delete(["head", "missing"])
    assert other.get(["head", "status"]) == [None, b"\0\xff"]
    store.write({})
    store.delete([])
    assert store.get([]) == []


def test_many_values_and_large_ones(store: JobStore, other: JobStore) -> None:
    """An assignment for each of five hundred nodes and a large state go through one call each."""
    values = {f"a/3.1/node-{number}": b"%d" % number * 100 for number in range(500)}
    store.write(values)
    assert other.get(list(values)) == list(values.values())
    state = bytes(range(256)) * 2000
    store.write({"s/3.1": state})
    assert other.get(["s/3.1"]) == [state]
    store.delete(list(values))
    assert set(other.get(list(values))) == {None}


def test_a_value_is_replaced_only_where_it_is_the_expected_one(store: JobStore, other: JobStore) -> None:
    """Of two that saw the same value one replaces it, and the other is told what is there now."""
    assert store.replace("d/start", None, b"1") == b"1"
    assert other.replace("d/start", None, b"2") == b"1"
    assert other.replace("d/start", b"1", b"2") == b"2"
    assert store.replace("d/start", b"1", b"3") == b"2"
    assert store.replace("d/missing", b"1", b"2") is None
    assert other.get(["d/start", "d/missing"]) == [b"2", None]


def test_keys_are_deleted_only_where_others_have_the_expected_values(store: JobStore, other: JobStore) -> None:
    """In a store that was restored from a backup, keys stay that the job needs there."""
    large = bytes(range(256)) * 100
    store.write({"d/start": b"7", "d/9": large, "d/1": b"one", **{f"s/{number}": b"x" for number in range(300)}})
    for expected in ({"d/start": b"8"}, {"d/start": b"7", "d/9": b"nine"}, {"d/start": b"7", "d/8": b"eight"}):
        other.delete_where(["d/1", "s/299"], expected)
    assert store.get(["d/1", "s/299"]) == [b"one", b"x"]
    other.delete_where(["d/1", *(f"s/{number}" for number in range(300))], {"d/start": b"7", "d/9": large})
    assert store.get(["d/1", "s/0", "s/299", "d/start"]) == [None, None, None, b"7"]
    other.delete_where(["d/start"], {"d/start": b"8"})
    other.delete_where(["d/9"], {"d/9": large, "d/start": b"7"})
    assert store.get(["d/start", "d/9"]) == [b"7", None]
    other.delete_where(["d/start"], {})
    assert store.get(["d/start"]) == [None]


def test_many_that_raise_a_number_never_lower_it(store: JobStore) -> None:
    """Whatever the order in which writers come, the highest number is there at the end."""

    def raise_to(number: int) -> None:
        with store.clone() as own:
            there = own.get(["d/start"])[0]
            while there is None or int(there) < number:
                there = own.replace("d/start", there, b"%d" % number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(raise_to, [3, 8, 1, 7, 2, 6, 5, 4]))
    assert store.get(["d/start"]) == [b"8"]


def test_another_key_is_read_with_the_one_that_is_made_or_waited_for(store: JobStore, other: JobStore) -> None:
    """What was written to another key before a key was made is seen by whoever makes or reads that key."""
    assert store.create_beside("d/1", b"one", "d/start") == (b"one", None)
    got: list[tuple[bytes | None, bytes | None]] = []
    for number in range(2, 5):
        slot = f"d/{number}"
        thread = _begin(lambda slot=slot: got.append(other.wait_beside(slot, "d/start", DEADLINE)))  # type: ignore[misc]
        store.write({"d/start": b"%d" % number})
        assert store.create_beside(slot, b"entry", "d/start") == (b"entry", b"%d" % number)
        thread.join(DEADLINE)
        assert got[-1] == (b"entry", b"%d" % number)
    assert other.create_beside("d/1", b"two", "d/start") == (b"one", b"4")
    assert other.wait_beside("d/9", "d/start", 0.0) == (None, b"4")
    assert other.wait_beside("d/9", "d/start", _SHORT) == (None, b"4")


# --- heartbeats ------------------------------------------------------------------------------------------------------
def test_a_heartbeat_is_a_change(store: JobStore, other: JobStore) -> None:
    """A node shows another number after each heartbeat, and None before the first."""
    seen = []
    last = None
    for _ in range(3):
        last = store.heartbeat("host_1_0a", last)
        seen.append(other.read_heartbeats(["host_1_0a", "host_2_0b"]))
    assert len({heartbeats[0] for heartbeats in seen}) == 3
    assert all(isinstance(heartbeats[0], int) and heartbeats[1] is None for heartbeats in seen)
    assert other.read_heartbeats([]) == []


def test_a_key_is_read_with_heartbeats(store: JobStore, other: JobStore) -> None:
    """Whether it is there or not; a second reading of the same heartbeat gives what `read_heartbeats` does."""
    other.heartbeat("a")
    heartbeats, beside = store.read_heartbeats_beside(["a", "b"], "key")
    assert (heartbeats[0] is None, heartbeats[1], beside) == (False, None, None)
    other.write({"key": b"value"})
    assert store.read_heartbeats_beside(["a"], "key")[1] == b"value"
    if not store.expires_heartbeats:
        assert store.read_heartbeats_beside(["a"], "key")[0] == store.read_heartbeats(["a"])


def test_a_heartbeat_answers(store: JobStore, other: JobStore) -> None:
    """A heartbeat replaces the node's last one, over any connection; the next one after it was dropped says so."""
    first = store.heartbeat("n")
    second = other.heartbeat("n", first)
    third = store.heartbeat("n", second)
    assert None not in (first, second, third)
    other.forget_heartbeats(["n", "never there"])
    assert store.heartbeat("n", third) is None
    assert other.read_heartbeats(["n"]) == [None], "a node that was dropped is not there again before it says so"
    again = store.heartbeat("n")
    assert other.read_heartbeats(["n"]) != [None]
    assert store.heartbeat("n", again) is not None


# --- the whole -------------------------------------------------------------------------------------------------------
def test_jobs_are_separate(opener: Opener, store: JobStore) -> None:
    """Jobs with other ids, be they a part of ours, see nothing of ours and remove nothing of ours."""
    store.append("facts", b"a")
    store.create("d/0", b"ours")
    store.heartbeat("n")
    for run_id in (store.run_id[:-1], f"{store.run_id}/d", f"{store.run_id}%", "ünïcode job/..", ".."):
        with opener(run_id) as foreign:
            assert foreign.read("facts", 0, 0)[0] == []
            assert foreign.create("d/0", b"theirs") == b"theirs"
            assert foreign.read_heartbeats(["n"]) == [None]
            foreign.remove_job()
    assert store.get(["d/0"]) == [b"ours"]
    assert _read_all(store, 1)[0] == [b"a"]


def test_a_removed_job_leaves_nothing(store: JobStore, other: JobStore) -> None:
    """After a job was removed nothing of it is there, and a job of the same id begins anew."""
    store.append("facts", b"a")
    store.create("d/0", b"x")
    store.heartbeat("n")
    store.remove_job()
    store.remove_job()
    assert other.get(["d/0"]) == [None]
    assert other.read_heartbeats(["n"]) == [None]
    assert other.read("facts", 0, 0)[0] == []
    other.append("facts", b"b")
    assert _read_all(other, 1)[0] == [b"b"]


@pytest.mark.parametrize("wait", ["wait", "read"])
def test_closing_wakes_who_waits(store: JobStore, wait: str) -> None:
    """An object that another thread closes raises from its wait at once, and from then on."""
    waiting = store.clone()
    raised: list[BaseException] = []
    begins = threading.Event()

    def block() -> None:
        begins.set()
        try:
            waiting.wait("never", DEADLINE) if wait == "wait" else waiting.read("never", 0, DEADLINE)
        except StoreConnectionError as error:
            raised.append(error)

    thread = _begin(block)
    begins.wait(DEADLINE)
    begun = time.monotonic()
    waiting.close()
    thread.join(DEADLINE)
    assert raised
    assert time.monotonic() - begun < stretched(2)
    waiting.close()
    with pytest.raises(StoreConnectionError):
        waiting.get(["d/0"])


def test_a_closed_object_can_be_cloned(store: JobStore) -> None:
    """What replaces a broken connection is made from the broken one."""
    store.create("d/0", b"x")
    store.close()
    with store.clone() as again:
        assert again.get(["d/0"]) == [b"x"]


# --- two threads -----------------------------------------------------------------------------------------------------
def test_operations_pass_a_wait_of_the_thread_that_shares(store: JobStore, shared: JobStore, other: JobStore) -> None:
    """Where two threads share a connection each has its answers, and the wait goes on behind the operations."""
    waiting, got = _begin_wait(shared, "d/slot")
    for number in range(10):
        assert store.create(f"c/{number}", b"%d" % number) == b"%d" % number
        assert store.get([f"c/{number}", "c/none"]) == [b"%d" % number, None]
        store.append("facts", b"%d" % number)
        assert store.heartbeat("node") is not None
        assert store.read_heartbeats(["node"])[0] is not None
    assert waiting.is_alive()
    other.create("d/slot", b"decision")
    waiting.join(DEADLINE)
    assert got == [b"decision"]
    assert _read_all(shared, 10)[0] == [b"%d" % number for number in range(10)]
    shared.close()
    assert store.get(["d/slot"]) == [b"decision"]


def test_an_awaited_key_that_comes_during_operations_is_seen(
    store: JobStore, shared: JobStore, other: JobStore
) -> None:
    """Whether it comes before the wait is called off, at the same time, or behind it."""
    is_over = threading.Event()

    def ask() -> None:
        last = None
        while not is_over.is_set():
            last = store.heartbeat("node", last)
            assert last is not None
            assert store.get(["c/none"]) == [None]

    asking = _begin(ask)
    try:
        for number in range(_CROSSINGS):
            waiting, got = _begin_wait(shared, f"d/{number}")
            other.create(f"d/{number}", b"%d" % number)
            waiting.join(DEADLINE)
            assert got == [b"%d" % number]
    finally:
        is_over.set()
        asking.join(DEADLINE)
    assert not asking.is_alive()


def test_a_wait_in_vain_ends_among_operations(store: JobStore, shared: JobStore) -> None:
    """It ends at its timeout, and both threads go on."""
    got: list[bytes | None] = []
    waiting = _begin(lambda: got.append(shared.wait("d/never", _SHORT)))
    while waiting.is_alive():
        store.heartbeat("node")
    assert got == [None]
    assert shared.wait_beside("d/never", "d/none", _SHORT) == (None, None)
    assert shared.create("d/now", b"1") == store.get(["d/now"])[0] == b"1"


def test_a_closed_connection_wakes_the_thread_that_shares_it(opener: Opener) -> None:
    """It fails there as well, in the wait and before it; where the connections are two, each is closed."""
    store = opener(f"job {uuid.uuid4().hex}")
    shared = store.share()
    errors: list[StoreConnectionError] = []

    def wait() -> None:
        try:
            shared.wait("d/never", DEADLINE)
        except StoreConnectionError as error:
            errors.append(error)

    waiting = _begin(wait)
    assert store.heartbeat("node") is not None
    store.close()
    shared.close()
    waiting.join(DEADLINE)
    assert len(errors) == 1
