"""The store in memory: torch's semantics, waiters, queues, and numbers in text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_run.store.errors import WireError
from elastic_run.store.memory_store import MemoryStore, parse_integer

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.store.memory_store import Waiter


class Calls:
    """Counts calls by name."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def named(self, name: str) -> Callable[[], None]:
        """Return a callback that leaves its name."""
        return lambda: self.made.append(name)


@pytest.fixture
def store() -> MemoryStore:
    """Give an empty store."""
    return MemoryStore()


@pytest.fixture
def calls() -> Calls:
    """Give a record of calls."""
    return Calls()


# --- values --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("present", "expected", "desired", "answer", "after"),
    [
        (None, b"", b"new", b"new", b"new"),
        (None, b"", b"", b"", b""),
        (None, b"old", b"new", b"old", None),
        (b"old", b"old", b"new", b"new", b"new"),
        (b"old", b"other", b"new", b"old", b"old"),
        (b"old", b"", b"new", b"old", b"old"),
        (b"", b"", b"new", b"new", b"new"),
    ],
)
def test_compare_set_is_torchs(
    store: MemoryStore, present: bytes | None, expected: bytes, desired: bytes, answer: bytes, after: bytes | None
) -> None:
    """compare_set answers and leaves behind what torch's server does, in every case."""
    if present is not None:
        store.set(b"k", present)
    assert store.compare_set(b"k", expected, desired) == answer
    assert store.get(b"k") == after


def test_add_wraps_as_64_bits(store: MemoryStore) -> None:
    """A counter runs over at 64 bits, both ways."""
    store.add(b"n", 2**63 - 1)
    assert store.add(b"n", 1) == -(2**63)
    assert store.add(b"n", -1) == 2**63 - 1


def test_append_in_many_pieces(store: MemoryStore) -> None:
    """A value that was appended to is bytes like any other, to get, compare and set."""
    for _ in range(1000):
        store.append(b"k", b"xy")
    value = store.get(b"k")
    assert value == b"xy" * 1000
    assert isinstance(value, bytes)
    assert store.compare_set(b"k", b"xy" * 1000, b"z") == b"z"


def test_clear_forgets_all(store: MemoryStore, calls: Calls) -> None:
    """After clear there is no key, no queue and nobody waiting."""
    store.set(b"k", b"v")
    store.queue_push(b"q", b"v")
    store.on_key([b"w"], calls.named("w"))
    store.clear()
    store.set(b"w", b"")
    assert (store.num_keys(), store.queue_len(b"q"), calls.made) == (1, 0, [])


# --- waiting -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "appear",
    [
        lambda store: store.set(b"b", b""),
        lambda store: store.add(b"b", 1),
        lambda store: store.append(b"b", b""),
        lambda store: store.compare_set(b"b", b"", b""),
        lambda store: store.multi_set([b"b"], [b""]),
        lambda store: store.queue_push(b"b", b""),
    ],
    ids=["set", "add", "append", "compare_set", "multi_set", "queue_push"],
)
def test_the_last_key_ends_a_wait_once(
    store: MemoryStore, calls: Calls, appear: Callable[[MemoryStore], object]
) -> None:
    """Whatever makes the last key appear ends the wait, once."""
    store.set(b"c", b"")
    store.on_key([b"a", b"b", b"b", b"c"], calls.named("x"))
    store.set(b"a", b"")
    assert calls.made == []
    appear(store)
    appear(store)
    assert calls.made == ["x"]


def test_a_key_that_came_and_went_counts(store: MemoryStore, calls: Calls) -> None:
    """A wait for several keys doesn't start over when one is deleted again."""
    store.on_key([b"a", b"b"], calls.named("x"))
    store.set(b"a", b"")
    store.delete_key(b"a")
    store.set(b"b", b"")
    assert calls.made == ["x"]


