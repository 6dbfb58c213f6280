"""The deaths that this node can prove to its job: deaths of agents that ran on this machine before it.

Rules
- A record whose exclusive lock this node has got is of a dead agent: it is told to each store that this node comes to,
  before this node's own first fact there.
- The lock is kept, and with it the file, until this node has a seat in a round itself, or the job is over. If this node
  dies before, the next agent on this machine finds both records.
- A guardian holds its agent's record until the workers are gone. So a node that waits looks again with its heartbeats.
- A record that can't be read is named once, with its path, and proves nothing.
"""

from __future__ import annotations

import hashlib
import os
import threading

from elastic_run.core.protocol import job_keys, messages
from elastic_run.core.protocol.codec import MessageError
from elastic_run.core.protocol.facts import SeatDead
from elastic_run.rendezvous.elastic.node_death.record_directory import RecordDirectory
from elastic_run.rendezvous.elastic.node_death.seat_record import Record, SeatRecord, make_prefix, read_record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.core.protocol.documents import Assignment
    from elastic_run.core.protocol.facts import Fact
    from elastic_run.rendezvous.elastic.backend.base import Backend
    from elastic_run.store.jobstore.api import JobStore

__all__ = ["DeathProofs", "death_facts", "find_notice_limit", "name_job"]

#: Characters of a job's name in a record.
_SHOWN = 64
#: Leases for which a guardian tries the stores, and further seconds.
_LEASES = 2
_FURTHER = 10.0


class DeathProofs:
    """This node's own record, and the records of dead agents that it has found.

    Args:
        job: What tells jobs apart.

    Attributes:
        job: The same.
        say: Tells the user one line.
    """

    def __init__(self, job: str) -> None:
        self.say: Callable[[str], None] = lambda _: None
        self.job = job
        self._directory: RecordDirectory | None = None
        self._own: SeatRecord | None = None
        self._found: dict[str, tuple[int, Record]] = {}
        self._unreadable: set[str] = set()
        self._told: dict[str, tuple[bytes | None, int]] = {}
        self._lock = threading.RLock()

    def open(self, node: str) -> None:
        """Make this node's record, and look for records of earlier agents; do nothing without a directory."""
        self._directory = RecordDirectory.open(os.environ)
        if self._directory is None:
            return
        try:
            self._own = SeatRecord(self._directory, self.job, node)
            self._directory.sweep()
        except OSError:
            self._own = None
        self.look()

    @property
    def path(self) -> str:
        """Where this node's record is; "" where there is none."""
        return "" if self._own is None else self._own.path

    @property
    def found(self) -> list[Record]:
        """The records of dead agents that this node has."""
        with self._lock:
            return [record for _, record in self._found.values()]

    def look(self) -> None:
        """Look for records that no process holds any more."""
        with self._lock:
            if self._directory is None:
                return
            for name, fd in self._directory.take_dead(make_prefix(self.job)):
                try:
                    self._found[name] = fd, read_record(fd, self.job)
                except (MessageError, OSError) as error:
                    os.close(fd)
                    self._name_unreadable(os.path.join(self._directory.path, name), error)

    def _name_unreadable(self, path: str, error: Exception) -> None:
        if path not in self._unreadable:
            self._unreadable.add(path)
            self.say(f"the seat record {path} can't be used, so it proves no agent's death: {error}")

    def tell(self, store: JobStore, store_id: bytes | None, known_round: int) -> None:
        """Tell a store of the death_proofs that it was not told of yet, or only before its log knew of this round.

        Args:
            store: The store.
            store_id: Its id.
            known_round: The newest round that its log has told this node of.

        Raises:
            StoreError: The store can't be reached; it will be told all again.
        """
        with self._lock:
            found = {name: record for name, (_, record) in self._found.items()}
        for name, record in found.items():
            if self._told.get(name) != (store_id, known_round):
                for fact in death_facts(record):
                    store.append(job_keys.FACTS, messages.to_json(fact))
                self._told[name] = store_id, known_round

    def note_fact(self, fact: Fact, store_id: bytes | None) -> None:
        """Note in this node's record what it is about to say; see `SeatRecord.note_fact`."""
        if self._own is not None:
            self._own.note_fact(fact, store_id)

    def note_round(self, assignment: Assignment) -> None:
        """Note in this node's record the round that its agent is about to be told; the dead of before count no more."""
        if self._own is not None:
            self._own.note_round(assignment)
        self._let_go(is_over=True)

    def close(self, *, is_over: bool) -> None:
        """Let go of all records: this node says nothing any more.

        Args:
            is_over: Whether the job has ended, so that nobody needs the records.
        """
        with self._lock:
            self._let_go(is_over=is_over)
            if self._own is not None:
                if is_over:
                    self._own.remove()
                self._own.close()
            if self._directory is not None:
                self._directory.close()
                self._directory = None

    def _let_go(self, *, is_over: bool) -> None:
        with self._lock:
            while self._found:
                name, (fd, _) = self._found.popitem()
                if is_over and self._directory is not None:
                    self._directory.remove(name)
                os.close(fd)


def death_facts(record: Record) -> list[Fact | SeatDead]:
    """Return the facts about a dead agent."""
    facts: list[Fact | SeatDead] = [messages.Leave(record.node, messages.LAST_SEQUENCE, messages.DIED)]
    seat = record.seat
    if seat is not None:
        facts.append(
            SeatDead(
                node=record.node,
                round_id=seat.round_id,
                incarnation=seat.incarnation,
                round_index=seat.round_index,
                rank=seat.rank,
                status=seat.status,
                store_id=seat.store_id,
            )
        )
    return facts


def find_notice_limit(lease: float) -> float:
    """Return the seconds for which a guardian tells a job of its agent's death."""
    return _LEASES * lease + _FURTHER


def name_job(backend: Backend) -> str:
    """Return what tells a job from others on this machine: its name, and where its stores are, in any order."""
    endpoints = ",".join(sorted(backend.describe()["endpoint"].split(",")))
    whole = f"{backend.kind} {endpoints} {backend.run_id}"
    return f"{backend.run_id[:_SHOWN]} {hashlib.sha256(whole.encode(errors='surrogateescape')).hexdigest()}"
