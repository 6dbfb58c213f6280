"""The lease in a directory of a file system that all nodes share: no server at all.

Rules
- Each holder has a file of its own, `coordinator.<term>`, and the highest term counts. The file appears whole or not at
  all: it is written under another name, then linked to its place, where the first wins. This holds on NFS as well. (A
  file system without hard links refuses.) A lock was rejected: an agent that is stopped would block all others.
- An agent may be stopped between any two calls and go on much later. A late agent finds its term taken, or places a
  file below the highest term, which it removes again.
- A renewal changes a counter, in place: a rename would bring back the file of an earlier holder. So a file is read
  until two reads agree.
- A lease has expired for an agent that has not seen the counter change for the time to live, by the agent's own clock.
  While an agent can't read the file no lease ages for it: the holder may be unable to write, and gets time to do so. To
  release is to write a time to live of 0.
- The file of the last holder stays, so that terms grow. `remove` deletes it.
- A client of NFS may list a directory from a cache of many seconds, until it makes a file there itself. So an agent
  makes its file first, then reads who has the lease.
"""

# ruff: noqa: D102 - LeaseStore says what the methods promise
from __future__ import annotations

import errno
import os
import secrets
import time
from contextlib import contextmanager, suppress

from elastic_run.records import dataclass
from elastic_run.rendezvous.coordination.lease import COORDINATOR, LAST_ROUND, Holder, LeaseStore, job_path
from elastic_run.store.errors import UNREACHABLE, StoreAccessError, StoreConnectionError, StoreTokenError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

#: What is beside the user's path where that is no directory.
_BESIDE = ".d"
#: What the names of files begin with that have no place yet.
_DRAFT = "draft"
#: Bytes of a file: a lease and a text beside it are small.
_LIMIT = 1 << 20
#: What a file that another node has removed meanwhile gives: NFS finds it stale.
_GONE = (errno.ENOENT, errno.ESTALE)


@dataclass(frozen=True, slots=True)
class _Lease:
    """What a holder's file says: a line with two numbers of fixed lengths, then the value."""

    term: int  # the number in the file's name
    count: int  # of renewals
    ttl: float  # in seconds; 0 if the lease was released
    value: str  # as it is stored

    def head(self) -> str:
        return f"{self.count:020d} {self.ttl:016.3f}\n"