def test_who_cancels_is_not_called(store: MemoryStore, calls: Calls) -> None:
    """A cancelled waiter is never called, also when it cancels while others are being called."""
    first = store.on_key([b"k", b"other"], calls.named("first"))
    assert first is not None
    store.cancel(first)
    third: list[Waiter] = []
    store.on_key([b"k"], lambda: store.cancel(third[0]))
    waiter = store.on_key([b"k"], calls.named("third"))
    assert waiter is not None
    third.append(waiter)
    store.set(b"k", b"")
    store.set(b"other", b"")
    store.cancel(waiter)
    assert calls.made == []


def test_a_waiter_leaves_nothing_behind(store: MemoryStore, calls: Calls) -> None:
    """Neither a wait that is over nor a cancelled one is kept anywhere: rounds go on for months."""
    waiter = store.on_key([b"a", b"b"], calls.named("x"))
    assert waiter is not None
    store.cancel(waiter)
    store.on_key([b"a"], calls.named("y"))
    store.set(b"a", b"")
    store.queue_push(b"q", b"")
    store.queue_pop(b"q")
    assert (store.waiters, store._queues) == ({}, {})


# --- queues --------------------------------------------------------------------------------------------------------
def test_a_queue_is_waited_for_and_no_key(store: MemoryStore) -> None:
    """A queue that isn't empty passes a check, but is neither counted nor listed nor deleted as a key."""
    assert not store.check([b"q"])
    store.queue_push(b"q", b"1")
    assert store.check([b"q"])
    assert (store.num_keys(), store.list_keys(), store.delete_key(b"q")) == (0, [], False)


def test_a_push_goes_past_who_misses_more(store: MemoryStore, calls: Calls) -> None:
    """Somebody who still misses another key doesn't use up the one wake-up."""
    store.on_key([b"q", b"k"], calls.named("a"))
    store.on_key([b"q"], calls.named("b"))
    store.queue_push(b"q", b"1")
    assert calls.made == ["b"]
    store.set(b"k", b"")
    assert calls.made == ["b", "a"]


# --- numbers -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "number"),
    [
        (b"0", 0),
        (b"-1", -1),
        (b" \t\n\v\f\r+12", 12),
        (b"12 13", 12),
        (b"7abc", 7),
        (b"1_000", 1),
        (b"0x10", 0),
        (b"000000000000000000000000000000042", 42),
        (b"9223372036854775807", 2**63 - 1),
        (b"-9223372036854775808", -(2**63)),
    ],
)
def test_numbers_are_read_as_c_reads_them(text: bytes, number: int) -> None:
    """A counter's text is read as strtoll reads it, which is what torch does."""
    assert parse_integer(text) == number


@pytest.mark.parametrize(
    "text",
    [b"", b"-", b"+-1", b"- 1", b"abc", b"\xd9\xa1", b"9223372036854775808", b"-9223372036854775809", b"9" * 100_000],
    ids=lambda t: repr(t[:9]),
)
def test_what_is_no_number_is_refused(text: bytes) -> None:
    """Text without a number, or with one beyond 64 bits, is an error and changes nothing."""
    store = MemoryStore()
    store.set(b"n", text)
    with pytest.raises(ValueError, match=r"number|64 bits"):
        store.add(b"n", 1)
    assert store.get(b"n") == text


@given(st.integers(-(2**63), 2**63 - 1))
def test_every_counter_is_read_back(number: int) -> None:
    """Each 64-bit number survives being stored as text."""
    assert parse_integer(b"%d" % number) == number


def test_keys_and_values_stay_within_the_limit(store: MemoryStore) -> None:
    """What would pass it is refused, and what was deleted makes room."""
    store.limit = 2000
    store.set(b"a", b"x" * 1000)
    with pytest.raises(WireError):
        store.set(b"b", b"x" * 1000)
    with pytest.raises(WireError):
        store.append(b"a", b"x" * 1000)
    assert store.delete_key(b"a")
    assert store.size == 0
    store.set(b"b", b"x" * 1000)
