"""What the job stores over etcd's two APIs share: how they read.

Rules
- An entry of a stream is a key of its own. The order is that in which etcd created the keys, and a position is etcd's
  number of that moment (a revision, an index). A reader reads what is there once, then follows the directory.
- So does who waits for a key: its directory is read once and followed, and the next decision costs no request. Such a
  directory should be small.
- A server that hangs lets those who follow it wait in silence. So what was silent for some seconds is checked: what is
  new is read, from whichever server answers. Where that shows something that should have been told, the next server is
  followed.
- An answer that is older than one before it means that etcd was restored from a backup (`revisions`): the object is
  closed, and the caller opens another one and reads from the beginning.
- A request may be done twice (see `http_client`); each is made so that this changes nothing.
"""

# ruff: noqa: D102 - JobStore says what the methods promise
from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import contextmanager

from elastic_run.records import dataclass
from elastic_run.store.backoff import Backoff
from elastic_run.store.errors import StoreConnectionError
from elastic_run.store.job_path import job_path
from elastic_run.store.jobstore.api import ENTRIES_AT_ONCE, JobStore
from elastic_run.store.jobstore.compression import decompress, decompress_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from elastic_run.store.jobstore.http_client import HttpClient
    from elastic_run.store.jobstore.revisions import Revisions

#: Seconds that the pauses between attempts take at most: the first one, and any.
_PAUSE = 0.1
_LAST_PAUSE = 0.8


class HistoryLostError(Exception):
    """What happened since is no longer known to etcd: read the directory anew."""


@dataclass
class Item:
    """A key with its value, or the news that it was deleted.

    Args:
        key: The key.
        value: What is stored; None if it was deleted.
        created: etcd's number when the key was made.
        changed: etcd's number when it got this value.
    """

    key: str
    value: bytes | None
    created: int
    changed: int


@dataclass
class Directory:
    """What was read of a directory.

    Args:
        items: Its keys, in the order in which they were made.
        number: etcd's number then.
    """

    items: list[Item]
    number: int


class Watch(ABC):
    """News of a directory, as one server tells them."""

    @abstractmethod
    def next_items(self, timeout: float) -> list[Item]:
        """Wait for news.

        Args:
            timeout: Seconds.

        Returns:
            The news in their order; none when nothing came in time, or none of it was for us.

        Raises:
            StoreConnectionError: The watch is over.
            HistoryLostError: It can't tell all of it.
        """


class EtcdReader(ABC):
    """How one of etcd's APIs reads.

    Attributes:
        http: The cluster.
        revisions: What this agent has seen of it.
    """

    http: HttpClient
    revisions: Revisions

    @abstractmethod
    def read_directory(self, directory: str, *, created_after: int = 0, changed_after: int = 0) -> Directory:
        """Read a directory.

        Args:
            directory: What its keys begin with; it ends with `/`.
            created_after: Leave out what was made up to this number.
            changed_after: Leave out what was not changed behind this number.

        Returns:
            What is there; all that was done before the call is in it.
        """

    @abstractmethod
    def watch(self, directory: str, number: int) -> Watch:
        """Follow a directory, from one of etcd's numbers on. Takes up the client's connection."""

    @abstractmethod
    def clone(self) -> EtcdReader:
        """Return another client of the cluster, not yet connected."""

    def make_backoff(self) -> Backoff:
        """Return the pauses between attempts."""
        return Backoff(_PAUSE, _LAST_PAUSE, self.http.draw)