class FileLease(LeaseStore):
    """A job's lease in a directory; where `path` isn't one, the directory is beside it, with `.d` behind its name."""

    def __init__(self, path: str, run_id: str, *, secret: bytes | None = None) -> None:
        super().__init__(path, run_id, secret)
        self._base = path.rstrip("/") if os.path.isdir(path) or path.endswith("/") else path + _BESIDE
        self._root = os.path.join(self._base, job_path(run_id))
        self._seen: tuple[int, str] | None = None
        self._seen_at = 0.0
        self._held_until: dict[int, float] = {}

    def read(self) -> Holder | None:
        seen, self._seen = self._seen, None  # after a read that failed the lease begins anew
        with self._explains():
            lease = self._read_lease()
        if lease is None:
            return None
        now = time.monotonic()
        self._seen = (lease.term, lease.head())
        if self._seen != seen:
            self._seen_at = now
        is_valid = now - self._seen_at < lease.ttl
        try:
            return Holder(self._seal.open(COORDINATOR, lease.value), lease.term, is_valid=is_valid)
        except StoreTokenError:
            if is_valid:
                raise
            return Holder("", lease.term, is_valid=False)  # of an earlier job that was killed, with another token

    def acquire(self, value: str, ttl: float, *, instead_of: Holder | None = None) -> Holder | None:
        begun = time.monotonic()
        stored = self._seal.close(COORDINATOR, value)
        with self._explains(), self._written(_Lease(0, 0, ttl, stored).head() + stored) as draft:
            there = self.read()
            if there is not None and there.is_valid:
                if there.value == value and self.renew(there, ttl):
                    return there
                if there.value != value and there != instead_of:
                    return None
            term = 1 if there is None else there.term + 1
            if not self._claim(term, draft, stored):
                return None
        self._held_until[term] = begun + ttl
        return Holder(value, term)

    def _claim(self, term: int, draft: str, stored: str) -> bool:
        """Give a file the place of a term; returns whether it has this place, and no higher term is there."""
        place = self._place(term)
        try:
            os.link(draft, place)
        except FileExistsError:
            pass  # another agent's, or ours: NFS may repeat a call whose answer was lost
        mine = self._read_term(term)
        if mine is None or mine.value != stored:
            return False
        terms = self._list_terms()
        if max(terms, default=term) > term:  # others had this term, went on, and removed its file before it was ours
            _remove(place)
            return False
        for past in terms:
            if past < term:
                _remove(self._place(past))
        return True

    def renew(self, held: Holder, ttl: float) -> bool:
        begun = time.monotonic()
        if begun >= self._held_until.get(held.term, begun + ttl):
            return False
        if not self._write_head(held, ttl):
            return False
        self._held_until[held.term] = begun + ttl
        return True

    def release(self, held: Holder) -> None:
        self._write_head(held, 0.0)
        self._held_until.pop(held.term, None)

    def _write_head(self, held: Holder, ttl: float) -> bool:
        """Write over the numbers of a holder's file; returns False where it isn't the newest holder any more."""
        with self._explains():
            lease = self._read_lease()
            stored = self._seal.close(COORDINATOR, held.value)
            if lease is None or not lease.ttl or (lease.term, lease.value) != (held.term, stored):
                return False
            head = _Lease(lease.term, lease.count + 1, ttl, lease.value).head().encode()
            try:
                with open(self._place(held.term), "r+b", buffering=0) as file:
                    is_whole = os.pwrite(file.fileno(), head, 0) == len(head)
            except OSError as error:
                if error.errno in _GONE:
                    return False
                raise
            # This agent may have been stopped before it wrote, for so long that another one has the lease by now.
            return is_whole and max(self._list_terms(), default=0) == held.term

    def write_last(self, text: str) -> None:
        with self._explains(), self._written(self._seal.close(LAST_ROUND, text)) as path:
            os.replace(path, os.path.join(self._root, LAST_ROUND))

    def _read_last(self) -> str:
        with self._explains():
            return self._read_file(LAST_ROUND) or ""

    def remove(self) -> None:
        with self._explains():
            for name in self._list_names():
                if name.partition(".")[0] in (COORDINATOR, LAST_ROUND, _DRAFT):
                    _remove(os.path.join(self._root, name))
            with suppress(OSError):  # another job is there, or a job of an earlier release
                os.rmdir(self._root)
                os.rmdir(os.path.dirname(self._root))
                if self._base.endswith(_BESIDE):
                    os.rmdir(self._base)

    # --- files -------------------------------------------------------------------------------------------------------
    def _read_lease(self) -> _Lease | None:
        """Return the lease of the highest term, or None."""
        while terms := self._list_terms():
            lease = self._read_term(max(terms))
            if lease is not None:
                return lease
            # Removed just now; an NFS client that lists it nevertheless lists anew after it has made a file.
            with self._written(""):
                pass
        return None

    def _read_term(self, term: int) -> _Lease | None:
        found = self._read_file(f"{COORDINATOR}.{term}")
        while found is not None:
            again = self._read_file(f"{COORDINATOR}.{term}")
            if again == found:
                break
            found = again
        if found is None:
            return None
        head, _, value = found.partition("\n")
        count, _, ttl = head.partition(" ")
        try:
            return _Lease(term, int(count), float(ttl), value)
        except ValueError as error:
            message = f"{self._place(term)} is no lease: no member of the job has written that"
            raise StoreAccessError(message) from error

    def _read_file(self, name: str) -> str | None:
        try:
            with open(os.path.join(self._root, name), "rb") as file:
                content = file.read(_LIMIT + 1)
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise
        if len(content) > _LIMIT:
            message = f"{self._root}/{name} has more than {_LIMIT} bytes: no member of the job has written that"
            raise StoreAccessError(message)
        return content.decode(errors="replace")

    def _list_terms(self) -> list[int]:
        parts = (name.partition(".") for name in self._list_names())
        return [int(term) for name, _, term in parts if name == COORDINATOR and term.isdecimal()]

    def _list_names(self) -> list[str]:
        try:
            return os.listdir(self._root)
        except OSError as error:
            if error.errno in _GONE:
                return []
            raise

    def _place(self, term: int) -> str:
        return os.path.join(self._root, f"{COORDINATOR}.{term}")

    @contextmanager
    def _written(self, text: str) -> Iterator[str]:
        """Write a file under a name of its own, and see to it that the name goes."""
        os.makedirs(self._root, exist_ok=True)
        new = os.path.join(self._root, f"{_DRAFT}.{secrets.token_hex(8)}")
        try:
            with open(new, "xb") as file:
                file.write(text.encode())
            yield new
        finally:
            _remove(new)

    @contextmanager
    def _explains(self) -> Iterator[None]:
        try:
            yield
        except (PermissionError, NotADirectoryError) as error:
            message = f"{self.name} can't be used as a rendezvous: {error.strerror}: {error.filename}"
            raise StoreAccessError(message) from error
        except StoreConnectionError:
            raise
        except OSError as error:
            place = f": {error.filename}" if error.filename else ""
            message = f"the rendezvous at {self.name} fails: {error.strerror}{place}"
            raise StoreConnectionError(message, UNREACHABLE) from error


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError as error:
        if error.errno not in _GONE:
            raise
