"""How one node learns the state of all nodes of a job, where somebody asks: nothing is sent while nobody does.

A node asks by giving `job_keys.STATUS_REQUEST` a new value. The other nodes read this key together with the heartbeats
that they look at anyway, so a question costs them no exchange and no wake-up of its own. Each then appends one document
to `job_keys.STATUS_ANSWERS`; the asker reads there until all have come, or until it has waited long enough, and trims
the stream. Where two nodes ask at the same time, the answers to either are as good for both.

Documents are versioned JSON of at most `LIMIT` bytes. A document that is none is passed over.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque

from elastic_run.core.protocol import job_keys
from elastic_run.core.protocol.node_status import is_sound

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.store.jobstore.api import JobStore

    Document = dict[str, Any]

__all__ = ["LIMIT", "StatusAnswers", "gather"]

VERSION = 1
#: Bytes of a node's document.
LIMIT = 1 << 18


class StatusAnswers:
    """This node's answers: the sender reads requests and writes answers, other threads add answers.

    Args:
        on_request: Called by the sender's thread when somebody has asked.
        wake: Wakes the sender.
    """

    def __init__(self, on_request: Callable[[], None], wake: Callable[[], None]) -> None:
        self._on_request = on_request
        self._wake = wake
        self._last: bytes | None = None
        self._unsent: deque[bytes] = deque(maxlen=1)  # an older one tells less

    @property
    def has_unsent(self) -> bool:
        """Whether an answer waits for the store."""
        return bool(self._unsent)

    def note_request(self, value: bytes | None) -> None:
        """Take the value of the request's key, as it was read just now."""
        if value is not None and value != self._last:
            self._on_request()
        self._last = value

    def add(self, document: Document) -> None:
        """Give an answer; one that is too large says only that."""
        line = _encode(document)
        if len(line) > LIMIT:
            workers = [{**worker, "last_line": ""} for worker in document.get("workers", ())]
            line = _encode({**document, "workers": workers})
        if len(line) <= LIMIT:
            self._unsent.append(line)
            self._wake()

    def send(self, store: JobStore) -> None:
        """Write what waits.

        Raises:
            StoreConnectionError: The store can't be reached; it is written again then.
        """
        while self._unsent:
            store.append(job_keys.STATUS_ANSWERS, self._unsent[0])
            self._unsent.popleft()


def gather(store: JobStore, *, expected: int, patience: float) -> list[Document]:
    """Ask all nodes of a job.

    Args:
        store: The job's store, over a connection of its own.
        expected: Nodes that are to answer.
        patience: Seconds to wait for them; twice as long in a store where a request takes longer to arrive.

    Returns:
        The document of each node that has answered, in no order.

    Raises:
        StoreConnectionError: The store can't be reached.
    """
    position = 0
    while (found := store.read(job_keys.STATUS_ANSWERS, position, 0.0))[1] != position:
        position = found[1]  # what others have asked for, and have not trimmed
    request = {job_keys.STATUS_REQUEST: os.urandom(8).hex().encode()}
    # Elsewhere nodes look for requests at their heartbeats only.
    deadline = time.monotonic() + (patience if store.reads_beside else 2 * patience)
    store.write(request)
    documents: dict[tuple[str, int], Document] = {}
    while len(documents) < expected and (left := deadline - time.monotonic()) > 0:
        entries, position = store.read(job_keys.STATUS_ANSWERS, position, left)
        for document in filter(None, map(_decode, entries)):
            documents[document["host"], document["pid"]] = document
    store.trim(job_keys.STATUS_ANSWERS, position)
    return [*documents.values()]


def _encode(document: Document) -> bytes:
    return json.dumps({"version": VERSION, "node": document}, separators=(",", ":")).encode()


def _decode(entry: bytes) -> Document | None:
    """Return a node's document; None where the entry is garbage, or of another version."""
    try:
        message = json.loads(entry) if len(entry) <= LIMIT else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or message.get("version") != VERSION:
        return None
    node = message.get("node")
    return node if isinstance(node, dict) and is_sound(node) else None
