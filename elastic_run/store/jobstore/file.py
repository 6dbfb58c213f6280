"""The job store in a directory of a file system that all nodes share: no server at all.

Rules
- A file appears whole or not at all: it is written under a name of its own, then linked to its place, where the first
  wins, or renamed to it, where the last wins. Both hold on NFS, unlike appending to one file.
- A stream's entries are files with numbers. A writer takes the number behind the last one; a reader goes up to the
  first that is missing. There are no gaps: a number is taken together with its entry.
- Trimming first raises the stream's floor, then deletes. A writer looks at the floor after it has placed its entry: at
  or below the log's start no reader has seen it, and it takes another number.
- An agent may be stopped between any two calls and go on much later. A value that replaces another is therefore a new
  file with the next number, and the highest number counts. A late writer finds its number taken, or leaves a file that
  no agent reads. A lock was rejected: an agent that is stopped while it holds the lock would block all others.
- A file system has no waits, so waits look again and again, ever more slowly. They list the directory: to ask for one
  name would be answered from a cache on NFS for up to a minute.
- A heartbeat is written over the one before it, in place: a rename would bring back the file of a node that was dropped
  meanwhile. So a heartbeat is read until two reads agree.
- Nothing expires; `remove_job` takes it all away.
"""

# ruff: noqa: D102 - JobStore says what the methods promise
from __future__ import annotations

import errno
import os
import secrets
import shutil
import threading
import time
from contextlib import contextmanager
from urllib.parse import quote

from elastic_run.store.errors import UNREACHABLE, StoreAccessError, StoreConnectionError
from elastic_run.store.job_path import job_path
from elastic_run.store.jobstore.api import ENTRIES_AT_ONCE, JobStore
from elastic_run.store.limits import MESSAGE_LIMIT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import TypeVar

    _T = TypeVar("_T")

_FIRST_PAUSE = 0.01
_LAST_PAUSE = 0.25
#: Before the position, in the name of a file that says up to where a stream was trimmed.
_FLOOR = "floor."
_BESIDE = ".d"
#: What a file that another node has removed meanwhile gives: NFS finds it stale.
_GONE = (errno.ENOENT, errno.ESTALE)
_WITHOUT_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK)


