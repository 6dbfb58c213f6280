"""etcd's version 2 API through python-etcd, as torch does it: requests, and watches.

Rules
- python-etcd makes the requests and reads the answers. Its pool of connections is ours (`_Pool`): urllib3's begins its
  timeout anew with each byte, takes an answer without end, looks names up without a deadline, and is not woken by
  `close`; python-etcd knows the next server only by asking the cluster for names, which need not resolve here.
- Reads ask for a quorum: a member that is cut off would answer from the past.
- What etcd can't do now (leader election, timeouts) is asked of the next server until the time is over; what it refuses
  for good is a `StoreAccessError`. What it refuses for the state of a key stays python-etcd's exception.
- Values are base64: the API knows text only.
- A watch is a request for the next event from an index on. etcd keeps the last thousand events of all keys, so it may
  answer that what the watch should begin with is gone.
"""

# ruff: noqa: D102 - EtcdReader and Watch say what their methods promise
from __future__ import annotations

import binascii
import logging
import time
from base64 import b64decode, b64encode
from urllib.parse import quote

import etcd
from urllib3.exceptions import ReadTimeoutError

from elastic_run.store.errors import FOREIGN, UNREADY, StoreAccessError, StoreConnectionError
from elastic_run.store.jobstore.etcd import Directory, EtcdReader, HistoryLostError, Item, Watch
from elastic_run.store.jobstore.revisions import Revisions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from elastic_run.store.jobstore.http_client import Credentials, HttpClient
    from elastic_run.store.jobstore.http_connection import Answer, HttpConnection

_SERVER_ERROR = 500
_UNAUTHORIZED = 110  # etcd's number
_GONE = ("delete", "expire", "compareAndDelete")
#: Seconds for a watch that is only to look: python-etcd takes 0 for no deadline.
_LEAST = 1e-6


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
        self._etcd = self.make_client()

    def clone(self) -> EtcdV2Client:
        return EtcdV2Client(self.http.clone(), self._credentials, self.revisions)

    def make_client(self) -> Any:  # noqa: ANN401 - python-etcd has no types
        """Return a client of python-etcd for one thing at a time: a request, or a watch."""
        # It logs each failure as an error, before the next server is asked.
        logging.getLogger("etcd").setLevel(logging.CRITICAL)
        client = etcd.Client(allow_redirect=False)
        pool = _Pool(self.http, self._credentials)
        client.http.pool_classes_by_scheme = {"http": lambda *_, **__: pool}
        return client

    def read(self, key: str, **options: object) -> Any:  # noqa: ANN401 - python-etcd has no types
        """Read a key or a directory, as `etcd.Client.read` does; see `_call` for what it raises."""
        return self._call(self._etcd.read, key, quorum=True, **options)

    def write(self, key: str, value: bytes | None, **options: object) -> None:
        """Write a key, or make or renew a directory (no value), as `etcd.Client.write` does."""
        self._call(self._etcd.write, key, None if value is None else encode_value(value), **options)

    def delete(self, key: str, **options: object) -> None:
        """Delete a key or a directory, as `etcd.Client.delete` does."""
        self._call(self._etcd.delete, key, **options)

    def _call(self, method: Callable[..., Any], key: str, *values: object, **options: object) -> Any:  # noqa: ANN401
        """Make one call of python-etcd's client.

        Returns:
            Its answer, an `etcd.EtcdResult`.

        Raises:
            StoreConnectionError: No server is able to answer within the timeout.
            StoreAccessError: etcd refuses us.
            etcd.EtcdException: etcd refuses the operation for what the key is or isn't.
        """
        deadline = time.monotonic() + self.http.timeout
        backoff = self.make_backoff()
        while True:
            before = self.revisions.highest
            try:
                result = method(quote_key(key), *values, **options)
            except etcd.EtcdConnectionFailed as error:
                raise error.cause from None
            except etcd.EtcdClusterIdChanged as error:
                # Said once; the index tells whether it was restored. Behind one address there may be two clusters.
                if time.monotonic() > deadline:
                    message = f"etcd at {self.http.endpoint} answers for several clusters in turn"
                    raise StoreConnectionError(message, UNREADY) from error
            except (etcd.EtcdException, UnicodeDecodeError) as error:
                self._face(error, deadline, backoff.next_pause())
            else:
                self.revisions.check(f"etcd at {self.http.endpoint}", before, result.etcd_index, self._restores)
                return result

    def _face(self, error: Exception, deadline: float, pause: float) -> None:
        """Raise what an error means, or return where the call is worth another try."""
        payload: Mapping[str, object] = getattr(error, "payload", None) or {}
        status, code = payload.get("status"), payload.get("errorCode")
        if not isinstance(status, int):
            what = "does not speak etcd's version 2 API (etcd 3.4 needs --enable-v2; etcd-v3 does not)"
            message = f"{self.http.endpoint} {what}"
            raise StoreConnectionError(message, FOREIGN) from error
        message = f"etcd at {self.http.endpoint}: {payload.get('message')} ({payload.get('cause')})"
        if status < _SERVER_ERROR:
            if isinstance(code, int) and code != _UNAUTHORIZED:
                raise error
            raise StoreAccessError(message) from error
        if time.monotonic() + pause > deadline:
            raise StoreConnectionError(message, UNREADY) from error
        self.http.prefer_next()
        time.sleep(pause)

    def read_directory(self, directory: str, *, created_after: int = 0, changed_after: int = 0) -> Directory:
        try:
            found = self.read(directory, sorted=True)
        except etcd.EtcdKeyNotFound as error:
            return Directory([], error.payload.get("index", 0))
        items = [_make_item(node) for node in found.leaves if not node.dir]
        news = [item for item in items if item.created > created_after and item.changed > changed_after]
        return Directory(sorted(news, key=lambda item: item.created), found.etcd_index)

    def watch(self, directory: str, number: int) -> Watch:
        return _Watch(self, directory, number)


