"""etcd's version 3 API through the JSON gateway that every etcd since 3.4 has: requests, and watches.

Why the gateway: the client libraries that exist pin years-old releases of grpc and protobuf, which training images have
in other versions. JSON over HTTP needs the standard library only.

Rules
- Keys and values are base64 in requests and answers, numbers of 64 bits are text.
- With a user and a password each request carries a token; where it has expired another one is fetched, once.
- What etcd can't do now (no leader, leader changed, request timed out) is asked of the next server until the time is
  over; what it refuses for good is a `StoreAccessError`.
- A watch asks to be ended when its server has lost the leader, so that a cut-off one doesn't keep silent.
"""

# ruff: noqa: D102 - EtcdReader and Watch say what their methods promise
from __future__ import annotations

import json
import time
from base64 import b64decode, b64encode

from elastic_run.store.errors import (
    FOREIGN,
    UNREADY,
    StoreAccessError,
    StoreConnectionError,
)
from elastic_run.store.etcd_job_store import Directory, EtcdReader, HistoryLostError, Item, Watch
from elastic_run.store.http_client import ChunkedLines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, TypeAlias

    from elastic_run.store.http_client import Answer, Credentials, HttpClient

    Document: TypeAlias = dict[str, Any]

_OK = 200
_REFUSED = (400, 401, 403)
# gRPC's numbers, as the gateway gives them.
_NOT_FOUND = 5
_NOT_NOW = (4, 8, 14)  # deadline exceeded, resource exhausted, unavailable
_REQUIRE_LEADER = {"Grpc-Metadata-hasleader": "true"}
_PAUSE = 0.1


class LeaseGoneError(Exception):
    """The lease has expired, or was never granted."""


class EtcdApi(EtcdReader):
    """Asks a cluster.

    Args:
        http: The cluster.
        credentials: Who we are, if etcd wants to know.
    """

    def __init__(self, http: HttpClient, credentials: Credentials | None = None) -> None:
        self.http = http
        self.credentials = credentials
        self._token = ""
        self._has_watched = False

    def clone(self) -> EtcdApi:
        """Return another client, not yet connected."""
        cloned = EtcdApi(self.http.clone(), self.credentials)
        cloned._token = self._token
        return cloned

    def call(self, path: str, request: Document) -> Document:
        """Make one call.

        Args:
            path: What follows `/v3/`.
            request: The call's fields.

        Returns:
            The answer's fields.

        Raises:
            StoreConnectionError: No server is able to answer within the timeout.
            StoreAccessError: etcd refuses us.
            LeaseGoneError: The lease of the request is unknown.
        """
        deadline = time.monotonic() + self.http.timeout
        while True:
            if self.credentials is not None and not self._token:
                self._authenticate()
            answer = self.http.ask("POST", f"/v3/{path}", json.dumps(request).encode(), self._headers())
            document = _parse(answer, self.http)
            if answer.status == _OK and "error" not in document:
                return document
            self._face(document, deadline)

    def _face(self, document: Document, deadline: float) -> None:
        """Raise what an error means, or return where the call is worth another try."""
        inner = document.get("error")
        fault: Document = inner if isinstance(inner, dict) else document
        code, text = fault.get("code", fault.get("grpc_code")), str(fault.get("message") or fault.get("error"))
        if code == _NOT_FOUND and "lease" in text:
            raise LeaseGoneError(text)
        is_over = time.monotonic() + _PAUSE > deadline
        if self._token and ("invalid auth token" in text or "revision in auth token is old" in text) and not is_over:
            self._token = ""
            return
        message = f"etcd at {self.http.endpoint}: {text}"
        if code in _NOT_NOW or "timed out" in text or "leader" in text:
            if is_over:
                raise StoreConnectionError(message, UNREADY)
            self.http.prefer_next()
            time.sleep(_PAUSE)
            return
        raise StoreAccessError(message)

    def _authenticate(self) -> None:
        assert self.credentials is not None  # noqa: S101 - the caller has looked
        request = {"name": self.credentials.user, "password": self.credentials.password}
        answer = self.http.ask("POST", "/v3/auth/authenticate", json.dumps(request).encode(), {})
        document = _parse(answer, self.http)
        if "token" not in document:
            text = document.get("message") or document.get("error")
            message = f"etcd at {self.http.endpoint} refuses user {self.credentials.user!r}: {text}"
            raise StoreAccessError(message)
        self._token = str(document["token"])

    def _headers(self) -> Mapping[str, str]:
        return {"Authorization": self._token} if self._token else {}

    # --- what is asked -------------------------------------------------------------------------------------------
    def read_directory(self, directory: str, *, created_after: int = 0, changed_after: int = 0) -> Directory:
        options: Document = {"sort_order": "ASCEND", "sort_target": "CREATE"}
        if created_after:
            options["min_create_revision"] = str(created_after + 1)
        if changed_after:
            options["min_mod_revision"] = str(changed_after + 1)
        return self.read(directory, end_of(directory), **options)

    def read(self, key: str, end: str, **options: object) -> Directory:
        """Read a range of keys.

        Args:
            key: The first one.
            end: The key behind the last one.
            options: More fields of the request.

        Returns:
            What is there.
        """
        answer = self.call("kv/range", range_request(key, end, **options))
        return Directory(parse_items(answer), int(answer["header"]["revision"]))

    def grant(self, lease: int, seconds: int) -> None:
        """Make a lease, under a number of our choice; harmless when it is there."""
        try:
            self.call("lease/grant", {"ID": str(lease), "TTL": str(seconds)})
        except StoreAccessError as error:
            if "already exists" not in str(error):
                raise

    def keep_alive(self, lease: int) -> bool:
        """Renew a lease; returns whether it was still there."""
        answer = self.call("lease/keepalive", {"ID": str(lease)})
        result = answer.get("result", {})
        return int(result.get("TTL", 0)) > 0

    def revoke(self, lease: int) -> None:
        """End a lease and all keys that hang on it; harmless when it is gone."""
        try:
            self.call("lease/revoke", {"ID": str(lease)})
        except LeaseGoneError:
            pass

    def watch(self, directory: str, number: int) -> Watch:
        if self.credentials is not None and (self._has_watched or not self._token):
            self._authenticate()  # a watch that was ended doesn't always say why: the token may be old
        self._has_watched = True
        request = range_request(directory, end_of(directory), start_revision=str(number))
        body = json.dumps({"create_request": request}).encode()
        stream, answer = self.http.open_answer("POST", "/v3/watch", body, {**_REQUIRE_LEADER, **self._headers()})
        if answer.status != _OK:
            message = f"etcd at {self.http.endpoint} refuses a watch with status {answer.status}"
            self.http.prefer_next()
            raise StoreConnectionError(message, UNREADY)
        return _Watch(ChunkedLines(stream, self.http.timeout))


