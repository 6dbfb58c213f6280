"""etcd's version 3 API through the JSON gateway that every etcd since 3.4 has: requests, and watches.

Why the gateway: the client libraries that exist pin years-old releases of grpc and protobuf, which training images have
in other versions. JSON over HTTP needs urllib3 only.

Rules
- Keys and values are base64 in requests and answers, numbers of 64 bits are text.
- With a user and a password each request carries a token; where it has expired another one is fetched, once.
- What etcd can't do now (no leader, leader changed, request timed out, too many requests) is asked of the next server
  until the time is over; the last of these comes with HTTP's 500, so that is no refusal. What it refuses for good is a
  `StoreAccessError`.
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

_OK = 200
_REFUSED = (400, 401, 403)
_SERVER_ERROR = 500
#: What the calls begin with whose answers are of the whole cluster: a server answers others from what it knows itself.
_KEYS = "kv/"
# gRPC's numbers, as the gateway gives them.
_NOT_FOUND = 5
_NOT_NOW = (4, 8, 14)  # deadline exceeded, resource exhausted, unavailable
_REQUIRE_LEADER = {"Grpc-Metadata-hasleader": "true"}


class LeaseGoneError(Exception):
    """The lease has expired, or was never granted."""


class Pass:
    """The token that etcd last gave our user, for all connections: each new one costs etcd a slow hash."""

    __slots__ = ("token",)

    def __init__(self) -> None:
        self.token = ""


class _Fault:
    """What an answer says went wrong."""

    __slots__ = ("code", "text")

    def __init__(self, document: Document) -> None:
        inner = document.get("error")
        fault: Document = inner if isinstance(inner, dict) else document
        self.code = fault.get("code", fault.get("grpc_code"))
        self.text = str(fault.get("message") or fault.get("error"))

    @property
    def is_of_token(self) -> bool:
        """Whether another token would help."""
        return "invalid auth token" in self.text or "revision in auth token is old" in self.text

    def is_momentary(self, status: int) -> bool:
        """Whether the same call may succeed a moment later."""
        return status >= _SERVER_ERROR or self.code in _NOT_NOW or "timed out" in self.text or "leader" in self.text


class EtcdV3Client(EtcdReader):
    """Asks a cluster.

    Args:
        http: The cluster.
        credentials: Who we are, if etcd wants to know.
        shared: Holds that user's token, for other connections too; None for this one and its clones only.
        revisions: The same for what was seen of the cluster.
    """

    def __init__(
        self,
        http: HttpClient,
        credentials: Credentials | None = None,
        shared: Pass | None = None,
        revisions: Revisions | None = None,
    ) -> None:
        self.http = http
        self.revisions = revisions or Revisions()
        self._restores = self.revisions.restores
        self.credentials = credentials
        self._pass = shared or Pass()
        self._has_watched = False

    def clone(self) -> EtcdV3Client:
        """Return another client, not yet connected."""
        return EtcdV3Client(self.http.clone(), self.credentials, self._pass, self.revisions)

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
        backoff = self.make_backoff()
        while True:
            token = self._find_token(deadline, backoff)
            before = self.revisions.highest
            status, document = self._ask(path, request, token)
            if status == _OK and "error" not in document:
                if path.startswith(_KEYS):
                    found = int(document.get("header", {}).get("revision", 0))
                    self.revisions.check(f"etcd at {self.http.endpoint}", before, found, self._restores)
                return document
            self._face(status, _Fault(document), token, deadline=deadline, backoff=backoff)

    def _ask(self, path: str, request: Document, token: str) -> tuple[int, Document]:
        answer = self.http.ask("POST", f"/v3/{path}", json.dumps(request).encode(), _headers(token))
        return answer.status, _parse(answer, self.http)

    def _find_token(self, deadline: float, backoff: Backoff) -> str:
        """Return the token of our user, after asking for one where there is none; "" without a user."""
        user = self.credentials
        token = "" if user is None else self._pass.token
        while user is not None and not token:
            status, document = self._ask("auth/authenticate", {"name": user.user, "password": user.password}, "")
            self._pass.token = token = str(document.get("token", ""))
            fault = _Fault(document)
            if not token and not fault.is_momentary(status):
                message = f"etcd at {self.http.endpoint} refuses user {user.user!r}: {fault.text}"
                raise StoreAccessError(message)
            if not token:
                self._face(status, fault, token, deadline=deadline, backoff=backoff)
        return token

    def _face(self, status: int, fault: _Fault, token: str, *, deadline: float, backoff: Backoff) -> None:
        """Raise what an error means, or return where the call is worth another try."""
        if fault.code == _NOT_FOUND and "lease" in fault.text:
            raise LeaseGoneError(fault.text)
        pause = backoff.next_pause()
        is_over = time.monotonic() + pause > deadline
        if token and fault.is_of_token and not is_over:
            if self._pass.token == token:
                self._pass.token = ""
            return
        message = f"etcd at {self.http.endpoint}: {fault.text}"
        if not fault.is_momentary(status):
            raise StoreAccessError(message)
        if is_over:
            raise StoreConnectionError(message, UNREADY)
        self.http.prefer_next()
        time.sleep(pause)

    # --- what is asked -------------------------------------------------------------------------------------------
    def read_directory(self, directory: str, *, created_after: int = 0, changed_after: int = 0) -> Directory:
        options: Document = {"sort_order": "ASCEND", "sort_target": "CREATE"}
        if created_after:
            options["min_create_revision"] = str(created_after + 1)
        if changed_after:
            options["min_mod_revision"] = str(changed_after + 1)
        return self.read(directory, end_of(directory), **options)

    def read(self, key: str, end: str, **options: object) -> Directory:
        """Return what is in a range of keys, whose end is the key behind the last one; options are more fields."""
        answer = self.call("kv/range", range_request(key, end, **options))
        return Directory(parse_items(answer), int(answer["header"]["revision"]))

    def grant(self, lease: int, seconds: int) -> None:
        """Make a lease, under a number of our choice; where it is there already, renew it."""
        try:
            self.call("lease/grant", {"ID": str(lease), "TTL": str(seconds)})
        except StoreAccessError as error:
            if "already exists" not in str(error):
                raise
            self.keep_alive(lease)

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
        if self._has_watched:
            self._pass.token = ""  # a watch that was ended doesn't always say why: the token may be old
        self._has_watched = True
        token = self._find_token(time.monotonic() + self.http.timeout, self.make_backoff())
        request = range_request(directory, end_of(directory), start_revision=str(number))
        body = json.dumps({"create_request": request}).encode()
        connection, answer = self.http.open_answer("POST", "/v3/watch", body, {**_REQUIRE_LEADER, **_headers(token)})
        if answer.status != _OK:
            message = f"etcd at {self.http.endpoint} refuses a watch with status {answer.status}"
            self.http.prefer_next()
            raise StoreConnectionError(message, UNREADY)
        return _Watch(connection)


def _headers(token: str) -> Mapping[str, str]:
    return {"Authorization": token} if token else {}


class _Watch(Watch):
    """The answer to a watch: one JSON document a line.

    Args:
        connection: The connection, at the answer's body.
    """

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection

    def next_items(self, timeout: float) -> list[Item]:
        return [item for line in self._connection.receive_lines(timeout) for item in parse_news(line)]


def parse_news(line: bytes) -> list[Item]:
    """Return the news in a line of a watch's answer.

    Args:
        line: The line.

    Raises:
        StoreConnectionError: It says that the watch is over.
        HistoryLostError: It says that what the watch should begin with is gone.
    """
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
