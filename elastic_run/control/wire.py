"""The format of the control socket: one request a connection, one answer, each of them one line of JSON.

    {"version": 1, "request": "identify", "arguments": {}}
    {"version": 1, "answer": {"run_id": "none", "pid": 4711}}
    {"version": 1, "error": "there is no request 'identity'"}

A connection ends with its answer. So a client that disappears, or that reads slowly, leaves nothing behind but its own
connection. Another version is refused with a message; a new request, or a new field, is no new version.
"""

from __future__ import annotations

import json

from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "ANSWER_LIMIT",
    "REQUEST_LIMIT",
    "VERSION",
    "Call",
    "ControlError",
    "decode_answer",
    "decode_call",
    "encode_answer",
    "encode_call",
    "encode_error",
]

VERSION = 1
#: Bytes of one line.
REQUEST_LIMIT = 1 << 16
ANSWER_LIMIT = 1 << 24


class ControlError(Exception):
    """A request can't be answered; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request as it was sent.

    Args:
        name: A key of `agent.control_requests.REQUESTS`.
        arguments: Its arguments by name.
    """

    name: str
    arguments: dict[str, Any]


def encode_call(call: Call) -> bytes:
    """Return a request as a line."""
    return _encode({"version": VERSION, "request": call.name, "arguments": call.arguments})


def decode_call(line: bytes) -> Call:
    """Read a request.

    Raises:
        ControlError: The line is no request of this version.
    """
    document = _decode(line)
    name, arguments = document.get("request"), document.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        message = "this is not a request: 'request' is a text, 'arguments' an object"
        raise ControlError(message)
    return Call(name, arguments)


def encode_answer(answer: dict[str, Any]) -> bytes:
    """Return an answer as a line; one above the limit becomes an error."""
    line = _encode({"version": VERSION, "answer": answer})
    return line if len(line) <= ANSWER_LIMIT else encode_error(f"the answer is larger than {ANSWER_LIMIT} bytes")


def encode_error(text: str) -> bytes:
    """Return the reason why there is no answer, as a line."""
    return _encode({"version": VERSION, "error": text})


def decode_answer(line: bytes) -> dict[str, Any]:
    """Read an answer.

    Raises:
        ControlError: The agent refuses the request, or the line is no answer of this version.
    """
    document = _decode(line)
    if "error" in document:
        raise ControlError(str(document["error"]))
    answer = document.get("answer")
    if not isinstance(answer, dict):
        message = "the agent's answer is not a JSON object"
        raise ControlError(message)
    return answer


def _encode(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def _decode(line: bytes) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        message = "this is not a line of JSON with an object"
        raise ControlError(message)
    version = document.get("version")
    if version != VERSION:
        message = f"version {version!r} of the control socket is unknown here, which has version {VERSION}"
        raise ControlError(message)
    return document