class _Watch(Watch):
    """The answer to a watch: one JSON document a line.

    Args:
        lines: The answer's body.
    """

    def __init__(self, lines: ChunkedLines) -> None:
        self._lines = lines

    def next_items(self, timeout: float) -> list[Item]:
        return [item for line in self._lines.next_lines(timeout) for item in _parse_news(line)]


def _parse_news(line: bytes) -> list[Item]:
    try:
        document = json.loads(line)
    except ValueError as error:
        message = "a watch that is no JSON"
        raise StoreConnectionError(message, FOREIGN) from error
    result = document.get("result")
    if result is None:
        message = f"etcd ended the watch: {document.get('error')}"
        raise StoreConnectionError(message, UNREADY)
    if int(result.get("compact_revision", 0)):
        raise HistoryLostError
    if result.get("canceled"):
        message = f"etcd ended the watch: {result.get('cancel_reason', '')}"
        raise StoreConnectionError(message, UNREADY)
    return [_parse_item(event["kv"], is_there=event.get("type") != "DELETE") for event in result.get("events", ())]


# --- fields ----------------------------------------------------------------------------------------------------------
def encode(data: bytes) -> str:
    """Return bytes as the gateway wants them."""
    return b64encode(data).decode()


def encode_key(key: str) -> str:
    """Return a key as the gateway wants it."""
    return encode(key.encode())


def range_request(key: str, end: str = "", **options: object) -> Document:
    """Return the fields that name keys."""
    named = {"key": encode_key(key)}
    if end:
        named["range_end"] = encode_key(end)
    return {**named, **options}


def end_of(directory: str) -> str:
    """Return the key behind all those of a directory."""
    return directory[:-1] + chr(ord(directory[-1]) + 1)


def parse_items(answer: Document) -> list[Item]:
    """Return the keys in an answer to a range."""
    return [_parse_item(item, is_there=True) for item in answer.get("kvs", ())]


def _parse_item(item: Document, *, is_there: bool) -> Item:
    return Item(
        key=b64decode(item["key"]).decode(errors="replace"),
        value=b64decode(item.get("value", "")) if is_there else None,
        created=int(item.get("create_revision", 0)),
        changed=int(item.get("mod_revision", 0)),
    )


def _parse(answer: Answer, http: HttpClient) -> Document:
    try:
        # A call that streams answers with lines; of those that we use the first is all.
        document = json.loads(answer.body.split(b"\n", 1)[0] or b"{}")
    except ValueError:
        document = None
    if isinstance(document, dict):
        return document
    if answer.status in _REFUSED:
        # Seen where users are on and our certificate has a CommonName: the gateway won't take such a one.
        message = f"etcd at {http.endpoint} refuses us: {answer.body[:200].decode(errors='replace').strip()}"
        raise StoreAccessError(message)
    message = f"{http.endpoint} does not speak etcd's version 3 API"
    raise StoreConnectionError(message, FOREIGN)