class _Watch(Watch):
    """One request for each event.

    Rejected: `stream=true`, which falls silent for good after it has told an event of the past.
    """

    def __init__(self, api: EtcdV2Client, directory: str, index: int) -> None:
        self._http = api.http
        self._etcd = api.make_client()
        self._key = quote_key(directory)
        self._index = index

    def next_items(self, timeout: float) -> list[Item]:
        try:
            event = self._etcd.watch(self._key, index=self._index, timeout=max(timeout, _LEAST), recursive=True)
        except etcd.EtcdWatchTimedOut:
            return []
        except etcd.EtcdConnectionFailed as error:
            raise error.cause from None
        except (etcd.EtcdEventIndexCleared, etcd.EtcdWatcherCleared) as error:
            raise HistoryLostError from error
        except (etcd.EtcdException, UnicodeDecodeError) as error:
            message = f"etcd at {self._http.endpoint} ended a watch: {error}"
            raise StoreConnectionError(message, UNREADY) from error
        is_gone = event.action in _GONE
        if event.dir and is_gone:
            raise HistoryLostError
        self._index = event.modifiedIndex + 1
        return [_make_item(event, is_there=not is_gone)]


class _Pool:
    """Takes python-etcd's requests to a cluster, and one watch, which goes on where python-etcd's wait timed out.

    Args:
        http: The cluster.
        credentials: Who we are, if etcd wants to know. python-etcd takes letters of Latin-1 only.
    """

    def __init__(self, http: HttpClient, credentials: Credentials | None) -> None:
        self._http = http
        text = "" if credentials is None else f"{credentials.user}:{credentials.password}"
        self._headers = {"Authorization": f"Basic {b64encode(text.encode()).decode()}"} if text else {}
        self._open: tuple[HttpConnection, Answer] | None = None

    def urlopen(
        self, method: str, url: str, *, headers: Mapping[str, str], timeout: float, body: str = "", **_: object
    ) -> _Response:
        """Send a request of python-etcd; a watch ends in `ReadTimeoutError` where nothing comes in time."""
        headers = {**headers, **self._headers}
        if "wait=true" not in url:
            return _Response(self._http.ask(method, url, body.encode(), headers))
        if self._open is None:
            self._open = self._http.open_answer(method, url, b"", headers)
        connection, answer = self._open
        # News come in chunks; an answer of a known length is an error, or the end of the watch.
        if "content-length" not in answer.headers and not connection.has_body_data(timeout):
            raise ReadTimeoutError(self, url, "nothing has come")  # type: ignore[arg-type] # it keeps the pool, no more
        answer.body = connection.receive_body(self._http.timeout)
        self._open = None
        return _Response(answer)


class _Response:
    """An answer, as python-etcd reads it."""

    def __init__(self, answer: Answer) -> None:
        self.status = answer.status
        self.data = answer.body
        self._headers = answer.headers

    def getheaders(self) -> Mapping[str, str]:
        return self._headers

    def getheader(self, name: str) -> str | None:
        return self._headers.get(name)


def encode_value(value: bytes) -> str:
    """Return bytes as text."""
    return b64encode(value).decode()


def decode_value(text: str) -> bytes:
    """Return the bytes of `encode_value`, or the text as it is where it wasn't made by that."""
    try:
        return b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return text.encode()


def quote_key(key: str) -> str:
    """Return a key as python-etcd puts it into a URL: it quotes nothing."""
    return quote(key.strip("/"))


def _make_item(node: Any, *, is_there: bool = True) -> Item:  # noqa: ANN401 - python-etcd has no types
    value = decode_value(node.value or "") if is_there else None
    return Item(node.key.lstrip("/"), value, node.createdIndex, node.modifiedIndex)
