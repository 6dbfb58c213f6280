"""The guardian's notice that its agent has died, so that the other nodes don't wait for the lease.

Rules
- The agent writes the document beforehand (`Session.death_notice`). The guardian is another process, which imports this
  module when nothing is left to kill. The seat record says what the agent did last; it is read only then.
- A job with several endpoints may be at any of them, and it may be between two stores. So each endpoint is tried again
  and again, for two leases and 10 s. Each store that is found there is told, and told again after its log has formed
  another round. The notice ends when a log has formed a newer round than the dead agent's.
- A store at one endpoint that refuses is gone, and the job with it, unless it is etcd or a file: that is tried again.
- The coordinator reads the facts. So if the dead agent was the coordinator, the guardian also ends its term, as the
  agent would have done: by an entry of that term after its last one, with the state as of that entry. The dead agent
  decides nothing more, so there are no two coordinators. If another node has begun a term, its entry is there already.
"""

from __future__ import annotations

import os
import time

from elastic_run.core.protocol import job_keys, messages
from elastic_run.core.protocol.codec import MessageError, decode, encode
from elastic_run.core.protocol.facts import SEAT_UNTOLD
from elastic_run.rendezvous.backend_table import make_backend, read_settings
from elastic_run.rendezvous.elastic.backend.tcp import TcpBackend
from elastic_run.rendezvous.elastic.decision_log import create_entry
from elastic_run.rendezvous.elastic.node_death.proofs import death_facts
from elastic_run.rendezvous.elastic.node_death.seat_record import Record, read_record
from elastic_run.rendezvous.elastic.store_connection import STORE_ID
from elastic_run.store.errors import REFUSED, StoreAccessError, StoreError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from elastic_run.core.protocol.facts import Fact, SeatDead
    from elastic_run.rendezvous.elastic.backend.base import Backend
    from elastic_run.store.jobstore.api import JobStore

__all__ = ["send_death_notice"]

#: Seconds to reach one store, and for each of its answers.
_ANSWER = 2.0
#: Seconds between two rounds of attempts.
_PAUSE = 0.5
#: Entries after which there is no thread any more, or another's.
_LAST = (messages.Claim, messages.Resign, messages.Failover, messages.End)


def send_death_notice(document: Mapping[str, Any]) -> None:
    """Tell a job that one of its nodes died.

    Args:
        document: The document of `Session.death_notice`.

    Raises:
        StoreError: The only store refuses this process, or is gone.
        ValueError: The document is not one of `Session.death_notice`'s.
    """
    record = _read_last(document["record"], document["job"], document["node"])
    settings = read_settings(document["backend"], document["conf"])
    secret = document["secret"]
    backend = make_backend(
        document["backend"],
        document["endpoint"],
        document["run_id"],
        settings,
        is_host=False,
        secret=None if secret is None else bytes.fromhex(secret),
    )
    notice = _Notice(record, backend)
    deadline = time.monotonic() + document["seconds"]
    while not notice.tell() and time.monotonic() < deadline:
        time.sleep(_PAUSE)  # this process has nothing else to do, and no store tells when it is there


def _read_last(path: str, job: str, node: str) -> Record:
    """Return what the agent's record says; where there is none, what is known of the agent without it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            record = read_record(fd, job)
        finally:
            os.close(fd)
    except (OSError, MessageError):
        return Record("", 0, "", job, node)
    return record if record.node == node else Record("", 0, "", job, node)


class _Notice:
    """The facts about a dead agent, and the stores that have them.

    Args:
        record: The agent's record.
        backend: The job's store.
    """

    def __init__(self, record: Record, backend: Backend) -> None:
        self._record = record
        self._backend = backend
        # None is the only one, however it is opened.
        self._endpoints: Sequence[tuple[str, int] | None] = (None,)
        if isinstance(backend, TcpBackend) and backend.others:
            self._endpoints = (backend.endpoint, *backend.others)
        self._facts: Sequence[Fact | SeatDead] = death_facts(record)
        self._told: set[tuple[bytes, int]] = set()

    def tell(self) -> bool:
        """Try each endpoint once.

        Returns:
            Whether there is nothing more to tell.

        Raises:
            StoreError: The only store is gone, or refuses us.
        """
        for endpoint in self._endpoints:
            try:
                with self._open(endpoint) as store:
                    if self._tell_store(store) or endpoint is None:
                        return True
            except StoreError as error:
                if endpoint is None and self._is_final(error):
                    raise
        return False

    def _open(self, endpoint: tuple[str, int] | None) -> JobStore:
        return self._backend.open(_ANSWER) if endpoint is None else self._backend.look_at(endpoint, _ANSWER)

    def _is_final(self, error: StoreError) -> bool:
        is_gone = self._backend.dies_with_host and getattr(error, "reason", None) == REFUSED
        return is_gone or isinstance(error, StoreAccessError)

    def _tell_store(self, store: JobStore) -> bool:
        store_id = store.get([STORE_ID])[0]
        if store_id is None:
            return False  # no agent has come to it yet: it may be emptied
        seat, head = self._record.seat, _read_head(store)
        place = store_id, 0 if head is None else head.round
        if place not in self._told:
            for fact in self._facts:
                store.append(job_keys.FACTS, messages.to_json(fact))
            self._told.add(place)
            if head is not None:
                _resign_for(store, self._record.node, head)
        if seat is None or seat.status == SEAT_UNTOLD:
            return True  # no newer round waits for what is told here
        return head is not None and head.incarnation == seat.incarnation and head.round > seat.round_index


def _read_head(store: JobStore) -> messages.Head | None:
    try:
        return messages.read_head(store.get([job_keys.HEAD])[0] or b"")
    except MessageError:
        return None


def _resign_for(store: JobStore, node: str, head: messages.Head) -> None:
    try:
        last = _find_last(store, node, head)
        state = None if last is None else store.get([last[1]])[0]
        document = None if state is None else decode(state)
    except MessageError:
        return  # a stranger has written garbage: the others miss the coordinator's heartbeats
    if last is not None and document is not None:
        slot, state_key = last
        copy = {**document, "slot": slot}
        store.write({job_keys.state_key(slot, head.term): encode(copy)})
        create_entry(store, slot, messages.Resign(head.term, node))
        store.delete([state_key])


def _find_last(store: JobStore, node: str, head: messages.Head) -> tuple[int, str] | None:
    """Return the slot behind the node's last entry, and the key of the state as of that; None if its term has ended."""
    slot, state_key = head.slot + 1, job_keys.state_key(head.state_slot, head.state_term)
    while (raw := store.get([job_keys.decision_key(slot)])[0]) is not None:
        decision = messages.read_decision(raw)
        if isinstance(decision, _LAST) or decision.term != head.term:
            return None
        slot, state_key = slot + 1, job_keys.state_key(slot, head.term)
    return (slot, state_key) if head.coordinator == node and head.state_slot >= 0 else None
