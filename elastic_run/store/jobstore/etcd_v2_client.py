"""etcd's version 2 API, which is plain HTTP: requests, and watches.

Why not through python-etcd, as torch does it: that takes 180 ms to import, speaks for one endpoint at a time, gives no
deadline to a watch, and a thread that waits in it can't be woken.

Rules
- Reads ask for a quorum: a member that is cut off would answer from the past.
- What etcd can't do now (leader election, timeouts) is asked of the next server until the time is over; what it refuses
  for good is a `StoreAccessError`.
- Values are base64: the API knows text only.
- A watch is a request for the next event from an index on. etcd keeps the last thousand events of all keys, so it may
  answer that what the watch should begin with is gone.
"""

# ruff: noqa: D102 - EtcdReader and Watch say what their methods promise
from __future__ import annotations

import binascii
import json
import time
from base64 import b64decode, b64encode
from urllib.parse import quote, urlencode

from elastic_run.store.errors import (
    FOREIGN,
    UNREADY,
    StoreAccessError,
    StoreConnectionError,
)
from elastic_run.store.jobstore.etcd import Directory, EtcdReader, HistoryLostError, Item, Watch
from elastic_run.store.jobstore.revisions import Revisions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, TypeAlias

    from elastic_run.store.backoff import Backoff
    from elastic_run.store.jobstore.http_client import Credentials, HttpClient
    from elastic_run.store.jobstore.http_connection import Answer, HttpConnection

    Document: TypeAlias = dict[str, Any]

_OK = (200, 201)
_BAD_REQUEST, _SERVER_ERROR = 400, 500
# etcd's numbers of errors.
MISSING, CHANGED, NOT_A_FILE, THERE_ALREADY, NOT_EMPTY, _UNAUTHORIZED = 100, 101, 102, 105, 108, 110
_GONE = ("delete", "expire", "compareAndDelete")
_FORM = {"Content-Type": "application/x-www-form-urlencoded"}


class KeyStateError(Exception):
    """etcd refused an operation for what the key is or isn't.

    Args:
        code: One of the numbers above.
        message: etcd's words.
        index: The store's index then.
    """

    def __init__(self, code: int, message: str, index: int) -> None:
        super().__init__(message)
        self.code = code
        self.index = index


class EtcdV2Client(EtcdReader):
    """Asks a cluster.

    Args:
        http: The cluster.
        credentials: Who we are, if etcd wants to know.
        revisions: What was seen of the cluster over all connections; None for this one and its clones only.
    """

    def __init__(
        self, http: HttpClient, credentials: Credentials | None = None, revisions: Revisions | None = None
    ) -> None:
        self.http = http
        self.revisions = revisions or Revisions()
        self._restores = self.revisions.restores
        self._credentials = credentials

    def clone(self) -> EtcdV2Client:
        return EtcdV2Client(self.http.clone(), self._credentials, self.revisions)

    def call(self, method: str, key: str, fields: Mapping[str, str], query: Mapping[str, str]) -> tuple[Document, int]:
        """Make one call.

        Args:
            method: `GET`, `PUT`, `POST` or `DELETE`.
            key: The key.
            fields: What goes into the body.
            query: What follows the path.

        Returns:
            The answer's fields, and the store's index.

        Raises:
            StoreConnectionError: No server is able to answer within the timeout.
            StoreAccessError: etcd refuses us.
            KeyStateError: etcd refuses the operation.
        """
        deadline = time.monotonic() + self.http.timeout
        backoff = self.make_backoff()
        body = urlencode(fields).encode()
        path = _path(key, query)
        while True:
            before = self.revisions.highest
            answer = self.http.ask(method, path, body, {**(_FORM if fields else {}), **self._headers()})
            document = _parse(answer, self.http)
            if answer.status in _OK:
                self.revisions.check(f"etcd at {self.http.endpoint}", before, _index(answer), self._restores)
                return document, _index(answer)
            self._face(answer, document, deadline, backoff)

    def _face(self, answer: Answer, document: Document, deadline: float, backoff: Backoff) -> None:
        """Raise what an error means, or return where the call is worth another try."""
        message = f"etcd at {self.http.endpoint}: {document.get('message')} ({document.get('cause')})"
        if answer.status >= _SERVER_ERROR:
            pause = backoff.next_pause()
            if time.monotonic() + pause > deadline:
                raise StoreConnectionError(message, UNREADY)
            self.http.prefer_next()
            time.sleep(pause)
            return
        code = document.get("errorCode")
        if isinstance(code, int) and code != _UNAUTHORIZED:
            raise KeyStateError(code, message, _index(answer))
        raise StoreAccessError(message)

    def read_directory(self, directory: str, *, created_after: int = 0, changed_after: int = 0) -> Directory:
        query = {"quorum": "true", "sorted": "true"}
        try:
            document, index = self.call("GET", directory.rstrip("/"), {}, query)
        except KeyStateError as error:
            if error.code != MISSING:
                raise
            return Directory([], error.index)
        items = [_parse_node(node) for node in document["node"].get("nodes", ()) if not node.get("dir")]
        news = [item for item in items if item.created > created_after and item.changed > changed_after]
        return Directory(sorted(news, key=lambda item: item.created), index)

    def watch(self, directory: str, number: int) -> Watch:
        return _Watch(self, directory, number)

    def open_wait(self, directory: str, index: int) -> HttpConnection:
        """Ask for the next event below a directory, from an index on.

        Returns:
            The connection, at the answer's body.

        Raises:
            StoreConnectionError: No server is able to answer.
            HistoryLostError: It was too long ago.
        """
        path = _path(directory, {"wait": "true", "recursive": "true", "waitIndex": str(index)})
        connection, answer = self.http.open_answer("GET", path, b"", self._headers())
        if answer.status in _OK:
            return connection
        self.http.prefer_next()
        if answer.status == _BAD_REQUEST:
            raise HistoryLostError
        message = f"etcd at {self.http.endpoint} refuses a watch with status {answer.status}"
        raise StoreConnectionError(message, UNREADY)

    def _headers(self) -> Mapping[str, str]:
        if self._credentials is None:
            return {}
        pair = f"{self._credentials.user}:{self._credentials.password}".encode()
        return {"Authorization": f"Basic {b64encode(pair).decode()}"}


