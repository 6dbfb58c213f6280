"""Finds the dumps of a job in files and directories, and the rank of each.

Dumps come from anywhere: copied from many nodes, not of all ranks, under any names, beside logs. A file that can't be
read is named with the reason and left out. Messages quote names, which may hold spaces, line ends and control
characters. The rank stands in the dump, if elastic-run has asked for it, or at the end of the file's name. A run has
one directory for each attempt (`attempt_0`, `attempt_0.1`, `attempt_1`), and only the dumps of its last attempt
count. Several runs are the nodes of one job if they have different ranks; otherwise they are several jobs, whose
dumps must not be mixed.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress

from elastic_run import contract
from elastic_run.diagnosis.collectives import Dump
from elastic_run.diagnosis.dump_format import MOST_BYTES, DumpError, ForeignFileError, parse_dump
from elastic_run.records import dataclass
from elastic_run.user_file import read_user_file

#: Files of a directory that are looked at; a wrong directory may have millions.
MOST_FILES = 100_000
_ATTEMPT = re.compile(rf"(?:^|/){contract.ATTEMPT_DIR_PREFIX}(\d+)(?:\.(\d+))?(?=/)")
_RANK = re.compile(r"rank[^0-9/]{0,2}(\d{1,7})(?!.*rank[^0-9/]{0,2}\d)|(\d{1,7})(?:\.[A-Za-z]\w*)*$")


@dataclass(frozen=True, slots=True)
class FoundDumps:
    """The dumps in some files and directories.

    Args:
        dumps: One dump of each rank, by ascending rank.
        problems: A line for each file that was left out, and for each remark on the choice.
        foreign: Number of files that are no dumps.
    """

    dumps: tuple[Dump, ...]
    problems: tuple[str, ...]
    foreign: int


def find_dumps(paths: list[str]) -> FoundDumps:
    """Read the dumps in files and directories.

    Args:
        paths: Each a file, or a directory that is searched with those below it.

    Returns:
        The dumps, and remarks on the files that were left out.

    Raises:
        DumpError: A path is not there or can't be read, or there are dumps of several jobs.
    """
    files = [file for path in paths for file in _list(path)]
    files, problems = _choose_attempts(files)
    found: dict[int, tuple[float, Dump]] = {}
    foreign = 0
    for path, changed_at in files:
        try:
            dump = _read(path)
        except ForeignFileError as error:
            foreign += 1
            if path in paths:
                problems.append(f"{path!r}: no dump of a flight recorder: {error}")
        except DumpError as error:
            problems.append(f"{path!r}: left out: {error}")
        else:
            other = found.get(dump.rank)
            if other is not None and not _are_of_one_run(path, other[1].source):
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
            if len(files) > MOST_FILES:
                message = f"{path!r}: more than {MOST_FILES} files; name the directory of the dumps"
                raise DumpError(message)
    return files


def _choose_attempts(files: list[tuple[str, float]]) -> tuple[list[tuple[str, float]], list[str]]:
    """Keep the files of each run's last attempt that has dumps, and what is below no attempt."""
    with_dumps: dict[str, set[tuple[int, int]]] = {}
    attempts = {path: _attempt_of(path) for path, _ in files}
    for path, attempt in attempts.items():
        if attempt is not None and _begins_like_a_dump(path):
            with_dumps.setdefault(_run_of(path), set()).add(attempt)
    last = {run: max(attempts) for run, attempts in with_dumps.items()}
    kept = [file for file in files if attempts[file[0]] in (None, last.get(_run_of(file[0]), attempts[file[0]]))]
    problems = []
    for run, several in with_dumps.items():
        if len(several) > 1:
            names = [f"{number}.{again}" if again else f"{number}" for number, again in sorted(several)]
            problems.append(
                f"{(run or '.')!r}: dumps of attempts {', '.join(names)}: only the last, {names[-1]}, is read"
            )
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


def _are_of_one_run(one: str, other: str) -> bool:
    return os.path.realpath(_run_of(one)) == os.path.realpath(_run_of(other))  # `latest` is a link


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


def _read(path: str) -> Dump:
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
    content = parse_dump(data)
    rank = content.rank if content.rank is not None else rank
    if rank is None:
        message = "neither the dump nor the file's name says which rank it is of: let the name end in the rank"
        raise DumpError(message)
    return Dump(rank, content.collectives, content.members, path)
