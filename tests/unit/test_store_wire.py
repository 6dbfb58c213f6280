"""The wire format: framing, limits, and streams cut anywhere."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_run.store import wire
from elastic_run.store.errors import GARBAGE, UNKNOWN, WireError
from elastic_run.store.wire import COUNT_LIMIT, KEY_LIMIT, VALUE_LIMIT

OPENING = wire.encode_opening(7)
MESSAGES: list[tuple[int, tuple[bytes | int, ...]]] = [
    (wire.SET, (b"/k", b"v")),
    (wire.COMPARE_SET, (b"/k", b"", b"w")),
    (wire.GET, (b"/k",)),
    (wire.ADD, (b"/n", -(2**63))),
    (wire.CHECK, (2, b"/a", b"/b")),
    (wire.WAIT, (0,)),
    (wire.NUM_KEYS, ()),
    (wire.DELETE, (b"",)),
    (wire.APPEND, (b"/k", b"x" * 300)),
    (wire.MULTI_GET, (3, b"/a", b"", b"/c")),
    (wire.MULTI_SET, (2, b"/a", b"1", b"/b", b"")),
    (wire.CANCEL_WAIT, ()),
    (wire.QUEUE_PUSH, (b"/q", b"v")),
    (wire.QUEUE_POP, (b"/q",)),
    (wire.QUEUE_LEN, (b"/q",)),
    (wire.LIST_KEYS, ()),
    (wire.BARRIER, (b"/b", 2)),
]
LISTS = (wire.CHECK, wire.WAIT, wire.MULTI_GET, wire.MULTI_SET)
STREAM = OPENING + b"".join(wire.encode(operation, *fields) for operation, fields in MESSAGES)
#: What a decoder gives for it: a list's count is not among the fields.
EXPECTED = [
    (wire.VALIDATE, [wire.MAGIC]),
    (wire.PING, [7]),
    *((operation, list(fields[1:] if operation in LISTS else fields)) for operation, fields in MESSAGES),
]


def decode(*pieces: bytes) -> list[tuple[int, list[bytes | int]]]:
    """Feed a decoder piece by piece and return all messages."""
    decoder = wire.Decoder()
    messages = []
    for piece in pieces:
        decoder.feed(piece)
        while (operation := decoder.next_operation()) >= 0:
            messages.append((operation, decoder.fields))
    return messages


def opened() -> wire.Decoder:
    """Return a decoder that has seen a proper opening."""
    decoder = wire.Decoder()
    decoder.feed(OPENING)
    while decoder.next_operation() >= 0:
        pass
    return decoder


def test_a_whole_stream_is_decoded() -> None:
    """A stream with every operation in one piece gives every message with its fields."""
    assert decode(STREAM) == EXPECTED


def test_every_operation_has_a_layout() -> None:
    """Each operation that the protocol names can be decoded once a connection is open."""
    assert set(wire.LAYOUTS) == {*range(1, wire.BARRIER + 1)}


def test_single_bytes_are_decoded() -> None:
    """A stream that arrives byte by byte gives the same messages."""
    assert decode(*(STREAM[i : i + 1] for i in range(len(STREAM)))) == EXPECTED


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_a_stream_cut_anywhere_is_decoded(cuts: list[int]) -> None:
    """Wherever a stream is cut, the messages are the same."""
    edges = [0, *sorted(cuts), len(STREAM)]
    assert decode(*(STREAM[a:b] for a, b in itertools.pairwise(edges) if a < b)) == EXPECTED


def test_messages_can_be_left_for_later() -> None:
    """A reader that takes one message at a time loses none when more bytes come in between."""
    decoder = opened()
    decoder.feed(wire.encode(wire.GET, b"/a") + wire.encode(wire.GET, b"/b"))
    assert decoder.next_operation() == wire.GET
    assert decoder.unread
    decoder.feed(wire.encode(wire.GET, b"/c"))
    assert [(decoder.next_operation(), decoder.fields) for _ in range(2)] == [
        (wire.GET, [b"/b"]),
        (wire.GET, [b"/c"]),
    ]
    assert decoder.next_operation() == -1
    assert not decoder.unread


def test_a_large_value_says_what_is_missing() -> None:
    """While a value is incomplete the decoder knows how much is missing, so that one read can take it."""
    decoder = opened()
    message = wire.encode(wire.SET, b"/k", b"x" * 1_000_000)
    decoder.feed(message[:100_000])
    assert decoder.next_operation() == -1
    assert decoder.missing == len(message) - 100_000
    decoder.feed(message[100_000:])
    assert decoder.next_operation() == wire.SET


@pytest.mark.parametrize(
    "message",
    [
        bytes((wire.GET,)) + wire.U64.pack(KEY_LIMIT + 1),
        bytes((wire.GET,)) + b"\xff" * 8,
        bytes((wire.SET,)) + wire.U64.pack(1) + b"k" + wire.U64.pack(VALUE_LIMIT + 1),
        bytes((wire.WAIT,)) + wire.U64.pack(COUNT_LIMIT + 1),
        bytes((wire.MULTI_SET,)) + b"\xff" * 8,
        bytes((wire.VALIDATE,)) + wire.U32.pack(wire.MAGIC),
    ],
    ids=["long key", "negative length", "long value", "long list", "negative count", "second opening"],
)
def test_what_the_protocol_forbids_is_refused_at_its_length(message: bytes) -> None:
    """A string or list over its limit is refused when its length is read, before any of it has come."""
    decoder = opened()
    decoder.feed(message)
    with pytest.raises(WireError):
        decoder.next_operation()


def test_a_message_has_a_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many strings that are each within their limit can't make one message of any size."""
    monkeypatch.setattr(wire, "MESSAGE_LIMIT", 10_000)
    decoder = opened()
    decoder.feed(bytes((wire.MULTI_SET,)) + wire.U64.pack(100))
    assert decoder.next_operation() == -1
    pair = wire.U64.pack(1) + b"k" + wire.U64.pack(1000) + b"v" * 1000

    def feed_all() -> None:
        for _ in range(100):
            decoder.feed(pair)
            assert decoder.next_operation() == -1

    with pytest.raises(WireError, match="more than 10000 bytes"):
        feed_all()


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", b"\x01", b"\xff", bytes((wire.PING,))])
def test_another_protocol_is_refused_at_its_first_byte(first: bytes) -> None:
    """Whatever doesn't begin with the opening is no client, and never an unknown operation."""
    decoder = wire.Decoder()
    decoder.feed(first)
    with pytest.raises(WireError) as caught:
        decoder.next_operation()
    assert caught.value.kind == GARBAGE


@pytest.mark.parametrize("operation", [wire.BARRIER + 1, 200, 255])
def test_an_unknown_operation_is_named(operation: int) -> None:
    """An operation of a newer torch is told apart from garbage, by its number."""
    decoder = opened()
    decoder.feed(bytes((operation,)))
    with pytest.raises(WireError, match=f"operation {operation} is unknown") as caught:
        decoder.next_operation()
    assert caught.value.kind == UNKNOWN


@given(st.binary(max_size=400))
def test_no_bytes_crash_the_decoder(data: bytes) -> None:
    """Random bytes behind a proper opening are messages, an error of the protocol, or incomplete; nothing else."""
    decoder = opened()
    decoder.feed(data)
    try:
        while decoder.next_operation() >= 0:
            pass
    except WireError:
        pass
