"""Finds the dumps of a job in files and directories, and the rank of each.

Dumps come from anywhere: copied from many nodes, not of all ranks, under any names, beside logs. A file that can't be
read is named with the reason and left out. The rank stands in the dump, if elastic-run has asked for it, or at the end
of the file's name. Of several attempts (directories `attempt_0`, `attempt_1`) the last one counts.
"""

from __future__ import annotations

import os
import re

from elastic_run.diagnosis.collectives import Dump
from elastic_run.diagnosis.dump_format import MOST_BYTES, DumpError, ForeignFileError, parse_dump
from elastic_run.records import dataclass

#: Files of a directory that are looked at; a wrong directory may have millions.
MOST_FILES = 100_000
_ATTEMPT = re.compile(r"(?:^|/)attempt_(\d+)(?=/)")
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
        DumpError: A path is not there or can't be read.
    """
    files = [file for path in paths for file in _list(path)]
    files, problems = _last_attempt(files)
    found: dict[int, tuple[float, Dump]] = {}
    foreign = 0
    for path, changed_at in files:
        try:
            dump = _read(path)
        except ForeignFileError as error:
            foreign += 1
            if path in paths:
                problems.append(f"{path}: no dump of a flight recorder: {error}")
        except DumpError as error:
            problems.append(f"{path}: left out: {error}")
        else:
            other = found.get(dump.rank)
            if other is not None:
                older = path if changed_at < other[0] else other[1].source
                problems.append(f"{older}: left out: there is a newer dump of rank {dump.rank}")
            if other is None or changed_at >= other[0]:
                found[dump.rank] = (changed_at, dump)
    return FoundDumps(tuple(found[rank][1] for rank in sorted(found)), tuple(problems), foreign)


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
        message = f"{path}: {error.strerror}"
        raise DumpError(message) from error
    files = []
    for directory, _, names in os.walk(path):
        for name in sorted(names):
            file = os.path.join(directory, name)
            if os.path.isfile(file):  # no pipes: reading one would wait
                files.append((file, os.stat(file).st_mtime))
            if len(files) > MOST_FILES:
                message = f"{path}: more than {MOST_FILES} files; name the directory of the dumps"
                raise DumpError(message)
    return files


def _last_attempt(files: list[tuple[str, float]]) -> tuple[list[tuple[str, float]], list[str]]:
    """Keep the files of the last attempt, where directories are called by attempts and several have dumps."""
    attempts = {path: int(found[1]) for path, _ in files if (found := _ATTEMPT.search(path))}
    with_dumps = {number for path, number in attempts.items() if _begins_like_a_dump(path)}
    if len(with_dumps) < 2:  # noqa: PLR2004 - one attempt needs no choice
        return files, []
    last = max(with_dumps)
    kept = [(path, changed_at) for path, changed_at in files if attempts.get(path, last) == last]
    return kept, [f"dumps of attempts {', '.join(map(str, sorted(with_dumps)))}: only the last, {last}, is read"]


def _begins_like_a_dump(path: str) -> bool:
    try:
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
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES)
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
