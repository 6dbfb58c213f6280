"""A flight recorder's dump: bytes to collectives.

Pure. torch writes pickles that hold nothing but numbers, texts, lists and dicts, and JSON with the same keys but
without stacks. A pickle that names a class or a function is refused before the function could run. The file may come
from anywhere: every field is checked, an entry with a field of the wrong kind makes the whole file unreadable, and no
dump is larger than `MOST_BYTES`.
"""

from __future__ import annotations

import io
import json
import pickle
import re

from elastic_run.core.failure.traceback_text import FOREIGN_PATHS
from elastic_run.diagnosis.collectives import COMPLETED, OPEN, RETIRED, STARTED, Collective
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

#: 2,000 entries (torch's default) with stacks take some 5 MB.
MOST_BYTES = 256 * 1024 * 1024
_P2P = re.compile(r"^(?P<operation>send|recv) (?P<left>\d+)(?:->|<-)(?P<right>\d+|\?)$")
_RANKS = re.compile(r"\d+")
#: Of a number: one of a million digits can't be printed.
_MOST_BITS = 64
#: What an entry of the wrong kind raises.
_DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, MemoryError)
#: In a millisecond.
_NANOSECONDS = 1_000_000


class DumpError(Exception):
    """A file is no readable dump; the message says why, in one clause."""


class ForeignFileError(DumpError):
    """A file is something else, and nothing says that it should be a dump."""


class _PrimitivesUnpickler(pickle.Unpickler):
    """Reads numbers, texts, lists and dicts, and refuses everything else."""

    def find_class(self, module: str, name: str) -> NoReturn:
        message = f"the pickle names {module}.{name}, which no dump does; nothing of it was run"
        raise DumpError(message)

    def persistent_load(self, pid: object) -> NoReturn:
        message = f"the pickle refers to an object outside of it ({str(pid)[:40]!r}), which no dump does"
        raise DumpError(message)


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a dump.

    Args:
        rank: The rank if the dump names it (torch's own don't), or None.
        collectives: The collectives in the order of their calls.
        members: Ranks of each process group by its name.
    """

    rank: int | None
    collectives: tuple[Collective, ...]
    members: dict[str, tuple[int, ...]]


def parse_dump(data: bytes) -> Content:
    """Read a dump.

    Args:
        data: The bytes of a file, or a worker's answer.

    Returns:
        The content.

    Raises:
        DumpError: The dump can't be read, or holds something that no dump holds.
        ForeignFileError: The data is no dump.
    """
    document = _load(data)
    if not isinstance(document, dict) or not isinstance(document.get("entries"), list):
        message = "it has no list of entries"
        raise ForeignFileError(message)
    try:
        collectives = tuple(_collective(entry) for entry in document["entries"])
        members = _members(document.get("pg_config") or {})
        rank = None if document.get("rank") is None else _number(document["rank"])
    except _DAMAGE as error:
        message = f"an entry can't be read ({type(error).__name__}: {str(error)[:60]})"
        raise DumpError(message) from error
    return Content(rank, tuple(sorted(collectives, key=lambda each: each.record)), members)


def _load(data: bytes) -> Any:
    if not data:
        message = "it is empty"
        raise DumpError(message)
    if data[:1] == b"{":
        return _load_json(data)
    if data[:1] != b"\x80":
        message = "it is neither a pickle nor JSON"
        raise ForeignFileError(message)
    try:
        return _PrimitivesUnpickler(io.BytesIO(data)).load()
    except DumpError:
        raise
    except (EOFError, pickle.UnpicklingError) as error:
        message = "it is cut short or damaged"
        raise DumpError(message) from error
    except Exception as error:
        # A damaged pickle raises whatever the operation raises that the damage has made of another.
        message = f"it is damaged ({type(error).__name__})"
        raise DumpError(message) from error


def _load_json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        message = "it is cut short or no JSON"
        raise (DumpError if b'"entries"' in data[:65536] else ForeignFileError)(message) from error


def _collective(entry: dict[str, Any]) -> Collective:
    name, description = entry["process_group"]
    library, _, operation = str(entry["profiling_name"]).rpartition(":")
    p2p = _P2P.match(operation)
    source = target = -1
    if p2p is not None:
        operation, left = p2p["operation"], _number(p2p["left"])
        right = -1 if p2p["right"] == "?" else _number(p2p["right"])  # which rank sent is known when it has sent
        source, target = (left, right) if operation == "send" else (right, left)
    sequence = entry["collective_seq_id"] if p2p is None else entry["p2p_seq_id"]
    return Collective(
        record=_number(entry["record_id"]),
        group=str(name),
        description="" if description == "undefined" else str(description),
        sequence=_number(sequence),
        operation=operation,
        state=_state(entry),
        input_sizes=_sizes(entry.get("input_sizes")),
        output_sizes=_sizes(entry.get("output_sizes")),
        input_types=_types(entry.get("input_dtypes")),
        output_types=_types(entry.get("output_dtypes")),
        where=_where(entry.get("frames") or []),
        source=source,
        target=target,
        library=library,
    )


def _number(value: Any) -> int:
    number = int(value)
    if number.bit_length() >= _MOST_BITS:
        message = "a number is too large"
        raise ValueError(message)
    return number


def _state(entry: dict[str, Any]) -> str:
    """Return the state; NCCL's watchdog retires a collective that has ended, unless it has aborted all of them."""
    if entry["state"] == "completed" and not _was_aborted(entry):
        return COMPLETED
    if entry.get("retired") or entry["state"] == "completed":
        return RETIRED
    return STARTED if entry["state"] == "started" else OPEN


def _was_aborted(entry: dict[str, Any]) -> bool:
    """Whether a collective of NCCL ended only because it was aborted after its timeout."""
    ended, limit = entry.get("time_discovered_completed_ns"), entry.get("timeout_ms")
    if entry.get("retired", True) or not ended or not limit:
        return False
    return int(ended) - int(entry["time_created_ns"]) > int(limit) * _NANOSECONDS


def _sizes(value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(_number(number) for number in shape) for shape in value or ())


def _types(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(str(name) for name in value or ())


def _where(frames: list[dict[str, Any]]) -> str:
    """Return the innermost place in the user's own code; frames begin with the innermost."""
    for frame in frames:
        path = str(frame["filename"])
        if path and not any(part in path for part in FOREIGN_PATHS):
            return f"{path.rpartition('/')[2]}:{_number(frame['line'])} in {frame['name']}"
    return ""


def _members(groups: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group; torch writes them as a text, `[0, 1]`, and for gloo's subgroups as `[]`."""
    ranks = {
        str(name): tuple(_number(number) for number in _RANKS.findall(str(group["ranks"])))
        for name, group in groups.items()
    }
    return {name: numbers for name, numbers in ranks.items() if numbers}
