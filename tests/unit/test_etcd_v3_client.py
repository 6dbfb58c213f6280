"""What the client of etcd's version 3 API makes of etcd's answers, which come from a list here."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run.store.errors import RESTORED, StoreAccessError, StoreConnectionError
from elastic_run.store.jobstore import etcd_v3
from elastic_run.store.jobstore.api import LEFT_BEHIND
from elastic_run.store.jobstore.etcd_v3 import EtcdV3JobStore
from elastic_run.store.jobstore.etcd_v3_client import EtcdV3Client, parse_news
from elastic_run.store.jobstore.http_client import Credentials
from elastic_run.store.jobstore.http_connection import Answer
from elastic_run.store.jobstore.revisions import Revisions

if TYPE_CHECKING:
    from collections.abc import Mapping

_LEASE_GONE = {"code": 5, "message": "etcdserver: requested lease not found"}
_HEADER = {"header": {"revision": "7"}}


class FakeHttp:
    """Gives the answers of a list, and notes what was asked.

    Args:
        answers: Status and document of each answer, in order; then each call succeeds.
    """

    timeout = 5.0
    endpoint = "etcd:2379"
    endpoints = ("etcd:2379",)

    def __init__(self, *answers: tuple[int, dict[str, Any]]) -> None:
        self.answers = list(answers)
        self.logins: list[tuple[int, dict[str, Any]]] = []
        self.asked: list[tuple[str, dict[str, Any], Mapping[str, str]]] = []
        self.moves = 0

    def draw(self) -> float:
        """Let no pause take time."""
        return 0.0

    def connect(self) -> None:
        """Nothing to do."""

    def prefer_next(self) -> None:
        """Count how often another server is to be asked."""
        self.moves += 1

    def ask(self, _method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Answer a call."""
        self.asked.append((path.removeprefix("/v3/"), json.loads(body), headers))
        if path.endswith("auth/authenticate"):
            status, document = self.logins.pop(0) if self.logins else (200, {"token": f"token {len(self.asked)}"})
        else:
            status, document = self.answers.pop(0) if self.answers else (200, _HEADER)
        return Answer(status, {}, json.dumps(document).encode())

    def open_answer(self, _method: str, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[object, object]:
        """Open a watch."""
        self.asked.append((path.removeprefix("/v3/"), json.loads(body), headers))
        return object(), SimpleNamespace(status=200)

    def paths(self) -> list[str]:
        """Return what was asked for."""
        return [path for path, _, _ in self.asked]


def make_api(http: FakeHttp, credentials: Credentials | None = None) -> EtcdV3Client:
    """Return a client of these answers."""
    return EtcdV3Client(http, credentials)  # type: ignore[arg-type] # a fake


@pytest.mark.parametrize(
    ("status", "fault"),
    [
        (500, {"code": 2, "message": "anything"}),
        (503, {"code": 14, "message": "no server"}),
        (400, {"code": 4, "message": "deadline exceeded"}),
        (429, {"code": 8, "message": "too many requests"}),
        (400, {"code": 14, "message": "unavailable"}),
        (400, {"code": 2, "message": "etcdserver: request timed out"}),
        (400, {"code": 9, "message": "etcdserver: leader changed"}),
        (200, {"error": {"grpc_code": 14, "message": "etcdserver: no leader"}}),
    ],
)
def test_what_etcd_cant_do_now_is_asked_of_the_next_server(status: int, fault: dict[str, Any]) -> None:
    """A momentary error isn't the caller's: the same call is made again, at another server."""
    http = FakeHttp((status, fault))
    assert make_api(http).call("kv/range", {}) == _HEADER
    assert (http.paths(), http.moves) == (["kv/range"] * 2, 1)


@pytest.mark.parametrize("code", [3, 7, 9, 13])
def test_what_etcd_refuses_is_not_asked_again(code: int) -> None:
    """An error for good is raised at once, with etcd's words."""
    http = FakeHttp((400, {"code": code, "message": "etcdserver: permission denied"}))
    with pytest.raises(StoreAccessError, match=r"etcd at etcd:2379: etcdserver: permission denied"):
        make_api(http).call("kv/put", {})
    assert (http.paths(), http.moves) == (["kv/put"], 0)


def test_a_lease_is_revoked_by_its_number_and_may_be_gone() -> None:
    """`revoke` asks etcd to end the lease; one that etcd doesn't know is no error."""
    http = FakeHttp((200, _HEADER), (404, _LEASE_GONE))
    for lease in (17, 18):
        make_api(http).revoke(lease)
    assert [(path, request) for path, request, _ in http.asked] == [
        ("lease/revoke", {"ID": "17"}),
        ("lease/revoke", {"ID": "18"}),
    ]


def test_a_node_that_is_dropped_loses_its_lease() -> None:
    """Forgetting a node's heartbeats ends the lease of its heartbeat; nodes without a heartbeat cost nothing."""
    http = FakeHttp()
    store = EtcdV3JobStore(make_api(http), "j", lease=6.0)
    store.write_heartbeat("dropped", b"1")
    granted = http.asked[-1][1]["lease"]
    there = {**_HEADER, "kvs": [{"key": http.asked[-1][1]["key"]}]}
    http.answers, http.asked = [(200, there)], []
    store.forget_heartbeats(["dropped", "never there"])
    assert [(path, request) for path, request, _ in http.asked[1:]] == [("lease/revoke", {"ID": granted})]


@pytest.mark.parametrize(("since", "leases"), [(60.0, 1), (LEFT_BEHIND / 4, 2)])
def test_a_heartbeat_is_one_request(since: float, leases: int) -> None:
    """It renews the node's lease; that of the job lasts for a day, and is renewed many times in a day."""
    alive = (200, {"result": {"ID": "7", "TTL": "6"}})
    http = FakeHttp(alive, alive)
    store = EtcdV3JobStore(make_api(http), "j", lease=6.0)
    store._job_renewed_at -= since
    assert store.write_heartbeat("n", b"2", b"1")
    assert http.paths() == ["lease/keepalive"] * leases
    assert len({request["ID"] for _, request, _ in http.asked}) == leases


def test_a_heartbeat_whose_lease_ends_meanwhile_is_not_written() -> None:
    """The node is told so, and says again where it stands."""
    http = FakeHttp((200, _HEADER), (404, _LEASE_GONE))
    assert not EtcdV3JobStore(make_api(http), "j", lease=6.0).write_heartbeat("n", b"1")
    assert http.paths() == ["lease/grant", "kv/put"]


def test_the_end_of_a_job_leaves_no_lease() -> None:
    """Else etcd would hold it for a day."""
    http = FakeHttp()
    store = EtcdV3JobStore(make_api(http), "j", lease=6.0)
    store.append("facts", b"x")
    lease = http.asked[-1][1]["lease"]
    http.asked.clear()
    store.remove_job()
    assert http.paths() == ["kv/deleterange", "lease/revoke"]
    assert http.asked[-1][1] == {"ID": lease}


@pytest.mark.parametrize(
    "news",
    [
        {"error": {"grpc_code": 8, "message": "too many watches"}},
        {"result": {"canceled": True, "cancel_reason": "too many watches"}},
    ],
)
def test_a_watch_that_etcd_ends_is_lost(news: dict[str, Any]) -> None:
    """Etcd says why, and the watch is opened again."""
    with pytest.raises(StoreConnectionError, match=r"etcd ended the watch: .*too many watches"):
        parse_news(json.dumps(news).encode())


def test_a_watch_after_the_first_takes_a_fresh_token() -> None:
    """A watch that etcd ended may have had an old token: the next one asks for another."""
    http = FakeHttp()
    api = make_api(http, Credentials("user", "password"))
    for _ in range(2):
        api.watch("/d/", 1)
    assert http.paths() == ["auth/authenticate", "watch", "auth/authenticate", "watch"]
    assert [headers["Authorization"] for path, _, headers in http.asked if path == "watch"] == ["token 1", "token 3"]


def test_a_user_whom_etcd_refuses_is_named_at_once() -> None:
    """The other servers would say the same."""
    http = FakeHttp()
    http.logins = [(400, {"code": 3, "message": "etcdserver: authentication failed, invalid user ID or password"})]
    with pytest.raises(
        StoreAccessError, match="etcd at etcd:2379 refuses user 'user': etcdserver: authentication fail"
    ):
        make_api(http, Credentials("user", "wrong")).call("kv/range", {})
    assert http.paths() == ["auth/authenticate"]


def test_a_token_that_etcd_cant_give_now_is_asked_for_again() -> None:
    """As any other call: at another server."""
    http = FakeHttp()
    http.logins = [(503, {"code": 14, "message": "etcdserver: leader changed"})]
    assert make_api(http, Credentials("user", "password")).call("kv/range", {}) == _HEADER
    assert (http.paths(), http.moves) == (["auth/authenticate", "auth/authenticate", "kv/range"], 1)


def test_an_old_token_is_replaced_once() -> None:
    """Where the token has expired the call is made again with another one, which later calls use too."""
    http = FakeHttp((401, {"code": 16, "message": "etcdserver: invalid auth token"}))
    api = make_api(http, Credentials("user", "password"))
    for _ in range(2):
        api.call("kv/range", {})
    assert http.paths() == ["auth/authenticate", "kv/range", "auth/authenticate", "kv/range", "kv/range"]
    assert http.asked[-1][2] == {"Authorization": "token 3"}


def test_operations_are_cut_into_transactions_that_etcd_takes() -> None:
    """A transaction has at most 128 operations and 512 KiB of values; none is lost, and their order stays."""
    small = [{"put": {"key": str(number), "value": "v"}} for number in range(300)]
    assert [len(batch) for batch in etcd_v3._batches(small)] == [128, 128, 44]
    large = [{"put": {"key": str(number), "value": "v" * 200 * 1024}} for number in range(5)]
    assert [len(batch) for batch in etcd_v3._batches(large)] == [2, 2, 1]
    huge = [{"put": {"key": "a", "value": "v" * 1024 * 1024}}, *small[:1]]
    assert [len(batch) for batch in etcd_v3._batches(huge)] == [1, 1]
    assert [each for batch in etcd_v3._batches(large + small) for each in batch] == large + small
    assert list(etcd_v3._batches([])) == []


@pytest.mark.parametrize(("result", "is_there"), [({"ID": "7", "TTL": "1"}, True), ({"ID": "7"}, False)])
def test_a_lease_without_time_is_gone(result: dict[str, str], *, is_there: bool) -> None:
    """The gateway of etcd leaves out what is 0."""
    assert make_api(FakeHttp((200, {"result": result}))).keep_alive(7) is is_there


def test_each_connection_hears_once_that_etcd_was_restored() -> None:
    """The one that gets the smaller number, and those that began before; not one that is opened afterwards."""
    seen = Revisions()
    seen.check("etcd", 0, 9, 0)
    seen.check("etcd", 7, 8, 0)  # an answer that another connection's has overtaken
    for found in (5, 6):
        with pytest.raises(StoreConnectionError, match=f"etcd went back to revision {found}: ") as told:
            seen.check("etcd", 9, found, 0)
        assert told.value.reason == RESTORED
    with pytest.raises(StoreConnectionError):
        seen.check("etcd", 5, 10, 0)
    seen.check("etcd", 10, 10, 1)
    assert (seen.highest, seen.restores) == (10, 1)