class Follower:
    """What one directory brings, whichever server tells it.

    Args:
        reader: For reading.
        directory: What the keys begin with; it ends with `/`.
        quiet: Seconds of silence after which to look oneself.
    """

    def __init__(self, reader: EtcdReader, directory: str, quiet: float) -> None:
        self._reader = reader
        self._watching = reader.clone()
        self._directory = directory
        self._quiet = quiet
        self._watch: Watch | None = None
        self._known = 0
        self._heard_at = 0.0
        self._backoff = reader.make_backoff()

    def close(self) -> None:
        """Close the watch, from any thread."""
        self._watching.http.close()

    def read(self, *, created_after: int = 0) -> list[Item]:
        """Read the directory; `next_items` goes on from there."""
        if self._watch is not None:
            self._drop_watch()
        there = self._reader.read_directory(self._directory, created_after=created_after)
        self._known = there.number
        self._heard_at = time.monotonic()
        return there.items

    def next_items(self, timeout: float) -> list[Item]:
        """Wait for news.

        Args:
            timeout: Seconds.

        Returns:
            What has changed since, in order; may be none before the time is over.

        Raises:
            StoreConnectionError: No server is able to answer.
            HistoryLostError: It was too long ago.
        """
        until_check = self._heard_at + self._quiet - time.monotonic()
        if until_check <= 0:
            return self._check()
        try:
            if self._watch is None:
                self._watch = self._watching.watch(self._directory, self._known + 1)
            items = self._watch.next_items(min(timeout, until_check))
        except StoreConnectionError:
            # If the store is out of reach the look itself says so.
            self._drop_watch()
            items = self._check()
            if not items:
                time.sleep(min(timeout, self._backoff.next_pause()))
            return items
        except HistoryLostError:
            self._drop_watch()
            raise
        self._backoff.reset()
        if items:
            self._known = items[-1].changed
            self._heard_at = time.monotonic()
        return items

    def _check(self) -> list[Item]:
        """Read what should have been told."""
        there = self._reader.read_directory(self._directory, changed_after=self._known)
        self._heard_at = time.monotonic()
        if there.items:
            self._drop_watch()
        if self._watch is None:
            self._known = there.number
        return there.items

    def _drop_watch(self) -> None:
        self._watch = None
        self._watching.http.prefer_next()


