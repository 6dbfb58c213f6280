"""Dumps of torch's flight recorder: a file's bytes to collectives, and the dumps of a job in files and directories.

The recorder is a ring: the newest entries overwrite the oldest. torch writes pickles that hold nothing but numbers,
texts, lists and dicts, and a dump may come from anywhere: a pickle that names a class is refused before that could run,
and every field is checked. A run has one directory for each attempt (`attempt_0`, `attempt_0.1`, `attempt_1`), and only
the dumps of its last attempt count. Several runs are the nodes of one job if they have different ranks; otherwise they
are several jobs, whose dumps must not be mixed.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import stat
from contextlib import suppress

from elastic_run import contract
from elastic_run.core.failure.traceback_text import FOREIGN_PATHS
from elastic_run.files import read_user_file
from elastic_run.records import dataclass, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn, TypeAlias

#: States of a collective. gloo doesn't record whether a collective has ended well: RETIRED is also a failed one.
OPEN = "open"
STARTED = "started"
RETIRED = "retired"
COMPLETED = "completed"


@dataclass(frozen=True, slots=True)
class Collective:
    """One call of a collective, or of send or recv, on one rank."""

    record: int  # Number of the entry in the recorder, from 0
    group: str  # Name of the process group
    description: str  # Description of the process group, or ""
    sequence: int  # Number of the collective in its group, as all ranks of the group count
    operation: str  # Its name, such as `all_reduce`
    state: str  # `OPEN`, `STARTED` (its kernel runs), `RETIRED` or `COMPLETED`
    input_sizes: tuple[tuple[int, ...], ...] = ()  # Shape of each input tensor
    output_sizes: tuple[tuple[int, ...], ...] = ()  # Shape of each output tensor
    input_types: tuple[str, ...] = ()  # Element type of each input tensor
    output_types: tuple[str, ...] = ()  # Element type of each output tensor
    where: str = ""  # The innermost line of the user's own code, `train.py:88 in step`, or ""
    #: Sender of a send or recv, as its number in the group; -1 for collectives, and for a recv from any rank
    source: int = -1
    target: int = -1  # Receiver of a send or recv, as its number in the group; -1 for collectives
    library: str = ""  # Name of the backend that performs it, such as `nccl2`: each numbers its own calls in a group

    @property
    def is_open(self) -> bool:
        """Whether the rank still waits for it."""
        return self.state in (OPEN, STARTED)

    @property
    def is_p2p(self) -> bool:
        """Whether it is a send or a recv."""
        return self.target >= 0


#: The calls of one rank under one number: several where they were coalesced.
Calls: TypeAlias = "tuple[Collective, ...]"


@dataclass(frozen=True, slots=True)
class Dump:
    """The content of one rank's flight recorder."""

    rank: int  # The rank in the job; -1 where the dump does not name it, as torch's own do not
    collectives: tuple[Collective, ...]  # The collectives in the order of their calls
    members: dict[str, tuple[int, ...]]  # Ranks of each process group that the dump lists, by the group's name
    source: str = ""  # The file

    @property
    def is_whole(self) -> bool:
        """Whether the ring still holds the rank's first collective."""
        return not self.collectives or self.collectives[0].record == 0


#: 2,000 entries (torch's default) with stacks take some 5 MB.
MOST_BYTES = 256 * 1024 * 1024
_P2P = re.compile(r"^(?P<operation>send|recv) (?P<left>\d+)(?:->|<-)(?P<right>\d+|\?)$")
_RANKS = re.compile(r"\d+")
#: Of a number: one of a million digits can't be printed.
_MOST_BITS = 64
#: What an entry of the wrong kind raises.
_DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, MemoryError)


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


def parse_dump(data: bytes) -> Dump:
    """Read a dump, or raise DumpError, ForeignFileError where the data is no dump."""
    document = _load(data)
    if not isinstance(document, dict) or not isinstance(document.get("entries"), list):
        message = "it has no list of entries"
        raise ForeignFileError(message)
    try:
        collectives = sorted(map(_collective, document["entries"]), key=lambda each: each.record)
        members = _members(document.get("pg_config") or {})
        rank = -1 if document.get("rank") is None else _number(document["rank"])
    except _DAMAGE as error:
        message = f"an entry can't be read ({type(error).__name__}: {str(error)[:60]})"
        raise DumpError(message) from error
    return Dump(rank, tuple(collectives), members)


def _load(data: bytes) -> Any:
    if not data:
        message = "it is empty"
        raise DumpError(message)
    if data[:1] != b"\x80":
        message = "it is no pickle"
        raise ForeignFileError(message)
    try:
        return _PrimitivesUnpickler(io.BytesIO(data)).load()
    except DumpError:
        raise
    except Exception as error:
        # A damaged pickle raises whatever the operation raises that the damage has made of another.
        message = f"it is cut short or damaged ({type(error).__name__})"
        raise DumpError(message) from error


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
    if entry["state"] != "completed":
        return RETIRED if entry.get("retired") else STARTED if entry["state"] == "started" else OPEN
    # NCCL's watchdog retires a collective that has ended, unless it has aborted all of them after the timeout.
    ended, limit = entry.get("time_discovered_completed_ns"), entry.get("timeout_ms")
    if entry.get("retired", True) or not ended or not limit:
        return COMPLETED
    was_aborted = int(ended) - int(entry["time_created_ns"]) > int(limit) * 1_000_000
    return RETIRED if was_aborted else COMPLETED


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


_ATTEMPT = re.compile(rf"(?:^|/){contract.ATTEMPT_DIR_PREFIX}(\d+)(?:\.(\d+))?(?=/)")
_RANK = re.compile(r"rank[^0-9/]{0,2}(\d{1,7})(?!.*rank[^0-9/]{0,2}\d)|(\d{1,7})(?:\.[A-Za-z]\w*)*$")


