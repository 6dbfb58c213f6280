"""Records to JSON and back, with every value checked on the way in: it came from a network (law 5).

A record is a frozen dataclass whose annotations are names of `_CHECKS` or of other records. A message leaves out the
fields that have their default. A reader ignores unknown fields and gives absent ones their default, so releases of one
protocol may differ by a field. A wrong type, a missing field or a number that is not finite raises.
"""

from __future__ import annotations

import json
from sys import float_info

from elastic_run.contract import LARGEST_NUMBER
from elastic_run.records import MISSING, fields

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, TypeAlias, TypeVar

    Check: TypeAlias = Callable[[object], Any]
    Record = TypeVar("Record")

Document: TypeAlias = "dict[str, Any]"

#: Bytes of one message. A round's state for 4,000 nodes takes a quarter of it.
LARGEST = 8 * 1024 * 1024
#: Characters of a string that stands by itself in a record.
LONGEST = 4096


class MessageError(ValueError):
    """What was read is not a message of ours; the text says why."""


def encode(document: Mapping[str, Any]) -> bytes:
    """Return a document as compact JSON, the same bytes for the same document."""
    return _ENCODER.encode(document).encode("ascii")


def decode(data: bytes) -> Document:
    """Read a document; raise `MessageError` where it is not a JSON object, or is too large."""
    if len(data) > LARGEST:
        message = f"{len(data)} bytes are more than a message may have ({LARGEST})"
        raise MessageError(message)
    try:
        found = _DECODER.decode(data.decode())
    except (ValueError, RecursionError) as error:
        message = f"not JSON: {error}"
        raise MessageError(message) from error
    if not isinstance(found, dict):
        message = f"a JSON object was expected, not {type(found).__name__}"
        raise MessageError(message)
    return found


def to_document(record: object) -> Document:
    """Return a record as a document of JSON's types, with all its fields."""
    return {name: _plain(getattr(record, name), to_document) for name, _, _ in _fields(type(record))}


def to_message(record: object) -> Document:
    """Return a record as it is sent, without the fields that have their default: a reader gives them their default.

    The document must not be changed: parts of it are in other messages, too.
    """
    return {
        name: value if type(value) in _PLAIN else _plain(value, _write_part)
        for name, _, default in _fields(type(record))
        if (value := getattr(record, name)) is not default
    }


def from_document(kind: type[Record], document: object) -> Record:
    """Make a record of a document that may hold anything.

    Raises `MessageError` where a field is missing or of the wrong type.
    """
    if not isinstance(document, dict):
        message = f"{kind.__name__}: an object was expected, not {type(document).__name__}"
        raise MessageError(message)
    values = {}
    for name, annotation, default in _fields(kind):
        if name in document:
            values[name] = _check(kind, name, annotation, document[name])
        elif default is MISSING:
            message = f"{kind.__name__}.{name} is missing"
            raise MessageError(message)
    try:
        return kind(**values)
    except ValueError as error:
        raise MessageError(str(error)) from error


def register(kind: type[Record]) -> type[Record]:
    """Let a record be a field of other records; a decorator."""
    last: tuple[object, Record] | None = None

    def read(value: object) -> Record:
        # Thousands of nodes have one configuration and one round: comparing costs a tenth of reading it anew.
        nonlocal last
        if last is None or value != last[0]:
            last = value, from_document(kind, value)
        return last[1]

    _allow(kind.__name__, read)
    return kind


def _fields(kind: type) -> tuple[tuple[str, str, object], ...]:
    """Return name, annotation and default of each field; remembered, since a job of 4,000 nodes asks as often."""
    found = _FIELDS.get(kind)
    if found is None:
        found = tuple((field.name, str(field.type), field.default) for field in fields(kind))
        _FIELDS[kind] = found
    return found


def _check(kind: type, name: str, annotation: str, value: object) -> object:
    try:
        return _CHECKS[annotation](value)
    except MessageError:
        raise
    except ValueError:
        text = repr(value)
        shown = text if len(text) <= 80 else f"{text[:80]}…"  # noqa: PLR2004 - one line
        message = f"{kind.__name__}.{name} must be {annotation}, not {shown}"
        raise MessageError(message) from None


def _plain(value: object, write: Callable[[object], Document]) -> object:
    if value is None or isinstance(value, str | int | float | dict):
        return value
    return [_plain(item, write) for item in value] if isinstance(value, tuple) else write(value)


def _write_part(part: object) -> Document:
    """Return a record that is a part of a message; the same one is often a part of the next message, too."""
    last = _WRITTEN.get(type(part))
    if last is None or last[0] is not part:
        last = _WRITTEN[type(part)] = part, to_message(part)
    return last[1]


def _refuse_constant(name: str) -> float:
    message = f"{name} is no number"
    raise ValueError(message)


def _make_check(*kinds: type, is_fine: Callable[[Any], bool] = lambda _: True) -> Check:
    """Return a check for values of some of JSON's types; a truth value is no number."""

    def check(value: object) -> object:
        if type(value) not in kinds or not is_fine(value):
            raise ValueError
        return value

    return check


# Made once: `json.dumps` and `json.loads` make one for each message, which takes as long as the message.
_ENCODER = json.JSONEncoder(separators=(",", ":"), sort_keys=True, allow_nan=False)
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)

# Neither nan nor infinity, nor an integer of some hundred digits.
_check_number = _make_check(int, float, is_fine=lambda number: abs(number) <= float_info.max)
_check_list = _make_check(list)
_SCALARS: Mapping[str, Check] = {
    "str": _make_check(str, is_fine=lambda text: len(text) <= LONGEST),
    "int": _make_check(int, is_fine=lambda number: abs(number) <= LARGEST_NUMBER),
    "float": lambda value: float(_check_number(value)),  # JSON of another writer may say 6 for 6.0
    "bool": _make_check(bool),
    "Document": _make_check(dict),
}
#: Types that JSON has too: a record's field of one is its own plain form.
_PLAIN = frozenset((str, int, float, bool, dict, type(None)))
_CHECKS: dict[str, Check] = {}
#: Of each kind the record that was written last as a part of another one, and its document.
_WRITTEN: dict[type, tuple[object, Document]] = {}
_FIELDS: dict[type, tuple[tuple[str, str, object], ...]] = {}


def _allow(name: str, check: Check) -> None:
    _CHECKS[name] = check
    _CHECKS[f"{name} | None"] = lambda value: None if value is None else check(value)
    _CHECKS[f"tuple[{name}, ...]"] = lambda value: tuple(map(check, _check_list(value)))


for _name, _scalar in _SCALARS.items():
    _allow(_name, _scalar)