class _Watch(Watch):
    """One request for each event.

    Rejected: `stream=true`, which falls silent for good after it has told an event of the past.
    """

    def __init__(self, api: EtcdV2Client, directory: str, index: int) -> None:
        self._api = api
        self._directory = directory
        self._index = index
        self._open: HttpConnection | None = None

    def next_items(self, timeout: float) -> list[Item]:
        if self._open is None:
            self._open = self._api.open_wait(self._directory, self._index)
        if not self._open.has_body_data(timeout):
            return []
        item = _parse_event(self._open.receive_body(self._api.http.timeout))
        self._open = None
        self._index = item.changed + 1
        return [item]


def _parse_event(body: bytes) -> Item:
    try:
        event = json.loads(body)
        node, is_gone = event["node"], event["action"] in _GONE
    except (ValueError, KeyError, TypeError) as error:
        message = f"etcd ended a watch: {body[:200]!r}"
        raise StoreConnectionError(message, UNREADY) from error
    if node.get("dir") and is_gone:
        raise HistoryLostError
    return _parse_node(node, is_there=not is_gone)


def encode_value(value: bytes) -> str:
    """Return bytes as text."""
    return b64encode(value).decode()


def decode_value(text: str) -> bytes:
    """Return the bytes of `encode_value`, or the text as it is where it wasn't made by that."""
    try:
        return b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return text.encode()


def _path(key: str, query: Mapping[str, str]) -> str:
    return f"/v2/keys/{quote(key.strip('/'))}{'?' + urlencode(query) if query else ''}"


def _index(answer: Answer) -> int:
    text = answer.headers.get("x-etcd-index", "")
    return int(text) if text.isdigit() else 0


def _parse_node(node: Document, *, is_there: bool = True) -> Item:
    value = decode_value(str(node.get("value", ""))) if is_there else None
    return Item(str(node["key"]).lstrip("/"), value, int(node["createdIndex"]), int(node["modifiedIndex"]))


def _parse(answer: Answer, http: HttpClient) -> Document:
    try:
        document = json.loads(answer.body or b"{}")
    except ValueError:
        document = None
    if not isinstance(document, dict):
        message = f"{http.endpoint} does not speak etcd's version 2 API (etcd 3.4 needs --enable-v2; etcd-v3 does not)"
        raise StoreConnectionError(message, FOREIGN)
    return document
