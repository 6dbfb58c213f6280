"""What the client of etcd's version 2 API makes of etcd's errors, which come from a list here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import etcd
import pytest

from elastic_run.store.errors import StoreAccessError
from elastic_run.store.jobstore.etcd_v2_client import EtcdV2Client
from elastic_run.store.jobstore.http_connection import Answer

if TYPE_CHECKING:
    from collections.abc import Mapping


class FakeHttp:
    """Gives one answer again and again.

    Args:
        status: Its number.
        code: etcd's number of the error.
    """

    timeout = 5.0
    endpoint = "etcd:2379"

    def __init__(self, status: int, code: int) -> None:
        self._answer = Answer(status, {}, json.dumps({"errorCode": code, "message": "no", "cause": "why"}).encode())

    def draw(self) -> float:
        """Let no pause take time."""
        return 0.0

    def ask(self, _method: str, _path: str, _body: bytes, _headers: Mapping[str, str]) -> Answer:
        """Answer a call."""
        return self._answer


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [(401, 110, StoreAccessError), (404, 100, etcd.EtcdKeyNotFound), (412, 105, etcd.EtcdAlreadyExist)],
)
def test_what_etcd_forbids_is_told_from_what_the_key_is(status: int, code: int, error: type[Exception]) -> None:
    """The user must mend the first; the caller expects the others."""
    http: Any = FakeHttp(status, code)
    with pytest.raises(error):
        EtcdV2Client(http).read("d/a")