class FileJobStore(JobStore):
    """A job's part of a directory.

    Args:
        path: The directory. Where it isn't one, the directory is beside it, with `.d` behind its name.
        run_id: The job.

    Raises:
        StoreConnectionError: The file system fails.
        StoreAccessError: We may not write there, or it has no links.
    """

    def __init__(self, path: str, run_id: str) -> None:
        self.run_id = run_id
        self.name = path
        self._base = path.rstrip("/") if os.path.isdir(path) or path.endswith("/") else path + _BESIDE
        self._root = os.path.join(self._base, job_path(run_id))
        self._closed = threading.Event()
        with self._explains():
            for part in ("b", "k", "s", "v", "new"):
                os.makedirs(os.path.join(self._root, part), exist_ok=True)

    # --- streams -------------------------------------------------------------------------------------------------
    def append(self, stream: str, value: bytes) -> None:
        with self._explains(), self._written(value) as new:
            while True:
                numbers, floor = self._scan(stream)
                number = max({floor, *numbers}) + 1  # a dead writer may have left an entry below the floor
                place = self._entry(stream, number)
                if not self._link(new, place):
                    continue
                if self._scan(stream)[1] < number:
                    return
                _remove(place)

    def read(self, stream: str, position: int, timeout: float) -> tuple[list[bytes], int]:
        def look() -> tuple[list[bytes], int] | None:
            there, floor = self._scan(stream)
            behind = max(position, floor if there and position + 1 not in there else 0)
            entries: list[bytes] = []
            while behind + 1 in there and len(entries) < ENTRIES_AT_ONCE:
                entry = _read(self._entry(stream, behind + 1))
                if entry is None:
                    break  # trimmed just now
                entries.append(entry)
                behind += 1
            return (entries, behind) if entries else None

        with self._explains():
            return self._poll(look, timeout) or ([], position)

    def trim(self, stream: str, position: int) -> None:
        with self._explains():
            numbers, floor = self._scan(stream)
            if floor < position:
                with self._written(b"") as new:
                    self._link(new, self._entry(stream, f"{_FLOOR}{position}"))
            for number in numbers:
                if number <= position:
                    _remove(self._entry(stream, number))
            if 0 < floor < position:
                _remove(self._entry(stream, f"{_FLOOR}{floor}"))

    def _scan(self, stream: str) -> tuple[set[int], int]:
        """Return the numbers of a stream's entries, and up to where it was trimmed."""
        names = _list(os.path.dirname(self._entry(stream, 0)))
        floors = (name[len(_FLOOR) :] for name in names if name.startswith(_FLOOR))
        return set(_numbers(names)), max(_numbers(floors), default=0)

    # --- keys ----------------------------------------------------------------------------------------------------
    def create(self, key: str, value: bytes) -> bytes:
        with self._explains(), self._written(value) as new:
            while True:
                if self._link(new, self._key(key)):
                    return value
                there = _read(self._key(key))
                if there is not None:
                    return there

    def replace(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        with self._explains(), self._written(value) as new:
            while True:
                number, there = self._newest(key)
                if there != expected:
                    return there
                if self._add_version(key, number + 1, new):
                    return value

    def _newest(self, key: str) -> tuple[int, bytes | None]:
        """Return a key's value and its number, which is 0 for one that was never replaced."""
        while numbers := _numbers(_list(self._versions(key))):
            value = _read(self._version(key, max(numbers)))
            if value is not None:
                return max(numbers), value
        return 0, _read(self._key(key))

    def _add_version(self, key: str, number: int, new: str) -> bool:
        """Give a key its next value; returns whether that counts or has counted a moment ago."""
        place = self._version(key, number)
        if not self._link(new, place):
            return False
        numbers = _numbers(_list(self._versions(key)))
        if max(numbers) > number:  # this process may have been stopped while others used the number and removed it
            _remove(place)
            return False
        for old in numbers:
            if old < number:
                _remove(self._version(key, old))
        return True

    def wait(self, key: str, timeout: float) -> bytes | None:
        place = self._key(key)

        def look() -> bytes | None:
            return _read(place) if os.path.basename(place) in _list(os.path.dirname(place)) else None

        with self._explains():
            return self._poll(look, timeout)

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._explains():
            return [self._newest(key)[1] for key in keys]

    def write(self, values: Mapping[str, bytes]) -> None:
        with self._explains():
            for key, value in values.items():
                with self._written(value) as new:
                    number, _ = self._newest(key)
                    if not number:
                        self._rename(new, self._key(key))
                    while number and not self._add_version(key, number + 1, new):
                        number, _ = self._newest(key)

    def delete(self, keys: Sequence[str]) -> None:
        with self._explains():
            for key in keys:
                _remove(self._key(key))

    # --- heartbeats ---------------------------------------------------------------------------------------------------
    def write_heartbeat(self, node: str, value: bytes, last: bytes | None = None) -> bool:
        with self._explains():
            if last is not None:
                return _overwrite(self._heartbeat(node), last, value)
            with self._written(value) as new:
                self._rename(new, self._heartbeat(node))
            return True

    def fetch_heartbeats(self, nodes: Sequence[str]) -> list[bytes | None]:
        with self._explains():
            return [_read_whole(self._heartbeat(node)) for node in nodes]

    def forget_heartbeats(self, nodes: Sequence[str]) -> None:
        with self._explains():
            for node in nodes:
                _remove(self._heartbeat(node))

    # --- the whole -----------------------------------------------------------------------------------------------
    def remove_job(self) -> None:
        with self._explains():
            shutil.rmtree(self._root, ignore_errors=True)
            try:
                os.rmdir(os.path.dirname(self._root))
                if self._base.endswith(_BESIDE):
                    os.rmdir(self._base)
            except OSError:
                pass  # another job's too

    def clone(self) -> FileJobStore:
        return FileJobStore(f"{self._base}/", self.run_id)

    def close(self) -> None:
        self._closed.set()

    # --- files ---------------------------------------------------------------------------------------------------
    @contextmanager
    def _written(self, value: bytes) -> Iterator[str]:
        """Write a file under a name of its own, and see to it that the name goes."""
        new = os.path.join(self._root, "new", secrets.token_hex(8))

        def write() -> None:
            with open(new, "xb") as file:
                file.write(value)

        _in_directory(new, write)
        try:
            yield new
        finally:
            _remove(new)

    def _link(self, new: str, place: str) -> bool:
        """Give a file its place; returns False where there is one already."""
        try:
            _in_directory(place, lambda: os.link(new, place))
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in _WITHOUT_LINKS:
                message = f"the file system of {self.name} has no hard links, which a job store needs"
                raise StoreAccessError(message) from error
            raise
        return True

    def _rename(self, new: str, place: str) -> None:
        _in_directory(place, lambda: os.replace(new, place))

    def _poll(self, look: Callable[[], _T | None], timeout: float) -> _T | None:
        """Look until there is something, the time is over, or we are closed."""
        deadline = time.monotonic() + timeout
        pause = _FIRST_PAUSE
        while True:
            found = look()
            left = deadline - time.monotonic()
            if found is not None or left <= 0:
                return found
            self._closed.wait(min(pause, left))
            self._check_open()
            pause = min(1.5 * pause, _LAST_PAUSE)

    @contextmanager
    def _explains(self) -> Iterator[None]:
        self._check_open()
        try:
            yield
        except (PermissionError, NotADirectoryError) as error:
            message = f"it can't be used as a job store: {error.strerror}: {error.filename}"
            raise StoreAccessError(message) from error
        except StoreConnectionError:
            raise
        except OSError as error:
            self.close()
            place = f": {error.filename}" if error.filename else ""
            message = f"the job store in {self.name} fails: {error.strerror}{place}"
            raise StoreConnectionError(message, UNREACHABLE) from error

    def _check_open(self) -> None:
        if self._closed.is_set():
            message = f"the job store in {self.name} is closed"
            raise StoreConnectionError(message)

    # --- where things are ----------------------------------------------------------------------------------------
    def _entry(self, stream: str, name: int | str) -> str:
        return os.path.join(self._root, "s", quote(stream, ""), str(name))

    def _key(self, key: str) -> str:
        return os.path.join(self._root, "k", quote(key, ""))

    def _versions(self, key: str) -> str:
        return os.path.join(self._root, "v", quote(key, ""))

    def _version(self, key: str, number: int) -> str:
        return os.path.join(self._versions(key), str(number))

    def _heartbeat(self, node: str) -> str:
        return os.path.join(self._root, "b", quote(node, ""))


def _in_directory(path: str, make: Callable[[], None]) -> None:
    """Make something at a path, and the directory before it if it is missing."""
    try:
        make()
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        make()


def _numbers(names: Iterable[str]) -> list[int]:
    return [int(name) for name in names if name.isdigit()]


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > MESSAGE_LIMIT:
                message = f"{path} has more than {MESSAGE_LIMIT} bytes: no member of the job has written that"
                raise StoreAccessError(message)
            return file.read()
    except FileNotFoundError:
        return None


def _read_whole(path: str) -> bytes | None:
    """Read a file that may be written just now."""
    found, again = _read(path), _read(path)
    while found != again:
        found, again = again, _read(path)
    return found


def _overwrite(path: str, before: bytes, value: bytes) -> bool:
    """Write over a file of the same length, in one call; returns False where it is gone or has another content."""
    try:
        with open(path, "r+b", buffering=0) as file:
            if file.read() != before:
                return False
            return os.pwrite(file.fileno(), value, 0) == len(value)
    except OSError as error:
        if error.errno in _GONE:
            return False
        raise


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _list(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
