"""One rendezvous on this machine, for tests of the launcher on several nodes: its flags, its store, its coordinator."""

from __future__ import annotations

import contextlib
import time

from elastic_run.core.protocol import job_keys
from elastic_run.rendezvous.elastic import other_jobs
from elastic_run.store.errors import StoreConnectionError
from elastic_run.store.jobstore.c10d import C10dJobStore
from elastic_run.store.tcpstore.token_proof import ClientAuthentication
from tests.support.wait import DEADLINE, DeadlinePassedError

#: A last call that no test waits for, and heartbeats that show a loss soon.
CONF = "last_call_timeout=3,keep_alive_interval=0.5"
RUN_ID = "j"


def place(port: int, conf: str = CONF) -> tuple[str, ...]:
    """Return the flags of nodes whose store is at a port of this machine."""
    endpoint = f"--rdzv-endpoint=localhost:{port}"
    return ("--rdzv-backend=c10d", endpoint, f"--rdzv-id={RUN_ID}", f"--rdzv-conf={conf}")


def open_job_store(port: int, token: bytes | None = None, run_id: str = RUN_ID) -> C10dJobStore:
    """Open the store of a job whose first node may still be starting."""
    authentication = None if token is None else ClientAuthentication(token)
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        with contextlib.suppress(StoreConnectionError):
            return C10dJobStore("localhost", port, run_id, timeout=DEADLINE, authentication=authentication)
    message = f"nobody serves port {port}"
    raise DeadlinePassedError(message)


def wait_coordinated(port: int, token: bytes | None = None) -> None:
    """Wait until the first node of a job has made itself its coordinator."""
    with open_job_store(port, token) as store:
        assert store.wait(job_keys.decision_key(0), DEADLINE) is not None


def wait_id_left(port: int, token: bytes | None = None) -> None:
    """Wait until the node that serves the store has left its job's id there, over a connection of its own."""
    with open_job_store(port, token, other_jobs.PLACE) as store:
        assert store.wait(other_jobs._SERVING_KEY, DEADLINE) is not None
