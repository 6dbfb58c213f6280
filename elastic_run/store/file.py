"""The job store in a directory of a file system that all nodes share: no server at all.

Rules
- A file appears whole or not at all: it is written under a name of its own, then linked to its place, where the first
  wins, or renamed to it, where the last wins. Both hold on NFS, unlike appending to one file.
- A stream's entries are files with numbers. A writer takes the number behind the last one; a reader goes up to the
  first that is missing. There are no gaps: a number is taken together with its entry.
- Trimming first raises the stream's floor, then deletes. A writer looks at the floor after it has placed its entry: at
  or below the floor nobody has seen it, and it takes another number.
- What depends on what was there before is changed under a lock (flock, which NFS has too): else an agent that was
  stopped in between would undo what others did meanwhile. Nothing else takes the lock.
- A file system has no waits, so waits look again and again, ever more slowly. They list the directory: to ask for one
  name would be answered from a cache on NFS for up to a minute.
- Nothing expires; `remove_job` takes it all away.
"""

# ruff: noqa: D102 - JobStore says what the methods promise
from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import threading
import time
from contextlib import contextmanager
from urllib.parse import quote

from elastic_run.store.errors import SILENT, UNREACHABLE, StoreAccessError, StoreConnectionError
from elastic_run.store.job_store import ENTRIES_AT_ONCE, JobStore, job_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import TypeVar

    _T = TypeVar("_T")

_FIRST_PAUSE = 0.01
_LAST_PAUSE = 0.25
_FLOOR = "floor"
_LOCK = "lock"
#: Seconds to wait for the lock, whose holder needs a millisecond.
_LOCK_WITHIN = 10.0
_BESIDE = ".d"
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
            for part in ("b", "k", "s", "new"):
                os.makedirs(os.path.join(self._root, part), exist_ok=True)

    # --- streams -------------------------------------------------------------------------------------------------
    def append(self, stream: str, value: bytes) -> None:
        with self._explains(), self._written(value) as new:
            while True:
                number = max(self._numbers(stream), default=self._floor(stream)) + 1
                place = self._entry(stream, number)
                if not self._link(new, place):
                    continue
                if self._floor(stream) < number:
                    return
                _remove(place)

    def read(self, stream: str, position: int, timeout: float) -> tuple[list[bytes], int]:
        def look() -> tuple[list[bytes], int] | None:
            there = self._numbers(stream)
            behind = max(position, self._floor(stream) if there and position + 1 not in there else 0)
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
            with self._locked():  # else one that was stopped between the two would lower it
                if self._floor(stream) < position:
                    with self._written(b"%d" % position) as new:
                        self._rename(new, self._entry(stream, _FLOOR))
            for number in self._numbers(stream):
                if number <= position:
                    _remove(self._entry(stream, number))

    def _numbers(self, stream: str) -> set[int]:
        return {int(name) for name in _list(os.path.dirname(self._entry(stream, _FLOOR))) if name.isdigit()}

    def _floor(self, stream: str) -> int:
        value = _read(self._entry(stream, _FLOOR))
        return int(value) if value is not None and value.isdigit() else 0

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
        with self._explains(), self._locked():
            there = _read(self._key(key))
            if there == expected:
                with self._written(value) as new:
                    self._rename(new, self._key(key))
                there = value
            return there

    def wait(self, key: str, timeout: float) -> bytes | None:
        place = self._key(key)

        def look() -> bytes | None:
            return _read(place) if os.path.basename(place) in _list(os.path.dirname(place)) else None

        with self._explains():
            return self._poll(look, timeout)

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._explains():
            return [_read(self._key(key)) for key in keys]

    def write(self, values: Mapping[str, bytes]) -> None:
        with self._explains():
            for key, value in values.items():
                with self._written(value) as new:
                    self._rename(new, self._key(key))

    def delete(self, keys: Sequence[str]) -> None:
        with self._explains():
            for key in keys:
                _remove(self._key(key))

    # --- beats ---------------------------------------------------------------------------------------------------
    def write_beat(self, node: str, value: bytes) -> None:
        with self._explains(), self._written(value) as new:
            self._rename(new, self._beat(node))

    def fetch_beats(self, nodes: Sequence[str]) -> list[bytes | None]:
        with self._explains():
            return [_read(self._beat(node)) for node in nodes]

    def forget_beats(self, nodes: Sequence[str]) -> None:
        with self._explains():
            for node in nodes:
                _remove(self._beat(node))

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

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the job's lock, which ends with its holder's process: for what depends on what was there before."""
        with open(os.path.join(self._root, _LOCK), "ab") as file:
            is_mine = self._poll(lambda: _try_lock(file.fileno()) or None, _LOCK_WITHIN)
            if not is_mine:
                message = f"the job store in {self.name} was locked for {_LOCK_WITHIN:.0f} s: another agent is stopped"
                raise StoreConnectionError(message, SILENT)
            yield

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
            message = f"can't use {self.name} as a job store: {error.strerror}: {error.filename}"
            raise StoreAccessError(message) from error
        except StoreConnectionError:
            raise
        except OSError as error:
            self.close()
            message = f"the job store in {self.name} fails: {error.strerror}: {error.filename}"
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

    def _beat(self, node: str) -> str:
        return os.path.join(self._root, "b", quote(node, ""))


def _in_directory(path: str, make: Callable[[], None]) -> None:
    """Make something at a path, and the directory before it if it is missing."""
    try:
        make()
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        make()


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


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
