"""A light node whose store is etcd, over version 3 of its API.

Each request is what `EtcdV3JobStore` asks for the same thing, made of the same parts, over as many connections. What an
etcd that is too busy refuses is asked again as there, after a growing pause of random length.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from typing import TYPE_CHECKING, Any

from elastic_run.core.protocol import job_keys
from elastic_run.rendezvous.elastic.store_connection import STORE_ID
from elastic_run.store.backoff import Backoff, draw_fraction
from elastic_run.store.errors import StoreConnectionError
from elastic_run.store.jobstore.compression import compress, decompress
from elastic_run.store.jobstore.etcd_v3_client import encode, encode_key, end_of, parse_items, parse_news, range_request
from tests.benchmarks.crowd.exchange import HTTP, HTTP_HEAD, HTTP_LINE, Exchange, Question
from tests.benchmarks.crowd.light_node import LightNode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_run.store.jobstore.etcd import Item
    from tests.benchmarks.crowd.exchange import Script
    from tests.benchmarks.crowd.light_node import Asking

#: Seconds that the pauses between attempts take at most: the first one, and any.
_PAUSE = 0.1
_LAST_PAUSE = 0.8


class LightEtcdNode(LightNode):
    """One node of a job in etcd."""

    _lease = 0
    _awaited = ""

    def _get(self, keys: Sequence[str]) -> Asking[list[bytes | None]]:
        if len(keys) == 1:
            answers = [(yield from self._call("kv/range", range_request(self._key(keys[0]))))]
        else:
            success = [{"request_range": range_request(self._key(key))} for key in keys]
            answer = yield from self._call("kv/txn", {"success": success})
            answers = [one["response_range"] for one in answer["responses"]]
        found = [parse_items(answer) for answer in answers]
        return [decompress(items[0].value) if items and items[0].value is not None else None for items in found]

    def _create(self, key: str, value: bytes) -> Asking[bytes]:
        path = self._key(key)
        is_free = {"key": encode_key(path), "target": "VERSION", "result": "EQUAL", "version": "0"}
        look = {"request_range": range_request(path)}
        put = {"request_put": self._put(path, value, self._job_lease)}
        start = {"request_range": range_request(self._key(job_keys.LOG_START))}
        request = {"compare": [is_free], "success": [put, start], "failure": [look, start]}
        answer = yield from self._call("kv/txn", request)
        if answer.get("succeeded"):
            return value
        there = parse_items(answer["responses"][0]["response_range"])[0].value
        return decompress(there or b"")

    def _append(self, value: bytes) -> Asking[None]:
        path = f"{self._path}/s/{job_keys.FACTS}/{secrets.token_hex(8)}"
        yield from self._call("kv/put", self._put(path, value, self._job_lease))

    def _heartbeat(self) -> Asking[None]:
        if self._lease:
            yield from self._call("lease/keepalive", {"ID": str(self._lease)})
            return
        self._lease = secrets.randbits(62) | 1
        yield from self._call("lease/grant", {"ID": str(self._lease), "TTL": str(math.ceil(self._config.lease))})
        yield from self._call("kv/put", self._put(f"{self._path}/b/{self._node}", b"1", self._lease))

    def _read_heartbeat(self, node: str) -> Asking[int | None]:
        answer = yield from self._call("kv/range", range_request(f"{self._path}/b/{node}"))
        return int(answer["header"]["revision"]) if parse_items(answer) else None

    def _begin_following(self) -> Asking[None]:
        directory = self._key(STORE_ID).rpartition("/")[0] + "/"
        order = {"sort_order": "ASCEND", "sort_target": "CREATE"}
        answer = yield from self._call("kv/range", range_request(directory, end_of(directory), **order))
        self._mirror: dict[str, bytes] = {}
        self._reflect(parse_items(answer))
        Exchange(self._loop, self._address, self._watch(directory, int(answer["header"]["revision"]) + 1))

    def _wait(self, key: str) -> Asking[bytes]:
        self._awaited = self._key(key)
        while self._awaited not in self._mirror:
            yield None
        return decompress(self._mirror[self._awaited])

    # --- the watch ---------------------------------------------------------------------------------------------------
    def _watch(self, directory: str, revision: int) -> Script:
        request = {"create_request": range_request(directory, end_of(directory), start_revision=str(revision))}
        head = {"Grpc-Metadata-hasleader": "true"}
        is_open = (yield Question(self._request("watch", request, head), (HTTP_HEAD,)))[0]
        while is_open:
            line = (yield Question(b"", (HTTP_LINE,)))[0]
            try:
                items = parse_news(line)
            except StoreConnectionError:
                break  # the server has lost its leader
            self._reflect(items)
            revision = items[-1].changed + 1 if items else revision
            if self._awaited in self._mirror:
                self._log_reader.wake()
        yield _PAUSE * draw_fraction()
        Exchange(self._loop, self._address, self._watch(directory, revision))

    def _reflect(self, items: Sequence[Item]) -> None:
        self._mirror.update((item.key, item.value) for item in items if item.value is not None)

    # --- requests ----------------------------------------------------------------------------------------------------
    def _call(self, path: str, request: dict[str, Any]) -> Asking[dict[str, Any]]:
        question = Question(self._request(path, request, {}), (HTTP,))
        backoff = Backoff(_PAUSE, _LAST_PAUSE)
        while not (body := (yield question)[0]):
            yield backoff.next_pause()
        answer: dict[str, Any] = json.loads(body.split(b"\n", 1)[0])
        if "error" in answer:
            raise OSError(answer["error"])
        return answer

    def _request(self, path: str, request: dict[str, Any], headers: dict[str, str]) -> bytes:
        host, port = self._address
        body = json.dumps(request).encode()
        more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"POST /v3/{path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
        return head.encode() + body

    def _put(self, path: str, value: bytes, lease: int) -> dict[str, Any]:
        return {"key": encode_key(path), "value": encode(compress(value)), "lease": str(lease)}

    @property
    def _job_lease(self) -> int:
        return int.from_bytes(hashlib.sha256(f"{self._path}/".encode()).digest()[:8], "big") >> 1 | 1

    def _key(self, key: str) -> str:
        return f"{self._path}/k/{key}" if "/" in key else f"{self._path}/k/-/{key}"
