"""How one node asks all nodes of a job, such as for their state or their stacks: nothing is sent while nobody asks.

A node asks by adding a line to the value of `job_keys.STATUS_REQUEST`: an id of its own and the question. The key keeps
the newest line of each question, and a few of them. The other nodes read it together with the heartbeats that they look
at anyway, so a question costs them no exchange and no wake-up of its own. Each then appends one document to the stream
of that kind of question (`find_stream`); the asker reads there until all have come, or until it has waited long enough,
trims the stream, and removes its line: otherwise nodes that come later would answer, and nobody would trim the answers.
The line of a drain stays.

If two nodes ask the same question at the same time, each may use the answers to both; the answer to a drain names its
question, which may be about another node. One question may be lost, since
no lock protects the key. One asker may also trim an answer before the other asker has read it. So an asker
asks again if answers are missing when a part of its time is over. It takes a new id, because a node does not answer the
same line twice.

A node that has just come takes no part in a drain that was asked for before: it may have the name, or the rank, of the
node that had to leave.

Answers are versioned JSON documents of at most `LIMIT` bytes. Anything else in the stream is ignored.
"""

from __future__ import annotations

import json
import os
import time

from elastic_run.core.diagnosis.stack_text import shorten_stacks
from elastic_run.core.protocol import job_keys
from elastic_run.core.protocol.node_status import DRAIN, HANG, STACKS, STATUS, MemberCount, is_sound, kind_of
from elastic_run.store.errors import StoreConnectionError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.store.jobstore.api import JobStore

    Document = dict[str, Any]

__all__ = ["LIMIT", "StatusAnswers", "find_stream", "gather"]

VERSION = 1
#: Bytes of a node's document.
LIMIT = 1 << 18
#: Where the answer to each question is in an entry of the stream.
_KEYS = {STATUS: "node", STACKS: "stacks", DRAIN: "drain", HANG: "hang"}
#: Questions that the key keeps, and bytes of each.
_MOST_QUESTIONS = 8
_QUESTION_LIMIT = 256
#: Part of an asker's time after which it asks again.
_FIRST_PART = 1 / 4


class StatusAnswers:
    """This node's answers: the sender reads requests and writes answers, other threads add answers.

    Args:
        on_request: Called by the sender's thread when somebody has asked, with the question.
        wake: Wakes the sender.
    """

    def __init__(self, on_request: Callable[[str], None], wake: Callable[[], None]) -> None:
        self._on_request = on_request
        self._wake = wake
        #: The questions in the key when it was read last; None before the first time.
        self._seen: list[bytes] | None = None
        self._unsent: dict[str, bytes] = {}  # by question: an older answer to the same one tells less

    @property
    def has_unsent(self) -> bool:
        """Whether an answer waits for the store."""
        return bool(self._unsent)

    def note_request(self, value: bytes | None) -> None:
        """Take the value of the request's key, as it was read just now."""
        lines = _split(value)
        for line in lines:
            question = _read_question(line)
            is_old_drain = self._seen is None and kind_of(question) == DRAIN
            if line not in (self._seen or ()) and not is_old_drain:
                self._on_request(question)
        self._seen = lines or self._seen or []

    def add(self, document: Document, question: str = STATUS) -> None:
        """Give the answer to a question; parts of the texts are left out if the answer is too large."""
        line = _encode(document, question)
        if len(line) > LIMIT:
            line = _encode(_shorten(document), question)
        if len(line) <= LIMIT:
            self._unsent[question] = line
            self._wake()

    def send(self, store: JobStore) -> None:
        """Write what waits.

        Raises:
            StoreConnectionError: The store can't be reached; it is written again then.
        """
        for question, line in [*self._unsent.items()]:
            store.append(find_stream(question), line)
            if self._unsent.get(question) is line:  # no newer one has come meanwhile
                del self._unsent[question]


def gather(store: JobStore, *, wait_limit: float, question: str = STATUS) -> list[Document]:
    """Ask all nodes of a job, and wait until all nodes of a round have answered.

    If the named node of a drain is none of them, it may be one that waits for a round: then all the time is waited.

    Args:
        store: The job's store, over a connection of its own.
        question: See `core.protocol.node_status`.
        wait_limit: Seconds to wait for the nodes; twice as long in a store where a request takes longer to arrive.

    Returns:
        The document of each node that has answered, in no order. If the store is lost meanwhile, since the drained node
        served it for example, these are the documents that have come before.

    Raises:
        StoreConnectionError: The store can't be reached.
    """
    answers = _Answers(question)
    try:
        _collect(store, question, wait_limit, answers)
    except StoreConnectionError:
        if not answers.documents:
            raise
    return [*answers.documents.values()]