class EtcdJobStore(JobStore):
    """The reading half of a job's part of etcd.

    Args:
        reader: The cluster; this object owns it from now on.
        run_id: The job.
        lease: Seconds after which etcd forgets the heartbeat of a node that stopped beating.
        prefix: What comes before `elastic-run/`.

    Attributes:
        keys_at_once: Heartbeats up to which reading each by its key is cheaper than reading the directory of all.
    """

    expires_heartbeats = True
    keys_at_once: int

    def __init__(self, reader: EtcdReader, run_id: str, lease: float, prefix: str) -> None:
        self.run_id = run_id
        self.name = ",".join(map(str, reader.http.endpoints))
        self._reader = reader
        self._lease = lease
        self._prefix = prefix
        self._root = f"{prefix}{job_path(run_id)}/"
        self._is_closed = False
        self._followers: dict[str, Follower] = {}
        # By stream, the position up to which its follower has delivered; by directory, the values it has brought.
        self._positions: dict[str, int] = {}
        self._mirrors: dict[str, dict[str, bytes]] = {}
        # The directory that `follow` has read just now.
        self._fresh = ""

    @property
    def restores(self) -> int:
        return self._reader.revisions.restores

    def set_timeout(self, timeout: float) -> None:
        self._reader.http.timeout = timeout

    def close(self) -> None:
        self._is_closed = True
        self._reader.http.close()
        for follower in tuple(self._followers.values()):
            follower.close()

    def read(self, stream: str, position: int, timeout: float) -> tuple[list[bytes], int]:
        deadline = time.monotonic() + timeout
        with self._closes_on_loss():
            follower = self._follow(self._stream(stream))
            is_behind = timeout <= 0 or self._positions.get(stream) != position
            items = follower.read(created_after=position) if is_behind else []
            while True:
                entries, position = self._deliver(stream, items, position)
                left = deadline - time.monotonic()
                if entries or left <= 0:
                    return entries, position
                try:
                    items = follower.next_items(left)
                except HistoryLostError:
                    items = follower.read(created_after=position)

    def _deliver(self, stream: str, items: Sequence[Item], position: int) -> tuple[list[bytes], int]:
        news: list[Item] = []
        for item in items:
            # A later change of a key is an append that was sent twice, which a watch tells twice.
            if item.created > position and len(news) < ENTRIES_AT_ONCE:
                news.append(item)
                position = item.created
        has_more = any(item.created > position for item in items)
        self._positions[stream] = -1 if has_more else position  # the rest has to be read again
        return decompress_all(item.value for item in news if item.value is not None), position

    def wait(self, key: str, timeout: float) -> bytes | None:
        return self._wait([self._key(key)], timeout)[0]

    def wait_beside(self, key: str, other: str, timeout: float) -> tuple[bytes | None, bytes | None]:
        value, beside = self._wait([self._key(key), self._key(other)], timeout)
        return value, beside

    def _wait(self, paths: Sequence[str], timeout: float) -> list[bytes | None]:
        """Wait for the first of some keys of a directory, and return what lies at all of them."""
        deadline = time.monotonic() + timeout
        path = paths[0]
        directory = path.rpartition("/")[0] + "/"
        with self._closes_on_loss():
            mirror = self._mirrors.get(directory)
            is_fresh, self._fresh = self._fresh == directory, ""
            if mirror is not None and is_fresh and path in mirror:
                return _pick(mirror, paths)
            if timeout <= 0 or (mirror is not None and path in mirror):
                # What the watch has brought before may be gone again.
                values = self._look(paths)
                if values[0] is not None or timeout <= 0:
                    return values
            follower = self._follow(directory)
            if mirror is None:
                mirror = self._mirrors[directory] = _reflect({}, follower.read())
            else:
                mirror.pop(path, None)
            while path not in mirror:
                left = deadline - time.monotonic()
                if left <= 0:
                    return _pick(mirror, paths)
                try:
                    _reflect(mirror, follower.next_items(left))
                except HistoryLostError:
                    mirror.clear()
                    _reflect(mirror, follower.read())
            return _pick(mirror, paths)

    def follow(self, key: str) -> bytes | None:
        path = self._key(key)
        with self._closes_on_loss():
            directory = path.rpartition("/")[0] + "/"
            mirror = self._mirrors[directory] = _reflect({}, self._follow(directory).read())
            self._fresh = directory
            stored = mirror.get(path)
        return None if stored is None else decompress(stored)

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._closes_on_loss():
            return self._look([self._key(key) for key in keys])

    @abstractmethod
    def _look(self, paths: Sequence[str]) -> list[bytes | None]:
        """Return what is stored there now, decompressed."""

    def fetch_heartbeats(self, nodes: Sequence[str]) -> list[bytes | None]:
        paths = [self._heartbeat(node) for node in nodes]
        with self._closes_on_loss():
            if len(paths) <= self.keys_at_once:
                return self._look(paths)
            there = {item.key: item.value for item in self._reader.read_directory(self._heartbeat("")).items}
            return [None if (value := there.get(path)) is None else decompress(value) for path in paths]

    def _follow(self, directory: str) -> Follower:
        follower = self._followers.get(directory)
        if follower is None:
            follower = self._followers[directory] = Follower(self._reader, directory, self._lease)
            if self._is_closed:
                follower.close()  # just now, by another thread that could not see it
        return follower

    @contextmanager
    def _closes_on_loss(self) -> Iterator[None]:
        try:
            yield
        except StoreConnectionError:
            self.close()
            raise

    # --- where things are ----------------------------------------------------------------------------------------
    def _key(self, key: str) -> str:
        # One without a directory gets one: else to wait for it would be to follow all keys.
        return f"{self._root}k/{key}" if "/" in key else f"{self._root}k/-/{key}"

    def _stream(self, stream: str) -> str:
        return f"{self._root}s/{stream}/"

    def _heartbeat(self, node: str) -> str:
        return f"{self._root}b/{node}"


def _pick(mirror: Mapping[str, bytes], paths: Sequence[str]) -> list[bytes | None]:
    # The mirror is the directory of one moment: what etcd did before the first key was made is in it.
    return [None if (stored := mirror.get(path)) is None else decompress(stored) for path in paths]


def _reflect(mirror: dict[str, bytes], items: Sequence[Item]) -> dict[str, bytes]:
    for item in items:
        if item.value is None:
            mirror.pop(item.key, None)
        else:
            mirror[item.key] = item.value
    return mirror
