"""The record of one agent: which seat it has in which round. A process that has to prove its death reads the record.

Rules
- A proved death takes a seat out of the quorum of a log (`facts.SeatDead`). So the record must never be older than
  what the agent has said: it is written before the agent is told of a round (`running`), and before the agent says in a
  store that it has read a `Prepare` (`confirmed`, with the store's id): the log there may form the next round on that.
- A round of the same nodes needs no `Prepare`. Its members are this round's, so a dead one among them gives no other
  node a majority, and `running` is right until the agent is told of it.
- The content is JSON with a format and a version, shorter than a page of memory and never made shorter: one write
  replaces it, so a process that is killed leaves the old content or the new one.
- A record is read by a process that holds the exclusive lock on it, or by the guardian of the agent, after its death.
  What can't be read proves nothing, and neither does a record of before the machine's last start: on a disk the last
  write may be missing.
- Where the record can't be written any more it is emptied and removed: no proof is better than an old one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading

from elastic_run.core.protocol.codec import MessageError, decode, encode, from_document, register, to_document
from elastic_run.core.protocol.facts import SEAT_CONFIRMED, SEAT_RUNNING, SEAT_UNTOLD, Join
from elastic_run.records import dataclass, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.protocol.documents import Assignment
    from elastic_run.core.protocol.messages import Copy, Fact
    from elastic_run.rendezvous.elastic.node_death.record_directory import RecordDirectory

_log = logging.getLogger(__name__)

__all__ = ["Record", "RecordedSeat", "SeatRecord", "make_prefix", "read_record"]

_FORMAT = "elastic-run seat record"
_VERSION = 1
#: Bytes that are read of a file; a record has less than a page.
_LARGEST = 4096
_PREFIX = "seat-"


@register
@dataclass(frozen=True, slots=True)
class RecordedSeat:
    """An agent's part in a round, as `facts.SeatDead` has it.

    Args:
        incarnation: Of the round's job.
        round_id: The round's unique id.
        round_index: Its number.
        rank: The agent's group rank in it.
        status: `running`, `confirmed`, or `untold` before the agent was told of a round.
        store_id: The id of the store in which it confirmed the last `Prepare` since then, as text; "" for none.
    """

    incarnation: str
    round_id: str
    round_index: int
    rank: int
    status: str = SEAT_RUNNING
    store_id: str = ""

    def __post_init__(self) -> None:
        if self.status not in (SEAT_RUNNING, SEAT_CONFIRMED, SEAT_UNTOLD):
            message = f"RecordedSeat.status: {self.status!r} is none of a seat"
            raise MessageError(message)


_UNTOLD = RecordedSeat("", "", 0, 0, SEAT_UNTOLD)


@dataclass(frozen=True, slots=True)
class Record:
    """The content of a record.

    Args:
        format: `_FORMAT`.
        version: `_VERSION`.
        boot: The id of the machine's start in which it was written.
        job: What tells jobs apart; see `make_prefix`.
        node: The agent's id among the nodes of its job.
        seat: Its seat in the last round that it was told of; None if the record can't be read.
    """

    format: str
    version: int
    boot: str
    job: str
    node: str
    seat: RecordedSeat | None = None


class SeatRecord:
    """The record of this agent.

    Args:
        directory: Where it is.
        job: What tells jobs apart.
        node: This agent's id.

    Raises:
        OSError: It can't be written.
    """

    def __init__(self, directory: RecordDirectory, job: str, node: str) -> None:
        self._directory = directory
        self._record = Record(_FORMAT, _VERSION, read_boot_id(), job, node, _UNTOLD)
        self._confirmed: Copy | None = None
        self._length = 0
        self._lock = threading.RLock()
        self._name = make_prefix(job) + os.urandom(8).hex()
        self._fd = directory.create(self._name, self._encode(self._record))

    @property
    def path(self) -> str:
        """Where it is; "" when it was given up."""
        return os.path.join(self._directory.path, self._name) if self._fd >= 0 else ""

    def note_round(self, assignment: Assignment) -> None:
        """Note the seat in a round, before the agent is told of the round."""
        seat = RecordedSeat(assignment.incarnation, assignment.round_id, assignment.round, assignment.group_rank)
        self._write(seat)

    def note_fact(self, fact: Fact, said_in: bytes | None) -> None:
        """Note a fact on which a log may form the next round, before the fact is said.

        Args:
            fact: The fact.
            said_in: The id of the store in which it is said.
        """
        if not isinstance(fact, Join) or fact.prepared is None:
            return
        with self._lock:
            seat, is_new = self._record.seat, fact.prepared != self._confirmed
            self._confirmed = fact.prepared
            if seat is not None and is_new:
                status = SEAT_UNTOLD if seat.status == SEAT_UNTOLD else SEAT_CONFIRMED
                self._write(replace(seat, status=status, store_id=_to_text(said_in)))

    def remove(self) -> None:
        """Remove it: the job is over, so the seat counts nowhere."""
        self._directory.remove(self._name)

    def close(self) -> None:
        """Let go of it: from now on this agent says nothing any more."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _write(self, seat: RecordedSeat) -> None:
        with self._lock:
            if seat == self._record.seat or self._fd < 0:
                return
            self._record = replace(self._record, seat=seat)
            try:
                os.pwrite(self._fd, self._encode(self._record), 0)
            except OSError as error:
                _log.debug("elastic-run: the seat record %s can't be written: %s", self.path, error)
                os.ftruncate(self._fd, 0)
                self._directory.remove(self._name)
                os.close(self._fd)
                self._fd = -1

    def _encode(self, record: Record) -> bytes:
        document = encode(to_document(record))
        # Blanks cover what was there before.
        self._length = max(self._length, len(document))
        return document.ljust(self._length)


def make_prefix(job: str) -> str:
    """Return what the names of all records of a job begin with.

    Args:
        job: What tells jobs apart: the kind of the store, its endpoints, and the job's name in it.
    """
    return f"{_PREFIX}{hashlib.sha256(job.encode(errors='surrogateescape')).hexdigest()[:16]}-"


def read_record(fd: int, job: str) -> Record:
    """Read a record.

    Args:
        fd: An open file, which may hold anything.
        job: What tells jobs apart.

    Returns:
        The record.

    Raises:
        MessageError: It is none of this job, of this version and of this start of the machine.
        OSError: It can't be read.
    """
    document = decode(os.pread(fd, _LARGEST, 0))
    if document.get("format") != _FORMAT or document.get("version") != _VERSION:
        message = (
            f"format {document.get('format')!r}, version {document.get('version')!r} is not {_FORMAT!r}, {_VERSION}"
        )
        raise MessageError(message)
    record = from_document(Record, document)
    if record.job != job:
        message = f"it is of another job, {record.job!r}"
        raise MessageError(message)
    if record.boot != read_boot_id():
        message = "it was written before the machine's last start"
        raise MessageError(message)
    return record


def read_boot_id() -> str:
    """Return the id of this machine's last start.

    Raises:
        OSError: The kernel does not say.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _to_text(store_id: bytes | None) -> str:
    return (store_id or b"").decode("ascii", "replace")