class _Answers:
    """The answers to one question.

    Attributes:
        documents: The newest document of each node, by host and pid.
    """

    def __init__(self, question: str) -> None:
        self.documents: dict[tuple[str, int], Document] = {}
        self._count = MemberCount()
        self._awaits_leaver = kind_of(question) == DRAIN

    def add(self, document: Document) -> None:
        """Take a document; thousands may come one by one."""
        key = document["host"], document["pid"]
        if key in self.documents:
            self._count.add(self.documents[key], -1)
        self.documents[key] = document
        self._count.add(document)
        if self._awaits_leaver and document["is_leaving"]:
            self._awaits_leaver = False

    @property
    def is_complete(self) -> bool:
        """Whether all nodes of a round have answered; the answer to a drain needs the node that leaves as well."""
        nodes, missing = self._count.total()
        return nodes > 0 and missing == 0 and not self._awaits_leaver


def _collect(store: JobStore, question: str, wait_limit: float, answers: _Answers) -> None:
    """Ask, and add the answers as they come."""
    stream, position = find_stream(question), 0
    while (found := store.read(stream, position, 0.0))[1] != position:
        position = found[1]  # answers to other askers, who have not trimmed them yet
    # Elsewhere nodes look for requests at their heartbeats only.
    wait_limit = wait_limit if store.reads_beside else 2 * wait_limit
    begin, is_drain = time.monotonic(), kind_of(question) == DRAIN
    request = _ask(store, question)
    for part in (_FIRST_PART, 1):
        end = begin + part * wait_limit
        while not answers.is_complete and (left := end - time.monotonic()) > 0:
            entries, position = store.read(stream, position, left)
            for document in filter(None, (_decode(entry, question) for entry in entries)):
                answers.add(document)
        if answers.is_complete:
            break
        if is_drain:
            if request not in _split(store.get([job_keys.STATUS_REQUEST])[0]):
                _add_request(store, request)
        elif part < 1:
            request = _ask(store, question)
    store.trim(stream, position)
    if not is_drain:  # a node that looks late leaves all the same
        _remove_request(store, request)


def find_stream(question: str) -> str:
    """Return the stream of the answers to a kind of question: no asker trims answers that another needs."""
    return f"{job_keys.STATUS_ANSWERS}_{kind_of(question)}"


def _ask(store: JobStore, question: str) -> bytes:
    """Ask a question under a new id; return its line."""
    request = f"{os.urandom(8).hex()} {question}".encode()
    _add_request(store, request)
    return request


def _add_request(store: JobStore, request: bytes) -> None:
    """Add a line to the key, in the place of an older one with the same question."""
    others = [
        line
        for line in _split(store.get([job_keys.STATUS_REQUEST])[0])
        if _read_question(line) != _read_question(request)
    ]
    store.write({job_keys.STATUS_REQUEST: b"\n".join([*others[1 - _MOST_QUESTIONS :], request])})


def _remove_request(store: JobStore, request: bytes) -> None:
    there = _split(store.get([job_keys.STATUS_REQUEST])[0])
    if request not in there:
        return
    others = [line for line in there if line != request]
    if others:
        store.write({job_keys.STATUS_REQUEST: b"\n".join(others)})
    else:
        store.delete([job_keys.STATUS_REQUEST])


def _split(value: bytes | None) -> list[bytes]:
    return [line for line in (value or b"").split(b"\n") if line][-_MOST_QUESTIONS:]


def _read_question(value: bytes) -> str:
    return value[:_QUESTION_LIMIT].decode(errors="replace").partition(" ")[2]


def _shorten(document: Document) -> Document:
    """Leave last lines out, and of stacks what does not fit: every worker gets as much, its main thread first."""
    workers = document.get("workers", ())
    share = LIMIT // (4 * max(1, len(workers)))
    for worker in workers:
        worker.update({key: "" for key in ("last_line", "details") if key in worker})
        if "text" in worker:
            worker["text"] = shorten_stacks(worker["text"], share)
    return document


def _encode(document: Document, question: str) -> bytes:
    return json.dumps({"version": VERSION, _KEYS[kind_of(question)]: document}, separators=(",", ":")).encode()


def _decode(entry: bytes, question: str = STATUS) -> Document | None:
    """Return a node's answer to a question; None where the entry is another's, garbage, or of another version."""
    try:
        message = json.loads(entry) if len(entry) <= LIMIT else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or message.get("version") != VERSION:
        return None
    node = message.get(_KEYS[kind_of(question)])
    if not isinstance(node, dict) or not is_sound(node, question):
        return None
    # Two nodes may be drained at the same time.
    return None if kind_of(question) == DRAIN and node["asked"] != question else node