@dataclass(frozen=True, slots=True)
class FoundDumps:
    """The dumps in some files and directories."""

    dumps: tuple[Dump, ...]  # One dump of each rank, by ascending rank
    problems: tuple[str, ...]  # A line for each file that was left out, and for each remark on the choice
    foreign: int  # Number of files that are no dumps


def find_dumps(paths: list[str]) -> FoundDumps:
    """Read the dumps in files and directories, searched with those below them, or raise DumpError."""
    files = [file for path in paths for file in _list(path)]
    files, problems = _choose_attempts(files)
    found: dict[int, tuple[float, Dump]] = {}
    foreign = 0
    for path, changed_at in files:
        try:
            dump = _read_file(path)
        except ForeignFileError as error:
            foreign += 1
            if path in paths:
                problems.append(f"{path!r}: no dump of a flight recorder: {error}")
        except DumpError as error:
            problems.append(f"{path!r}: left out: {error}")
        else:
            other = found.get(dump.rank)
            # Real paths: `latest` is a link.
            if other is not None and len({os.path.realpath(_run_of(each)) for each in (path, other[1].source)}) > 1:
                both = f"{other[1].source!r} and {path!r} are of rank {dump.rank}"
                message = f"these are dumps of several jobs: {both}; name the directory of one job"
                raise DumpError(message)
            if other is not None:
                older = path if changed_at < other[0] else other[1].source
                problems.append(f"{older!r}: left out: there is a newer dump of rank {dump.rank}")
            if other is None or changed_at >= other[0]:
                found[dump.rank] = (changed_at, dump)
    dumps, remarks = _leave_out_lost_nodes([found[rank][1] for rank in sorted(found)])
    return FoundDumps(tuple(dumps), (*problems, *remarks), foreign)


def rank_in_name(path: str) -> int | None:
    """Return the rank that a file's name says: the number behind the last `rank`, or the number at its end."""
    found = _RANK.search(os.path.basename(path))
    return None if found is None else int(found[1] or found[2])


def _list(path: str) -> list[tuple[str, float]]:
    try:
        if not os.path.isdir(path):
            return [(path, os.stat(path).st_mtime)]
        os.listdir(path)
    except OSError as error:
        message = f"{path!r}: {error.strerror}"
        raise DumpError(message) from error
    files = []
    for directory, _, names in os.walk(path):
        for name in sorted(names):
            file = os.path.join(directory, name)
            with suppress(OSError):  # it was removed just now, or is a link to nothing
                status = os.stat(file)
                if stat.S_ISREG(status.st_mode):  # no pipes: reading one would wait
                    files.append((file, status.st_mtime))
    return files


def _choose_attempts(files: list[tuple[str, float]]) -> tuple[list[tuple[str, float]], list[str]]:
    """Keep the files of each run's last attempt that has dumps, and what is below no attempt."""
    with_dumps: dict[str, set[tuple[int, int]]] = {}
    attempts = {path: _attempt_of(path) for path, _ in files}
    for path, attempt in attempts.items():
        if attempt is not None and _begins_like_a_dump(path):
            with_dumps.setdefault(_run_of(path), set()).add(attempt)
    last = {run: max(several) for run, several in with_dumps.items()}
    kept = [file for file in files if attempts[file[0]] in (None, last.get(_run_of(file[0]), attempts[file[0]]))]
    problems = []
    for run, several in with_dumps.items():
        names = [f"{number}.{again}" if again else f"{number}" for number, again in sorted(several)]
        if len(names) > 1:
            text = f"dumps of attempts {', '.join(names)}: only the last, {names[-1]}, is read"
            problems.append(f"{(run or '.')!r}: {text}")
    return kept, problems


def _leave_out_lost_nodes(dumps: list[Dump]) -> tuple[list[Dump], list[str]]:
    """Keep the dumps of the job's last attempt: a node that was lost before has none of it."""
    attempts = {dump.source: attempt[0] for dump in dumps if (attempt := _attempt_of(dump.source)) is not None}
    last = max(attempts.values(), default=0)
    old = {path: number for path, number in attempts.items() if number < last}
    remarks = [f"{path!r}: left out: it is of attempt {number}, others are of {last}" for path, number in old.items()]
    return [dump for dump in dumps if dump.source not in old], remarks


def _run_of(path: str) -> str:
    """Return the directory of a file's run: the one above its attempt, or else the file's own."""
    attempt = _ATTEMPT.search(path)
    return os.path.dirname(path) if attempt is None else path[: attempt.start()]


def _attempt_of(path: str) -> tuple[int, int] | None:
    attempt = _ATTEMPT.search(path)
    return None if attempt is None else (int(attempt[1]), int(attempt[2] or 0))


def _begins_like_a_dump(path: str) -> bool:
    try:
        if not os.path.isfile(path):
            return True  # a pipe that the user names: a byte that is read here is missing when the dump is read
        with open(path, "rb") as file:
            return file.read(1) == b"\x80"
    except OSError:
        return False


def _read_file(path: str) -> Dump:
    rank = rank_in_name(path)
    try:
        if os.stat(path).st_size > MOST_BYTES:
            message = f"it is larger than {MOST_BYTES >> 20} MiB"
            raise DumpError(message)
        data = read_user_file(path, MOST_BYTES)
    except OSError as error:
        raise DumpError(error.strerror) from error
    if not data and rank is None:
        message = "it is empty"
        raise ForeignFileError(message)
    dump = parse_dump(data)
    if dump.rank >= 0:
        rank = dump.rank
    if rank is None:
        message = "neither the dump nor the file's name says which rank it is of: let the name end in the rank"
        raise DumpError(message)
    return replace(dump, rank=rank, source=path)
