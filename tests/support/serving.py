"""Waits for the store of a job of several nodes."""

from __future__ import annotations

import contextlib
import time

from elastic_run.core.protocol import job_keys
from elastic_run.store.errors import StoreConnectionError
from elastic_run.store.jobstore.c10d import C10dJobStore
from elastic_run.store.tcpstore.token_proof import ClientAuthentication
from tests.support.wait import DEADLINE


def wait_served(port: int, *, token: bytes | None = None) -> None:
    """Wait until the first node of a job has made itself its coordinator."""
    store = None
    deadline = time.monotonic() + DEADLINE
    while store is None and time.monotonic() < deadline:
        with contextlib.suppress(StoreConnectionError):
            proof = None if token is None else ClientAuthentication(token)
            store = C10dJobStore("localhost", port, "j", timeout=DEADLINE, authentication=proof)
    assert store is not None, f"nobody serves port {port}"
    with store:
        assert store.wait(job_keys.decision_key(0), DEADLINE) is not None
