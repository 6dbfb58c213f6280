"""The lines of the control socket: requests and answers there and back, and what is refused."""

from __future__ import annotations

import json

import pytest

from elastic_run.control import wire
from elastic_run.control.wire import Call, ControlError


def test_a_request_and_its_answer_are_read_as_they_were_written() -> None:
    """Each is one line, whatever is in it."""
    call = Call("status", {"text": "two\nlines, ä", "ranks": [0, 3]})
    line = wire.encode_call(call)
    assert line.count(b"\n") == 1
    assert wire.decode_call(line) == call
    answer = {"lines": ["a\nb"]}
    line = wire.encode_answer(answer)
    assert line.count(b"\n") == 1
    assert wire.decode_answer(line) == answer


def test_an_error_is_raised_where_it_is_read() -> None:
    """The client shows the agent's own words."""
    with pytest.raises(ControlError, match=r"^not now$"):
        wire.decode_answer(wire.encode_error("not now"))


@pytest.mark.parametrize(
    "line",
    [b"", b"GET / HTTP/1.0\r\n", b"[1]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"request": "status"}\n']
    + [
        json.dumps({"version": 1, **fields}).encode()
        for fields in ({}, {"request": 3}, {"request": "a", "arguments": []})
    ],
)
def test_what_is_no_request_is_refused(line: bytes) -> None:
    """Garbage, other formats and wrong types raise the one error that the client is told."""
    with pytest.raises(ControlError):
        wire.decode_call(line)


def test_another_version_is_refused_with_both_numbers() -> None:
    """A newer command says that the agent is older, and the other way round."""
    with pytest.raises(ControlError, match=r"version 2 .* has version 1"):
        wire.decode_call(b'{"version": 2, "request": "status"}')
    with pytest.raises(ControlError, match="version None"):
        wire.decode_answer(b'{"answer": {}}')


def test_an_answer_above_the_limit_becomes_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client learns why it gets nothing."""
    monkeypatch.setattr(wire, "ANSWER_LIMIT", 100)
    with pytest.raises(ControlError, match="larger than 100 bytes"):
        wire.decode_answer(wire.encode_answer({"text": "a" * 200}))


def test_an_answer_that_is_no_object_is_refused() -> None:
    """A command never works with a number where it expects fields."""
    with pytest.raises(ControlError, match="not a JSON object"):
        wire.decode_answer(b'{"version": 1, "answer": 7}')
